"""Running compiled graphs: dynamic sizes, zero copies, threads, flat memory, the disk cache."""

from __future__ import annotations

import copy
import gc
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from tests.threads import in_threads
from torch_max_backend import backend
from torch_max_backend.graph.compiled import CompiledGraph
from torch_max_backend.runtime.caches import cache
from torch_max_backend.runtime.events import CompileEvent, listen


@dataclass
class Trained:
    """A model, what it compiles to, and the graphs of that."""

    model: nn.Module
    run: nn.Module
    graphs: list[CompiledGraph]


@pytest.fixture(scope="module")
def trained() -> Iterator[Trained]:
    torch.manual_seed(3)
    torch._dynamo.reset()
    model = nn.Sequential(nn.Conv1d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv1d(8, 4, 3))
    with backend.recorded_graphs() as graphs:
        yield Trained(model, torch.compile(model, backend="max", dynamic=True, options={"fallback": "error"}), graphs)


def test_one_graph_serves_every_batch_size(trained: Trained) -> None:
    reference = copy.deepcopy(trained.model)
    # None of them is another extent: PyTorch takes equal sizes for one.
    for batch in (5, 7, 3):
        x = torch.randn(batch, 4, 16)
        for contender in (trained.run, reference):
            contender(x).square().sum().backward()
        torch.testing.assert_close(trained.run(x), reference(x), rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(trained.model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-4)
    assert [graph.name for graph in trained.graphs] == ["forward", "backward"]


def test_memory_is_flat_over_thousands_of_steps(trained: Trained) -> None:
    model, run = trained.model, trained.run
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    process = psutil.Process()

    def steps(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad(set_to_none=True)
            run(torch.randn(16, 4, 16)).square().mean().backward()
            optimizer.step()

    steps(200)
    gc.collect()
    before = process.memory_info().rss
    tensors = sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())
    steps(3000)
    gc.collect()
    # The allocator takes memory in pieces of up to 8 MiB: what a step may keep is found over many steps.
    assert process.memory_info().rss - before < 24 * 2**20
    assert sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects()) <= tensors + 8


def test_parameters_cross_without_a_copy(trained: Trained) -> None:
    model, run = trained.model, trained.run
    x = torch.randn(16, 4, 16)
    before = run(x).detach()
    with torch.no_grad():
        model[2].bias.add_(1.0)
    torch.testing.assert_close(run(x).detach(), before + 1, rtol=1e-5, atol=1e-5)
    model[2].bias.data = model[2].bias.data.clone() - 1
    torch.testing.assert_close(run(x).detach(), before, rtol=1e-5, atol=1e-5)


def test_calls_from_threads_agree(trained: Trained) -> None:
    model, run = trained.model, trained.run
    inputs = [torch.randn(16, 4, 16) for _ in range(8)]
    run(inputs[0])
    expected = [model(x) for x in inputs]
    failures: list[str] = []

    def work(number: int) -> None:
        for repeat in range(50):
            index = (number + repeat) % len(inputs)
            if not torch.allclose(run(inputs[index]), expected[index], rtol=1e-4, atol=1e-5):
                failures.append(f"thread {number}, repeat {repeat}")

    in_threads(work, 4)
    assert not failures


def _cached_function() -> Callable[[torch.Tensor], torch.Tensor]:
    torch._dynamo.reset()
    return torch.compile(lambda x: torch.relu(x - 2) * 3, backend="max", options={"run": "graph"})


SCRIPT = """
import logging, sys, torch
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
x = torch.arange(6.0).reshape(2, 3)
print("RESULT", torch.compile(lambda x: torch.relu(x - 2) * 3, backend="max", options={"run": "graph"})(x).sum().item())

import os, time

def wakes():
    lines = (line for task in os.listdir("/proc/self/task") for line in open(f"/proc/self/task/{task}/status"))
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))

before = wakes()
time.sleep(1)
print("WAKES", wakes() - before)
"""


def test_compiled_graphs_survive_the_process_and_damage_is_noticed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kernels_only: Callable[[Path], dict[str, str]],
) -> None:
    """Compiled here, heard by a listener; loaded in another process; damaged, compiled again, and loaded again."""
    kernels_only(tmp_path)
    monkeypatch.setenv("TORCH_MAX_BACKEND_CACHE_DIR", str(tmp_path))
    seen: list[CompileEvent] = []

    def call() -> list[bool | None]:
        """Whether the graph came from the cache, when that was not known yet and when it was."""
        seen.clear()
        with listen(seen.append):
            assert _cached_function()(torch.arange(6.0).reshape(2, 3)).sum().item() == 18
        assert [event.seconds is None for event in seen] == [True, False]
        return [event.cached for event in seen]

    assert call() == [None, False]
    assert seen[0].graphs == ("inference",) and seen[1].ops == 3
    result = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    assert "RESULT 18.0" in result.stdout and "loaded from the cache inference" in result.stdout
    # At rest the process's threads stay asleep: MAX's logger would wake some 5600 times by itself.
    assert int(result.stdout.split("WAKES ")[1]) < 1000
    (artifact,) = (tmp_path / "graphs").glob("*/model.mef")
    artifact.write_bytes(b"garbage" + artifact.read_bytes()[7:])
    with caplog.at_level(logging.WARNING):
        assert call() == [None, False]
    assert "dropping the cache entry" in caplog.text
    assert call() == [None, True]


def test_facts_of_any_kind_change_the_entry() -> None:
    facts = {"graph": "a", "device": "cpu"}
    names = {cache.digest(facts), cache.digest({**facts, "graph": "b"}), cache.digest({**facts, "device": "gpu"})}
    assert len(names) == 3
    assert {"max", "mojo", "backend", "kernels"} <= set(cache.versions())


def test_an_unwritable_cache_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no directory")
    monkeypatch.setenv("TORCH_MAX_BACKEND_CACHE_DIR", str(blocked))
    assert cache.store("graphs", {"a": "b"}, "model.mef", lambda file: file.write_bytes(b"")) is None
