"""Processes of ``python -m benchmarks fuzz`` side by side."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import records

#: Between two looks at the processes, and between two lines of counts.
_SECONDS, _SECONDS_OF_A_LINE = 1.0, 30.0
#: A process whose time is over may end its lot, and shrink what it found; then it hangs.
_SECONDS_TO_END = 600.0


@dataclass
class Job:
    """A process, and its share.

    Attributes:
        seed: that its programs are drawn with, which names its files.
        number: of the job; a process that died is followed by another one with the same number.
        graphs: how many it runs; None for no limit.
    """

    seed: int
    number: int
    graphs: int | None
    process: subprocess.Popen[bytes]


def run(folder: Path, *, jobs: int, seed: int, minutes: float, graphs: int | None, options: Sequence[str]) -> int:
    """Runs jobs until all have their share, or the time is over; 1 if there are faults.

    Args:
        folder: for what is found. It must have no results yet.
        jobs: how many at a time.
        seed: of the first; each process has one more than the one that was started before.
        minutes: after which no lot begins.
        graphs: of all jobs together; None for no limit.
        options: of each process.

    Raises:
        ValueError: ``jobs`` is not positive, or ``folder`` has results.
    """
    if jobs < 1:
        raise ValueError(f"jobs={jobs}: expected at least 1")
    if any(folder.glob("*.json")):
        raise ValueError(f"folder={folder}: has results of another run, expected none")
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * minutes
    seeds = iter(range(seed, sys.maxsize))
    share = None if graphs is None else math.ceil(graphs / jobs)

    def started(number: int, graphs: int | None) -> Job:
        own = next(seeds)
        left = max(0.0, end - time.monotonic()) / 60
        command = [sys.executable, "-m", "benchmarks", "fuzz", "--seed", str(own), "--minutes", str(left), *options]
        command += ["--first-lot", str(1 + number), "--output", str(folder)]
        command += [] if graphs is None else ["--graphs", str(graphs)]
        cores = _cores(number, jobs)
        environment = {**os.environ, "OMP_NUM_THREADS": str(len(cores))}
        with (folder / f"{own}.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        os.sched_setaffinity(process.pid, cores)
        return Job(own, number, graphs, process)

    running = [started(number, share) for number in range(jobs)]
    ended = 0
    said = time.monotonic()
    try:
        while running:
            time.sleep(_SECONDS)
            for job in list(running):
                if job.process.poll() is None and time.monotonic() < end + _SECONDS_TO_END:
                    continue
                running.remove(job)
                why = _died(folder, job)
                if why is None:
                    continue
                ended += 1
                print(f"the process with seed {job.seed} {why}: its programs are in {_kept(folder, job)}", flush=True)
                left = None if job.graphs is None else job.graphs - _read(folder, job.seed)["counts"].get("graphs", 0)
                if time.monotonic() < end and ended < 3 * jobs and (left is None or left > 0):
                    running.append(started(job.number, left))
            if time.monotonic() > said + _SECONDS_OF_A_LINE:
                said = time.monotonic()
                print(_merged(folder)["counts"], f"{len(running)} processes", flush=True)
    finally:
        for job in running:
            job.process.kill()
    found = _merged(folder)
    records.write(folder / "found.json", {**found, "ended": ended})
    for program in found["failures"]:
        print(program.splitlines()[0])
    print(found["counts"], f"{len(found['operators'])} operators, {len(found['failures'])} faults in {folder}")
    return 1 if found["failures"] or ended else 0


def _cores(number: int, jobs: int) -> list[int]:
    """The cores of a job: each has as many, and at least one."""
    mine = sorted(os.sched_getaffinity(0))
    return mine[number::jobs] or [mine[number % len(mine)]]


def _died(folder: Path, job: Job) -> str | None:
    """How a process ended that did not come to its end."""
    status = job.process.poll()
    if status is None:
        job.process.kill()
        job.process.wait()
        return "hung"
    if status in (0, 1) and (folder / f"{job.seed}.json").exists() and not _raised(folder, job):
        return None
    return f"ended with {status}"


def _raised(folder: Path, job: Job) -> bool:
    lines = (folder / f"{job.seed}.log").read_text(errors="replace").splitlines()
    return not lines or not lines[-1].endswith("operators")


def _kept(folder: Path, job: Job) -> Path:
    """The lot that a process died in, under a name that says so."""
    lot, kept = folder / f"{job.seed}.lot.py", folder / f"died_{job.seed}.py"
    return lot.rename(kept) if lot.exists() else folder / f"{job.seed}.log"


def _read(folder: Path, seed: int) -> dict[str, Any]:
    path = folder / f"{seed}.json"
    empty: dict[str, Any] = {"counts": {}, "operators": [], "not_met": [], "left_to_pytorch": {}, "failures": []}
    return json.loads(path.read_text()) if path.exists() else empty


def _merged(folder: Path) -> dict[str, Any]:
    """What all processes have found so far."""
    parts = [_read(folder, int(path.stem)) for path in folder.glob("*.json") if path.stem.isdecimal()]
    counts: Counter[str] = Counter()
    left: Counter[str] = Counter()
    for part in parts:
        counts.update(part["counts"])
        left.update(part["left_to_pytorch"])
    reached = {op for part in parts for op in part["operators"]}
    return {
        "counts": dict(counts),
        "operators": sorted(reached),
        "not_met": sorted({op for part in parts for op in part["not_met"]} - reached),
        "left_to_pytorch": dict(left),
        "failures": [program for part in parts for program in part["failures"]],
    }
