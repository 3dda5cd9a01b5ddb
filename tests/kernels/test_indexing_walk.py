"""What the GPU's threads do that read and write at indices, run on a CPU thread after thread: an index outside its
dimension is reported, is read at the nearest element and written nowhere. No GPU runs."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.kernels.programs import fixture_of, printed

program = fixture_of(Path(__file__).with_name("indexing_walk.mojo"))


def problems(seed: int, count: int, outside: int) -> list[str]:
    """Of one place and of many, short and long lists; one index in ``outside`` lies outside, 0 for none."""
    chance = random.Random(seed)
    found = []
    for _ in range(count):
        outer, inner = chance.choice(((1, 1), (1, 3), (2, 5), (1, 130), (3, 40)))
        found.append(f"{outer} {chance.choice((1, 2, 7, 300))} {chance.choice((1, 5, 64, 300))} {inner} {outside}")
    return found


@pytest.mark.parametrize("outside", [0, 1, 5], ids=["inside", "all_outside", "some_outside"])
def test_indices_outside_are_reported(program: Path, outside: int) -> None:
    output = printed(program, problems(outside, 60, outside))
    counts = [int(line) for line in output.split()]
    assert len(counts) == 60 and (any(counts) if outside else not any(counts))
