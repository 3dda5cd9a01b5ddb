"""Compiling modules: every graph is found again under its own name, whatever MAX's cache called it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from max.dtype import DType
from max.graph import DeviceRef, Graph, Module, TensorType

from torch_max_backend.runtime.building import libraries
from torch_max_backend.runtime.engine import graph_team, session

CPU = torch.device("cpu")


def _factors(graphs: Sequence[tuple[str, float]]) -> dict[str, float]:
    """What each graph multiplies by, measured."""
    module = Module()
    for name, factor in graphs:
        kind = TensorType(DType.float32, ["n"], DeviceRef.CPU())
        with Graph(name, input_types=[kind], module=module) as graph:
            graph.output(graph.inputs[0].tensor * factor)
    models = session.compile_module(module, CPU, [name for name, _ in graphs], len(graphs), "factors")
    return {name: torch.from_dlpack(model.execute(torch.ones(1))[0]).item() for name, model in models.items()}


def test_equal_modules_with_other_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_MAX_BACKEND_CACHE_DIR", str(tmp_path))
    first = [("q", 2.25), ("p", 4.5)]
    swapped = [("p", 2.25), ("q", 4.5)]
    others = [("z", 2.25), ("a", 4.5)]
    for graphs in (first, swapped, others, swapped):
        assert _factors(graphs) == dict(graphs)


def test_kernels_of_compiled_graphs_run_on_the_threads_of_max() -> None:
    x = torch.randn(4, 3, 8, 8)
    compiled = torch.compile(torch.nn.Conv2d(3, 5, 3), backend="max", options={"run": "graph"})
    assert compiled(x).shape == (4, 5, 6, 6)
    assert graph_team.lend.cache_info().currsize == 1
    assert libraries.address(graph_team.require_graph_team(), CPU) != 0
