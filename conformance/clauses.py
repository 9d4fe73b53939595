"""The clauses of the contract: an id, one sentence, the functions that it binds. The one list; tests name a clause with a marker."""

from __future__ import annotations

from typing import NamedTuple


class Clause(NamedTuple):
    id: str
    sentence: str
    functions: tuple[str, ...]  # it is judged for each of these that an implementation offers
    may_refuse: bool = False  # refusing every case is one of the two right answers
    claim: str | None = None  # judged only when CAPABILITIES["claims"] names it
    judged_in: str = "conformance"  # "tests": it binds the reference and the suite, not an implementation

    @property
    def family(self) -> str:
        return self.id.split("-")[0]


PREPARE = ("prepare_prefill",)
DECODE_BATCH = ("prepare_decode",)
SLOTS = ("prepare_prefill", "prepare_decode", "compute_slot_mapping")
STORE = ("store_kvcache",)
PREFILL = ("prefill_attention",)
DECODE = ("decode_attention",)
SAMPLE = ("sample",)
MANAGER = ("BlockManager",)

CLAUSES: dict[str, Clause] = {
    clause.id: clause
    for clause in [
        Clause("BATCH-1", "input_ids are the scheduled tokens of each sequence, end to end", PREPARE),
        Clause("BATCH-2", "positions are absolute: a token's index in its own sequence", PREPARE),
        Clause("BATCH-3", "cu_seqlens are int32 prefix sums from 0; k counts cached + scheduled tokens, not the whole prompt", PREPARE),
        Clause("BATCH-4", "max_seqlen_q and max_seqlen_k are the largest of this batch", PREPARE),
        Clause("BATCH-5", "block_tables: row i is sequence i's own table, -1 beyond it, one row for every sequence, or None", PREPARE),
        Clause("BATCH-6", "a decode step feeds the last token of each sequence, at position len - 1, with context_lens = len", DECODE_BATCH),
        Clause("BATCH-7", "a warm-up pass has no block table and no slots", PREPARE),
        Clause("SLOT-1", "slot(p) = table[p // S] * S + p % S for every scheduled position, in the order of input_ids", SLOTS),
        Clause("SLOT-2", "chunks laid end to end give the slots of one pass, and a decode step the prefill's slot of its position", SLOTS),
        Clause("KV-1", "a mapped slot holds the row's bits: -0.0, NaN payloads, subnormals and infinities included", STORE),
        Clause("KV-2", "every other byte of both caches, and around them, is unchanged, whatever is live in the first and last slot", STORE),
        Clause("KV-3", "-1 writes nothing: first, interior, last, all", STORE),
        Clause("KV-4", "strided key and value, strided caches: honoured or refused", STORE, may_refuse=True),
        Clause("KV-5", "int32 and int64 mappings, T = 0, Hk * D not a power of two", STORE),
        Clause("KV-6", "element offsets beyond 2^31 are addressed", STORE),
        *[
            Clause(f"{family}-{number}", sentence.format(row=row), functions)
            for family, row, functions in (("PRE", "a prefill row", PREFILL), ("DEC", "a decode row", DECODE))
            for number, sentence in (
                (1, "{row} attends to exactly its visible positions, each once, K and V of the same slot"),
                (2, "{row}'s values lie within the error budget of the float64 oracle"),
                (3, "block order, unused table cells, spare columns, metadata strides, foreign blocks and pool size have no influence on {row}"),
                (5, "{row} depends on its own sequence alone: not on neighbours, batch order or batch size"),
                (6, "query head h of {row} uses kv head h // G, for every group size G"),
                (7, "scale is used as given, and extreme scores of {row} change nothing"),
                (8, "every output row is written, and empty sequences disturb nobody beside {row}"),
                (9, "inputs and metadata of {row} are unchanged, and an earlier result is not overwritten by a later call"),
            )
        ],
        Clause("PRE-4", "any split of a prefill into chunks equals one pass, and a prefill row the decode step at its position", PREFILL),
        Clause("STEP-1", "store, then attend: the newest token is seen, at every length around a block's end", (*STORE, *DECODE, *PREFILL)),
        Clause("STEP-2", "batches of real requests go through prepare, store and attend, prefix hits and chunks included",
               (*PREPARE, *DECODE_BATCH, *STORE, *PREFILL, *DECODE)),
        Clause("LOGIT-1", "a prefill's logits are those of each sequence's last row, for ragged lengths and for T = B", ("last_token_logits",)),
        Clause("LOGIT-2", "a decode step's logits are those of all rows", ("last_token_logits",)),
        Clause("LOGIT-3", "every row is its own: hidden row i alone decides logits row i", ("last_token_logits",)),
        Clause("LOGIT-6", "logits lie within the rounding of sums in float32, for every hidden size, vocabulary and layout of the weight",
               ("last_token_logits",)),
        Clause("LOGIT-4", "shards lie in rank order, whole on the group's first rank and None elsewhere", ("parallel_logits",)),
        Clause("LOGIT-5", "a vocabulary that the ranks do not divide is refused, or padded and masked", ("parallel_logits",), may_refuse=True),
        Clause("SAMPLE-1", "tokens are distributed as softmax(logits / T)", SAMPLE),
        Clause("SAMPLE-2", "each row uses its own temperature", SAMPLE),
        Clause("SAMPLE-3", "bf16 and fp16 logits give the distribution of the same values in float32", SAMPLE),
        Clause("SAMPLE-4", "with injected noise the token is the argmax of p / noise, ties and the ends of the noise range included", SAMPLE),
        Clause("SAMPLE-5", "rows are independent of each other", SAMPLE),
        Clause("SAMPLE-6", "consecutive calls are independent; the same seed repeats, another does not", SAMPLE),
        Clause("SAMPLE-7", "-inf logits are never sampled, ids lie in [0, V), a NaN row disturbs no neighbour", SAMPLE),
        Clause("SAMPLE-8", "a tail keeps its mass down to the stated number of nats under the top token, 20 and more if none is stated", SAMPLE),
        Clause("SAMPLE-9", "T -> 0 gives the argmax, or is refused; logits and temperatures are unchanged", SAMPLE),
        Clause("LIFE-1", "a batch tells of its own step, whatever was hit, chunked, forked, preempted or re-used before it",
               (*PREPARE, *DECODE_BATCH)),
        Clause("LIFE-2", "after every step of a life each computed token's slot holds its K and V, and no other byte has changed", STORE),
        Clause("LIFE-3", "in a life of hits, chunks, forks, preemptions and re-used blocks a prefill row sees its sequence's own history", PREFILL),
        Clause("LIFE-4", "in such a life a decode row sees its sequence's own history", DECODE),
        Clause("LIFE-5", "a token counts as cached only if its slot holds its KV, computed after equal tokens; one token is always left", MANAGER),
        Clause("LIFE-6", "every scheduled position has a slot, and a block that is taken from the pool is in nobody else's table", MANAGER),
        Clause("LIFE-7", "a block that several sequences share is copied before it is written", MANAGER),
        Clause("LIFE-8", "freed blocks can be taken again: a step is turned down only if the pool is too small for it", MANAGER),
        Clause("CLAIM-1", "nan_tail: NaN in slots that were never written does not leak", (*PREFILL, *DECODE), claim="nan_tail"),
        Clause("CLAIM-2", "empty_zero: a row that sees nothing is 0", (*PREFILL, *DECODE), claim="empty_zero"),
        Clause("CLAIM-3", "spare_blocks: blocks after the last token's block do not move a decode step's slot", DECODE_BATCH, claim="spare_blocks"),
        Clause("CLAIM-4", "checked: bad slots and tables raise", (*STORE, *DECODE), claim="checked"),
        Clause("CLAIM-5", "cuda_graph: a captured decode step may be replayed with fewer, longer and shorter sequences, and padding disturbs nobody",
               (*STORE, *DECODE), claim="cuda_graph"),
        Clause("CLAIM-6", "deterministic: the same call gives the same bits", (*PREFILL, *DECODE, "last_token_logits", *SAMPLE),
               claim="deterministic"),
        Clause("CLAIM-7", "batch_invariant: a row has the same bits alone, in any batch, at any place in it",
               (*PREFILL, *DECODE, "last_token_logits", *SAMPLE), claim="batch_invariant"),
        Clause("ERR-1", "a bad call to the reference raises ValueError with one sentence that names the values", (), judged_in="tests"),
        Clause("ERR-2", "bad arguments of the suite, and implementations that cannot be called, get one sentence", (), judged_in="tests"),
    ]
}
