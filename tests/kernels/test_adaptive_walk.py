"""What the threads of a GPU do in adaptive max pooling with large windows, run on a CPU thread after thread."""

from __future__ import annotations

import random
from pathlib import Path

from tests.kernels.programs import fixture_of, printed

program = fixture_of(Path(__file__).with_name("adaptive_walk.mojo"))


def problems(seed: int, count: int) -> list[str]:
    """Windows of one tap to thousands, shared by one thread to a block's, up and down."""
    chance = random.Random(seed)
    found = []
    for _ in range(count):
        vectors = chance.random() < 0.5
        channels = 2 * chance.randint(1, 2) if vectors else chance.randint(1, 3)
        lanes = 1 << chance.randint(0, 8)
        rank = chance.randint(1, 3)
        longest = (700, 40, 14)[rank - 1]
        missing = [1] * (3 - rank)
        input = [*missing, *(chance.randint(1, longest) for _ in range(rank))]
        output = [*missing, *(chance.randint(1, chance.choice((2, 7, 16))) for _ in range(rank))]
        found.append(" ".join(map(str, (channels, int(vectors), lanes, *input, *output))))
    return found


def test_windows_and_gradients_are_right(program: Path) -> None:
    output = printed(program, problems(3, 300))
    assert output.split() == ["right"]
