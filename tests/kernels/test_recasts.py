"""The ways in which Hopper's convolutions take few channels as more: in whole numbers, on a CPU. No GPU runs."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

from benchmarks.kernels.convolution.random_check import random_problem
from tests.kernels.programs import fixture_of
from tests.kernels.test_hopper_walk import FORWARD, argument
from torch_max_backend.problems.convolution import ConvolutionProblem

CASES = {
    "an image's channels, strided": ConvolutionProblem.from_sizes(2, 3, 16, [9, 16], [7, 7], stride=[2], padding=[3]),
    "one channel": ConvolutionProblem.from_sizes(2, 1, 6, [7, 8], [5, 3], padding=[2, 1]),
    "eight channels": ConvolutionProblem.from_sizes(1, 8, 9, [6, 8], [3, 7], padding=[1, 3]),
    "few filters": ConvolutionProblem.from_sizes(1, 12, 3, [5, 16], [3, 3], padding=[1]),
    "few filters without padding": ConvolutionProblem.from_sizes(1, 16, 4, [6, 18], [3, 3]),
    "few of both": ConvolutionProblem.from_sizes(2, 5, 2, [6, 12], [3, 5], padding=[1, 2]),
    "pointwise": ConvolutionProblem.from_sizes(2, 16, 12, [3, 8], [1, 1]),
    "pointwise, odd channels": ConvolutionProblem.from_sizes(1, 58, 58, [2, 8], [1, 1]),
    "pointwise, odd rows": ConvolutionProblem.from_sizes(2, 20, 12, [4, 7], [1, 1]),
    "pointwise along rows": ConvolutionProblem.from_sizes(1, 20, 12, [5, 8], [3, 1], padding=[1, 0]),
    "windows beside each other": ConvolutionProblem.from_sizes(1, 4, 8, [6, 24], [3, 3], stride=[3]),
    "wide strides": ConvolutionProblem.from_sizes(1, 3, 8, [9, 35], [5, 5], stride=[2, 4], padding=[2]),
    "three axes": ConvolutionProblem.from_sizes(1, 3, 6, [4, 5, 12], [3, 3, 5], stride=[2, 1, 1], padding=[1, 1, 2]),
    "rows apart": ConvolutionProblem.from_sizes(1, 3, 8, [9, 8], [3, 3], padding=[2, 1], dilation=[2, 1]),
}
SMALL = 300_000
"""Products of one pass."""

program = fixture_of(Path(__file__).with_name("recast_walk.mojo"))


def _products(p: ConvolutionProblem) -> int:
    return int(p.output_pixels) * int(p.taps) * int(p.c) * int(p.k)


def test_every_way_gives_the_convolution(program: Path) -> None:
    chance = random.Random(0)
    problems = list(CASES.values())
    while len(problems) < 60:
        drawn = random_problem(chance)
        if drawn.groups == 1 and _products(drawn) <= SMALL:
            problems.append(drawn)
    arguments = [argument(each, FORWARD).split(",", 1)[1] for each in problems]
    result = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=300)
    lines = result.stdout.split()
    assert result.returncode == 0, f"{arguments[len(lines)]}: {result.stderr}"
    assert len(lines) == len(arguments)
