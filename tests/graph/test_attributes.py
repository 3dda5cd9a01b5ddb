"""What a graph holds beside its tensor arguments: literals, branches of ``torch.cond``, checkpoints, sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from torch_max_backend import backend, explain
from torch_max_backend.graph.compiled import CompiledGraph
from torch_max_backend.ir import ops

TABLE = [[1.0, -2.0, 3.0], [0.5, 4.0, -1.0]]
MANY = ops.MAX_ELEMENTS + 1


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


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


def _pooled(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.mean((2, 3)) @ weight


def _pooled_inside(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.lgamma(x[:, :, 1:-1]).relu().mean((2, 3)) @ weight


def _backward_refusals(model: Callable[..., torch.Tensor], graphs: list[CompiledGraph], run: str) -> dict[str, str]:
    compiled = torch.compile(model, backend=backend.build_only, dynamic=True, options={"run": run})
    x, weight = torch.rand(2, 3, 5, 7, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    compiled(x, weight).sum().backward()
    assert [graph.name for graph in graphs] == ["forward", "backward"]
    assert all(graph.executables for graph in graphs)
    return {refusal.op: refusal.reason for refusal in graphs[1].refusals}


@pytest.mark.filterwarnings("ignore:.*runs in PyTorch")
@pytest.mark.parametrize("model", [_pooled, _pooled_inside])
def test_a_size_that_no_argument_has(model: Callable[..., torch.Tensor], graphs: list[CompiledGraph]) -> None:
    """The gradient of a mean is spread over extents that are numbers among the backward graph's arguments, or parts of
    an expression. A launch list is made for the numbers of a call; MAX's compiler cannot know them."""
    assert "aten.expand.default" not in _backward_refusals(model, graphs, "launches")
    graphs.clear()
    torch._dynamo.reset()
    refused = _backward_refusals(model, graphs, "graph")
    assert "cannot be told from the tensors" in refused["aten.expand.default"]
