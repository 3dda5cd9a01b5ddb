"""Ctrl-C while a graph is traced and compiled, and while steps run: the call ends with KeyboardInterrupt, and the next
one is right. What is compiled in the background is held by tests/runtime/test_background.py."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

DELAYS = (0.01, 0.1, 0.3, 0.8)


@contextlib.contextmanager
def _interrupted_after(seconds: float) -> Iterator[list[bool]]:
    """Ends the block by an interrupt; the list says that it came while the block ran."""
    came: list[bool] = []

    def interrupt(*_: Any) -> None:
        came.append(True)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield came
    except KeyboardInterrupt:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 49, 4))


def _step(run: nn.Module, model: nn.Module, x: Tensor) -> list[Tensor]:
    loss = run(x).square().sum()
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def test_while_it_compiles(model: nn.Module) -> None:
    x = torch.randn(2, 3, 16, 16)
    wanted = _step(model, model, x)
    interrupts = 0
    for delay in DELAYS:
        torch.compiler.reset()
        run = torch.compile(model, backend="max", options={"fallback": "error"})
        with _interrupted_after(delay) as came:
            _step(run, model, x)
        interrupts += len(came)
        torch.testing.assert_close(_step(run, model, x), wanted, rtol=1e-4, atol=1e-4)
    assert interrupts


def test_while_steps_run(model: nn.Module) -> None:
    torch.compiler.reset()
    x = torch.randn(16, 3, 16, 16)
    wanted = _step(model, model, x)
    run = torch.compile(model, backend="max", options={"fallback": "error"})
    _step(run, model, x)
    interrupts = 0
    for delay in torch.linspace(0.001, 0.012, 60).tolist():
        with _interrupted_after(delay) as came:
            end = time.monotonic() + 1
            while time.monotonic() < end:
                _step(run, model, x)
        interrupts += len(came)
        torch.testing.assert_close(_step(run, model, x), wanted, rtol=1e-4, atol=1e-4)
    assert interrupts == 60
