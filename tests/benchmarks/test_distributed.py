"""The benchmark of several processes: on a CPU over gloo, and what it makes of traces, failures and rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import ROOT
from benchmarks.distributed import distributed
from benchmarks.distributed.distributed import Chosen, Runs, add, results_of
from benchmarks.distributed.process import CHOSEN, How, contenders_of, overlap, union
from benchmarks.pages.distributed_tables import rows_of

HOW = How("cpu", amp=False, size=0, steps=1, bucket_mb=25.0, search=True)
TIMES = {"first_step_seconds": 1.0, "median_seconds": 0.02, "queued_seconds": 0.02}


def measured(output: Path) -> subprocess.CompletedProcess[str]:
    """Two processes train the digits example's network."""
    options = ["--gpus", "2", "--model", "digits", "--batch", "4", "--contender", "eager", "--contender", "max"]
    options += ["--device", "cpu", "--amp", "none", "--steps", "2", "--minutes", "8"]
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", "distributed", "--output", str(output), *options],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip


def test_two_processes_are_measured_and_rows_are_not_measured_again(tmp_path: Path) -> None:
    output = tmp_path / "found.json"
    done = measured(output)
    assert done.returncode == 0, done.stderr[-4000:]
    document = json.loads(output.read_text())
    assert [row["contender"] for row in document["rows"]] == ["eager", "max"], done.stdout + done.stderr[-4000:]
    assert all(0 < row["queued_seconds"] < 60 and row["gpus"] == 2 for row in document["rows"])
    assert {"date", "hardware", "versions"} <= document.keys()
    again = measured(output)
    assert (again.returncode, again.stdout) == (0, ""), again.stderr[-4000:]
    assert json.loads(output.read_text()) == document


def test_a_contender_that_fails_is_a_row_and_the_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "found.json"
    chosen = Chosen(["digits"], ["ddp"], ["eager", "max"], 4, sync=False)
    calls: list[int] = []

    def together(gpus: int, *_: object) -> bool:
        working, failed = distributed._marks(output, "")
        results = results_of(output, HOW)
        missing = [case for case in chosen.cases(gpus) if results.get(vars(case)) is None]
        calls.append(len(missing))
        if missing[0].contender == "eager":
            working.write_text(json.dumps(vars(missing[0])))
            failed.write_text("RuntimeError: gone")
            return False
        add(results, missing[0], TIMES)
        return True

    monkeypatch.setattr(distributed, "together", together)
    assert Runs(output, chosen, HOW, [], hard=float("inf")).all_of(chosen, 2) == []
    assert calls == [2, 1]
    first, second = json.loads(output.read_text())["rows"]
    assert (first["error"], second["contender"]) == ("RuntimeError: gone", "max")
    assert not list(tmp_path.glob(".*"))


def test_overlap_counts_each_moment_once() -> None:
    def kernel(name: str, begin: float, duration: float, kind: str = "kernel") -> dict[str, Any]:
        return {"cat": kind, "name": name, "ts": begin, "dur": duration}

    events = [
        kernel("ncclDevKernel_AllReduce", 10, 10), kernel("ncclDevKernel_AllReduce", 15, 10),
        kernel("conv", 0, 12), kernel("conv", 11, 2), kernel("conv", 24, 6), kernel("conv", 40, 5),
        kernel("nccl:all_reduce", 0, 100, "gpu_user_annotation"), {"ph": "M", "name": "process_name"},
    ]  # fmt: skip
    both, beside = overlap(events)
    assert (round(both * 1e6), round(beside * 1e6)) == (15, 4)
    assert union([(3, 4), (0, 1), (1, 2)]) == [(0, 2), (3, 4)]
    assert overlap([]) == (0, 0)


def test_contenders_that_would_be_another_twice_are_left_out() -> None:
    assert contenders_of("none", 1, CHOSEN) == ["eager", "max", "max, captured", "inductor"]
    assert contenders_of("fsdp", 2, CHOSEN) == ["eager", "max", "inductor"]
    assert contenders_of("ddp", 2, CHOSEN) == list(CHOSEN)


def test_a_row_of_the_table_has_scaling_memory_and_overlap() -> None:
    common = {"model": "resnet50", "batch": 128, "sync": False, "peak_bytes": 3 * 2**30}
    alone = {**common, "engine": "none", "gpus": 1, "contender": "max", "queued_seconds": 0.019}
    both = {**common, "engine": "ddp", "gpus": 2, "queued_seconds": 0.02}
    both |= {"communication_seconds": 0.004, "overlapped_seconds": 0.003}
    theirs = {**both, "contender": "inductor", "queued_seconds": 0.025}
    wrong = {**both, "contender": "eager", "error": "RuntimeError: gone"}
    first, second = rows_of([{**both, "contender": "max"}, theirs, wrong, alone])
    assert first == ["resnet50, 128", "1", "", "", "19.0, 3.0", "", "", ""]
    assert second[:5] == ["resnet50, 128, DDP", "2", "fails", "25.0, 3.0, 75%", "20.0 (95%), 3.0, 75%"]
    assert second[-1] == "0.80"
