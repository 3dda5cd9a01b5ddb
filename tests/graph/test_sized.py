"""Symbolic sizes: a launch list for each set of sizes that a graph is called with."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

from tests.threads import in_threads
from torch_max_backend.graph import sized
from torch_max_backend.runtime.engine import session


class Net(nn.Module):
    """A convolution, normalization, pooling and a product over planes of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        """[N, 5] of images [N, 3, H, W], and a number made of sizes."""
        y = F.max_pool2d(F.relu(self.norm(self.convolution(x))), 2, ceil_mode=True)
        return self.head(y.mean((2, 3))), x.shape[0] * x.shape[2]


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """MAX's graph compiler is not asked."""

    def refuse(*arguments: Any) -> None:
        pytest.fail("a graph went to MAX's compiler")

    monkeypatch.setattr(session, "compile_module", refuse)


def _net() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    eager = Net()
    return eager, copy.deepcopy(eager)


@pytest.mark.usefixtures("no_compiler")
def test_training_at_changing_sizes() -> None:
    eager, ours = _net()
    run = torch.compile(ours, backend="max", dynamic=True, options={"fallback": "error"})
    for shape in ((2, 3, 16, 12), (5, 3, 9, 21), (4, 3, 15, 11), (5, 3, 9, 21)):
        x = torch.randn(shape)
        (y, number), (expected, same) = run(x), eager(x)
        assert number == same
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
        for result in (y, expected):
            result.square().sum().backward()
    for ours_, theirs in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours_.grad, theirs.grad, rtol=1e-3, atol=1e-4)
    for ours_, theirs in zip(ours.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(ours_, theirs)


@pytest.mark.usefixtures("no_compiler")
def test_autocast_around_the_call_changes_nothing_twice() -> None:
    """A graph for new sizes is made in the middle of the user's program, under whatever is on there."""
    eager, ours = _net()
    run = torch.compile(ours, backend="max", dynamic=True)
    for shape in ((2, 3, 16, 12), (3, 3, 12, 14)):
        x = torch.randn(shape)
        with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
            y, expected = run(x)[0], eager(x)[0]
        assert y.dtype == torch.bfloat16
        torch.testing.assert_close(y, expected, rtol=0.02, atol=0.02)


@pytest.mark.usefixtures("no_compiler")
def test_a_view_of_what_was_saved_in_another_order() -> None:
    """Its strides are those of the memory that the forward graph left, not those of the trace."""
    torch._dynamo.reset()
    w, v, scale = (torch.randn(shape, requires_grad=True) for shape in ((12, 1, 3), (2,), (1, 1, 2)))

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = F.batch_norm(F.adaptive_max_pool1d(x, 2), torch.zeros(4), torch.ones(4))
        return y @ v, F.conv1d(y * scale, w, padding=2, groups=4).relu()

    run = torch.compile(function, backend="max", dynamic=True, options={"fallback": "error"})
    for batch in (5, 3):
        x = torch.randn(batch, 4, 12)
        ours, eager = (torch.autograd.grad([y.sum() for y in f(x)], (w, v, scale)) for f in (run, function))
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("no_compiler")
def test_padding_that_the_filters_size_tells() -> None:
    """The backward graph gets it as a number."""
    torch._dynamo.reset()
    run = torch.compile(
        lambda x, w: F.conv1d(x, w, padding="same"), backend="max", dynamic=True, options={"fallback": "error"}
    )
    for size in (3, 5):
        x, w = torch.randn(2, 3, 8), torch.randn(2, 3, size, requires_grad=True)
        ours = torch.autograd.grad(run(x, w).square().sum(), w)
        eager = torch.autograd.grad(F.conv1d(x, w, padding="same").square().sum(), w)
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("no_compiler")
def test_threads_with_sizes_of_their_own() -> None:
    torch._dynamo.reset()
    run = torch.compile(lambda x: (x * 2).relu().sum(1), backend="max", dynamic=True)
    run(torch.randn(3, 4))
    inputs = [torch.randn(5 + number, 2 + number % 3) for number in range(6)]
    results: dict[int, torch.Tensor] = {}

    def work(number: int) -> None:
        results[number] = run(inputs[number])

    in_threads(work, len(inputs))
    for number, x in enumerate(inputs):
        torch.testing.assert_close(results[number], (x * 2).relu().sum(1))


def test_the_oldest_sizes_go(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(sized, "MAX_GRAPHS", 3)
    torch._dynamo.reset()
    graphs: list[sized.SizedGraph] = []
    init = sized.SizedGraph.__init__

    def seen(self: sized.SizedGraph, *arguments: Any) -> None:
        init(self, *arguments)
        graphs.append(self)

    monkeypatch.setattr(sized.SizedGraph, "__init__", seen)
    run = torch.compile(lambda x: x.sin(), backend="max", dynamic=True)
    with caplog.at_level(logging.WARNING, "torch_max_backend"):
        for length in (4, 5, 6, 7, 4):
            x = torch.randn(length)
            torch.testing.assert_close(run(x), x.sin())
    (graph,) = graphs
    assert len(graph._graphs) == 3
    assert caplog.text.count("3 sets of sizes") == 1


def test_sizes_that_arguments_do_not_tell() -> None:
    """What depends on values is no size that a call tells."""
    verdicts: list[bool] = []

    def look(gm: GraphModule, inputs: list[Any]) -> Any:
        verdicts.append(sized.is_sized(gm))
        return make_boxed_func(gm.forward)

    looking = aot_autograd(fw_compiler=look)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch.compile(lambda x: x[x > 0] * 2, backend=looking, dynamic=True)(torch.randn(5))
    torch._dynamo.reset()
    torch.compile(lambda x: x * 2, backend=looking, dynamic=True)(torch.randn(5))
    torch._dynamo.reset()
    torch.compile(lambda x: x * 2, backend=looking, dynamic=False)(torch.randn(5))
    assert verdicts == [False, True, False]


class Boxes(nn.Module):
    """Offsets as fractions of the planes that they lie in, and the largest of them: what a detection model computes."""

    def __init__(self) -> None:
        super().__init__()
        self.offsets = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, 4, 2] of tokens [N, H, W, 3]."""
        height, width = x.shape[1:3]
        torch._check(height + width == width + x.shape[1])
        offsets = self.offsets(x).flatten(1, 2)
        scaled = torch.stack([offsets[..., 0] / (height / 2), offsets[..., 1] / (width / 2)], -1)
        best = scaled.sum(-1).topk(4).indices
        return scaled.gather(1, best.unsqueeze(-1).expand(-1, -1, 2))


@pytest.mark.usefixtures("no_compiler")
def test_numbers_made_of_sizes() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    eager = Boxes()
    ours = copy.deepcopy(eager)
    run = torch.compile(ours, backend="max", dynamic=True, options={"fallback": "error"})
    for height, width in ((5, 7), (6, 3), (5, 7), (4, 9)):
        x = torch.randn(2, height, width, 3)
        y, expected = run(x), eager(x)
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
        for module, value in ((ours, y), (eager, expected)):
            module.zero_grad()
            value.square().sum().backward()
        torch.testing.assert_close(ours.offsets.weight.grad, eager.offsets.weight.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*runs in PyTorch")
def test_a_factor_of_a_call_is_no_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph is not made for each."""
    torch._dynamo.reset()
    made: list[GraphModule] = []
    at = sized.at
    monkeypatch.setattr(sized, "at", lambda gm, args: made.append(gm) or at(gm, args))
    run = torch.compile(lambda x, factor: x * factor, backend="max", dynamic=True)
    for factor in (0.5, 0.25, 0.125, 0.75):
        torch.testing.assert_close(run(torch.ones(3, 4), factor), torch.full((3, 4), factor))
    assert len(made) <= 1
