"""Bytes that the kernels of a training step's graphs move, and how many of them are needed; no GPU has to be there.

    python -m benchmarks step_bytes [--model mobilenetv2 ...] [--batch 256] [--target sm_90a] [--worst 12] [--json FILE]

Graphs are built for a GPU as ``torch_max_backend.compile_ahead`` builds them, in bfloat16 autocast with channels_last
memory, and no kernel is compiled. What counts as needed ``torch_max_backend/launch_list/traffic.py`` says. Loss and
optimizer are outside. Milliseconds are at the H200's measured 4.3 TB/s.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks import records, zoo
from benchmarks.step_graphs import step_graphs
from benchmarks.steps import MEMORY_FORMATS
from torch_max_backend.ahead import TARGETS
from torch_max_backend.graph.compiled import CompiledGraph
from torch_max_backend.launch_list.traffic import Kernel, Traffic, kernels_by_entry, traffic

BATCHES = {
    "resnet50": 256,
    "resnet18": 64,
    "mobilenetv2": 256,
    "efficientnet_b0": 128,
    "convnext_tiny": 64,
    "unet": 16,
    "r3d18": 16,
    "swin_t": 64,
    "deeplabv3": 8,
}
BYTES_PER_MS = 4.3e9


def graphs_of(model: str, batch: int, target: str) -> list[CompiledGraph]:
    """The forward and the backward graph, built only."""
    make, shape = zoo.MODELS[model]
    # Of the images only sizes and strides count.
    x = torch.empty(batch, *shape, device="meta")
    layout = MEMORY_FORMATS[x.dim()]
    return step_graphs(make().to(memory_format=layout), x.contiguous(memory_format=layout), target=target)


def saved(graph: CompiledGraph) -> int:
    """Bytes of what a forward graph makes: nearly all of it is kept for the backward graph."""
    outputs = [spec for executable in graph.executables for spec in executable.built.outputs]
    return sum({spec.index: spec.bytes for spec in outputs if spec.passthrough is None}.values())


def rows_of(model: str, batch: int, graph: CompiledGraph, found: Traffic) -> list[dict[str, Any]]:
    """One row for each kernel family, as the result file has them."""
    rows = []
    for family, kernels in kernels_by_entry(found.kernels).items():
        read, written = (sum(sum(getattr(k, way).values()) for k in kernels) for way in ("inputs", "outputs"))
        rows.append({
            "model": model, "batch": batch, "graph": graph.name, "family": family, "launches": len(kernels),
            "read": read, "written": written, "needed": sum(kernel.needed for kernel in kernels),
        })  # fmt: skip
    return rows


def _named(kernel: Kernel | None) -> str:
    return "argument" if kernel is None else f"{kernel.number} {kernel.text}"


def _print(console: Console, rows: list[dict[str, Any]], found: Traffic, worst: int) -> None:
    first = rows[0]
    title = f"{first['model']}, batch {first['batch']}, {first['graph']}: {found.moved / BYTES_PER_MS:.2f} ms, "
    title += f"{found.needed / BYTES_PER_MS:.2f} ms needed"
    table = Table("kernels", "launches", "read, MB", "written, MB", "needed, MB", "ms", title=title)
    for row in rows:
        cells = [f"{row[key] / 1e6:.0f}" for key in ("read", "written", "needed")]
        milliseconds = (row["read"] + row["written"]) / BYTES_PER_MS
        table.add_row(row["family"], str(row["launches"]), *cells, f"{milliseconds:.2f}")
    console.print(table)
    rest = Table("from", "to", "MB", "value", "why")
    for each in found.avoidable[:worst]:
        value = f"{each.dtype} {'x'.join(map(str, each.shape))}"
        rest.add_row(_named(each.producer), _named(each.consumer), f"{each.bytes / 1e6:.0f}", value, each.reason)
    console.print(rest)


def count(
    model: Annotated[list[str], typer.Option(help=f"any of {', '.join(zoo.MODELS)}")] = list(BATCHES),  # noqa: B006
    batch: Annotated[int, typer.Option(min=0, help="0 for the model's own")] = 0,
    target: Annotated[str, typer.Option(help=f"one of {', '.join(TARGETS)}")] = "sm_90a",
    worst: Annotated[int, typer.Option(min=0, help="how many avoidable reads to name")] = 12,
    json_file: Annotated[Path | None, typer.Option("--json", help="where the figures go")] = None,
) -> None:
    """Counts and prints."""
    zoo.refuse_unknown(model)
    zoo.refuse_unknown([target], TARGETS, "target")
    console = Console(width=180)
    rows: list[dict[str, Any]] = []
    kept: dict[str, int] = {}
    for name in model:
        images = batch or BATCHES.get(name, 64)
        for graph in graphs_of(name, images, target):
            if graph.name == "forward":
                kept[name] = saved(graph)
            for executable in graph.executables:
                found = traffic(executable.built.typed)
                own = rows_of(name, images, graph, found)
                _print(console, own, found, worst)
                rows += own
        console.print(f"{name}: the forward graph makes {kept.get(name, 0) / 1e6:.0f} MB of results")
    if json_file is not None:
        where = torch.device("cpu")
        facts = {"target": target, "saved": kept, "date": records.date(), "versions": records.versions(where)}
        records.write(json_file, {**facts, "rows": rows})


def main() -> None:
    """Reads the options."""
    typer.run(count)


if __name__ == "__main__":
    main()
