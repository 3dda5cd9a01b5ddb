"""Graphs that run as launch lists, beside eager PyTorch: how arguments enter and results leave."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from max.dtype import DType
from max.graph import DeviceRef
from torch import Tensor, nn

from tests.threads import in_threads
from torch_max_backend.graph.unit import CompilationUnit
from torch_max_backend.ir.layout import contiguous_order
from torch_max_backend.launch_list import Kind, Launch, LaunchList, Place
from torch_max_backend.mojo_ops.functions import require_entry
from torch_max_backend.runtime.building import libraries
from torch_max_backend.runtime.executable import Executable
from torch_max_backend.runtime.launching.runner import ListRunner, RunnerSpec
from torch_max_backend.runtime.tensors.interface import InputSpec, OutputSpec
from torch_max_backend.runtime.tensors.leaving import Leaving


@pytest.fixture
def executables(monkeypatch: pytest.MonkeyPatch) -> list[Executable]:
    """Every executable that is made during the test."""
    found: list[Executable] = []
    add = CompilationUnit.add

    def noted(self: CompilationUnit, *args: Any, **options: Any) -> Executable:
        found.append(add(self, *args, **options))
        return found[-1]

    monkeypatch.setattr(CompilationUnit, "add", noted)
    torch._dynamo.reset()
    return found


def _compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend="max", options={"fallback": "error", **options})


def test_a_network_trains_as_a_list_and_as_a_graph(executables: list[Executable]) -> None:
    """Forward, backward, running statistics; MAX's compiler is asked for neither graph."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))
    twin = copy.deepcopy(model)
    x = torch.randn(2, 3, 12, 12)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    run = _compiled(model)
    for _ in range(3):
        for inputs, call in ((ours, run), (theirs, twin)):
            (call(inputs) * torch.linspace(0, 1, 5)).sum().backward()
    assert len(executables) == 2
    assert all(each.runner is not None and each.model is None for each in executables)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)
    for a, b in zip(model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_results_have_memory_of_their_own(executables: list[Executable]) -> None:
    """Reshaped arguments, one value under two shapes, constants."""

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        z = torch.relu(x - y)
        return z, z.clone().view(3, 4), x.clone().view(12), y + 0, torch.full((5,), 2.5), torch.relu(y)

    x, y = torch.randn(4, 3), torch.randn(4, 3)
    results = _compiled(function)(x, y)
    (executable,) = executables
    assert executable.runner is not None
    for ours, theirs in zip(results, function(x, y), strict=True):
        assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()
    memories = [each.untyped_storage().data_ptr() for each in (x, y, *results)]
    assert len(set(memories)) == len(memories)
    kept = [each.clone() for each in results]
    again = _compiled(function)(x + 1, y)
    assert all(torch.equal(each, before) for each, before in zip(results, kept, strict=True))
    assert not torch.equal(again[0], results[0])


def test_arguments_enter_in_any_order(executables: list[Executable]) -> None:
    """Strided, overlapping, negated and empty ones, and those that the function updates."""

    def function(x: Tensor, y: Tensor, total: Tensor) -> Tensor:
        total += x * 2
        return (x * y).abs() + total

    run = _compiled(function)
    base = torch.randn(8, 6)
    cases = [
        (base[::2, ::3], base[:4, :2]),
        (torch.randn(2, 4).t(), torch.randn(1, 2).expand(4, 2)),
        (torch._neg_view(torch.randn(4, 2)), torch.randn(4, 2)),
        (torch.empty(0, 2), torch.empty(0, 2)),
    ]
    for x, y in cases:
        ours, theirs = torch.ones(x.shape), torch.ones(x.shape)
        torch.testing.assert_close(run(x, y, ours), function(x, y, theirs))
        torch.testing.assert_close(ours, theirs)
    assert any(each.runner is not None for each in executables)


def test_threads_take_turns(executables: list[Executable]) -> None:
    run = _compiled(lambda x: (x * 2 + 1).relu().exp())
    run(torch.zeros(1000))
    failures: list[int] = []

    def work(number: int) -> None:
        x = torch.full((1000,), number / 10)
        if not all(torch.allclose(run(x), (x * 2 + 1).exp()) for _ in range(50)):
            failures.append(number)

    in_threads(work, 4)
    assert not failures and len(executables) == 1


def test_what_a_kernel_refuses_is_raised() -> None:
    """An index that lies outside; the call after it is as if nothing had been."""
    device, shapes = torch.device("cpu"), ((1, 4, 3), (2,), (1, 2, 3))
    dtypes = (torch.float32, torch.int64, torch.float32)
    inputs = [
        InputSpec(number, dtype, contiguous_order(len(shape)), device, shape)
        for number, (dtype, shape) in enumerate(zip(dtypes, shapes, strict=True))
    ]
    leaving = Leaving([OutputSpec(0, contiguous_order(3), torch.float32, shapes[0])], [])
    function = require_entry("indexing", "scatter_rows_add", DeviceRef.CPU(), (DType.float32,))
    walk = require_entry("runner", "walk", DeviceRef.CPU(), ())
    places = [Place(Kind.RESULT, 0), *(Place(Kind.ARGUMENT, number) for number in range(3))]
    tensors = zip(places, (shapes[0], *shapes), strict=True)
    deterministic = 1
    words = [deterministic, *(word for place, shape in tensors for word in (place, *shape))]
    listing = LaunchList((Launch(function, tuple(words)),), 3, (places[0],), (), 0)
    with libraries.ready(device):
        pass
    runner = ListRunner(RunnerSpec(listing, inputs, leaving, device, walk))
    x, source = torch.zeros(shapes[0]), torch.ones(shapes[2])
    with pytest.raises(RuntimeError, match="index out of range: 9 in a dimension of 4"):
        runner.run([x, torch.tensor([1, 9]), source])
    (result,) = runner.run([x, torch.tensor([1, 3]), source])
    assert result[0, :, 0].tolist() == [0, 1, 0, 1]
    with pytest.raises(ValueError, match="argument 1: expected shape"):
        runner.run([x, torch.tensor([1]), source])


def test_a_user_may_have_every_graph_compiled(executables: list[Executable]) -> None:
    x = torch.randn(6)
    function = lambda x: torch.sigmoid(x) * 3  # noqa: E731
    torch.testing.assert_close(_compiled(function, run="graph")(x), function(x))
    (executable,) = executables
    assert executable.runner is None and executable.model is not None
