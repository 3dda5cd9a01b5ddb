"""Training steps of nine vision models beside eager PyTorch and Inductor, one table for a machine.

    python -m benchmarks training_zoo [--batch 8 ...] [--amp none ...] [--mode training ...] [--json FILE]

Every row is a run of ``training_step`` in a process of its own, on small images. The best contender is the fastest of
eager PyTorch in either memory format and Inductor; Inductor with frozen weights is timed in inference, but no other
contender may take weights for constants. A row that fails is reported and left out. A machine that computes something
else is waited for, a minute at most: each row has the load average that was left.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
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

from benchmarks import records, zoo
from benchmarks.contenders import INDUCTOR_FROZEN, MAX

#: By model, height and width of an image; 0 for the model's own.
SIZES: dict[str, int] = {
    "digits": 0, "resnet18": 64, "resnet50": 64, "mobilenetv2": 64, "efficientnet_b0": 64, "convnext_tiny": 64,
    "vit_small": 64, "unet": 64, "r3d18": 48,
}  # fmt: skip
#: Load average for each core up to which a machine is quiet; our own steps keep it near 1 while they run.
QUIET = 0.75


def best(row: dict[str, Any]) -> float:
    """Seconds of the fastest contender's step."""
    return min(value for name, value in row["median_seconds"].items() if name not in (MAX, INDUCTOR_FROZEN))


def ratio(row: dict[str, Any]) -> float:
    """Our time over the best contender's."""
    return row["median_seconds"][MAX] / best(row)


def wait_for_quiet(limit: float = QUIET, patience: float = 60.0) -> float:
    """Waits until the load average of a minute is below ``limit`` for each core; returns what it was last."""
    cores = len(os.sched_getaffinity(0))
    until = time.monotonic() + patience
    while (load := os.getloadavg()[0] / cores) > limit and time.monotonic() < until:
        time.sleep(1.0)
    return load


def _step(model: str, batch: int, amp: str, mode: str, device: str, steps: int) -> dict[str, Any] | None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "step.json"
        command = [
            sys.executable, "-m", "benchmarks", "training_step", "--model", model, "--batch", str(batch),
            "--size", str(SIZES[model]), "--device", device, "--amp", amp, "--mode", mode, "--steps", str(steps),
            "--json", str(file),
        ]  # fmt: skip
        if subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode:
            return None
        return json.loads(file.read_text())


def measure(
    batch: Annotated[list[int], typer.Option(min=1)] = [8],  # noqa: B006
    amp: Annotated[list[str], typer.Option(help="none or bf16")] = ["none"],  # noqa: B006
    model: Annotated[list[str], typer.Option(help=f"one of {', '.join(SIZES)}")] = list(SIZES),  # noqa: B006
    mode: Annotated[list[str], typer.Option(help="training or inference")] = ["training"],  # noqa: B006
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    wait: Annotated[bool, typer.Option(help="wait for a quiet machine before each row")] = True,
    steps: Annotated[int, typer.Option(min=1)] = 10,
    json_file: Annotated[Path | None, typer.Option("--json", help="where the figures go")] = None,
) -> None:
    """Measures and prints."""
    zoo.refuse_unknown(model, SIZES)
    kept = ("model", "batch", "shape", "amp", "mode", "load_average", "median_seconds", "first_step_seconds")
    rows: list[dict[str, Any]] = []
    failed: list[str] = []
    console = Console()

    def write() -> None:
        """After each row: a run that is stopped keeps what it has measured."""
        if json_file is not None:
            facts = {"steps": steps, "torch_threads": torch.get_num_threads(), "failed": failed}
            records.write(json_file, {**facts, **records.provenance(torch.device(device)), "rows": rows})

    table = Table("mode", "model", "batch", "amp", "ours, ms", "best other, ms", "ratio", "over frozen")
    for how, kind, images, name in itertools.product(mode, amp, batch, model):
        if wait:
            wait_for_quiet()
        found = _step(name, images, kind, how, device, steps)
        if found is None:
            failed.append(f"{name}, batch {images}, amp {kind}, {how}")
            console.print(f"{failed[-1]}: failed")
            continue
        row = {key: found[key] for key in kept}
        rows.append(row)
        write()
        seconds = row["median_seconds"]
        times = [f"{each * 1e3:.1f}" for each in (seconds[MAX], best(row))]
        frozen = f"{seconds[MAX] / seconds[INDUCTOR_FROZEN]:.2f}" if INDUCTOR_FROZEN in seconds else ""
        words = [how, name, str(images), kind, *times, f"{ratio(row):.2f}", frozen]
        console.print(" ".join(words))
        table.add_row(*words)
    console.print(table)
    if rows:
        console.print(
            f"geometric mean {statistics.geometric_mean(map(ratio, rows)):.2f}, worst {max(map(ratio, rows)):.2f}"
        )


def main() -> None:
    """Reads the options."""
    typer.run(measure)


if __name__ == "__main__":
    main()
