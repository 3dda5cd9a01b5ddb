"""A network's training graphs: what is left to MAX. They are built, not compiled."""

from __future__ import annotations

import pytest
import torch

from benchmarks import zoo
from torch_max_backend import explain
from torch_max_backend.fusion.terms import is_fusible
from torch_max_backend.fusion.values import read
from torch_max_backend.graph.builder import BuiltGraph, GraphBuilder


def test_max_computes_nothing_elementwise_of_resnet18(monkeypatch: pytest.MonkeyPatch) -> None:
    """All elementwise work and all reductions are in generated programs, few of them."""
    left: list[str] = []
    calls: list[str] = []
    build = GraphBuilder.build

    def recorded(self: GraphBuilder) -> BuiltGraph:
        built = build(self)
        for operation in read(built.graph)[0]:
            if is_fusible(operation) or ".reduce" in operation.name:
                left.append(operation.name)
            if operation.name == "mo.custom":
                calls.append(str(operation.handle.attributes["parameters"]))
        return built

    monkeypatch.setattr(GraphBuilder, "build", recorded)
    make, _ = zoo.MODELS["resnet18"]
    model = make().to(memory_format=torch.channels_last)
    images = torch.randn(2, 3, 64, 64).to(memory_format=torch.channels_last)
    torch.compiler.reset()
    with torch.autocast("cpu", torch.bfloat16):
        explain(model, images, quiet=True, compile=False)
    assert left == []
    programs = [call for call in calls if "torch_max_pointwise" in call]
    assert 40 <= len(programs) <= 120
    assert len(set(programs)) <= 30
