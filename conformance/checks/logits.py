"""last_token_logits and parallel_logits: exact values, a wrong row or shard told by name (clauses LOGIT-1...5)."""

from __future__ import annotations

import math

import torch

from conformance.buffers import Buffers
from conformance.cases.laws import dtype_name
from conformance.cases.logits import LogitsCase
from conformance.checks.ranks import Answer, World
from conformance.findings import Broken, Call, Refused
from conformance.judge import Judge


def call_logits(judge: Judge, case: LogitsCase, hidden: torch.Tensor) -> tuple[torch.Tensor, Call]:
    """(B, V) float64 on the CPU, from guarded tensors."""
    buffers = Buffers(judge.device)
    args = [buffers.put("hidden", hidden, case.layout), buffers.put("weight", case.tensors[1])]
    sums = case.cu_seqlens_q
    if sums is not None:
        args.append(buffers.put("cu_seqlens_q", sums, case.sums_layout, gap=0))
    buffers.freeze()
    got = judge.call("last_token_logits", *args)
    changed = buffers.changed()
    if changed:
        judge.note_beside("LOGIT-3", f"last_token_logits wrote into its inputs: {changed}")
    call = Call("last_token_logits", tuple(args), {}, case.want, 0.0)
    require_logits(got, case, judge.device)
    return got.cpu().double(), call


def require_logits(got: object, case: LogitsCase, device: torch.device, masked: bool = False) -> None:
    """A tensor (B, V) of hidden's dtype or float32; with `masked`, more columns are allowed if they hold -inf."""
    shape = len(case.lens), case.vocab_size
    if not isinstance(got, torch.Tensor):
        raise Broken(("logits", f"are a {type(got).__name__}, the contract says a tensor"))
    if got.device.type != device.type:
        raise Broken(("logits", f"lie on {got.device}, hidden lies on {device}"))
    if got.dtype not in (case.dtype, torch.float32):
        raise Broken(("logits", f"have dtype {dtype_name(got.dtype)}, it must be {dtype_name(case.dtype)} as hidden, or float32"))
    if tuple(got.shape) == shape:
        return
    wider = got.dim() == 2 and got.shape[0] == shape[0] and got.shape[1] > shape[1]
    if wider and masked and bool((got[:, shape[1] :] == -math.inf).all()):
        return
    facts = [("logits", f"have shape {tuple(got.shape)}, it must be {shape}")]
    if wider:
        largest = int(got[0].argmax()) if len(got) else 0
        facts.append(("row 0", f"has its largest logit, {float(got[0, largest]):g}, in column {largest}"))
    raise Broken(*facts, likely="the padding of the vocabulary is neither cut off nor masked" if wider and case.shards else "")


def last_rows(judge: Judge, case: LogitsCase) -> None:
    """LOGIT-1, LOGIT-2: every row, exactly."""
    got, call = call_logits(judge, case, case.tensors[0])
    require_rows(got, case, call)


def require_rows(got: torch.Tensor, case: LogitsCase, call: Call | None = None) -> None:
    wrong = (got != case.want).any(dim=1).nonzero().flatten().tolist()
    if not wrong:
        return
    row, all_logits = wrong[0], case.all_logits
    end = case.ends[row]
    must = ("must be", f"of {case.row_name(end)}, whose argmax is token {int(all_logits[end].argmax())}")
    is_of = (all_logits == got[row]).all(dim=1).nonzero().flatten().tolist()
    if is_of:
        told = (f"row {row}", f"holds the logits of {case.row_name(is_of[0])}")
        raise Broken(told, must, likely=likely_of_row(case, row, is_of[0]), call=call)
    column = int((got[row] != all_logits[end]).nonzero()[0])
    count = int((got[row] != all_logits[end]).sum())
    told = (f"row {row}", f"token {column}: {float(got[row, column]):g}, it must be {float(all_logits[end, column]):g}")
    off = ("columns", f"{count} of {case.vocab_size} are wrong in row {row}, {len(wrong)} of {len(case.lens)} rows are")
    raise Broken(told, must, off, call=call)


def likely_of_row(case: LogitsCase, row: int, is_of: int) -> str:
    end, length = case.ends[row], case.lens[row]
    if is_of == end - length + 1 and length > 1:
        return "the first token's row is taken, not the last one's"
    if is_of == end + 1:
        return "cu_seqlens_q[1:] is taken for the row, without - 1"
    if case.decode:
        return "a decode step takes all rows, in order"
    return ""


