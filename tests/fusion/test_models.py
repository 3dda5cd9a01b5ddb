"""A network's training graphs: what is left to MAX. They are built, not compiled."""

from __future__ import annotations

import pytest
import torch

from benchmarks import zoo
from torch_max_backend import explain
from torch_max_backend.fusion.terms import is_fusible
from torch_max_backend.fusion.values import Operation, read
from torch_max_backend.graph.builder import BuiltGraph, GraphBuilder


def is_for_a_reduction(operation: Operation) -> bool:
    """Whether a reduction reads the result, through other operations or none."""
    return any(
        ".reduce" in reader.name or is_for_a_reduction(reader)
        for value in operation.results
        for reader in value.readers
    )


def test_max_compiles_no_elementwise_kernel_of_resnet18(monkeypatch: pytest.MonkeyPatch) -> None:
    """All elementwise work is in generated programs, few of them; MAX keeps what goes into its reductions."""
    left: list[str] = []
    calls: list[str] = []
    build = GraphBuilder.build

    def recorded(self: GraphBuilder) -> BuiltGraph:
        built = build(self)
        for operation in read(built.graph)[0]:
            if is_fusible(operation) and not is_for_a_reduction(operation):
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
