"""Runs convolutions of small problems under compute-sanitizer's tools and writes what these report.

    python -m benchmarks convolution.sm90_sanitize --output benchmarks/results/convolution_sm90_h200_sanitizer.json

Needs a Hopper GPU and `compute-sanitizer` on the path. A run is sm90_once on some problems of the suite sm90_check, or
random_check, whose problems meet the kernels for any GPU, too. All run at a time. The exit status is 1 where a tool
reports anything, or did not come to its end.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks import records

EVERYTHING = "narrow|tails|^strided$|stride3|gap_stride|5x3|k10|c3_k136|c5_k7|c20|stem_c3|long_sum"
"""Strided data gradients, images of few channels, channels that are padded or folded in copies, long reductions."""


@dataclass(frozen=True)
class Run:
    tool: str
    passes: str
    problems: str
    """Regular expression that the names match."""
    every: bool
    """Every tile shape, split, cluster and share instead of the table's choice."""
    random: int = 0
    """Problems at random instead, so many."""

    def command(self, once: str) -> list[str]:
        line = ["compute-sanitizer", "--tool", self.tool, "--kernel-regex", "kns=conv", "--print-limit", "20"]
        if self.random:
            check = [sys.executable, "-m", "benchmarks", "convolution.random_check", "--seed", "7"]
            return [*line, *check, "--count", str(self.random)]
        line += [*shlex.split(once), "--suite", "sm90_check", "--passes", self.passes, "--problems", self.problems]
        return [*line, "--every"] if self.every else line


RUNS = (
    Run("memcheck", "fprop,dgrad,wgrad", EVERYTHING, False),
    Run("memcheck", "fprop,dgrad", "tails|stride3|c3_k136", True),
    Run("memcheck", "wgrad", "narrow|tails|c3_k136|long_sum", True),
    Run("racecheck", "fprop,dgrad", "narrow|^strided$|stride3|c3_k136|c5_k7", False),
    Run("racecheck", "wgrad", "narrow|c3_k136|c5_k7", False),
    Run("racecheck", "wgrad", "long_sum", True),
    Run("synccheck", "fprop,dgrad,wgrad", EVERYTHING, False),
    Run("synccheck", "wgrad", "narrow|c3_k136|long_sum", True),
    *(Run(tool, "fprop,dgrad,wgrad", "", False, random=60) for tool in ("memcheck", "racecheck", "synccheck")),
)


def summary(text: str) -> int | None:
    """What a tool counted, or None without its last line."""
    found = re.findall(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)", text)
    return max(int(a or b) for a, b in found) if found else None


def start(run: Run, once: str, log: Path) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with log.open("w") as file:
        # A session of its own, so that the tool's child ends with it.
        return subprocess.Popen(
            run.command(once), stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )


def outcome(run: Run, status: int, text: str) -> dict:
    done = re.findall(r"^(\w+ \S+): (\d+) launches$", text, re.MULTILINE)
    done += [("random", number) for number in re.findall(r"^(\d+) results, 0 wrong", text, re.MULTILINE)]
    reported = summary(text) if status == 0 else None
    ran = {name: int(count) for name, count in done}
    print(f"{run.tool} {run.passes} {run.problems}: {sum(ran.values())} calls, reported {reported}", flush=True)
    ok = reported == 0 and bool(ran)
    if not ok:
        print(text[-4000:], flush=True)
    return {**asdict(run), "launches": ran, "reported": reported, "ok": ok}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--once", default=f"{sys.executable} -m benchmarks convolution.sm90_once", help="what runs one list"
    )
    parser.add_argument("--seconds", type=float, default=600, help="most that all runs together may take")
    parser.add_argument("--output", type=Path, help="write results as JSON here")
    args = parser.parse_args()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        started = [(run, Path(folder) / f"{number}.log") for number, run in enumerate(RUNS)]
        processes = [start(run, args.once, log) for run, log in started]
        rows = []
        for (run, log), process in zip(started, processes, strict=True):
            try:
                process.wait(max(args.seconds - (time.perf_counter() - began), 0.1))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            rows.append(outcome(run, process.returncode, log.read_text()))
    if args.output:
        device = torch.device("cuda", 0)
        document = {
            **records.provenance(device),
            "rows": rows,
        }
        records.write(args.output, document)
    print(f"{time.perf_counter() - began:.0f} s", flush=True)
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
