"""What the GPU's threads do that lay out windows and add them up, run on a CPU thread after thread. No GPU runs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from tests.kernels.programs import fixture_of, printed

program = fixture_of(Path(__file__).with_name("windows_walk.mojo"))


def axes(chance: random.Random) -> Iterator[tuple[int, int, int, int, int]]:
    """Extent, taps, stride, padding and dilation of axes that have a window; strides and dilations share factors or do
    not."""
    while True:
        axis = (
            chance.randint(1, chance.choice((3, 12, 30))),
            chance.randint(1, chance.choice((3, 9))),
            chance.randint(1, chance.choice((1, 4, 12))),
            chance.randint(0, chance.choice((1, 5))),
            chance.randint(1, chance.choice((1, 4, 12))),
        )
        if axis[0] + 2 * axis[3] > axis[4] * (axis[1] - 1):
            yield axis


def test_threads_do_what_the_cpu_does(program: Path) -> None:
    chance = random.Random(3)
    of_axes = axes(chance)
    problems = [
        " ".join(map(str, (chance.randint(1, 2), chance.randint(1, 3), *next(of_axes), *next(of_axes))))
        for _ in range(300)
    ]
    output = printed(program, problems)
    assert output.split() == ["right"]
