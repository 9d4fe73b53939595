"""CAPABILITIES that are not known."""

CAPABILITIES = {"claims": ("fast",)}


def sample(logits, temperatures):
    return logits.argmax(1)
