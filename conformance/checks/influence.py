"""What must have no influence on a row: metamorphic checks, a call against another call (clauses 3, 4 and 5 of PRE and DEC)."""

from __future__ import annotations

from dataclasses import replace

import torch

from conformance.buffers import METADATA_LAYOUTS
from conformance.cases.attention import FILLERS, AttentionCase
from conformance.checks.attention_call import AttentionCall, Numbers, attend, head_name, loud_numbers, row_name
from conformance.checks.read_sets import check_counts, check_read_set
from conformance.checks.values import Budgeted, budgeted, random_numbers, require_within
from conformance.findings import Broken, Call, Refused
from conformance.judge import Judge


def check_surroundings(judge: Judge, case: AttentionCase) -> None:
    """The same sequences under other tables, other unused cells, a wider table, a larger pool, another block size."""
    check_read_set(judge, case)
    base = random_numbers(case, query_scale=1.0)
    first = attend(judge, case, base)
    sizes = judge.capabilities.allowed("block_sizes", (1, 3, 16, 64, 256))
    other_size = sizes[case.data_seed % len(sizes)]
    for what, variant in (
        ("the blocks lie in another order", replace(case, table_seed=case.table_seed + 1000)),
        *((f"unused table cells hold {filler}", replace(case, filler=filler, spare_columns=5)) for filler in FILLERS),
        ("the pool is larger", replace(case, spare_blocks=case.spare_blocks + 61)),
        (f"the block size is {other_size}", replace(case, block_size=other_size)),
    ):
        require_same(judge, case, first, base, variant, what)


def require_same(judge: Judge, case: AttentionCase, first: AttentionCall, base: Numbers, variant: AttentionCase, what: str) -> None:
    """The variant holds the same keys and values at the same positions, and gives the same rows within both calls' rounding."""
    numbers = loud_numbers(variant)
    numbers.q = base.q
    for mine, theirs in zip(variant.slots, case.slots, strict=True):
        numbers.keys[mine], numbers.values[mine] = base.keys[theirs], base.values[theirs]
    second = attend(judge, variant, numbers)
    expected = budgeted(judge, case, base)
    try:
        require_within(judge, variant, second, expected)
    except Broken as broken:
        broken.finding.facts.insert(0, ("changed", what))
        raise
    require_close(case, first, second, list(range(len(case.rows))), expected, f"differs when {what}")


def require_close(
    case: AttentionCase, first: AttentionCall, second: AttentionCall, rows: list[int], expected: Budgeted, sentence: str
) -> None:
    """Row r of the second call is the first call's row rows[r], within the rounding of both; rows < 0 are not asked.

    Calls that differ by more than twice the budget: one of them is outside it. That one is named, and replayed.
    """
    asked = [r for r, row in enumerate(rows) if row >= 0 and case.rows[row][1] > 0]
    theirs = [rows[r] for r in asked]
    exact, limit = expected.exact[theirs], expected.limit[theirs]
    wrong = ~((first.out[theirs] - second.out[asked]).abs() <= 2 * limit)
    if not wrong.any():
        return
    place = tuple(int(x) for x in wrong.nonzero()[0])
    in_first = not bool((first.out[theirs] - exact).abs()[place] <= limit[place])
    guilty, other, at = (first, second.out[asked], theirs) if in_first else (second, first.out[theirs], asked)
    row, head, dim = at[place[0]], *place[1:]
    want, limits = torch.zeros_like(guilty.out), torch.full_like(guilty.out, float("inf"))  # other rows are not asked
    want[row], limits[row] = exact[place[0]], limit[place[0]].masked_fill(~wrong[place[0]], float("inf"))  # nor where the two agree
    raise Broken(
        (f"{row_name(case, theirs[place[0]])}, {head_name(case, head)}, dimension {dim}", sentence),
        (f"{'first' if in_first else 'second'} call", f"is wrong at out[{row}, {head}, {dim}]"),
        ("got", f"{float(guilty.out[row, head, dim]):.8g}"),
        ("want", f"{float(exact[place]):.8g} ± {float(limit[place]):.3g}"),
        ("the other call", f"{float(other[place]):.8g} (the two may differ by {2 * float(limit[place]):.3g})"),
        call=Call(guilty.function, guilty.args, guilty.kwargs, want, limits),
    )


def check_metadata(judge: Judge, case: AttentionCase) -> None:
    """Tables and lengths as strided integers, and max_seqlen as upper bounds. A layout may be refused; then the others are still tried."""
    check_read_set(judge, case)
    variants = [(f"block tables and lengths are {layout} integers", replace(case, metadata_layout=layout)) for layout in METADATA_LAYOUTS[1:]]
    if not case.decode:
        for slack in (1, 1 + case.block_size + case.data_seed % 300):
            variants.append((f"max_seqlen_q and max_seqlen_k are {slack} more than the longest", replace(case, seqlen_slack=slack)))
    for what, variant in variants:
        judge.record.examples += 1
        try:
            check_read_set(judge, variant)
        except Refused as refusal:
            judge.record.refusals[str(refusal)] = judge.record.refusals.get(str(refusal), 0) + 1
        except Broken as broken:
            broken.finding.facts.append(("changed", what))
            raise


