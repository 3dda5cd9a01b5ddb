"""The backward graph writes over what was saved for it, but for what somebody else may see."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from tests.threads import in_threads
from torch_max_backend.backend import recorded_graphs
from torch_max_backend.graph.compiler import CompiledGraph
from torch_max_backend.runtime.memory import packs, reuse
from torch_max_backend.runtime.memory.reuse import Reuse

Net = Callable[..., torch.Tensor]


class Case:
    """A compiled model, its twin in eager, and what its backward calls wrote over."""

    def __init__(self) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 8, 3, padding=1), nn.Tanh(),
        )  # fmt: skip
        self.twin = copy.deepcopy(self.model)
        self.run: Net = torch.compile(self.model, backend="max", fullgraph=True)
        with recorded_graphs() as graphs:
            self.run(self.batch()).sum().backward()
        self.graphs: list[CompiledGraph] = list(graphs)
        self.kept: list[bool] = []

    def batch(self, seed: int = 0) -> torch.Tensor:
        return torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(seed))

    def gradients(self) -> list[torch.Tensor]:
        """Those of the model, which then has none."""
        found = [parameter.grad for parameter in self.model.parameters()]
        self.model.zero_grad(set_to_none=True)
        return [gradient for gradient in found if gradient is not None]

    def expected(self, passes: int = 1) -> list[torch.Tensor]:
        self.twin.load_state_dict(self.model.state_dict())
        self.twin.zero_grad(set_to_none=True)
        out = self.twin(self.batch()).sum()
        for _ in range(passes):
            out.backward(retain_graph=True)
        return [parameter.grad for parameter in self.twin.parameters() if parameter.grad is not None]


@pytest.fixture(scope="module")
def compiled() -> Case:
    return Case()


@pytest.fixture
def case(compiled: Case, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    """Whose ``kept`` tells, for each argument that a call might write over, that it did not."""
    compiled.model.zero_grad(set_to_none=True)
    compiled.kept.clear()
    plain = Reuse.written_over

    def watched(self: Reuse, entering: Sequence[torch.Tensor], args: Sequence[object]) -> list[torch.Tensor]:
        memory = plain(self, entering, args)
        compiled.kept += [
            tensor is not entering[number] for (number, *_), tensor in zip(self._arguments, memory, strict=True)
        ]
        return memory

    monkeypatch.setattr(Reuse, "written_over", watched)
    yield compiled


def same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)


def test_what_is_read_no_more_is_written_over(case: Case) -> None:
    forward, backward = (graph.executables[0].listing for graph in case.graphs)
    assert forward is not None and backward is not None
    assert not forward.reused and backward.reused
    case.run(case.batch()).sum().backward()
    assert case.kept and not any(case.kept)
    same(case.gradients(), case.expected())


def test_memory_elsewhere_gives_the_same_bits(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    case.run(case.batch()).sum().backward()
    written_over = case.gradients()
    monkeypatch.setattr(reuse, "graph_is_kept", lambda: True)
    case.run(case.batch()).sum().backward()
    assert any(case.kept)
    for one, other in zip(written_over, case.gradients(), strict=True):
        assert torch.equal(one, other)


def test_a_graph_that_is_kept_runs_again(case: Case) -> None:
    out = case.run(case.batch()).sum()
    out.backward(retain_graph=True)
    assert case.kept and all(case.kept)
    out.backward(retain_graph=True)
    assert all(case.kept)
    out.backward()
    assert not all(case.kept)
    same(case.gradients(), case.expected(passes=3))


def test_saved_tensors_that_a_user_has_stay_as_they_are(case: Case) -> None:
    out = case.run(case.batch()).sum()
    node: Any = out.grad_fn.next_functions[0][0] if out.grad_fn is not None else None
    held = node.saved_tensors
    before = [tensor.clone() for tensor in held]
    out.backward()
    assert case.kept and all(case.kept)
    assert all(map(torch.equal, held, before))
    same(case.gradients(), case.expected())


def test_views_of_saved_tensors_stay_as_they_are(case: Case) -> None:
    out = case.run(case.batch()).sum()
    node: Any = out.grad_fn.next_functions[0][0] if out.grad_fn is not None else None
    held = [tensor.detach().view(-1) for tensor in node.saved_tensors]
    before = [tensor.clone() for tensor in held]
    out.backward()
    assert case.kept and all(case.kept)
    assert all(map(torch.equal, held, before))


@pytest.mark.parametrize("way", ["as they are", "copies", "odd copies", "held", "held copies"])
def test_hooks_on_saved_tensors(case: Case, way: str) -> None:
    """Whatever hooks keep holds what was saved after the backward pass."""
    held: list[tuple[torch.Tensor, torch.Tensor]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept = tensor.clone() if "copies" in way else tensor
        if "odd" in way:
            # At an address that no allocator gives out.
            kept = tensor.new_empty(tensor.numel() + 1)[1:].as_strided_(tensor.shape, tensor.stride()).copy_(tensor)
        if "held" in way:
            held.append((kept, kept.clone()))
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = case.run(case.batch()).sum()
    out.backward()
    assert case.kept and (way not in ("odd copies", "held", "held copies") or all(case.kept))
    assert all(torch.equal(kept, content) for kept, content in held)
    same(case.gradients(), case.expected())


class Returned(torch.autograd.Function):
    """One of its gradients is what was saved; the other is computed from it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        square = x @ x
        ctx.save_for_backward(square)
        return square.sum() + y.sum()

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (square,) = ctx.saved_tensors
        return square, square.sin() * slopes[0]


