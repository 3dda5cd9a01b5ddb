"""What launches of the Hopper convolutions walk: every product of a convolution once and nothing else. No GPU runs."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

from benchmarks.kernels.convolution.random_check import random_problem
from tests.kernels.programs import fixture_of
from torch_max_backend.problems.convolution import ConvolutionProblem

MAX_PHASES = 16
FORWARD, DATA_GRADIENT, GROUPED_FORWARD, GROUPED_DATA_GRADIENT = range(4)
CASES = {
    "phases along three axes": ConvolutionProblem.from_sizes(2, 8, 8, [5, 7, 6], [3, 3, 3], stride=[2], padding=[1]),
    "no taps for seven phases": ConvolutionProblem.from_sizes(1, 8, 8, [6, 4, 5], [1, 1, 1], stride=[2]),
    "all different": ConvolutionProblem.from_sizes(
        1, 8, 8, [7, 9, 11], [2, 3, 4], stride=[1, 2, 3], padding=[1, 0, 2], dilation=[3, 2, 1]
    ),
    "channels of several tiles": ConvolutionProblem.from_sizes(1, 728, 1056, [3, 5], [1, 1]),
    "stages half full": ConvolutionProblem.from_sizes(2, 96, 160, [5, 4], [3, 3], padding=[1]),
    "fewer channels than half a stage": ConvolutionProblem.from_sizes(1, 32, 24, [5, 5], [3, 3], padding=[1]),
    "folded rows as wide as their copy": ConvolutionProblem.from_sizes(
        1, 4, 64, [6, 106], [5, 1], stride=[2, 4], padding=[1, 1]
    ),
    "a filter that stays": ConvolutionProblem.from_sizes(2, 24, 72, [40, 40], [1, 1]),
    "padding along depth alone": ConvolutionProblem.from_sizes(1, 8, 8, [1, 3, 3], [1, 1, 1], padding=[1, 0, 0]),
}


def argument(problem: ConvolutionProblem, which: int) -> str:
    """The program's argument for one pass."""
    p = problem
    extents = [*p.input_size, *p.filter_size, *p.output_size]
    return ",".join(map(str, [which, p.n, p.c, p.k, p.groups, *extents, *p.stride, *p.dilation, *p.padding]))


program = fixture_of(Path(__file__).with_name("hopper_walk.mojo"))


def test_every_product_comes_once(program: Path) -> None:
    chance = random.Random(0)
    problems = list(CASES.values())
    while len(problems) < 150:
        problem = random_problem(chance)
        pixels = max(int(problem.input_pixels), int(problem.output_pixels))
        if problem.groups == 1 and pixels * problem.taps <= 40000:
            problems.append(problem)
    arguments = []
    for problem in problems:
        arguments.append(argument(problem, FORWARD))
        if problem.stride[0] * problem.stride[1] * problem.stride[2] <= MAX_PHASES:
            arguments.append(argument(problem, DATA_GRADIENT))
    result = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=300)
    lines = result.stdout.split()
    assert result.returncode == 0, f"{arguments[len(lines)]}: {result.stderr}"
    assert len(lines) == len(arguments)


def test_groups_are_phases(program: Path) -> None:
    """Each has its own source, filter rows and results: every product once."""
    sizes = ConvolutionProblem.from_sizes
    problems = [
        sizes(2, 8 * groups, 16 * groups, size, taps, stride=[stride], padding=[1], groups=groups)
        for size, taps in (([7, 9], [3, 3]), ([5, 6, 4], [3, 2, 3]))
        for stride, groups in ((1, 2), (1, 11), (2, 2))
    ]
    which = (GROUPED_FORWARD, GROUPED_DATA_GRADIENT)
    arguments = [argument(problem, each) for problem in problems for each in which]
    result = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=300)
    phases = list(map(int, result.stdout.split()))
    assert result.returncode == 0, f"{arguments[len(phases)]}: {result.stderr}"
    assert phases == [2, 2, 11, 11, 2, 8, 2, 2, 11, 11, 2, 16]


def test_the_limits_of_tensor_maps(program: Path) -> None:
    """With three axes corners have 5 bits and offsets too, with two they have 8; 0 is a refusal."""

    def answers(size: list[int], taps: list[int], dilation: int, padding: int) -> str:
        problem = ConvolutionProblem.from_sizes(1, 8, 8, size, taps, dilation=[dilation], padding=[padding])
        return subprocess.run([program, argument(problem, FORWARD)], capture_output=True, text=True).stdout.strip()

    assert answers([60, 60], [3, 3], 24, 24) == "1"
    assert answers([34, 34, 34], [2, 2, 2], 31, 15) == "1"
    assert answers([34, 34, 34], [2, 2, 2], 32, 15) == "0"
    assert answers([3, 3, 3], [1, 1, 1], 1, 16) == "0"
