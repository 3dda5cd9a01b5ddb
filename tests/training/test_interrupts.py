"""Ctrl-C while a graph is partitioned and lowered, while its libraries are built, and while steps run: the call ends
with KeyboardInterrupt, and the next one is right. What is compiled in the background is held by
tests/runtime/building/test_background.py."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torch_max_backend import backend
from torch_max_backend.graph.unit import CompilationUnit
from torch_max_backend.runtime.building import libraries
from torch_max_backend.runtime.launching.runner import ListRunner
from torch_max_backend.runtime.tensors.leaving import Leaving


def _interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(autouse=True)
def _heard() -> Iterator[None]:
    """Python's own handler: a shell starts what runs in its background with the signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 49, 4))


def _step(run: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> list[Tensor]:
    loss = run(x).square().sum()
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def _compiled(model: nn.Module) -> Callable[[Tensor], Tensor]:
    torch.compiler.reset()
    return torch.compile(model, backend="max", options={"fallback": "error"})


def _interrupted(patched: pytest.MonkeyPatch, where: Any, name: str, call: int) -> list[int]:
    """Interrupts a call of a function; the list has one item for each of its calls."""
    real, calls = getattr(where, name), list[int]()

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        calls.append(len(calls) + 1)
        if calls[-1] == call:
            _interrupt()
        return real(*args, **kwargs)

    patched.setattr(where, name, interrupted)
    return calls


@pytest.mark.parametrize(
    ("where", "name", "call"),
    [
        (backend, "facts_of", 1),
        (backend, "min_cut_rematerialization_partition", 1),
        (backend, "compile_graph", 1),
        (backend, "compile_graph", 2),
        (CompilationUnit, "adopt", 2),
        (CompilationUnit, "compile", 1),
    ],
)
def test_while_it_is_traced_and_lowered(
    where: Any, name: str, call: int, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this package alone: docs/internals/conformance.md says what an interrupt of PyTorch's own tracing does."""
    x = torch.randn(2, 3, 16, 16)
    wanted, run = _step(model, model, x), _compiled(model)
    with monkeypatch.context() as patched:
        calls = _interrupted(patched, where, name, call)
        with pytest.raises(KeyboardInterrupt):
            _step(run, model, x)
        torch.testing.assert_close(_step(run, model, x), wanted, rtol=1e-4, atol=1e-4)
    assert len(calls) > call


def test_while_libraries_are_built(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """The builds go on, and the next call finds what they made."""
    x = torch.randn(2, 3, 16, 16)
    wanted = _step(model, model, x)
    began, go_on, build = threading.Event(), threading.Event(), libraries.build

    def slow(*args: Any) -> Any:
        began.set()
        go_on.wait(60)
        return build(*args)

    def interrupt() -> None:
        began.wait(60)
        # The main thread is on its way to the wait.
        time.sleep(0.5)
        _interrupt()

    monkeypatch.setattr(libraries, "_loaded", {})
    monkeypatch.setattr(libraries, "build", slow)
    run, thread = _compiled(model), threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        _step(run, model, x)
    thread.join()
    assert began.is_set() and not go_on.is_set()
    go_on.set()
    torch.testing.assert_close(_step(run, model, x), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("where", "name"), [(ListRunner, "walk"), (Leaving, "picked")])
@pytest.mark.parametrize("call", [1, 2])
def test_while_steps_run(where: type, name: str, call: int, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the forward and in the backward graph."""
    x = torch.randn(2, 3, 16, 16)
    wanted, run = _step(model, model, x), _compiled(model)
    _step(run, model, x)
    with monkeypatch.context() as patched:
        _interrupted(patched, where, name, call)
        with pytest.raises(KeyboardInterrupt):
            _step(run, model, x)
        torch.testing.assert_close(_step(run, model, x), wanted, rtol=1e-4, atol=1e-4)
