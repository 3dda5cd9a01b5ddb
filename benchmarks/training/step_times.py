"""Time that each kind of kernel of a training step takes on a GPU, beside the bytes that it moves.

    python -m benchmarks step_times [--model mobilenetv2 ...] [--batch 256] [--json FILE]

Models train as in ``benchmarks training_step``, in bfloat16 autocast with channels_last memory. Each launch is timed
by itself (``torch_max_backend.launch_times``), the median of some steps; bytes are those of ``benchmarks step_bytes``,
in milliseconds at the H200's measured 4.3 TB/s. ``queued`` is the time of a whole step, loss and optimizer included,
where the host waits for the last of ten.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch._functorch import config as functorch_config

import torch_max_backend
from benchmarks import records, zoo
from benchmarks.contenders import MAX, compiled
from benchmarks.steps import MEMORY_FORMATS, drawn, queued, stepper
from benchmarks.training.step_bytes import BATCHES, BYTES_PER_MS
from torch_max_backend.backend import recorded_graphs
from torch_max_backend.launch_list.traffic import kernels_by_entry, traffic

_STEPS, _ROUNDS = 10, 3


def measured(model: str, batch: int) -> dict[str, Any]:
    """One model's step: as a whole, and the kinds of its kernels."""
    device = torch.device("cuda")
    base, x, y = drawn(model, batch, 0, device)
    layout = MEMORY_FORMATS[x.dim()]
    base, x = base.to(memory_format=layout), x.to(memory_format=layout)
    torch.compiler.reset()
    # A program from the cache has no graph to count.
    with recorded_graphs() as graphs, functorch_config.patch(enable_autograd_cache=False):
        step = stepper(base, compiled(base, MAX), x, y, amp=True)
        step()
    queued(step, _STEPS, device)
    whole = [queued(step, _STEPS, device) for _ in range(_ROUNDS)]
    with torch_max_backend.launch_times() as times:
        for _ in range(5):
            step()
    kinds: dict[str, dict[str, Any]] = defaultdict(lambda: {"launches": 0, "seconds": 0.0, "bytes": 0, "needed": 0})
    for launch in times.launches:
        kinds[launch.entry]["launches"] += 1
        kinds[launch.entry]["seconds"] += launch.seconds
    for executable in (each for graph in graphs for each in graph.executables):
        for entry, kernels in kernels_by_entry(traffic(executable.built.typed).kernels).items():
            kinds[entry]["bytes"] += sum(kernel.moved for kernel in kernels)
            kinds[entry]["needed"] += sum(kernel.needed for kernel in kernels)
    ordered = dict(sorted(kinds.items(), key=lambda item: -item[1]["seconds"]))
    return {"model": model, "batch": batch, "queued_seconds": statistics.median(whole), "kinds": ordered}


def table_of(row: dict[str, Any]) -> Table:
    """One model's kinds of kernels."""
    title = f"{row['model']}, batch {row['batch']}: {row['queued_seconds'] * 1e3:.2f} ms"
    table = Table("kernels", "launches", "ms", "bytes, ms", "ratio", title=title)
    for entry, kind in row["kinds"].items():
        floor = kind["bytes"] / BYTES_PER_MS
        ratio = kind["seconds"] * 1e3 / floor if floor else float("nan")
        cells = str(kind["launches"]), f"{kind['seconds'] * 1e3:.3f}", f"{floor:.3f}", f"{ratio:.2f}"
        table.add_row(entry, *cells)
    return table


def measure(
    model: Annotated[list[str], typer.Option(help=f"any of {', '.join(zoo.MODELS)}")] = list(BATCHES),  # noqa: B006
    batch: Annotated[int, typer.Option(min=0, help="0 for the model's own")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="where the figures go")] = None,
) -> None:
    """Measures and prints."""
    zoo.refuse_unknown(model)
    if not torch.cuda.is_available():
        raise typer.BadParameter("step_times needs a GPU: none is available")
    console, rows = Console(width=120), []
    for name in model:
        rows.append(measured(name, batch or BATCHES.get(name, 64)))
        console.print(table_of(rows[-1]))
        torch.cuda.empty_cache()
    if json_file is not None:
        records.write(json_file, {**records.provenance(torch.device("cuda")), "rows": rows})


def main() -> None:
    """Reads the options."""
    typer.run(measure)


if __name__ == "__main__":
    main()
