"""Bytes that launches move: of small graphs, by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.training import step_bytes
from torch_max_backend.backend import build_only, recorded_graphs
from torch_max_backend.launch_list.traffic import Traffic, kernels_by_entry, traffic

ROWS, COLUMNS = 64, 32
WHOLE, ROW = 4 * ROWS * COLUMNS, 4 * COLUMNS


def counted(function: object, *arguments: Tensor) -> Traffic:
    torch.compiler.reset()
    with recorded_graphs() as graphs:
        torch.compile(function, backend=build_only)(*arguments)
    (graph,) = graphs
    typed = graph.executables[0].built.typed
    assert typed is not None
    return traffic(typed)


def test_a_program_reads_and_writes_once() -> None:
    """``b`` is broadcast: its own bytes count."""
    found = counted(lambda a, b: (a * b + a).relu(), torch.randn(ROWS, COLUMNS), torch.randn(COLUMNS))
    assert list(kernels_by_entry(found.kernels)) == ["pointwise"]
    assert found.moved == found.needed == 2 * WHOLE + ROW
    assert not found.avoidable


def test_a_slice_is_read_in_part() -> None:
    found = counted(lambda a: a[:, :8] * 2, torch.randn(ROWS, COLUMNS))
    assert found.moved == 2 * WHOLE // 4


def test_what_a_reduction_separates_is_read_twice() -> None:
    """The second read has to be: the sums are complete only after the first."""
    found = counted(lambda a: a - a.sum(0), torch.randn(ROWS, COLUMNS))
    assert found.moved == found.needed == 3 * WHOLE + 2 * ROW


def test_a_read_that_others_have_done_is_avoidable() -> None:
    """Sums over rows and over columns are two launches of one level."""
    found = counted(lambda a: (a.sum(0), a.sum(1)), torch.randn(ROWS, COLUMNS))
    assert found.moved - found.needed == WHOLE
    (each,) = found.avoidable
    assert (each.bytes, each.producer, each.shape) == (WHOLE, None, (ROWS, COLUMNS))
    assert "apart from reduction 0" in each.reason


def test_the_benchmark_counts_a_step_for_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each layer's operands are read by the forward and by the backward graph."""
    file = tmp_path / "bytes.json"
    step_bytes.count(model=["digits"], batch=8, target="sm_90a", worst=3, json_file=file)
    rows = json.loads(file.read_text())["rows"]
    assert {row["graph"] for row in rows} == {"forward", "backward"}
    assert {"conv_fprop", "conv_wgrad"} <= {row["family"].replace("pointwise", "fprop") for row in rows}
    assert all(row["read"] + row["written"] >= row["needed"] > -1 for row in rows)
    assert "needed" in capsys.readouterr().out
