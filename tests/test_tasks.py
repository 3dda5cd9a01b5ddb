"""Modules of one unit that are compiled in several processes."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from max.engine import Model
from torch import nn

from tests.harness import trace
from torch_max_backend import MaxBackendError, lowering
from torch_max_backend.graph.unit import CompilationUnit
from torch_max_backend.options import Options
from torch_max_backend.runtime import dealing, events, session, tasks, worker
from torch_max_backend.runtime.events import CompileEvent
from torch_max_backend.runtime.workers import Workers


@pytest.fixture
def everyone(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Workers]]:
    """Every graph is compiled by itself; all that start processes."""
    made: list[Workers] = []

    def start(*arguments: int) -> Workers:
        made.append(Workers(*arguments))
        return made[-1]

    monkeypatch.setattr(dealing, "best", lambda sizes, *_: [[number] for number in range(len(sizes))])
    monkeypatch.setattr(tasks, "Workers", start)
    yield made
    assert not any(workers.processes for workers in made)


def test_forward_and_backward_in_two_processes(
    everyone: list[Workers], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    kernels_only: Callable[[Path], dict[str, str]],
) -> None:  # fmt: skip
    for name, value in kernels_only(tmp_path).items():
        monkeypatch.setenv(name, value)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.LayerNorm(5))
    eager = copy.deepcopy(model)
    x, y = torch.randn(4, 6), torch.randn(4, 5)
    seen: list[CompileEvent] = []

    def gradients(module: Callable[..., Any], parameters: Iterator[nn.Parameter]) -> list[torch.Tensor]:
        return list(torch.autograd.grad(F.mse_loss(module(x), y), list(parameters)))

    with events.listen(seen.append):
        compiled = torch.compile(model, backend="max", options={"fallback": "error", "run": "graph"})
        first = gradients(compiled, model.parameters())
        assert len(everyone) == 1
        assert {(event.graphs, event.cached) for event in seen if event.seconds is not None} == {
            (("forward",), False), (("backward",), False),
        }  # fmt: skip
        # A process that would deal them otherwise finds them.
        monkeypatch.setattr(dealing, "best", lambda sizes, *_: [list(range(len(sizes)))])
        torch._dynamo.reset()
        del seen[:]
        again = gradients(torch.compile(model, backend="max", options={"run": "graph"}), model.parameters())
        assert [event.cached for event in seen if event.seconds is not None] == [True, True]
    torch._dynamo.reset()
    torch.testing.assert_close(first, gradients(eager, eager.parameters()))
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert len(list((tmp_path / "graphs").glob("*/model.mef"))) == 2


def _two_graphs() -> CompilationUnit:
    lowering.load_all()
    unit = CompilationUnit("two")
    for name, function in (("sine", torch.sin), ("tangent", torch.tan)):
        unit.add(trace(function, [torch.ones(3)]), name, options=Options(run="graph"))
    return unit


@pytest.mark.usefixtures("everyone")
def test_what_a_worker_says_reaches_the_caller(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_MAX_BACKEND_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "worker.py").write_text("raise SystemExit('the compiler says no')")
    monkeypatch.setattr(worker, "__file__", str(tmp_path / "worker.py"))
    unit = _two_graphs()
    monkeypatch.setattr(session, "compile_here", lambda *arguments: dict.fromkeys(arguments[3]))
    with pytest.raises(MaxBackendError, match=r"could not compile two \(status 1\): the compiler says no"):
        unit.compile()


def test_ctrl_c_ends_the_workers(everyone: list[Workers], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_MAX_BACKEND_CACHE_DIR", str(tmp_path / "cache"))
    unit, running = _two_graphs(), []

    def interrupt(*_: object) -> Mapping[str, Model]:
        while not everyone[0].processes:
            time.sleep(0.01)
        running.extend(everyone[0].processes)
        raise KeyboardInterrupt

    monkeypatch.setattr(session, "compile_here", interrupt)
    with pytest.raises(KeyboardInterrupt):
        unit.compile()
    (process,) = running
    assert process.poll() is not None