def test_a_saved_value_that_is_returned_is_not_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    # Of packs, whose values are then views, nothing at all would be written over.
    monkeypatch.setattr(packs, "MIN_LIMIT", 0)
    monkeypatch.setattr(packs, "_LARGEST", 0)

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            w = torch.tanh(w @ w)
        return Returned.apply(x, w)

    x, w = (torch.randn(200, 200, requires_grad=True) for _ in range(2))
    with recorded_graphs() as graphs:
        torch.compile(function, backend="max", fullgraph=True)(x, w).backward()
    built = graphs[1].executables[0].built
    listing = built.listing
    assert listing is not None and listing.reused
    returned = {spec.passthrough for spec in built.outputs} - {None}
    assert returned and returned.isdisjoint(built.inputs[number].position for number in listing.reused)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, x.detach() @ x.detach(), rtol=1e-3, atol=1e-3)


def test_neighbours_in_a_pack_serve_for_what_is_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of wide layers lie over activations of narrow ones behind them, and are what they were elsewhere."""
    torch.manual_seed(0)
    narrow = [layer for _ in range(8) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.Tanh())]
    wide = [layer for _ in range(2) for layer in (nn.Conv2d(32, 32, 3, padding=1), nn.Tanh())]
    model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.Tanh(), *wide, nn.Conv2d(32, 8, 1), *narrow)
    x = torch.randn(2, 3, 64, 64)
    found = []
    for limit in (packs.MIN_LIMIT, 0):
        torch._dynamo.reset()
        monkeypatch.setattr(packs, "MIN_LIMIT", limit)
        if not limit:
            monkeypatch.setattr(packs, "_LARGEST", 0)
        model.zero_grad(set_to_none=True)
        with recorded_graphs() as graphs:
            torch.compile(model, backend="max", fullgraph=True)(x).sum().backward()
        listing = graphs[1].executables[0].listing
        assert listing is not None
        found.append((listing.workspace, [parameter.grad for parameter in model.parameters()]))
    (together, gradients), (apart, others) = found
    assert together <= apart // 2
    for one, other in zip(gradients, others, strict=True):
        assert one is not None and other is not None and torch.equal(one, other)


def test_threads(case: Case) -> None:
    """Each has saved tensors of its own."""

    def step(number: int) -> torch.Tensor:
        x = case.batch(number).requires_grad_()
        case.run(x).sum().backward()
        assert x.grad is not None
        return x.grad

    alone = [step(number) for number in range(4)]

    def again(number: int) -> None:
        assert torch.equal(step(number), alone[number])

    in_threads(again, 4)
    case.gradients()


def test_values_lie_where_what_is_saved_is_made_later() -> None:
    """The first product, in the memory of the exponentials, which the backward graph reads."""

    def sums(x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return (x @ first).amax(1) + (x @ second).exp().sum(1)

    torch.manual_seed(0)
    inputs = [torch.randn(64, 8), torch.randn(8, 512), torch.randn(8, 512).mul_(0.1).requires_grad_()]
    torch._dynamo.reset()
    with recorded_graphs() as graphs:
        run = torch.compile(sums, backend="max", fullgraph=True)
        found = run(*inputs)
        found.sum().backward()
    listing = graphs[0].executables[0].listing
    assert listing is not None and listing.workspace < 64 * 512 * 4
    torch.testing.assert_close(found, sums(*inputs))
    gradient, inputs[2].grad = inputs[2].grad, None
    sums(*inputs).sum().backward()
    torch.testing.assert_close(gradient, inputs[2].grad)