def in_large_pool(case: AttentionCase, effort: str) -> AttentionCase:
    """The sequences lie at the top of more blocks than 16 bits count, or of as many as the effort fills."""
    elements = 6_000_000 if effort == "quick" else 20_000_000
    return replace(case, first_block=min(66_000, elements // (case.block_size * case.head_dim)), cache_layout="plain")


def check_large_pool(judge: Judge, case: AttentionCase) -> None:
    check_counts(judge, case, 0, case.head_dim * 32)


def rows_of_sequences(case: AttentionCase) -> list[slice]:
    firsts, row = [], 0
    for queries in case.query_lens:
        firsts.append(slice(row, row + queries))
        row += queries
    return firsts


def check_neighbours(judge: Judge, case: AttentionCase) -> None:
    """A row alone, and in another order of the batch, is what it is in the batch."""
    check_read_set(judge, case)
    base = random_numbers(case, query_scale=1.0)
    whole = attend(judge, case, base)
    expected = budgeted(judge, case, base)
    parts = rows_of_sequences(case)
    count = len(parts)
    require_untouched_by_nan(judge, case, base, whole, expected)
    orders = [list(range(count))[::-1]] + [[i] for i in {0, count // 2, count - 1}]
    for order in orders:
        variant, numbers = subset(case, base, order)
        sentence = "differs when its sequence is alone" if len(order) == 1 else "differs when the batch is in reverse order"
        rows = [row for i in order for row in range(parts[i].start, parts[i].stop)]
        require_close(case, whole, attend(judge, variant, numbers), rows, expected, sentence)


def require_untouched_by_nan(judge: Judge, case: AttentionCase, base: Numbers, whole: AttentionCall, expected: Budgeted) -> None:
    """Rows stay what they are when every other sequence's queries are NaN."""
    poisoned = torch.tensor([sequence % 2 == 1 for sequence, _ in case.rows], dtype=torch.bool)
    numbers = Numbers(q=base.q.clone(), keys=base.keys, values=base.values)
    numbers.q[poisoned] = float("nan")
    rows = [-1 if sequence % 2 == 1 else row for row, (sequence, _) in enumerate(case.rows)]
    sentence = "differs when the queries of every second sequence are NaN"
    require_close(case, whole, attend(judge, case, numbers), rows, expected, sentence)


def subset(case: AttentionCase, base: Numbers, order: list[int]) -> tuple[AttentionCase, Numbers]:
    """Only these sequences of the batch, in this order, with the same numbers at their positions."""
    variant = replace(
        case,
        query_lens=tuple(case.query_lens[i] for i in order),
        context_lens=tuple(case.context_lens[i] for i in order),
    )
    numbers = loud_numbers(variant)
    parts = rows_of_sequences(case)
    numbers.q = torch.cat([base.q[parts[i]] for i in order])
    for mine, i in zip(variant.slots, order, strict=True):
        numbers.keys[mine], numbers.values[mine] = base.keys[case.slots[i]], base.values[case.slots[i]]
    return variant, numbers


def check_chunks(judge: Judge, case: AttentionCase, split: int) -> None:
    """A prefill in two chunks equals one pass, row by row, and so do the decode steps at the last positions (PRE-4).

    The case queries each sequence from some position on; `split` cuts each one's queries in two.
    """
    base = random_numbers(case, query_scale=1.0)
    whole = attend(judge, case, base)
    expected = budgeted(judge, case, base)
    require_within(judge, case, whole, expected)
    parts = rows_of_sequences(case)
    cuts = [min(split % (t + 1), t) for t in case.query_lens]
    for first in (True, False):
        counts = [cut if first else t - cut for cut, t in zip(cuts, case.query_lens, strict=True)]
        here = [i for i, count in enumerate(counts) if count > 0]  # sequences that have nothing to do in a step are not in its batch
        if not here:
            continue
        # the table of the whole prompt stands in the first chunk already, and the later positions' slots are loud
        chunk = replace(
            case,
            query_lens=tuple(counts[i] for i in here),
            context_lens=tuple(case.context_lens[i] - (case.query_lens[i] - cuts[i] if first else 0) for i in here),
            given_tables=tuple(tuple(case.tables[i]) for i in here),
            given_num_blocks=case.num_blocks,
        )
        rows = [slice(parts[i].start + (0 if first else cuts[i]), parts[i].start + (cuts[i] if first else case.query_lens[i])) for i in here]
        numbers = loud_numbers(chunk)
        numbers.q = torch.cat([base.q[r] for r in rows])
        for mine, i in zip(chunk.slots, here, strict=True):
            theirs = case.slots[i][: len(mine)]
            numbers.keys[mine], numbers.values[mine] = base.keys[theirs], base.values[theirs]
        sentence = f"differs between one pass and the {'first' if first else 'second'} chunk, cut after {cuts} queries"
        require_close(case, whole, attend(judge, chunk, numbers), [row for r in rows for row in range(r.start, r.stop)], expected, sentence)
    if "decode_attention" in judge.implementation.offered:
        require_decode_equal(judge, case, base, whole, expected)


def require_decode_equal(judge: Judge, case: AttentionCase, base: Numbers, whole: AttentionCall, expected: Budgeted) -> None:
    """The last row of each sequence is the decode step at its position."""
    if not case.paged or 0 in case.query_lens:
        return
    last_rows = [part.stop - 1 for part in rows_of_sequences(case)]
    step = replace(case, decode=True, query_lens=(1,) * len(case.query_lens))
    numbers = Numbers(q=base.q[last_rows], keys=base.keys, values=base.values)
    sentence = "differs between the prefill and the decode step at its position"
    require_close(case, whole, attend(judge, step, numbers), last_rows, expected, sentence)
