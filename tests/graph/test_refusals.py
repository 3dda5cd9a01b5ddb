"""Nodes that cannot be lowered are found in one pass, however many they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from max.graph import TensorValue
from torch.fx import Node

from tests.harness import trace
from torch_max_backend import UnsupportedOpError, lowering
from torch_max_backend.backend import recorded_graphs
from torch_max_backend.graph import compiler
from torch_max_backend.graph.builder import NodesCannotLower
from torch_max_backend.graph.partition import cut
from torch_max_backend.graph.unit import CompilationUnit
from torch_max_backend.ir.notes import key_of, notes
from torch_max_backend.mojo_ops import functions
from torch_max_backend.mojo_ops.signatures import Signature
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


def _sorted_and_summed(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    first = (x.sin() + 1).sort(1).values
    second = (first * y).cumsum(0)
    return [(second - 1).sort(0).values.exp(), second]


@pytest.fixture
def no_sorting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sorting has no library function: its call is not noted."""
    call = functions.call

    def without(signature: Signature, *arguments: Any, **options: Any) -> list[TensorValue]:
        results = call(signature, *arguments, **options)
        if signature.name == "sort_rows":
            del notes().calls[key_of(results[0])]
        return results

    monkeypatch.setattr(functions, "call", without)
    torch._dynamo.reset()
    compiler.fallback_warnings.forget()


@pytest.mark.usefixtures("no_sorting")
def test_operations_without_a_library_function_stay_in_pytorch(rounds: list[int]) -> None:
    """All of them at once, with one warning that names their op, and nothing else."""
    x, y = torch.rand(3, 4), torch.rand(3, 4)
    compiled = torch.compile(_sorted_and_summed, backend="max")
    with (
        recorded_graphs() as graphs,
        pytest.warns(UserWarning, match=r"aten\.sort\.default.*no library function") as told,
    ):
        results = compiled(x, y)
    torch.testing.assert_close(results, _sorted_and_summed(x, y))
    assert sum("runs in PyTorch" in str(each.message) for each in told) == 1
    assert rounds == [2]
    (graph,) = graphs
    assert [refusal.op for refusal in graph.refusals] == ["aten.sort.default"] * 2
    assert len(graph.executables) == 3 and all(each.listing is not None for each in graph.executables)


@pytest.mark.usefixtures("no_sorting")
def test_the_fallback_can_be_forbidden() -> None:
    compiled = torch.compile(_sorted_and_summed, backend="max", options={"fallback": "error"})
    with pytest.raises(UnsupportedOpError, match=r"aten\.sort\.default.*no library function"):
        compiled(torch.rand(3, 4), torch.rand(3, 4))


def _selected(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A size that depends on values, among others that do not."""
    h = (x @ w).relu()
    chosen = (h[h > 0.5] * 2 + 1).exp()
    return h.sum(0), chosen, chosen.sum() + h.mean()


@pytest.mark.filterwarnings("ignore:.*runs in PyTorch")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_what_depends_on_values_stays_in_pytorch(dynamic: bool) -> None:
    """The graph is cut there; pieces with symbolic sizes are made for each set of these."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), recorded_graphs() as graphs:
        run = torch.compile(_selected, backend="max", dynamic=dynamic, fullgraph=True)
        for rows in (4, 6):
            x, w = torch.rand(rows, 5), (torch.rand(5, 7) / 2).requires_grad_()
            outcomes = []
            for function in (run, _selected):
                results = function(x, w)
                outcomes.append((results, torch.autograd.grad(results[0].sum() + results[2], w)))
            torch.testing.assert_close(*outcomes, rtol=1e-5, atol=1e-5)
    assert len(graphs) == (2 if dynamic else 4)
    for graph in graphs:
        reasons = {refusal.reason for refusal in graph.refusals}
        assert reasons and all("depends on values" in reason for reason in reasons)
        assert graph.executables and all(each.listing is not None for each in graph.executables)
        assert not any("assert" in refusal.op or "sym" in refusal.op for refusal in graph.refusals)
