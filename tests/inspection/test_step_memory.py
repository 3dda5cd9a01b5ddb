"""The account of a step's memory, beside what PyTorch's allocators deal out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import torch_max_backend
from torch_max_backend.inspection.step_memory import StepMemory
from torch_max_backend.runtime.launching.runner import ListRunner
from torch_max_backend.runtime.memory.kept import drop_kept


class Residual(nn.Module):
    """Convolutions with batch normalization, a sum that both branches need, pooling and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
        self.block = nn.Sequential(
            nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32),
        )  # fmt: skip
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = F.max_pool2d(F.relu(self.block(x) + x), 2)
        return self.head(F.dropout(x, 0.5).mean((2, 3)))


class Widening(nn.Module):
    """Activations of several sizes that meet again, as in a UNet."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 24, 3, padding=1)
        self.low = nn.Conv2d(24, 48, 3, padding=1, stride=2)
        self.norm = nn.GroupNorm(4, 48)
        self.up = nn.ConvTranspose2d(48, 24, 2, stride=2)
        self.out = nn.Conv2d(48, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = F.gelu(self.down(x))
        return self.out(torch.cat([first, self.up(F.silu(self.norm(self.low(first))))], 1))


class Cut(nn.Module):
    """An operator stays in PyTorch, between two parts of a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.before(x))
        return torch.sinh(self.after(torch.cummax(y, 3)[0]))


MODELS = {"residual": Residual, "widening": Widening, "cut": Cut}


def step(run: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> None:
    """The result lives on, as in a program that computes a loss of it."""
    model.zero_grad(set_to_none=True)
    result = run(x)
    result.sum().backward()


def compiled(name: str, device: str) -> tuple[StepMemory, Callable[[], None], nn.Module]:
    """The account of a step, and the step after two warm ones."""
    torch.manual_seed(0)
    model = MODELS[name]().to(device)
    # CUDA's allocator counts up to a MiB too much for each of its blocks.
    x = torch.randn(8 if device == "cpu" else 64, 3, 96, 96, device=device)
    account = torch_max_backend.explain(model, x, quiet=True).memory
    assert account is not None
    torch._dynamo.reset()
    run = torch.compile(model, backend="max")
    for _ in range(2):
        step(run, model, x)
    model.zero_grad(set_to_none=True)
    return account, lambda: step(run, model, x), model


@pytest.mark.filterwarnings("ignore:.*runs in PyTorch, not in MAX")
@pytest.mark.parametrize("name", MODELS)
def test_beside_the_cpu_allocator(name: str, tmp_path: Path) -> None:
    """The peak of what is allocated, as PyTorch's profiler sees each block come and go."""
    account, run, _ = compiled(name, "cpu")
    drop_kept()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    trace = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(trace))
    events = [each for each in json.loads(trace.read_text())["traceEvents"] if each["name"] == "[memory]"]
    events.sort(key=lambda event: event["ts"])
    now = most = 0
    for event in events:
        now += event["args"]["Bytes"]
        most = max(most, now)
    assert account.added == pytest.approx(most, rel=0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["residual", "widening"])
def test_beside_the_gpu_allocator(name: str) -> None:
    account, run, _ = compiled(name, "cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    most = torch.cuda.max_memory_allocated() - before
    assert account.added == pytest.approx(most, rel=0.05)


def test_a_step_on_a_gpu_that_is_not_there() -> None:
    """What is kept, by whom, and the peak, in bfloat16."""
    torch.manual_seed(0)
    account = torch_max_backend.explain_ahead(
        Residual(), torch.randn(4, 3, 64, 64), target="sm_90a", autocast=torch.bfloat16, quiet=True
    )
    memory = account.memory
    assert memory is not None and [call.graph for call in memory.calls] == ["forward", "backward"]
    forward, backward = memory.calls
    assert memory.peak is backward and "of" in backward.moment and backward.written_over > 0
    assert backward.held >= forward.held + memory.saved_bytes
    assert [tensor.bytes for tensor in memory.saved] == sorted((t.bytes for t in memory.saved), reverse=True)
    largest = memory.saved[0]
    assert largest.bytes == 4 * 32 * 64 * 64 * 2 and largest.dtype == torch.bfloat16
    assert largest.shape == (4, 32, 64, 64) and largest.user_line is not None and __file__ in largest.user_line
    assert {"aten.convolution.default", "aten.native_dropout.default"} <= {tensor.op for tensor in memory.saved}
    assert any(tensor.reused for tensor in memory.saved)
    text = str(account)
    assert "tensors kept for the backward pass" in text and "aten.convolution.default" in text


def test_a_later_graph_adds_to_what_an_earlier_one_keeps() -> None:
    """Two graphs of one model: backward graphs run in reverse order."""

    def function(x: Tensor) -> Tensor:
        y = torch.tanh(x)
        torch._dynamo.graph_break()
        return torch.sigmoid(y).sum()

    x = torch.randn(256, 256, requires_grad=True)
    memory = torch_max_backend.explain(function, x, quiet=True, compile=False).memory
    assert memory is not None
    assert [call.graph for call in memory.calls] == ["forward", "forward", "backward", "backward"]
    one = 256 * 256 * 4
    first, second, *_ = memory.calls
    # The result of tanh leaves the first graph, and the second one is given it: neither keeps more.
    assert (first.held, first.results, second.held) == (one, one, 2 * one)
    assert memory.saved_bytes == 0


def test_without_memory_the_largest_saved_tensors_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the forward and in the backward pass, also of graphs from the cache; statistics stay as they were."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Residual(), torch.randn(2, 3, 16, 16)
    run = torch.compile(model, backend="max")
    step(run, model, x)
    fresh = ListRunner.fresh

    def nothing(*_: object) -> NoReturn:
        raise torch.OutOfMemoryError("no memory")

    for _ in range(2):
        statistics = [buffer.clone() for buffer in model.buffers()]
        result = run(x)
        after = [buffer.clone() for buffer in model.buffers()]
        monkeypatch.setattr(ListRunner, "fresh", nothing)
        with pytest.raises(torch.OutOfMemoryError) as backward:
            result.sum().backward()
        with pytest.raises(torch.OutOfMemoryError) as forward:
            run(x)
        monkeypatch.setattr(ListRunner, "fresh", fresh)
        for error in (forward, backward):
            (note,) = error.value.__notes__
            assert "MiB are kept for the backward pass" in note
            assert "float32[2, 32, 16, 16] of aten.convolution.default" in note and __file__ in note
        assert all(map(torch.equal, model.buffers(), after))
        assert not all(map(torch.equal, after, statistics))
        # Now from the cache.
        torch._dynamo.reset()
        run = torch.compile(model, backend="max")
