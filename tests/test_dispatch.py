"""Attention's dispatch: which path a call takes, from a table that is planted. The own kernel runs in the interpreter, libraries are stand-ins."""

import json

import pytest
import torch

import gpu_impl
from benchmarks import dispatch as writer
from gpu_impl import attention, dispatch, fastest, flash_paths
from gpu_impl.dispatch_table import OWN, Entry, Heads, Shape, Table, heads_of, page_class, read_table, write_table

GPU = "a GPU"
DECODE, PREFILL = "decode_attention", "prefill_attention"


def entry(us, function=DECODE, num_sequences=8, kv_heads=2, longest_k=64, pages=1, dtype="fp32"):
    shape = Shape(num_sequences, kv_heads, num_sequences, 1, longest_k)
    return Entry(Heads(function, dtype, 16, 2, pages), shape, us)


def table(*entries, gpu=GPU):
    return Table(gpu, "2026-11-29", {"torch": "2"}, {"fa3": "vllm 1"}, {DECODE: {"fa3": writer.KEEPS}, PREFILL: {}}, entries)


class Library:
    """In place of a path to a library: counts its calls, and raises what it is told to."""

    name = "fa3"

    def __init__(self, error=None):
        self.error, self.calls = error, 0

    def decode_attention(self, q, k_cache, v_cache, *, context_lens, block_tables, scale):
        self.calls += 1
        if self.error:
            raise self.error
        return torch.full_like(q, 7)

    def prefill_attention(self, q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, block_tables=None):
        self.calls += 1
        return torch.full_like(q, 7)


@pytest.fixture
def plant(monkeypatch):
    """plant(table, library): as on the GPU of the table, with the library installed in the version that was judged."""

    def planted(planted_table, library, gpu=GPU, version="vllm 1"):
        monkeypatch.setattr(fastest, "_table", planted_table)
        monkeypatch.setattr(fastest, "_unusable", set())
        monkeypatch.setattr(fastest, "INTERPRET", False)
        monkeypatch.setattr(fastest, "_gpu", lambda device: gpu)
        monkeypatch.setattr(fastest, "version_of", lambda name: version if name == "fa3" else "")
        monkeypatch.setitem(fastest.PATHS, "fa3", library)
        fastest._chosen.cache_clear()
        return library

    yield planted
    fastest._chosen.cache_clear()


def decode(num_sequences=8, columns=16, block_size=4, **options):
    torch.manual_seed(0)
    q = torch.randn(num_sequences, 4, 16)
    cache = torch.randn(2, columns + 1, block_size, 2, 16)
    tables = torch.randperm(columns).int().expand(num_sequences, -1).contiguous()
    lens = torch.full((num_sequences,), 9, dtype=torch.int32)
    arguments = dict(context_lens=lens, block_tables=tables, scale=0.25, **options)
    return gpu_impl.decode_attention(q, *cache, **arguments), attention.decode_attention(q, *cache, **arguments)


def went_to_own(outputs):
    return torch.equal(*outputs)


def test_the_committed_table_is_one():
    committed = read_table()
    assert (committed.gpu == "") == (not committed.entries)
    assert all(entry.us for entry in committed.entries)


def test_every_claim_of_attention_is_judged_of_a_path_too():
    claimed = {
        claim: tuple(function for function in (PREFILL, DECODE) if function in functions)
        for claim, functions in gpu_impl.CAPABILITIES["claims"].items()
    }
    assert {claim: functions for claim, functions in claimed.items() if functions} == dict(flash_paths.CLAIMS)


def test_the_fastest_is_taken(plant):
    library = plant(table(entry({OWN: 2.0, "fa3": 1.0})), Library())
    assert (decode()[0] == 7).all() and library.calls == 1


@pytest.mark.parametrize(
    ("entries", "surroundings"),
    [
        ([], {}),  # nothing was timed
        ([entry({OWN: 1.0, "fa3": 2.0})], {}),
        ([entry({OWN: 2.0, "fa3": 1.0})], {"gpu": "another GPU"}),
        ([entry({OWN: 2.0, "fa3": 1.0})], {"version": ""}),  # not installed
        ([entry({OWN: 2.0, "fa3": 1.0})], {"version": "vllm 2"}),  # not the one that was judged
        ([entry({OWN: 2.0, "fa9": 1.0})], {}),  # a name that this version does not know
        ([entry({OWN: 2.0, "fa3": 1.0}, dtype="bf16")], {}),
        ([entry({OWN: 2.0, "fa3": 1.0}, pages=256)], {}),
        ([entry({OWN: 2.0, "fa3": 1.0}, function=PREFILL)], {}),
    ],
)  # fmt: skip
def test_the_own_kernel_is_taken(plant, entries, surroundings):
    library = plant(table(*entries), Library(), **surroundings)
    assert went_to_own(decode()) and library.calls == 0


