"""The depthwise kernels of tensor cores, run on a CPU lane by lane: exact results for any geometry. No GPU runs."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.kernels.convolution.random_check import random_problem
from tests.kernels.programs import fixture_of
from tests.kernels.test_hopper_walk import argument
from torch_max_backend.problems.convolution import ConvolutionProblem

FORWARD, DATA_GRADIENT, WEIGHT_GRADIENT = range(3)


def depthwise(
    n: int, c: int, size: list[int], taps: list[int], stride: int = 1, padding: int = 0, dilation: int = 1
) -> ConvolutionProblem:
    return ConvolutionProblem.from_sizes(
        n, c, c, size, taps, stride=[stride], padding=[padding], dilation=[dilation], groups=c
    )


CASES = {
    "7x7": depthwise(2, 64, [14, 14], [7, 7], padding=3),
    "several images in a product": depthwise(3, 40, [7, 7], [5, 5], padding=2),
    "pairs of channels": depthwise(1, 34, [9, 30], [3, 3], stride=2, padding=1),
    "phases": depthwise(2, 16, [13, 15], [5, 5], stride=2, padding=2),
    "residues without taps": depthwise(1, 8, [7, 9], [1, 1], stride=3),
    "several tiles along both axes": depthwise(1, 8, [40, 70], [3, 3], padding=1),
    "a band of several products": ConvolutionProblem.from_sizes(1, 8, 8, [50], [31], padding=[15], groups=8),
    "dilated": depthwise(1, 8, [20, 22], [3, 3], padding=4, dilation=4),
}


def random_depthwise(seed: int) -> Iterator[ConvolutionProblem]:
    chance = random.Random(seed)
    while True:
        problem = random_problem(chance)
        pixels = max(int(problem.input_pixels), int(problem.output_pixels))
        if problem.groups == problem.c == problem.k > 1 and problem.c * pixels * problem.taps < 1 << 20:
            yield problem


program = fixture_of(Path(__file__).with_name("depthwise_walk.mojo"))


def taken(program: Path, problem: ConvolutionProblem, which: int) -> bool:
    result = subprocess.run([program, argument(problem, which)], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return int(result.stdout) > 0


@pytest.mark.parametrize("name", CASES)
def test_results_are_exact(program: Path, name: str) -> None:
    problem = CASES[name]
    assert taken(program, problem, FORWARD) == (problem.stride[2] == 1)
    assert taken(program, problem, DATA_GRADIENT)
    band_is_short = problem.stride[2] == 1 and problem.filter_size[2] < 10
    assert taken(program, problem, WEIGHT_GRADIENT) == band_is_short


def test_random_problems_are_exact(program: Path) -> None:
    problems = [problem for problem, _ in zip(random_depthwise(0), range(100), strict=False)]
    arguments = [argument(problem, which) for problem in problems for which in range(3)]
    result = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=300)
    lines = result.stdout.split()
    assert result.returncode == 0, f"{arguments[len(lines)]}: {result.stderr}"
    assert len(lines) == len(arguments)
    # Odd channels, three axes and strides along W, but in the data gradient, are left to other kernels.
    assert sum(line != "0" for line in lines) > len(lines) // 3


def test_what_is_refused(program: Path) -> None:
    assert not taken(program, depthwise(1, 7, [9, 9], [3, 3]), FORWARD)
    assert not taken(program, depthwise(1, 8, [90, 90], [3, 3], dilation=40), FORWARD)
    assert not taken(program, depthwise(1, 8, [9, 9], [3, 3], stride=2), FORWARD)
    assert not taken(program, depthwise(1, 8, [9, 9], [3, 3], stride=2), WEIGHT_GRADIENT)
    assert not taken(program, depthwise(1, 8, [30, 30], [11, 3]), WEIGHT_GRADIENT)
