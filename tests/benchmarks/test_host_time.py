"""The host's time for a call is split into parts that are all measured."""

import torch

from benchmarks.contenders import EAGER, MAX
from benchmarks.training.host_time import PARTS, ManyTensors, rows_of


def test_parts_of_a_call_are_measured() -> None:
    rows = rows_of("3 tensors", ManyTensors(3), torch.randn(64), 2, MAX)
    assert [row["call"] for row in rows] == ["forward", "backward"]
    for row in rows:
        assert list(row["microseconds"]) == [*PARTS, "total"]
        assert min(row["microseconds"].values()) > 0


def test_other_contenders_have_a_total_alone() -> None:
    rows = rows_of("3 tensors", ManyTensors(3), torch.randn(64), 2, EAGER)
    assert [list(row["microseconds"]) for row in rows] == [["total"], ["total"]]
