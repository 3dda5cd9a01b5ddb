"""The GPU's kernels that scatter the gradients of regions, run on a CPU thread after thread beside the CPU's kernels.
No GPU runs."""

from __future__ import annotations

import random
from pathlib import Path

from tests.kernels.programs import fixture_of, printed

program = fixture_of(Path(__file__).with_name("regions_walk.mojo"))


def problems(seed: int, count: int) -> list[str]:
    """Small and larger images, more samples than pixels and fewer, as many as there are pixels."""
    chance = random.Random(seed)
    found = []
    for _ in range(count):
        rows, columns = chance.choice(((1, 1), (2, 3), (7, 7), (5, 2)))
        channels = rows * columns * chance.choice((1, 2))
        height, width = chance.choice(((1, 1), (4, 5), (16, 9), (1, 30), (23, 2)))
        numbers = (chance.choice((1, 3)), channels, height, width, chance.choice((1, 4, 9)), rows, columns)
        found.append(" ".join(map(str, (*numbers, chance.choice((0, 1, 2, 5)), chance.randint(0, 1), len(found)))))
    return found


def test_gradients_are_those_of_the_cpu(program: Path) -> None:
    arguments = problems(0, 100)
    output = printed(program, arguments)
    assert len(output.split()) == len(arguments)
