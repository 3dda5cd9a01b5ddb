"""Backward graphs that run in segments: numbers are eager's, whatever users do around the backward pass."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config

import torch_max_backend
from torch_max_backend import backend
from torch_max_backend.runtime.launching import segments
from torch_max_backend.runtime.launching.segments import SegmentedRunner

LAYERS, WIDTH = 5, 16
BUCKET = WIDTH * WIDTH * 4
#: Each layer's weight fills one, and the first layer's bias comes last.
SEGMENTS = LAYERS + 1


class Net(nn.Module):
    """Layers whose gradients fill a bucket each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The segments that run, in order; graphs are cut as inside of DistributedDataParallel with small buckets."""
    found: list[int] = []
    run_segment = SegmentedRunner.run_segment

    def noted(self: SegmentedRunner, segment: int, *args: Any) -> None:
        found.append(segment)
        run_segment(self, segment, *args)

    monkeypatch.setattr(backend, "bucket_bytes", lambda: BUCKET)
    monkeypatch.setattr(SegmentedRunner, "run_segment", noted)
    torch._dynamo.reset()
    yield found
    torch._dynamo.reset()


@pytest.fixture
def twins() -> tuple[nn.Module, nn.Module]:
    """Two models of the same parameters."""
    torch.manual_seed(0)
    net = Net()
    return net, copy.deepcopy(net)


def _compiled(net: nn.Module, **options: Any) -> Callable[..., Tensor]:
    return torch.compile(net, backend="max", options={"fallback": "error", **options})


def _x() -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))


def _same(ours: nn.Module, theirs: nn.Module) -> None:
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6)


def test_gradients_are_accumulated_between_the_segments(ran: list[Any], twins: tuple[nn.Module, nn.Module]) -> None:
    """The last layer's before the second segment begins; each is autograd's to keep, no copy."""
    ours, theirs = twins
    for name, weight in ours.named_parameters():
        weight.register_post_accumulate_grad_hook(lambda _, name=name: ran.append(name))
    run = _compiled(ours)
    for _ in range(2):
        ran.clear()
        run(_x()).square().sum().backward()
        theirs(_x()).square().sum().backward()
        _same(ours, theirs)
    numbers = [event for event in ran if isinstance(event, int)]
    assert numbers == list(range(SEGMENTS))
    for segment in numbers[1:]:
        before = ran[: ran.index(segment)]
        assert f"layers.{LAYERS - segment}.weight" in before and f"layers.{LAYERS - 1 - segment}.weight" not in before
    assert {event for event in ran if isinstance(event, str)} == {name for name, _ in ours.named_parameters()}


def test_hooks_of_parameters_see_finished_gradients(ran: list[int], twins: tuple[nn.Module, nn.Module]) -> None:
    for net in twins:
        for weight in net.parameters():
            weight.register_hook(lambda gradient: gradient * 2 if gradient.isfinite().all() else None)
    ours, theirs = twins
    _compiled(ours)(_x()).sum().backward()
    theirs(_x()).sum().backward()
    _same(ours, theirs)
    assert len(ran) == SEGMENTS


def test_a_graph_that_is_kept_runs_as_a_whole_first(ran: list[int], twins: tuple[nn.Module, nn.Module]) -> None:
    for net, run in zip(twins, (_compiled(twins[0]), twins[1]), strict=True):
        loss = run(_x()).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        assert next(net.parameters()).grad is not None
    _same(*twins)
    assert ran == [*range(SEGMENTS)]


def test_weights_may_change_when_their_gradients_are_there(ran: list[int], twins: tuple[nn.Module, nn.Module]) -> None:
    """As an optimizer does that steps inside of the backward pass."""
    for net, run in zip(twins, (_compiled(twins[0]), twins[1]), strict=True):
        for weight in net.parameters():

            def step(weight: Tensor) -> None:
                with torch.no_grad():
                    weight.sub_(weight.grad)

            weight.register_post_accumulate_grad_hook(step)
        run(_x()).square().sum().backward()
    _same(*twins)
    for a, b in zip(twins[0].parameters(), twins[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert ran == [*range(SEGMENTS)]


def test_some_gradients_alone(ran: list[int], twins: tuple[nn.Module, nn.Module]) -> None:
    """Segments that nobody asks for do not run, and what they would have read is freed."""
    ours, theirs = twins
    run = _compiled(ours)
    for layer, expected in ((LAYERS - 1, [0]), (LAYERS - 3, [0, 1, 2]), (0, [*range(SEGMENTS - 1)])):
        ran.clear()
        kept = len(_calls())
        (mine,) = torch.autograd.grad(run(_x()).square().sum(), [ours.layers[layer].weight])  # type: ignore[index,union-attr]
        (other,) = torch.autograd.grad(theirs(_x()).square().sum(), [theirs.layers[layer].weight])  # type: ignore[index,union-attr]
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
        assert ran == expected
        assert len(_calls()) == kept


def _calls() -> list[object]:
    gc.collect()
    return [each for each in gc.get_objects() if isinstance(each, segments._Call)]


def test_the_gradient_of_an_argument_comes_last(ran: list[int], twins: tuple[nn.Module, nn.Module]) -> None:
    found = []
    for run in (_compiled(twins[0]), twins[1]):
        x = _x().requires_grad_()
        # The argument is a result of other nodes, as between two graphs.
        run(x * 2).square().sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
    _same(*twins)
    assert ran == [*range(SEGMENTS)]


def test_two_calls_of_one_graph_in_one_backward_pass(ran: list[int], twins: tuple[nn.Module, nn.Module]) -> None:
    for run in (_compiled(twins[0]), twins[1]):
        (run(_x()) + run(_x() + 1)).square().sum().backward()
        run(run(_x())).sum().backward()
    _same(*twins)
    assert sorted(ran) == sorted([*range(SEGMENTS)] * 4)


def test_a_weight_that_changes_before_the_backward_pass_is_noticed(
    ran: list[int], twins: tuple[nn.Module, nn.Module]
) -> None:
    loss = _compiled(twins[0])(_x()).square().sum()
    with torch.no_grad():
        twins[0].layers[2].weight.mul_(2)  # type: ignore[index,union-attr]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert ran == []


@pytest.mark.parametrize("how", ["anomaly", "times", "batched", "off", "compiled autograd", "create_graph"])
def test_where_gradients_are_looked_at_they_are_complete_at_once(
    how: str, ran: list[int], twins: tuple[nn.Module, nn.Module]
) -> None:
    ours, theirs = twins
    run = _compiled(ours, early_gradients=how != "off")
    with torch._dynamo.config.patch(compiled_autograd=how == "compiled autograd"):
        loss, other = run(_x()).square().sum(), theirs(_x()).square().sum()
    if how == "anomaly":
        with torch.autograd.detect_anomaly(check_nan=True):
            loss.backward()
    elif how == "times":
        with torch_max_backend.launch_times() as times:
            loss.backward()
        assert times.launches
    elif how == "compiled autograd":
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            loss.backward()
    elif how == "batched":
        weights = list(ours.parameters())
        ones = torch.ones(2)
        for weight, gradient in zip(
            weights, torch.autograd.grad(loss, weights, ones, is_grads_batched=True), strict=True
        ):
            weight.grad = gradient[1]
    elif how == "create_graph":
        for weight, gradient in zip(
            ours.parameters(), torch.autograd.grad(loss, list(ours.parameters()), create_graph=True), strict=True
        ):
            weight.grad = gradient.detach()
    else:
        loss.backward()
    other.backward()
    _same(ours, theirs)
    assert ran == []


def test_without_gradients_nothing_is_relayed(ran: list[int], twins: tuple[nn.Module, nn.Module]) -> None:
    run = _compiled(twins[0])
    run(_x()).sum().backward()
    with torch.no_grad():
        torch.testing.assert_close(run(_x()), twins[1](_x()), rtol=1e-5, atol=1e-6)
    assert len(ran) == SEGMENTS


def test_a_graph_from_the_cache_runs_in_segments(
    ran: list[int], twins: tuple[nn.Module, nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "torch_max_backend")
    for _ in range(2):
        caplog.clear()
        ran.clear()
        torch._dynamo.reset()
        twins[0].zero_grad()
        with functorch_config.patch(enable_autograd_cache=True):
            _compiled(twins[0])(_x()).square().sum().backward()
        assert len(ran) == SEGMENTS
    assert "the backward graph is in the cache" in caplog.text
    twins[1](_x()).square().sum().backward()
    _same(*twins)


class Returning(Net):
    """Returns a parameter beside its result."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), self.layers[0].weight.t()


