"""What the benchmarks of whole steps run and measure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks import steps
from benchmarks.contenders import INDUCTOR_FROZEN
from benchmarks.training import step_memory, training_step, training_zoo
from torch_max_backend.runtime.memory import kept


def test_inference_computes_no_gradients_and_follows_amp() -> None:
    seen: list[tuple[bool, torch.dtype]] = []
    weight = torch.ones(2, 2, requires_grad=True)

    def runner(x: torch.Tensor) -> torch.Tensor:
        product = x @ weight
        seen.append((product.requires_grad, product.dtype))
        return product

    for amp in (False, True):
        steps.inference(runner, torch.ones(2, 2), amp)()
    assert seen == [(False, torch.float32), (False, torch.bfloat16)]


def test_frozen_weights_are_no_contender() -> None:
    row = {"median_seconds": {"max": 3.0, "eager": 4.0, "inductor": 2.0, INDUCTOR_FROZEN: 1.0}}
    assert training_zoo.ratio(row) == 1.5


def test_a_busy_machine_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = iter([9e9, 9e9, 0.0])
    waited: list[float] = []
    monkeypatch.setattr("os.getloadavg", lambda: (next(loads), 0.0, 0.0))
    monkeypatch.setattr("time.sleep", waited.append)
    assert training_zoo.wait_for_quiet() == 0.0
    assert len(waited) == 2


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(Exception, match="one of training, inference"):
        training_step.train(mode="dreaming")


#: A process that has computed other things has free memory that is resident; the tests' allocator keeps it, too.
_PEAK = """
import torch
from benchmarks.training import step_memory

before = step_memory.resident()
step_memory.reset_peak()
torch.ones(2**24)  # 64 MiB
assert step_memory.resident(peak=True) - before > 2**25
step_memory.give_back()
step_memory.reset_peak()
assert step_memory.resident(peak=True) - before < 2**25
"""


def test_a_peak_counts_what_was_given_back() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", "MALLOC_CONF")}
    subprocess.run([sys.executable, "-c", _PEAK], check=True, cwd=Path(__file__).parents[2], env=environment)


def test_workspaces_can_be_dropped() -> None:
    with kept.lent_workspace(2**20, torch.device("cpu")):
        pass
    assert kept._workspaces
    kept.drop_kept()
    assert not kept._workspaces


def test_memory_of_a_step_goes_to_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sizes = dict(zip(step_memory.ON_CPU, (3, 4, 2, 5), strict=True))
    monkeypatch.setattr(step_memory, "_apart", lambda measured, model, who, batch, amp: sizes[who] * 2**20)
    file = tmp_path / "memory.json"
    app = typer.Typer()
    app.command()(step_memory.measure)
    assert CliRunner().invoke(app, ["--model", "digits", "--json", str(file)]).exit_code == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert row["step_bytes"]["max"] == 3 * 2**20
    assert step_memory.over_eager(row) == 1.5


def test_memory_of_a_step_on_a_gpu_goes_to_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def found(measured: str, model: str, who: str, batch: int, amp: str) -> dict[str, int] | None:
        assert (measured, model, batch, amp) == ("peaks", "resnet18", 64, "bf16")
        return None if who == "max, captured" else {"allocated": len(who), "reserved": 2 * len(who)}

    monkeypatch.setattr(step_memory, "_apart", found)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(step_memory.records, "provenance", lambda device: {"device": str(device)})
    file = tmp_path / "memory.json"
    app = typer.Typer()
    app.command()(step_memory.measure)
    words = ["--device", "cuda", "--model", "resnet18", "--amp", "bf16", "--side-by-side", "3", "--json", str(file)]
    assert CliRunner().invoke(app, words).exit_code == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert step_memory.over_inductor(row, "max", "allocated") == len("max") / len("inductor")
    assert step_memory.over_inductor(row, "max, captured", "reserved") is None
