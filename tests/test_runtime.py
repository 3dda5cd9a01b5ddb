"""Running compiled graphs: zero copies, threads, flat memory, the disk cache."""

from __future__ import annotations

import gc
import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from torch_max_backend.runtime import cache
from torch_max_backend.runtime.events import CompileEvent, listen


@pytest.fixture(scope="module")
def trained() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(3)
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    return model, torch.compile(model, backend="max", options={"fallback": "error"})


def test_memory_is_flat_over_a_thousand_steps(trained: tuple[nn.Module, nn.Module]) -> None:
    model, run = trained
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    process = psutil.Process()

    def steps(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad(set_to_none=True)
            run(torch.randn(64, 16)).square().mean().backward()
            optimizer.step()

    steps(200)
    gc.collect()
    before = process.memory_info().rss
    tensors = sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())
    steps(1000)
    gc.collect()
    assert process.memory_info().rss - before < 8 * 2**20
    assert sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects()) <= tensors + 8


def test_parameters_cross_without_a_copy(trained: tuple[nn.Module, nn.Module]) -> None:
    model, run = trained
    x = torch.randn(64, 16)
    before = run(x).detach()
    with torch.no_grad():
        model[2].bias.add_(1.0)
    torch.testing.assert_close(run(x).detach(), before + 1)
    model[2].bias.data = model[2].bias.data.clone() - 1
    torch.testing.assert_close(run(x).detach(), before)


def test_calls_from_threads_agree(trained: tuple[nn.Module, nn.Module]) -> None:
    model, run = trained
    inputs = [torch.randn(64, 16) for _ in range(8)]
    run(inputs[0])
    expected = [model(x) for x in inputs]
    failures: list[str] = []

    def work(number: int) -> None:
        for repeat in range(50):
            index = (number + repeat) % len(inputs)
            if not torch.allclose(run(inputs[index]), expected[index], rtol=1e-4, atol=1e-5):
                failures.append(f"thread {number}, repeat {repeat}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


SCRIPT = """
import logging, sys, torch
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
x = torch.arange(6.0).reshape(2, 3)
print("RESULT", torch.compile(lambda x: torch.relu(x - 2) * 3, backend="max")(x).sum().item())
"""


def _run(directory: Path) -> str:
    environment = {**os.environ, "TORCH_MAX_BACKEND_CACHE_DIR": str(directory)}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stderr
    assert "RESULT 18.0" in result.stdout
    return result.stdout + result.stderr


def test_compiled_graphs_survive_the_process_and_damage_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled here, heard by a listener; loaded in another process; damaged; compiled again in a third."""
    # The precompiled kernels are copied from the common cache: making them is not what is tested here.
    kernels = cache.kernel_library_path()
    target = tmp_path / "kernels" / kernels.parent.name
    target.mkdir(parents=True)
    for file in kernels.parent.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    monkeypatch.setenv("TORCH_MAX_BACKEND_CACHE_DIR", str(tmp_path))
    seen: list[CompileEvent] = []
    torch._dynamo.reset()
    with listen(seen.append):
        result = torch.compile(lambda x: torch.relu(x - 2) * 3, backend="max")(torch.arange(6.0).reshape(2, 3))
    assert result.sum().item() == 18
    assert [event.seconds is None for event in seen] == [True, False]
    assert seen[0].graphs == ("inference",) and seen[1].ops == 3
    assert "loaded from the cache inference" in _run(tmp_path)
    (artifact,) = (tmp_path / "graphs").glob("*/model.mef")
    artifact.write_bytes(b"garbage" + artifact.read_bytes()[7:])
    output = _run(tmp_path)
    assert "dropping the cache entry" in output and "compiled inference" in output
    assert "loaded from the cache inference" in _run(tmp_path)


def test_a_foreign_entry_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCH_MAX_BACKEND_CACHE_DIR", str(tmp_path))
    facts = {"graph": "one"}
    path = cache.store("graphs", facts, "model.mef", lambda file: file.write_bytes(b"artifact"))
    assert path is not None and cache.lookup("graphs", facts, "model.mef") == path
    record = path.parent / "entry.json"
    entry = json.loads(record.read_text())
    record.write_text(json.dumps({**entry, "facts": {"graph": "another"}}))
    with caplog.at_level(logging.WARNING):
        assert cache.lookup("graphs", facts, "model.mef") is None
    assert "dropping the cache entry" in caplog.text and not path.exists()


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