def test_a_graph_that_returns_a_parameter_is_not_cut(ran: list[int]) -> None:
    """Its gradient would be added to one that is not there yet."""
    torch.manual_seed(0)
    ours = Returning()
    theirs = copy.deepcopy(ours)
    for run in (_compiled(ours), theirs):
        result, weight = run(_x())
        (result.square().sum() + weight.square().sum()).backward()
    _same(ours, theirs)
    assert ran == []


def test_memory_of_a_finished_call_is_free(ran: list[int], twins: tuple[nn.Module, nn.Module]) -> None:
    freed: list[weakref.ref[object]] = []
    made = segments._Call.__init__

    def noted(self: segments._Call, *args: Any) -> None:
        made(self, *args)
        freed.append(weakref.ref(self))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments._Call, "__init__", noted)
        _compiled(twins[0])(_x()).sum().backward()
    gc.collect()
    assert len(freed) == 1 and freed[0]() is None


def test_a_lost_call_is_an_error(ran: list[int], twins: tuple[nn.Module, nn.Module]) -> None:
    """Gradients are never left out silently."""
    token = segments._Call._token

    def lost(self: segments._Call, like: Tensor) -> Tensor:
        return token(self, like).clone()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments._Call, "_token", lost)
        with pytest.raises(RuntimeError, match="the call that computes these gradients is lost"):
            _compiled(twins[0])(_x()).sum().backward()
