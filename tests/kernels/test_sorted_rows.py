"""The GPU's kernels that scatter rows by a sorted list, run on a CPU thread after thread: exact sums, and the last row
where rows are put. No GPU runs."""

from __future__ import annotations

import random
from pathlib import Path

from tests.kernels.programs import fixture_of, printed

program = fixture_of(Path(__file__).with_name("sorted_rows_walk.mojo"))


def problems(seed: int, count: int) -> list[str]:
    """One place that all rows go to, many that are hit once, rows of one element, several stretches of columns."""
    chance = random.Random(seed)
    found = []
    for _ in range(count):
        places = chance.choice((1, 2, 7, 64, chance.randint(1, 300)))
        rows = chance.choice((1, 5, 64, 197, chance.randint(1, 600)))
        outer, inner = chance.choice(((1, 1), (1, 3), (1, 16), (2, 5), (1, 130), (3, 40), (1, 1100)))
        hit = min(places, chance.choice((1, 4, places)))
        length = chance.choice((0, 0, 1, 3, 8, 50))
        found.append(f"{outer} {places} {rows} {inner} {hit} {chance.randint(0, 1)} {length}")
    return found


def test_results_are_exact(program: Path) -> None:
    arguments = problems(0, 150)
    output = printed(program, arguments)
    assert len(output.split()) == len(arguments)
