"""Which slots a kernel reads, recovered from its output as integers (clauses PRE-1, DEC-1).

With q = 0 every visible key has weight exp(0) = 1. Let the value row of a position be one-hot at dimension bucket(position): then
output * (number of visible positions) is the number of visible positions in each bucket, an integer. A dropped, doubled or foreign
position changes a count by about one, whatever the context's length; the only rounding is the output's. The last dimension is 1 in every
slot of a sequence, so that it must come out 1: the weights sum to one. Slots of nobody are loud.

Where a row sees one position, any number of foreign ones with the same bucket would leave the mean as it is: there the values are
random, and the row must return its one value.

Two more passes tie K to V. Keys are one-hot by another bucket, q picks a bucket with a large score, and the output counts the value
buckets among the picked positions. Then every key holds its position in base 4, a digit at a time decides its weight (1, 2, 4 or 8), and
the output holds the weights of the positions in each value bucket: two positions differ in a digit, so that exchanging their values shows.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from conformance.cases.attention import AttentionCase
from conformance.checks.attention_call import AttentionCall, attend, head_name, loud_numbers, row_name
from conformance.checks.budget import SMALLEST_STEP, UNIT_ROUNDOFF
from conformance.checks.likely import likely_of_scores
from conformance.checks.localise import localise, localise_pairs
from conformance.findings import Broken, Call
from conformance.judge import Judge

LARGEST_COUNT = {torch.bfloat16: 32, torch.float16: 96, torch.float32: 96}  # of a bucket, so that a step of one stands out of the rounding
PICKED_SCORE = 44.0  # exp(-44) = 8e-20: what was not picked weighs nothing in float32, and exp(44) is still finite
KEY_BUCKETS = 8
DIGIT_BASE = 4  # digit d of a position weighs 2**d
LARGEST_WEIGHED_COUNT = {torch.bfloat16: 8, torch.float16: 64, torch.float32: 96}  # as LARGEST_COUNT, where one position weighs up to 8


def check_read_set(judge: Judge, case: AttentionCase) -> None:
    """Every row's counts, in windows of positions that keep each count small."""
    buckets = case.head_dim - 1
    window = buckets * LARGEST_COUNT[case.dtype]
    longest = max(case.context_lens, default=0)
    for first in range(0, max(longest, 1), window):
        check_counts(judge, case, first, window)
    if any(visible == 1 for _, visible in case.rows):
        check_only_value(judge, case)


def check_counts(judge: Judge, case: AttentionCase, first: int, window: int) -> None:
    """q = 0: every visible position counts once."""
    generator = np.random.default_rng((case.data_seed, first))
    numbers = loud_numbers(case)
    codes = value_codes(case, generator, first, window)
    for sequence, slots in enumerate(case.slots):
        numbers.keys[slots] = 0.0
        numbers.values[slots] = codes[sequence]
    call = attend(judge, case, numbers)
    require_counts(judge, case, call, [np.cumsum(code.numpy(), axis=0) for code in codes], None)


def check_only_value(judge: Judge, case: AttentionCase) -> None:
    """q = 0, and random values: a row that sees one position returns its value."""
    generator = np.random.default_rng((case.data_seed, 2))
    numbers = loud_numbers(case)
    values = [
        torch.from_numpy(generator.choice([1.0, -1.0, 2.0, -2.0], size=(n, case.num_kv_heads, case.head_dim)).astype(np.float32))
        for n in case.context_lens
    ]
    for sequence, slots in enumerate(case.slots):
        numbers.keys[slots] = 0.0
        numbers.values[slots] = values[sequence]
    call = attend(judge, case, numbers)
    kv_heads = np.arange(case.num_heads) // case.group_size
    want = torch.zeros(call.out.shape, dtype=torch.float64)
    sees_one = torch.tensor([visible == 1 for _, visible in case.rows])
    for row in sees_one.nonzero().flatten().tolist():
        want[row] = values[case.rows[row][0]][0, kv_heads].double()
    require_sums(judge, case, call, want, allowed(case, want, want.new_ones(want.shape[:2])), sees_one, pairs=False)


