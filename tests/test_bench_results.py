"""What becomes of a run's figures: ratios, goals, the summary and the picture, from figures that are planted."""

import json

import pytest

from benchmarks import goals, machine, roofline, summary
from benchmarks.results import add_ratios, brief, figures, read_results

ROOF = {"copy_gb_per_s": 4000.0, "matmul_tflop_per_s": 800.0}
STORE = "store_kvcache 65536-S256-8x128-bf16"
DECODE = "decode_attention 64x8192-S{}-32/8x128-bf16"
PREFILL = "prefill_attention 4x8192-S256-32/8x128-bf16"


def bench(group, contender, us, bytes_moved=1_000_000, flops=0, clock="device"):
    told = dict(contender=contender, us=us, clock=clock, bytes_moved=bytes_moved, flops=flops, **figures(us, bytes_moved, flops, *ROOF.values()))
    return {"group": group, "extra_info": told}


@pytest.fixture
def results_of(tmp_path):
    """results_of(benches, device=...): as pytest-benchmark writes them, read back."""

    def written(*benches, device="NVIDIA H200", name="results.json"):
        add_ratios(list(benches))
        about = {"device": device, "libraries": {"torch": "2.11"}, "driver": "580", "roof": ROOF, "not_timed": ["gpu_impl.flash:fa4 (no)"]}
        path = tmp_path / name
        refused = {"group": "", "extra_info": {}}
        path.write_text(json.dumps({"machine_info": about, "datetime": "2026-11-29T21:00:00", "benchmarks": [*benches, refused]}))
        return read_results(path)

    return written


def verdicts_of(results, start):
    return [verdict for verdict in goals.verdicts(results) if verdict.goal.text.startswith(start)]


def test_rates_and_the_share_of_the_roof():
    """1 GB in 500 µs is 2 TB/s, half of the roof; with 0.32 TFLOP, which need 400 µs, it is 80 % of it."""
    assert figures(500, 10**9, 0, *ROOF.values()) == {"gb_per_s": 2000, "tflop_per_s": 0, "percent_of_roof": 50}
    assert figures(500, 10**9, 32 * 10**10, *ROOF.values()) == pytest.approx({"gb_per_s": 2000, "tflop_per_s": 640, "percent_of_roof": 80})


def test_ratios_to_everyone_else_in_a_case():
    benches = [bench("a 1", "x", 2.0), bench("a 1", "y", 4.0), bench("a 2", "x", 1.0), {"group": "a 1", "extra_info": {}}]
    add_ratios(benches)
    assert [b["extra_info"].get("ratio_to") for b in benches] == [{"y": 0.5}, {"x": 2.0}, {}, None]


@pytest.mark.parametrize(("us", "told"), [(80.0, "reached, by 25%"), (100.0, "reached, by 0%"), (125.0, "missed, by 20%")])
def test_a_goal_of_being_times_as_fast(results_of, us, told):
    verdict, = verdicts_of(results_of(bench(STORE, "gpu_impl", us), bench(STORE, "torch", 400.0)), "store of 65,536 tokens is 4 times")
    assert verdict.told == told and verdict.value == round(400 / us, 2)


def test_a_goal_of_the_roof(results_of):
    """1 MB at 4,000 GB/s takes 0.25 µs."""
    near, far = bench(STORE, "gpu_impl", 0.26), bench(STORE, "gpu_impl", 0.27)
    assert verdicts_of(results_of(near), "store of 65,536 tokens reaches")[0].told == "reached, by 1%"
    assert verdicts_of(results_of(far), "store of 65,536 tokens reaches")[0].told == "missed, by 3%"


def test_the_fastest_peer_is_that_of_any_page_size(results_of):
    """FlashAttention 2 refuses small pages: it is the peer all the same. torch and the reference are none."""
    benches = [
        bench(DECODE.format(16), "gpu_impl", 110.0), bench(DECODE.format(16), "gpu_impl.flash:fa3", 130.0), bench(DECODE.format(16), "torch", 1.0),
        bench(DECODE.format(256), "gpu_impl", 99.0), bench(DECODE.format(256), "gpu_impl.flash:fa2", 100.0),
    ]  # fmt: skip
    small, large = verdicts_of(results_of(*benches), "decode is as fast")
    assert (small.value, small.told) == (1.1, "missed, by 10%")
    assert small.peer == "gpu_impl.flash:fa2 in 64x8192-S256-32/8x128-bf16"
    assert (large.value, large.reached, large.peer) == (0.99, True, "gpu_impl.flash:fa2")


def test_a_goal_of_the_own_kernel_is_not_reached_by_another(results_of):
    flops = 36 * 10**9
    fast, own = bench(PREFILL, "gpu_impl", 60.0, flops=flops), bench(PREFILL, "gpu_impl, own kernel", 90.0, flops=flops)
    verdict, = verdicts_of(results_of(fast, own), "prefill of 4 x 8,192, own kernel")
    assert verdict.value == pytest.approx(400) and verdict.told == "missed, by 11%"


