"""What a graph holds beside its arguments: tensors written in the model, branches of ``torch.cond``, checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from torch_max_backend import backend, explain
from torch_max_backend.graph import ops
from torch_max_backend.graph.compiler import CompiledGraph

TABLE = [[1.0, -2.0, 3.0], [0.5, 4.0, -1.0]]
MANY = ops.MOST_ELEMENTS + 1


@pytest.fixture
def graphs() -> Iterator[list[CompiledGraph]]:
    seen: list[CompiledGraph] = []
    torch._dynamo.reset()
    backend.observers.append(seen.append)
    yield seen
    backend.observers.remove(seen.append)


def _with_literals(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Literals in a part that MAX runs, on both sides of an op that it does not run, and as a result."""
    literal = torch.tensor(TABLE)
    scaled = torch.lgamma(x * literal) + literal
    chosen = torch.cond(x.sum() > 0, lambda y: y * torch.tensor(TABLE), lambda y: y - 1, (scaled + 2,))
    return chosen * literal[0], literal * 2


@pytest.mark.filterwarnings("ignore:.*runs in PyTorch")
def test_literals_and_branches_in_a_cut_graph(graphs: list[CompiledGraph]) -> None:
    compiled = torch.compile(_with_literals, backend="max", fullgraph=True)
    for x in (torch.rand(2, 3) + 1, -torch.rand(2, 3) - 1):
        for got, expected in zip(compiled(x), _with_literals(x), strict=True):
            torch.testing.assert_close(got, expected)
    (graph,) = graphs
    assert {refusal.op for refusal in graph.refusals} == {"aten.lgamma.default", "cond"}
    assert len(graph.executables) >= 2


def test_a_literal_does_not_cut_a_graph() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda y: torch.relu(y * torch.tensor(TABLE)), x, use_reentrant=False) + x.new_tensor(2.0)

    account = explain(step, torch.randn(2, 3, requires_grad=True), quiet=True, compile=False)
    assert [(graph.name, graph.max_graphs) for graph in account.graphs] == [("forward", 1), ("backward", 1)]
    assert not account.fallback_count


def test_a_large_literal_enters_as_an_argument() -> None:
    values = list(range(MANY))
    account = explain(
        lambda x: x + torch.tensor(values), torch.zeros(MANY, dtype=torch.int64), quiet=True, compile=False
    )
    assert not account.fallback_count and [graph.max_graphs for graph in account.graphs] == [1]
