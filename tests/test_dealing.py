"""Which graphs are compiled together."""

from __future__ import annotations

import pytest

from torch_max_backend import OptionError
from torch_max_backend.runtime import dealing


@pytest.mark.parametrize(
    ("sizes", "cores", "beside", "expected"),
    [
        ([300], 16, 0, [[0]]),
        # A worker would begin when this process is nearly done with both.
        ([4, 7], 16, 0, [[0, 1]]),
        ([100, 200], 16, 0, [[1], [0]]),
        ([100, 200], 2, 0, [[1], [0]]),
        # One core, or two that are busy with the kernels' libraries: another module is more work for the same cores.
        ([100, 200], 1, 0, [[0, 1]]),
        ([100, 200], 2, 400, [[0, 1]]),
        ([100, 200], 16, 400, [[1], [0]]),
        # Pieces of a graph that was cut: as alike as can be, the small ones together.
        ([200, 10, 10, 100, 90], 16, 0, [[0], [2, 3], [1, 4]]),
    ],
)  # fmt: skip
def test_graphs_are_dealt_out_as_it_pays(
    sizes: list[int], cores: int, beside: float, expected: list[list[int]]
) -> None:
    assert dealing.best(sizes, cores, beside) == expected


def test_every_graph_is_in_one_module() -> None:
    ways = list(dealing.ways([5] * 40))
    assert [len(way) for way in ways] == list(range(1, dealing.MOST + 1))
    assert all(sorted(number for lot in way for number in lot) == list(range(40)) for way in ways)


def test_the_number_of_cores_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_MAX_BACKEND_COMPILE_CORES", "3")
    assert dealing.cores() == 3
    for bad in ("0", "-1", "all"):
        monkeypatch.setenv("TORCH_MAX_BACKEND_COMPILE_CORES", bad)
        with pytest.raises(OptionError, match="at least 1"):
            dealing.cores()
