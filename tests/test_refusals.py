"""Nodes that cannot be lowered are found in one pass, however many they are."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch.fx import Node

from tests.harness import trace
from torch_max_backend import lowering
from torch_max_backend.graph import compiler
from torch_max_backend.graph.builder import NodesCannotLower
from torch_max_backend.graph.partition import cut
from torch_max_backend.graph.unit import CompilationUnit
from torch_max_backend.options import Options


def _through_nine_dimensions(x: torch.Tensor) -> torch.Tensor:
    """MAX has eight."""
    return x.reshape(*x.shape, *[1] * 7).sin().reshape(x.shape) + 1


def _refused_in_a_row(x: torch.Tensor) -> torch.Tensor:
    return _through_nine_dimensions(_through_nine_dimensions(x).relu() * 2).exp()


def _refused_after_a_refusal_by_name(x: torch.Tensor) -> list[torch.Tensor]:
    """lgamma has no lowering, so that the graph is cut before anything is built."""
    y = torch.lgamma(_through_nine_dimensions(x))
    return [_through_nine_dimensions(y * 3), _through_nine_dimensions(x - 3)]


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many nodes were refused whenever a graph was cut."""
    lowering.load_all()
    counts: list[int] = []

    def counted(gm: torch.fx.GraphModule, outside: dict[str, object]) -> torch.fx.GraphModule:
        counts.append(len(outside))
        return cut(gm, outside)

    monkeypatch.setattr(compiler, "cut", counted)
    return counts


@pytest.mark.filterwarnings("ignore:.*runs in PyTorch")
@pytest.mark.parametrize(
    "function, expected", [(_refused_in_a_row, [6]), (_refused_after_a_refusal_by_name, [1, 10])], ids=["whole", "cut"]
)
def test_all_are_refused_together(function: object, expected: list[int], rounds: list[int]) -> None:
    unit = CompilationUnit("refusals")
    graph = trace(function, [torch.rand(2, 3) + 1], "cpu")
    compiled = compiler.compile_graph(graph, unit, Options(), "refusals")
    assert rounds == expected
    assert {refusal.reason for refusal in compiled.refusals} <= {
        "MAX has tensors of rank 8 at most, this is 9", "no lowering is registered for this op"
    }  # fmt: skip
    assert len(unit.graphs) == len(compiled.executables) > 1, "what was built in vain is gone"


def test_the_error_names_every_node() -> None:
    lowering.load_all()
    graph = trace(_refused_in_a_row, [torch.rand(2, 3)], "cpu")
    with pytest.raises(NodesCannotLower) as caught:
        CompilationUnit("named").add(graph, "named")
    sines: Sequence[Node] = [node for node in graph.graph.nodes if "sin" in node.name]
    assert len(sines) == 2 and caught.value.refused.keys() >= set(sines)
