"""A network's training graphs: which calls they are. They are built, not compiled."""

from __future__ import annotations

import pytest
import torch

from benchmarks import zoo
from tests.models.architectures import architectures
from torch_max_backend import explain
from torch_max_backend.graph.builder import GraphBuilder
from torch_max_backend.runtime.tensors.interface import BuiltGraph
from torch_max_backend.typed_graph.operations import Call, Constant, Operation, Reshape

#: What computes nothing.
SILENT = (Reshape, Constant)


@pytest.fixture
def operations(monkeypatch: pytest.MonkeyPatch) -> list[Operation]:
    """Those of all graphs that are built."""
    found: list[Operation] = []
    build = GraphBuilder.build

    def recorded(self: GraphBuilder) -> BuiltGraph:
        built = build(self)
        assert built.typed is not None
        found.extend(built.typed.operations)
        return built

    monkeypatch.setattr(GraphBuilder, "build", recorded)
    torch.compiler.reset()
    return found


@pytest.mark.parametrize("name", ["mobilenet_v3_small", "vit_b_32", "swin_t"])
def test_training_graphs_are_library_calls_alone(operations: list[Operation], name: str) -> None:
    """Nothing else computes."""
    architecture = next(each for each in architectures() if each.name == name)
    arguments, keywords = architecture.call()
    explain(architecture.model().train(), *arguments, quiet=True, compile=False, **keywords)
    assert sum(isinstance(operation, Call) for operation in operations) > 100
    assert all(isinstance(operation, (Call, *SILENT)) for operation in operations)


def test_programs_of_resnet18_are_few(operations: list[Operation]) -> None:
    """Layers share them."""
    make, _ = zoo.MODELS["resnet18"]
    model = make().to(memory_format=torch.channels_last)
    images = torch.randn(2, 3, 64, 64).to(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.bfloat16):
        explain(model, images, quiet=True, compile=False)
    assert all(isinstance(operation, (Call, *SILENT)) for operation in operations)
    symbols = [each.function.symbol for each in operations if isinstance(each, Call)]
    programs = [symbol for symbol in symbols if symbol.startswith("torch_max_pointwise")]
    assert 40 <= len(programs) <= 120
    assert len(set(programs)) <= 30