def check_pairing(judge: Judge, case: AttentionCase) -> None:
    """K and V come from the same slot: among the positions whose key was picked, every value counts once."""
    buckets = case.head_dim - 1
    window = buckets * LARGEST_COUNT[case.dtype]
    longest = max(case.context_lens, default=0)
    for first in range(0, max(longest, 1), window):
        check_picked_counts(judge, case, first, window)
    window = buckets * LARGEST_WEIGHED_COUNT[case.dtype]
    for first in range(0, max(longest, 1), window):
        for digit in range(math.ceil(math.log(max(longest, 2), DIGIT_BASE))):
            check_weighed_counts(judge, case, first, window, digit)


def check_picked_counts(judge: Judge, case: AttentionCase, first: int, window: int) -> None:
    generator = np.random.default_rng((case.data_seed, first, 1))
    numbers = loud_numbers(case)
    codes = value_codes(case, generator, first, window)
    num_buckets = min(KEY_BUCKETS, case.head_dim)
    key_buckets = [generator.integers(0, num_buckets, size=(n, case.num_kv_heads)) for n in case.context_lens]
    for sequence, slots in enumerate(case.slots):
        numbers.keys[slots] = torch.nn.functional.one_hot(torch.from_numpy(key_buckets[sequence]), case.head_dim).float()
        numbers.values[slots] = codes[sequence]
    aim = 2.0 ** math.ceil(math.log2(PICKED_SCORE / case.scale))
    picks = np.zeros((len(case.rows), case.num_heads), dtype=np.int64)
    for row, (sequence, visible) in enumerate(case.rows):
        if visible:  # each head picks the bucket of some visible position, every third one that of the newest
            positions = generator.integers(0, visible, size=case.num_heads)
            positions[:: 3] = visible - 1
            picks[row] = key_buckets[sequence][positions, np.arange(case.num_heads) // case.group_size]
    numbers.q = aim * torch.nn.functional.one_hot(torch.from_numpy(picks), case.head_dim).float()
    call = attend(judge, case, numbers)
    picked_sums = []
    for sequence in range(len(case.context_lens)):
        hot = np.eye(num_buckets, dtype=np.float32)[key_buckets[sequence]]  # (n, Hk, buckets)
        picked_sums.append(np.cumsum(hot[:, :, :, None] * codes[sequence].numpy()[:, :, None, :], axis=0))  # (n, Hk, key bucket, D)
    require_counts(judge, case, call, picked_sums, picks)


def check_weighed_counts(judge: Judge, case: AttentionCase, first: int, window: int, digit: int) -> None:
    """Each position weighs 2**d, where d is a digit of its number in base 4: what the sums must be is computed from the rounded q."""
    generator = np.random.default_rng((case.data_seed, first, digit, 3))
    numbers = loud_numbers(case)
    codes = value_codes(case, generator, first, window)
    digits = [np.arange(n) // DIGIT_BASE**digit % DIGIT_BASE for n in case.context_lens]
    for sequence, slots in enumerate(case.slots):
        numbers.keys[slots] = torch.nn.functional.one_hot(torch.from_numpy(digits[sequence]), case.head_dim).float()[:, None, :]
        numbers.values[slots] = codes[sequence]
    q = (torch.arange(DIGIT_BASE) * (math.log(2.0) / case.scale)).bfloat16().float()  # exact in every dtype, and in tf32 products
    if float(q.abs().max()) > torch.finfo(case.dtype).max:  # a scale so small that no q of this dtype tells the digits apart
        return
    numbers.q[:, :, :DIGIT_BASE] = q
    weight = np.exp(q.double().numpy() * case.scale)
    call = attend(judge, case, numbers)
    sums = [
        np.cumsum(weight[digits[sequence]][:, None, None] * codes[sequence].double().numpy(), axis=0)
        for sequence in range(len(case.context_lens))
    ]
    require_counts(judge, case, call, sums, None, pairs=True)


def value_codes(case: AttentionCase, generator: np.random.Generator, first: int, window: int) -> list[torch.Tensor]:
    """For each sequence (n, Hk, D): one-hot at a random bucket for positions in the window, balanced; 1 in the last dimension for all."""
    buckets = case.head_dim - 1
    codes = []
    for n in case.context_lens:
        code = np.zeros((n, case.num_kv_heads, case.head_dim), dtype=np.float32)
        code[:, :, -1] = 1.0
        last = min(n, first + window)
        for head in range(case.num_kv_heads):
            if last > first:
                order = (generator.permutation(last - first) + generator.integers(0, buckets)) % buckets
                code[np.arange(first, last), head, order] = 1.0
        codes.append(torch.from_numpy(code))
    return codes


def require_counts(
    judge: Judge,
    case: AttentionCase,
    call: AttentionCall,
    sums: list[np.ndarray],
    picks: np.ndarray | None,
    extra: float = 0.0,
    pairs: bool = False,
) -> None:
    """out * n equals the expected counts, for every row and head.

    sums: for each sequence the running counts (n, Hk, D), or (n, Hk, key bucket, D) where `picks` (T, Hq) tells the bucket picked.
    extra: relative error that the scores' size adds. pairs: the keys matter, a wrong row may read the right slots with other values.
    """
    kv_heads = np.arange(case.num_heads) // case.group_size
    counts = np.zeros((len(case.rows), case.num_heads, case.head_dim))
    for row, (sequence, visible) in enumerate(case.rows):
        if visible:
            at = sums[sequence][visible - 1]
            counts[row] = at[kv_heads] if picks is None else at[kv_heads, picks[row]]
    attended = counts[:, :, -1]  # the last dimension is 1 in every slot of the sequence
    sees = torch.tensor([visible > 0 for _, visible in case.rows], dtype=torch.bool)
    want = torch.from_numpy(counts / np.maximum(attended, 1)[:, :, None])
    limit = allowed(case, want, torch.from_numpy(attended), extra)
    require_sums(judge, case, call, want, limit, sees, pairs=pairs or picks is not None, scores=extra > 0.0)


def allowed(case: AttentionCase, want: torch.Tensor, attended: torch.Tensor, extra: float = 0.0) -> torch.Tensor:
    """One rounding of the weight, one of the output, float32 sums of n exact terms, exp and division; half precision's smallest step."""
    relative = extra + 2.5 * UNIT_ROUNDOFF[case.dtype] + 2.0**-18 + attended[:, :, None] * 2.0**-23
    return want.abs() * relative + 2.0**-40 + 2 * SMALLEST_STEP[case.dtype]


def require_sums(
    judge: Judge, case: AttentionCase, call: AttentionCall, want: torch.Tensor, limit: torch.Tensor, asked: torch.Tensor, *,
    pairs: bool, scores: bool = False,
) -> None:  # fmt: skip
    """|out - want| <= limit in the rows that are `asked` (T,) bool. Raises Broken, which tells the slots of the first row and head."""
    error = (call.out - want).abs()
    wrong = ~(error <= limit) & asked[:, None, None]
    judge.note_budget(case.dtype, float((error / limit)[asked].nan_to_num(0.0).max()) if asked.any() else 0.0)
    if not wrong.any():
        return
    row, head, dim = (int(x) for x in wrong.nonzero()[0])
    affected = wrong.any(dim=2)
    rows_wrong = affected.any(dim=1).nonzero().flatten().tolist()
    heads_wrong = affected[row].nonzero().flatten().tolist()
    facts = [(where_in_words(case, row, rows_wrong, heads_wrong), "")]

    def explain() -> tuple[list[tuple[str, str]], str]:
        named, likely = localise(judge, case, row, heads_wrong[0])
        if not named and pairs:
            named, likely = localise_pairs(judge, case, row, heads_wrong[0])
        if not named and scores:
            likely = likely_of_scores(call.out[row, heads_wrong[0]])
        return named, likely

    got, wanted = float(call.out[row, head, dim]), float(want[row, head, dim])
    facts.append((f"out[{row}, {head}, {dim}]", f"is {got:.6g}, it must be {wanted:.6g} ± {float(limit[row, head, dim]):.2g}"))
    looked_at = limit.masked_fill(~asked[:, None, None], float("inf"))  # rows that see nothing are not looked at
    raise Broken(*facts, call=Call(call.function, call.args, call.kwargs, want, looked_at), explain=explain)


def where_in_words(case: AttentionCase, row: int, rows: list[int], heads: list[int]) -> str:
    which = "every head" if len(heads) == case.num_heads else ", ".join(head_name(case, head) for head in heads[:3])
    more = f" (and {len(rows) - 1} more of {len(case.rows)} rows)" if len(rows) > 1 else ""
    return f"{row_name(case, row)}, {which}{more}"
