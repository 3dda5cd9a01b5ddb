"""What the GPU's threads do that lay out windows and add them up, run on a CPU thread after thread. No GPU runs."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernels.programs import built

SOURCE = Path(__file__).with_name("windows_walk.mojo")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(SOURCE, tmp_path_factory.mktemp("walk"))


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
    result = subprocess.run([program, *problems], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout[-500:] + result.stderr
    assert result.stdout.split() == ["right"]