def test_the_interpreter_takes_the_own_kernel(plant, monkeypatch):
    library = plant(table(entry({OWN: 2.0, "fa3": 1.0})), Library())
    monkeypatch.setattr(fastest, "INTERPRET", True)
    assert went_to_own(decode()) and library.calls == 0


def test_a_number_of_splits_is_the_own_kernels(plant):
    library = plant(table(entry({OWN: 2.0, "fa3": 1.0})), Library())
    assert went_to_own(decode(num_splits=2)) and library.calls == 0


def test_what_a_library_refuses_goes_to_the_own_kernel_and_is_asked_again(plant):
    library = plant(table(entry({OWN: 2.0, "fa3": 1.0})), Library(NotImplementedError("odd strides")))
    assert went_to_own(decode()) and went_to_own(decode()) and library.calls == 2


def test_a_library_that_cannot_be_imported_is_tried_once(plant):
    library = plant(table(entry({OWN: 2.0, "fa3": 1.0})), Library(ImportError("half installed")))
    assert went_to_own(decode()) and went_to_own(decode()) and library.calls == 1


def test_a_fault_of_a_library_is_not_hidden(plant):
    plant(table(entry({OWN: 2.0, "fa3": 1.0})), Library(RuntimeError("illegal memory access")))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        decode()


def test_a_bad_call_is_told_by_the_own_kernel(plant):
    plant(table(entry({OWN: 2.0, "fa3": 1.0})), Library(ValueError("of the library")))
    q, cache = torch.randn(8, 4, 16), torch.randn(2, 17, 4, 2, 16)
    with pytest.raises(ValueError, match="context_lens has shape"):
        gpu_impl.decode_attention(q, *cache, context_lens=torch.ones(3), block_tables=torch.zeros(8, 16, dtype=torch.int32), scale=1.0)


def test_the_nearest_shape_counts(plant):
    near, far = entry({OWN: 2.0, "fa3": 1.0}), entry({OWN: 1.0, "fa3": 2.0}, num_sequences=1, longest_k=4096)
    library = plant(table(near, far), Library())
    assert (decode(num_sequences=4)[0] == 7).all()
    assert went_to_own(decode(num_sequences=1, columns=512)) and library.calls == 1


def test_lengths_on_the_device_are_not_read(plant, monkeypatch):
    plant(table(entry({OWN: 2.0, "fa3": 1.0})), Library())
    q, cache = torch.randn(8, 4, 16), torch.randn(2, 17, 4, 2, 16)
    lens, tables = torch.full((8,), 9, dtype=torch.int32), torch.zeros(8, 16, dtype=torch.int32)
    for reading in ("item", "tolist", "__bool__", "__int__", "cpu"):
        monkeypatch.setattr(torch.Tensor, reading, lambda *_: pytest.fail("a tensor was read on the host"))
    out = gpu_impl.decode_attention(q, *cache, context_lens=lens, block_tables=tables, scale=0.25)
    monkeypatch.undo()
    assert (out == 7).all()


def test_some_heads_of_a_prefill_go_where_all_of_them_go(plant):
    """Ranks that share the heads agree with one that has them all."""
    entries = [
        Entry(Heads(PREFILL, "fp32", 16, 2, 0), Shape(1, kv_heads, 8, 8, 8), {OWN: own, "fa3": 1.5}) for kv_heads, own in ((4, 2.0), (2, 1.0))
    ]
    shapes = [Shape(1, kv_heads, 8, 8, 8) for kv_heads in (1, 2, 4, 8)]
    assert len({table(*entries).fastest(entries[0].heads, shape) for shape in shapes}) == 1
    library = plant(table(*entries), Library())
    sums = torch.tensor([0, 8], dtype=torch.int32)
    metadata = dict(cu_seqlens_q=sums, cu_seqlens_k=sums, max_seqlen_q=8, max_seqlen_k=8, scale=1.0)
    for kv_heads in (4, 2):
        q, k = torch.randn(8, 2 * kv_heads, 16), torch.randn(8, kv_heads, 16)
        assert (gpu_impl.prefill_attention(q, k, k, **metadata) == 7).all()
    assert library.calls == 2


def test_page_classes():
    assert [page_class(size) for size in (None, 1, 16, 48, 64, 128, 256, 512)] == [0, 1, 1, 1, 64, 64, 256, 256]


def test_a_table_is_read_as_it_was_written(tmp_path):
    written = table(entry({OWN: 2.0, "fa3": 1.0}), entry({OWN: 1.0}, num_sequences=1))
    write_table(written, tmp_path / "table.json")
    read = read_table(tmp_path / "table.json")
    assert sorted(read.entries, key=str) == sorted(written.entries, key=str) and read[:5] == written[:5]
    write_table(written._replace(entries=()), tmp_path / "empty.json")
    assert read_table(tmp_path / "empty.json").entries == ()
    assert json.loads((tmp_path / "empty.json").read_text())["gpu"] == GPU


