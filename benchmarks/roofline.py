"""`python -m benchmarks.roofline results.json --write roofline`: every case of a run under the roof that the run measured, as PNG and SVG.

Above, what computes: TFLOP/s over the FLOPs that a case does for each byte that it has to move. Below, every case: the share of the roof, which is
the least time that its bytes (at a copy's rate) and its FLOPs (at a matrix product's) need, over the time that it took.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.results import Results, Row, brief, read_results
from benchmarks.summary import joined

# who is drawn: colour, marker, and the size of the mark; ours stand out, peers are told apart by their marks too
STYLES = {
    "gpu_impl": ("#1b6ac9", "o", 52),
    "gpu_impl, own kernel": ("#7fb2ef", "o", 34),
    "gpu_impl.flash:fa2": ("#d9822b", "^", 30),
    "gpu_impl.flash:fa3": ("#b5452c", "s", 26),
    "gpu_impl.flash:fa4": ("#8a5a9e", "D", 24),
    "torch": ("#5c6670", "x", 26),
    "reference": ("#a9b1b9", "+", 30),
}
OTHERS = ("#5c6670", ".", 30)
LEAST_PERCENT = 1e-3


def draw(results: Results, stem: Path) -> list[Path]:
    """STEM.png and STEM.svg."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "whichslot"})
    groups = results.groups()
    below = 0.17 * len(groups) + 0.8  # inches
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(10, 5 + below), height_ratios=[5, below], layout="constrained")
    draw_roof(top, results)
    draw_shares(bottom, results, groups)
    machine = f"{results.machine.get('device')}, {results.date[:10]}"
    figure.suptitle(f"Under the measured roof: {machine}" + ("" if results.on_gpu else ". No GPU figures: Triton's interpreter on a CPU"))
    contenders = [name for name in STYLES if any(row.contender == name for row in results.rows)]
    if any(row.contender not in STYLES for row in results.rows):
        contenders.append("others")
    handles = [top.scatter([], [], c=colour, marker=marker, s=size) for colour, marker, size in map(style, contenders)]
    figure.legend(handles, contenders, loc="outside lower center", ncols=4, frameon=False)
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [stem.with_suffix(suffix) for suffix in (".png", ".svg")]
    for path in paths:
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
    return paths


def style(contender: str) -> tuple[str, str, int]:
    return STYLES.get(contender, OTHERS)


def mark(axes, x: float, y: float, row: Row) -> None:
    colour, marker, size = style(row.contender)
    axes.scatter([x], [y], c=colour, marker=marker, s=size, linewidths=1, alpha=0.9, zorder=3 if row.contender == "gpu_impl" else 2)


def draw_roof(axes, results: Results) -> None:
    """Attention and logits: what the roof is at each intensity, and what was reached."""
    copy, matmul = results.machine["roof"]["copy_gb_per_s"], results.machine["roof"]["matmul_tflop_per_s"]
    computing = [row for row in results.rows if row.flops]
    ridge = matmul * 1e3 / copy
    intensities = [row.flops / row.bytes_moved for row in computing] or [ridge]
    left, right = min(*intensities, ridge) / 2, max(*intensities, ridge) * 3
    axes.plot([left, ridge, right], [left * copy / 1e3, matmul, matmul], c="#20262c", lw=1.2, zorder=1)
    middle = (left * ridge) ** 0.5
    axes.annotate(f"a copy's {brief(copy)} GB/s", (middle, middle * copy / 1e3), xytext=(-6, 6), textcoords="offset points", ha="right")
    axes.annotate(f"a matrix product's {brief(matmul)} TFLOP/s", (right, matmul), xytext=(0, 3), textcoords="offset points", ha="right", va="bottom")
    for row in computing:
        mark(axes, row.flops / row.bytes_moved, row.tflop_per_s, row)
    axes.set(xscale="log", yscale="log", xlabel="FLOPs a byte", ylabel="TFLOP/s")
    axes.grid(which="major", color="#e6e9ec", zorder=0)


def draw_shares(axes, results: Results, groups: list[str]) -> None:
    """A line a case, a mark a contender."""
    for i, group in enumerate(groups):
        axes.axhline(i, color="#eef0f2", lw=0.8, zorder=0)
        for row in results.rows:
            if row.group == group:
                mark(axes, max(row.percent_of_roof, LEAST_PERCENT), i, row)
    axes.axvline(100, c="#20262c", lw=1.2, zorder=1)
    axes.set_yticks(range(len(groups)), groups)
    axes.set_ylim(len(groups) - 0.4, -0.6)
    axes.set_xlabel("% of the roof")
    if results.on_gpu:
        axes.set_xlim(0, max(102, *(row.percent_of_roof + 2 for row in results.rows)))
    else:
        axes.set_xscale("log")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.roofline", description=__doc__)
    parser.add_argument("results", type=Path, nargs="+", help="what `pytest benchmarks/ --benchmark-json=` wrote; several are read as one run")
    parser.add_argument("--write", type=Path, required=True, help="the path of both pictures, without .png and .svg")
    options = parser.parse_args()
    try:
        results = joined([read_results(path) for path in options.results])
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"{', '.join(map(str, options.results))}: no results of the benchmarks ({type(error).__name__}: {error})", file=sys.stderr)
        return 4
    if not results.rows:
        print("nothing was timed in this run: there is nothing to draw", file=sys.stderr)
        return 4
    print(*draw(results, options.write))
    return 0


if __name__ == "__main__":
    sys.exit(main())