def test_what_was_not_measured_is_said(results_of):
    results = results_of(bench(DECODE.format(16), "gpu_impl", 1.0))
    assert {verdict.told for verdict in verdicts_of(results, "sample")} == {"not measured"}
    assert verdicts_of(results, "decode is as fast")[0].told == "not measured"  # there is no peer
    assert {verdict.told for verdict in goals.verdicts(results)} == {"not measured"}


def test_a_cpu_is_asked_for_the_hosts_work_alone(results_of):
    results = results_of(bench("prepare_prefill 64x4096+0-S256", "gpu_impl", 10.0, clock="host"), device="cpu")
    assert {verdict.goal.on_cpu for verdict in goals.verdicts(results)} == {True}


def test_every_goal_of_speed_names_a_case_that_is_benchmarked():
    """By their names on a GPU, which are written out here as the goals' own negative control."""
    names = [
        *(goals.STORE.format(n) for n in (256, 8192, 65536)), "decode_attention 1x8192-S16-32/8x128-bf16", DECODE.format(16), PREFILL,
        "decode_attention trace-64-S16-32/8x128-bf16", "prepare_prefill 64x4096+0-S256", *(f"sample {b}-V151936-fp32" for b in (1, 64, 256)),
        "sample 256-V151936-bf16",
    ]  # fmt: skip
    for goal in goals.GOALS:
        assert any(goals.concerns(goal, name) for name in names), goal.text
    for small in ("sample 4-V1000-fp32", "decode_attention 3x49-S16-4/2x64-bf16", "prefill_attention trace-mixed-1+2-S4-4/2x64-bf16"):
        assert not any(goals.concerns(goal, small) for goal in goals.GOALS)


def test_the_summary_tells_figures_and_goals(results_of, tmp_path, capsys, monkeypatch):
    results_of(bench(STORE, "gpu_impl", 100.0), bench(STORE, "torch", 500.0), bench("prepare_decode 256x1+7-S16", "gpu_impl", 3.0, clock="host"))
    target = tmp_path / "docs" / "README.md"
    target.parent.mkdir()
    arguments = ["summary", str(tmp_path / "results.json"), "--write", str(target), "--picture", str(tmp_path / "roof.svg")]
    monkeypatch.setattr("sys.argv", arguments)
    assert summary.main() == 0
    text = target.read_text()
    assert "2026-11-29, NVIDIA H200 · driver 580 · torch 2.11." in text and "../roof.svg" in text and "no GPU figures" not in text
    assert "| store of 65,536 tokens is 4 times as fast as index_put | 65536-S256-8x128-bf16 | 5.00 times as fast | torch | reached, by 25% |" in text
    assert "|  | torch | 500.0 | 2.0 | 0.05 | 5.00 |" in text
    assert "3.0 host" in text and "Not timed: gpu_impl.flash:fa4 (no)." in text
    assert "reached, by 25%" in capsys.readouterr().out


def test_a_cpus_summary_says_so(results_of):
    assert "**These are no GPU figures**" in summary.render(results_of(bench("store_kvcache 64-S16", "gpu_impl", 9.0, clock="host"), device="cpu"))


def test_runs_in_parts_are_one_run(results_of):
    first = results_of(bench(STORE, "gpu_impl", 100.0), bench(STORE, "torch", 500.0))
    second = results_of(bench(STORE, "gpu_impl", 90.0), name="second.json")
    assert summary.joined([first, second]).us(STORE) == {"gpu_impl": 90.0, "torch": 500.0}
    with pytest.raises(ValueError, match="several devices"):
        summary.joined([first, second._replace(machine={"device": "cpu"})])


@pytest.mark.parametrize("content", [None, "{}", "no JSON"])
def test_what_is_no_run_is_told_in_a_sentence(tmp_path, capsys, monkeypatch, content):
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content)
    monkeypatch.setattr("sys.argv", ["summary", str(path)])
    assert summary.main() == 4 and "no results of the benchmarks" in capsys.readouterr().err


@pytest.mark.parametrize("device", ["NVIDIA H200", "cpu"])
def test_the_picture_has_every_case(results_of, tmp_path, device):
    pytest.importorskip("matplotlib")
    ours = bench(STORE, "gpu_impl", 100.0), bench(PREFILL, "gpu_impl", 60.0, flops=36 * 10**9)
    results = results_of(*ours, bench(PREFILL, "stranger", 70.0), device=device)
    png, svg = roofline.draw(results, tmp_path / "pictures" / "roof")
    assert png.read_bytes().startswith(b"\x89PNG") and "<svg" in svg.read_text()
    assert roofline.style("stranger") == roofline.OTHERS


def test_the_machine_is_told(monkeypatch):
    assert "torch" in machine.library_versions()
    if not machine.ON_GPU:
        assert machine.gpu_state() == {} and machine.device_name() == "cpu"
        roof = machine.measured_roof()
        assert roof.copy_gb_per_s > 0 and roof.matmul_tflop_per_s > 0


def test_three_digits():
    assert [brief(value) for value in (4256.2, 99.04, 1.0, 0.0312)] == ["4,256", "99.0", "1.0", "0.031"]
