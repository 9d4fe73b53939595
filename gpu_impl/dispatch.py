"""`python -m gpu_impl.dispatch`: the table by which attention goes to the fastest kernel, and what of it is followed on this machine."""

from __future__ import annotations

import sys

import torch

from gpu_impl.dispatch_table import Entry, Table, read_table
from gpu_impl.fastest import why_not


def render(table: Table, here: str) -> list[str]:
    """here: the name of this machine's GPU."""
    if not table.entries:
        return ["the table is empty: the own kernel is used for everything (python -m benchmarks.dispatch --write, on a GPU, fills it)"]
    about = " · ".join(f"{name} {told}" for name, told in (*table.about.items(), *table.libraries.items()))
    lines = [f"written {table.written} on {table.gpu} · {about}"]
    lines.append(f"here: {here}" if here == table.gpu else f"here: {here}, so that the own kernel is used for everything")
    lines += [f"{function}: {name} {verdict}" for function, judged in table.judged.items() for name, verdict in judged.items()]
    heads = None
    for entry in sorted(table.entries, key=lambda entry: entry[:2]):
        if entry.heads != heads:
            heads = entry.heads
            pages = f"block sizes from {heads.pages}" if heads.pages else "no cache"
            lines.append(f"{heads.function}, {heads.dtype}, D {heads.head_dim}, G {heads.group_size}, {pages}")
        lines.append("  " + line_of(entry, why_not(table, entry.fastest)))
    return lines


def line_of(entry: Entry, reason: str) -> str:
    shape = entry.shape
    times = ", ".join(f"{name} {entry.us[name]:,.1f}" for name in sorted(entry.us, key=lambda name: entry.us[name]))
    batch = f"{shape.num_sequences:>4} sequences, {shape.num_tokens:>6} tokens, at most {shape.max_seqlen_q:>5} of {shape.max_seqlen_k:>6}"
    return f"{batch}, {shape.kv_heads} kv heads: {entry.fastest:<10} ({times} µs){f'; here the own kernel, {reason}' if reason else ''}"


def main() -> int:
    print(*render(read_table(), torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
