"""Compiles every GPU kernel for an architecture, with no GPU: also for those that the tests leave out.

    python -m benchmarks targets --target sm_100a --target gfx950 [--dtype bfloat16 ...] --output FILE

Each architecture has a process of its own (tests/kernels/targets.py) and an empty cache. A kernel that does not compile
is an error.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks import ROOT, records, zoo
from benchmarks.records import cpu_seconds
from tests.kernels.targets import DTYPES, TARGETS, Report

NAMES = [dtype.name for dtype in DTYPES]


def compiled(target: str, dtypes: list[str]) -> dict[str, Any]:
    """A row: how many library functions were built, how many of them from generated programs, and in what time."""
    command = [sys.executable, "-m", "tests.kernels.targets", target, *dtypes]
    computing, begun = cpu_seconds(), time.monotonic()
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TORCH_MAX_BACKEND_CACHE_DIR": cache}
        result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"{target}: {result.stderr[-4000:]}")
    report = Report(**json.loads(result.stdout.splitlines()[-1]))
    return {
        "target": target, "dtypes": dtypes, "functions": report.functions, "programs": len(report.programs),
        "seconds": round(time.monotonic() - begun, 1), "processor_seconds": round(cpu_seconds() - computing, 1),
    }  # fmt: skip


def compile_all(
    target: Annotated[list[str], typer.Option(help=f"any of {', '.join(TARGETS)}")],
    dtype: Annotated[list[str], typer.Option(help=f"any of {', '.join(NAMES)}")] = NAMES,
    output: Annotated[Path | None, typer.Option(help="the result file")] = None,
) -> None:
    """Compiles every GPU kernel for each architecture."""
    zoo.refuse_unknown(target, tuple(TARGETS), "target")
    zoo.refuse_unknown(dtype, NAMES, "dtype")
    rows = [compiled(each, dtype) for each in target]
    table = Table("architecture", "dtypes", "library functions", "of generated programs", "s", "processor s")
    for name, dtypes, *figures in (row.values() for row in rows):
        table.add_row(name, ", ".join(dtypes), *map(str, figures))
    Console().print(table)
    if output is not None:
        records.write(output, {**records.provenance(torch.device("cpu")), "rows": rows})


def main() -> None:
    """Reads the options."""
    typer.run(compile_all)


if __name__ == "__main__":
    main()
