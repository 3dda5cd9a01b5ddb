"""What happens when a GPU's memory does not suffice: an error of PyTorch's, and right results afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.gpu


@contextmanager
def _only(more: int) -> Iterator[None]:
    """PyTorch may take so many bytes more than it uses now."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + more) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(8, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3)).cuda()


def _gradients(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_too_large_a_batch_raises_and_the_model_trains_on(mode: str) -> None:
    torch._dynamo.reset()
    model = _net()
    run = torch.compile(model, backend="max", mode=mode, dynamic=False)
    small, large = (torch.randn(batch, 8, 256, 256, device="cuda") for batch in (2, 32))
    before = [_gradients(model, run(small).square().mean()) for _ in range(5)][-1]
    statistics = [buffer.clone() for buffer in model.buffers()]
    with _only(64 << 20), pytest.raises(torch.OutOfMemoryError) as error:
        run(large)
    assert "kept for the backward pass" in error.value.__notes__[0]
    for buffer, old in zip(model.buffers(), statistics, strict=True):
        assert torch.equal(buffer, old)
    # Training mode: the result does not depend on the running statistics.
    for _ in range(5):
        after = _gradients(model, run(small).square().mean())
        assert all(map(torch.equal, after, before))
    enough = _gradients(model, run(large).square().mean())
    assert len(enough) == len(before) and all(bool(each.isfinite().all()) for each in enough)


def test_a_backward_pass_without_memory_raises_and_can_be_repeated() -> None:
    torch._dynamo.reset()
    model = _net()
    run = torch.compile(model, backend="max", dynamic=False)
    x = torch.randn(32, 8, 256, 256, device="cuda")
    expected = _gradients(model, run(x).square().mean())
    loss = run(x).square().mean()
    model.zero_grad(set_to_none=True)
    with _only(8 << 20), pytest.raises(torch.OutOfMemoryError):
        loss.backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(map(torch.equal, _gradients(model, run(x).square().mean()), expected))
