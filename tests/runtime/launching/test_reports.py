"""Reports of indices outside their dimensions become errors."""

from __future__ import annotations

import ctypes

import torch

from torch_max_backend.launch_list import Indexing, Launch
from torch_max_backend.mojo_ops.indexing import SEVERAL, JoinedDimensions
from torch_max_backend.runtime.launching.reports import Reports


def _report(reports: Reports, record: int, index: int, size: int) -> None:
    """As kernels/common/bounds.mojo does."""
    words = (ctypes.c_int64 * 2).from_address(record)
    words[:] = size + 1, index
    ctypes.c_int64.from_address(reports.found.address).value = 1


def test_the_first_launch_is_named_and_all_reports_are_dropped() -> None:
    reports = Reports(pinned=False)
    launches = [Launch("f", (), f"op{number}", Indexing(f"model.py:{number}")) for number in range(2000)]
    records = [reports.record(launch) for launch in launches]
    assert len(set(records)) == len(records) and reports.found.address not in records
    assert reports.taken() is None
    for number in (1999, 700):
        _report(reports, records[number], 12, 10)
    reports.raise_found(torch.device("cpu"))
    assert str(reports.taken()) == "aten.op700: index out of range: 12 in a dimension of 10\n  at: model.py:700"
    assert reports.taken() is None
    _report(reports, records[3], -1, 0)
    assert str(reports.taken()) == "aten.op3: index out of range: -1 in a dimension of 0\n  at: model.py:3"


def test_an_index_into_several_dimensions_names_them() -> None:
    reports = Reports(pinned=False)
    record = reports.record(Launch("f", (), "index", Indexing("", JoinedDimensions((4, 5)))))
    _report(reports, record, SEVERAL, 20)
    error = reports.taken()
    assert str(error) == "aten.index: index out of range: an index into dimensions of 4, 5"
    assert isinstance(error, IndexError) and isinstance(error, RuntimeError)