def test_a_table_is_printed():
    told = "\n".join(dispatch.render(table(entry({OWN: 2.0, "fa3": 1.0})), "another GPU"))
    assert "here: another GPU, so that the own kernel is used for everything" in told
    assert "fa3        (fa3 1.0, own 2.0 µs); here the own kernel, fa3 is not installed" in told
    assert dispatch.render(table(), GPU)[0].startswith("the table is empty")


def test_only_what_keeps_the_claims_is_timed():
    def clause(name, verdict, *nodeids):
        return {"id": name, "verdict": verdict, "tests": [{"nodeid": nodeid, "verdict": verdict} for nodeid in nodeids]}

    clauses = [
        clause("CLAIM-1", "fail", "conformance/test_prefill_attention.py::test_prefill_attention_nan"),
        clause("CLAIM-2", "fail", "conformance/test_decode_attention.py::test_decode_attention_empty"),
        clause("DEC-1", "pass", "conformance/test_decode_attention.py::test_decode_attention_reads"),
        clause("PRE-6", "refused", "conformance/test_prefill_attention.py::test_prefill_attention_heads"),
    ]
    assert writer.broken_by(clauses, PREFILL) == ["CLAIM-1"] and writer.broken_by(clauses, DECODE) == ["CLAIM-2"]
    lives = clause("LIFE-1", "fail", "conformance/test_lifecycle.py::test_lives")
    seen_beside = {"id": "DEC-8", "verdict": "fail", "tests": []}
    for function in (PREFILL, DECODE):
        assert {"LIFE-1", "DEC-8"} <= set(writer.broken_by([*clauses, lives, seen_beside], function))
    told = {"fa2": writer.KEEPS, "fa3": writer.verdict(["CLAIM-2"]), "fa3_zeroed": writer.KEEPS}
    assert list(writer.admitted(told)) == [OWN, "fa2", "fa3_zeroed"]


def test_nan_in_unwritten_slots_keeps_a_library_from_caches_alone():
    told = {"fa2": writer.verdict(["CLAIM-1", "PRE-1"]), "fa3": writer.verdict(["CLAIM-1"])}
    assert list(writer.admitted(told, cached=True)) == [OWN]
    assert list(writer.admitted(told, cached=False)) == [OWN, "fa3"]


def test_a_library_that_cannot_be_called_is_not_judged(monkeypatch):
    monkeypatch.setattr(writer.flash_paths, "library_versions", lambda: {"fa4": "flash-attn-4 1"})
    monkeypatch.setattr(writer, "why_not_usable", lambda path: "RuntimeError: no compiler")
    monkeypatch.setattr(writer, "judge_path", lambda *_: pytest.fail("it was judged"))
    told = {"fa4": "is not usable: RuntimeError: no compiler"}
    assert writer.judged_paths("quick", reuse=False) == {DECODE: told, PREFILL: told}


def test_a_module_without_a_distribution_is_known_by_its_compiled_files(tmp_path, monkeypatch):
    folder = tmp_path / "vllm_of_a_wheel" / "vllm_flash_attn"
    folder.mkdir(parents=True)
    for each in (folder, folder.parent):
        (each / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert flash_paths.digest_of("vllm_of_a_wheel.vllm_flash_attn") == "" == flash_paths.digest_of("no_such.module")
    told = set()
    for content in (b"one", b"another"):
        (folder / "_C.so").write_bytes(content)
        told.add(flash_paths.digest_of("vllm_of_a_wheel.vllm_flash_attn"))
    assert len(told) == 2 and all(each.startswith("vllm_of_a_wheel.vllm_flash_attn sha256 ") for each in told)


def test_entries_of_other_libraries_are_not_kept():
    before, now = table(entry({OWN: 1.0}), entry({OWN: 3.0}, num_sequences=1)), table(entry({OWN: 2.0}))
    assert {e.us[OWN] for e in writer.merged(before, now).entries} == {2.0, 3.0}
    assert writer.merged(before, now._replace(libraries={"fa3": "vllm 2"})).entries == now.entries


def test_rows_that_see_nothing_are_zeroed_on_the_device():
    """Sequences of 3 queries and 1 key, none and none, 2 and 2: two rows see nothing."""
    sums_q, sums_k = torch.tensor([0, 3, 3, 5], dtype=torch.int32), torch.tensor([0, 1, 1, 3], dtype=torch.int32)
    assert flash_paths._sees_nothing(5, sums_q, sums_k).tolist() == [True, True, False, False, False]
    path = flash_paths.Through("fa3", zeroes_empty=True)
    path.library = Library()
    q = torch.randn(2, 4, 16)
    out = path.decode_attention(q, q, q, context_lens=torch.tensor([0, 3]), block_tables=None, scale=1.0)
    assert (out[0] == 0).all() and (out[1] == 7).all()


def test_heads_are_told_from_the_tensors():
    q, k = torch.zeros(3, 6, 80, dtype=torch.bfloat16), torch.zeros(9, 16, 2, 80)
    assert heads_of(DECODE, q, k, 16) == Heads(DECODE, "bf16", 80, 3, 1)