def own_rows(judge: Judge, case: LogitsCase) -> None:
    """LOGIT-3: row i is the same, bit for bit, when all other rows of hidden are NaN or infinite. Right or wrong is LOGIT-1's and 2's."""
    clean, _ = call_logits(judge, case, case.tensors[0])
    for row in {0, len(case.lens) // 2, len(case.lens) - 1}:
        hidden = torch.full_like(case.tensors[0], case.poison)
        hidden[case.ends[row]] = case.tensors[0][case.ends[row]]
        got, call = call_logits(judge, case, hidden)
        if not torch.equal(got[row], clean[row]):
            column = int((got[row] != clean[row]).nonzero()[0])
            limit = torch.full_like(clean, math.inf)  # the other rows are not asked
            limit[row] = 0.0
            call.want, call.limit = clean, limit
            raise Broken(
                (f"row {row}", f"token {column} is another when the other rows of hidden are {case.poison:g}"),
                ("got", f"{float(got[row, column]):g}"),
                ("want", f"{float(clean[row, column]):g} as without them"),
                likely="rows are picked by multiplying with zeros, and 0 * NaN is NaN", call=call,
            )  # fmt: skip


# --- parallel_logits ----------------------------------------------------------------------------------------------------------------------


def parallel(judge: Judge, ranks: World, case: LogitsCase) -> None:
    """LOGIT-4, LOGIT-5: whole logits on the group's first rank, None on every other one."""
    members = list(range(ranks.world_size)) if case.ranks is None else list(case.ranks)
    hidden, weight = case.tensors
    shards = dict(zip(members, weight.split(list(case.shards)), strict=True))
    answers = ranks.run(case.ranks, {rank: (hidden, shard, case.cu_seqlens_q) for rank, shard in shards.items()})
    kinds = {answers[rank].kind for rank in members}
    facts = [(f"rank {rank}", answers[rank].told()) for rank in members]
    if kinds == {"refused"}:
        raise Refused(answers[members[0]].text)
    if "refused" in kinds:
        raise Broken(*facts, likely="a refusal must come on every rank, or the others wait for it")
    if kinds & {"silent", "raised"}:
        raise Broken(*facts, likely="not every rank of the group reaches the collective, or its destination is no global rank of the group")
    first, *others = members
    for rank in members:
        if answers[rank].changed:
            judge.note_beside("LOGIT-3", f"parallel_logits wrote into its {answers[rank].changed} on rank {rank}")
    if answers[first].kind != "tensor" or any(answers[rank].kind != "none" for rank in others):
        where = f"the group's first rank is global rank {first}: it returns the logits, the others None"
        raise Broken(*facts, ("must be", where))
    got = answers[first].tensor
    assert got is not None  # its kind says so
    require_logits(got, case, got.device, masked=True)
    require_columns(judge, answers[first], case)


def require_columns(judge: Judge, answer: Answer, case: LogitsCase) -> None:
    """Every column is that of its shard. Whole rows that are another token's are a finding about the rows: LOGIT-1's, or LOGIT-2's."""
    assert answer.tensor is not None
    got, want = answer.tensor.double()[:, : case.vocab_size], case.want
    if torch.equal(got, want):
        return
    if all(bool((case.all_logits == row).all(dim=1).any()) for row in got):
        clause = "LOGIT-2" if case.decode else "LOGIT-1"
        judge.note_beside(clause, "parallel_logits took another row of hidden than the last of its sequence")
        return
    starts = [sum(case.shards[:r]) for r in range(len(case.shards))]
    facts: list[tuple[str, str]] = []
    for shard, (start, width) in enumerate(zip(starts, case.shards, strict=True)):
        block = got[:, start : start + width]
        if torch.equal(block, want[:, start : start + width]):
            continue
        holds = [
            other
            for other, (begin, size) in enumerate(zip(starts, case.shards, strict=True))
            if size == width and torch.equal(block, want[:, begin : begin + size])
        ]
        what = f"hold the logits of shard {holds[0]}" if holds else "hold what is no shard's"
        facts.append((f"columns {start}...{start + width - 1}", f"{what}, they must hold those of shard {shard}"))
    try:
        require_rows(got, case)
    except Broken as broken:
        raise Broken(*facts, *broken.finding.facts, likely=broken.finding.likely) from None
