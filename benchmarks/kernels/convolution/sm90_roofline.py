"""Draws a result file of sm90_check.py as a roofline: TFLOP/s over operations per byte, ours and cuDNN's.

    python -m benchmarks convolution.sm90_roofline benchmarks/results/convolution_sm90_h200_bfloat16.json PICTURE

The roof is the copy and the matrix product measured in the same run. Bytes are every tensor of the pass once,
operations are the problem's own: what a kernel computes or moves beyond that shows as distance from the roof.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.kernels.convolution.sm90_check import BIAS, PASSES, Problem, read


def intensity(problem: Problem) -> float:
    """Operations for each byte of a 16-bit problem."""
    x = problem.n * problem.h * problem.w * problem.c
    y = problem.n * problem.p * problem.q * problem.k
    w = problem.k * problem.r * problem.s * problem.c
    return problem.flops / (2 * (x + y + w))


def draw(document: dict[str, Any], target: Path) -> None:
    problems = {problem.name: problem for problem in read("sm90", "")}
    peak, copy = document["ceilings"]["tflops"], document["ceilings"]["gb_per_s"] / 1e3
    passes = [each for each in PASSES if each != BIAS]
    figure, axes = plt.subplots(1, len(passes), figsize=(16, 5.2), sharey=True)
    for axis, passing in zip(axes, passes, strict=True):
        rows = [row for row in document["rows"] if row["pass"] == passing]
        across = [intensity(problems[row["problem"]]) for row in rows]
        low, high = min(across) / 1.5, max(across) * 1.5
        ridge = peak / copy
        axis.plot([low, ridge, high], [low * copy, peak, peak], color="black", linewidth=1)
        for key, label, marker in (("cudnn_ms", "cuDNN", "o"), ("ours_ms", "ours", "x")):
            rates = [problems[row["problem"]].flops / row[key] / 1e9 for row in rows]
            axis.plot(across, rates, marker, label=label, markersize=5, fillstyle="none")
        ratios = [row["ours_ms"] / row["cudnn_ms"] for row in rows]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        axis.set_title(
            f"{passing}: {mean:.3f} of cuDNN's time (geometric mean), {max(ratios):.2f} at most", fontsize=10
        )
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlabel("operations per byte")
        axis.grid(True, which="both", alpha=0.2)
    axes[0].set_ylabel("TFLOP/s")
    axes[0].legend(loc="lower right")
    dtype = document["rows"][0]["dtype"]
    figure.suptitle(
        f"{document['hardware']['gpu']}, {dtype}, {document['date'][:10]}: roof {copy:.2f} TB/s and {peak:.0f} TFLOP/s"
    )
    figure.tight_layout()
    figure.savefig(target, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("target", type=Path)
    args = parser.parse_args()
    draw(json.loads(args.results.read_text()), args.target)


if __name__ == "__main__":
    main()
