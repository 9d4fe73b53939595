"""The calls that memcheck watches are made, each of them."""

from benchmarks import every_kernel_once


def test_every_kernel_is_called(capsys):
    assert every_kernel_once.main() == 0
    told = capsys.readouterr().out
    for function in ("store_kvcache", "decode_attention", "prefill_attention", "prepare_prefill", "sample", "last_token_logits"):
        assert function in told
