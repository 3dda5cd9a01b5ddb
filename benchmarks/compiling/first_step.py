"""The wait for a model's first training step, in a process of its own: caches empty, and again with what that left.

    python -m benchmarks first_step --model resnet18 --batch 64 [--device cuda] [--amp bf16] [--json FILE]

A run is one process: wall and CPU seconds (of the processes that it starts, too) to the end of the first step, after
Python's imports and the opening of the device. What a backend keeps on disk lies in a folder of the run's own. A row
has the medians of the rounds, in which the runs take turns. ``--prebuilt`` adds runs with empty caches and the kernels
that a wheel carries: a folder that ``python -m torch_max_backend.wheel TARGET FOLDER/TARGET`` made.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import ROOT, records, zoo
from benchmarks.contenders import EAGER, INDUCTOR, MAX, caches_in, compiled
from benchmarks.records import cpu_seconds
from benchmarks.steps import drawn, stepper, timed

CHOSEN = (MAX, INDUCTOR, EAGER)
STATES = ("empty", "filled")
PREBUILT = "prebuilt"
MARK = "first step: "


def _step(contender: str, model: str, batch: int, size: int, device: str, amp: str) -> dict[str, Any]:
    """Takes the first step in this process."""
    where = torch.device(device)
    own, x, y = drawn(model, batch, size, where)
    if x.dim() == 4:
        own = own.to(memory_format=torch.channels_last)
    # What the device's libraries do once for a process is nobody's compilation.
    torch.nn.functional.conv2d(torch.ones(1, 1, 3, 3, device=where), torch.ones(1, 1, 3, 3, device=where)).sum().item()
    before = cpu_seconds()
    seconds = timed(stepper(own, compiled(own, contender), x, y, amp == "bf16"), where)
    return {"seconds": round(seconds, 2), "cpu_seconds": round(cpu_seconds() - before, 1)}


def _in_a_process(arguments: list[str], folder: Path, prebuilt: Path | None) -> dict[str, Any]:
    environment = {**os.environ, **caches_in(folder)}
    if prebuilt is not None:
        environment["TORCH_MAX_BACKEND_PREBUILT"] = str(prebuilt.resolve())
    command = [sys.executable, "-m", "benchmarks", "first_step", "--here", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not lines:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    return json.loads(lines[-1].removeprefix(MARK))


def measure(
    model: Annotated[str, typer.Option(help=f"one of {', '.join(zoo.MODELS)}")] = "digits",
    batch: Annotated[int, typer.Option(min=1)] = 64,
    size: Annotated[int, typer.Option(min=0, help="height and width of an image; 0 for the model's own")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    amp: Annotated[str, typer.Option(help="none or bf16")] = "none",
    contender: Annotated[list[str], typer.Option(help="which; may be given again")] = list(CHOSEN),  # noqa: B006
    rounds: Annotated[int, typer.Option(min=1)] = 1,
    prebuilt: Annotated[Path | None, typer.Option(help="kernels that a wheel carries")] = None,
    state: Annotated[
        list[str], typer.Option(help="caches: empty, filled or prebuilt; may be given again; all by default")
    ] = [],  # noqa: B006
    here: Annotated[
        bool, typer.Option("--here", help="take the step in this process, with the caches at hand")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="where the figures go")] = None,
) -> None:
    """Measures and prints."""
    zoo.refuse_unknown([model])
    zoo.refuse_unknown(contender, CHOSEN, "contender")
    if here:
        print(MARK + json.dumps(_step(contender[0], model, batch, size, device, amp)))
        return
    facts: dict[str, Any] = {"model": model, "batch": batch, "size": size, "device": device, "amp": amp}
    chosen = [text for name, value in facts.items() for text in (f"--{name}", str(value))]
    states = {name: STATES[:1] if name == EAGER else STATES for name in contender}
    if prebuilt is not None and MAX in states:
        states[MAX] = (*STATES, PREBUILT)
    zoo.refuse_unknown(state, (*STATES, PREBUILT), "state")
    if "filled" in state and "empty" not in state:
        raise typer.BadParameter("--state filled needs --state empty, whose run fills the caches")
    runs = [(name, each) for name, some in states.items() for each in some if not state or each in state]
    taken: dict[tuple[str, str], list[dict[str, Any]]] = {run: [] for run in runs}
    for turn in track(range(rounds), "rounds", console=Console(stderr=True)):
        with tempfile.TemporaryDirectory() as scratch:
            for name, each in runs if turn % 2 == 0 else sorted(runs, key=lambda run: (run[0] == MAX, run[1])):
                folder = Path(scratch) / (f"{name}, {PREBUILT}" if each == PREBUILT else name)
                folder.mkdir(exist_ok=True)
                load = round(os.getloadavg()[0], 1)
                own = prebuilt if each == PREBUILT else None
                step = _in_a_process([*chosen, "--contender", name], folder, own)
                taken[name, each].append({**step, "load_average_before": load})
    rows = [
        {"backend": name, "caches": state, **{key: round(median(run[key] for run in some), 2) for key in some[0]}}
        for (name, state), some in taken.items()
    ]
    table = Table(
        "backend", "caches", "first step, s", "CPU seconds", title=f"{model}, batch {batch}, {device}, amp {amp}"
    )
    for row in rows:
        table.add_row(row["backend"], row["caches"], f"{row['seconds']:.1f}", f"{row['cpu_seconds']:.0f}")
    Console().print(table)
    if json_file is not None:
        provenance = records.provenance(torch.device(device))
        records.write(json_file, {**facts, "rounds": rounds, **provenance, "rows": rows})


def main() -> None:
    """Reads the options."""
    typer.run(measure)


if __name__ == "__main__":
    main()
