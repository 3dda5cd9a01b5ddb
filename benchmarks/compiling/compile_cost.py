"""CPU seconds to build each library function of a model's training graphs by itself, once for a machine.

    python -m benchmarks compile_cost [--model resnet18 ...] [--target cpu|sm_90a] [--programs 8] [--json FILE]

Nothing else is compiled for a graph that runs as a launch list. A library has a price of its own, the first row;
the other rows come on top of it. The models are in float32 on a CPU, in bfloat16 autocast for a GPU, which need not be
there.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import records, zoo
from benchmarks.records import cpu_seconds
from benchmarks.step_graphs import CPU, PLACES, WithLoss, step_graphs
from benchmarks.steps import MEMORY_FORMATS
from torch_max_backend.ahead import TARGETS
from torch_max_backend.mojo_ops.functions import Function, LibraryFunction, required
from torch_max_backend.runtime.building import libraries
from torch_max_backend.runtime.engine import session

WALK = "walk"


def functions_of(models: Sequence[str], target: str) -> list[Function]:
    """The functions that the models' training graphs call."""
    for name in models:
        make, shape = zoo.MODELS[name]
        x, y = torch.randn(2, *shape), torch.zeros(2, dtype=torch.int64)
        layout = MEMORY_FORMATS[x.dim()]
        model = WithLoss(make().to(memory_format=layout))
        step_graphs(model, x.contiguous(memory_format=layout), y, target=target)
    kind = "cpu" if target == "cpu" else "gpu"
    return sorted((each for each in required() if each.target == kind), key=lambda each: each.symbol)


@contextlib.contextmanager
def _targeted(target: str) -> Iterator[torch.device]:
    if target == "cpu":
        yield torch.device("cpu")
        return
    with session.virtual_accelerator(TARGETS[target], target):
        yield torch.device("cuda")


def cost(functions: Sequence[Function], device: torch.device) -> float:
    """CPU seconds to build one library of these functions with an empty cache."""
    kept = {"TORCH_MAX_BACKEND_COMPILE_CORES": "1"}
    with tempfile.TemporaryDirectory() as folder:
        kept["TORCH_MAX_BACKEND_CACHE_DIR"] = f"{folder}/cache"
        # Mojo's compiler remembers there what it has compiled.
        kept["HOME"] = kept["XDG_CACHE_HOME"] = f"{folder}/home"
        with mock.patch.dict(os.environ, kept):
            before = cpu_seconds()
            libraries.build(functions, device)
            return cpu_seconds() - before


def _chosen(functions: Sequence[Function], programs: int) -> list[Function]:
    """Every entry, and some of the generated programs, from all over their list."""
    entries = [each for each in functions if isinstance(each, LibraryFunction) and each.entry != WALK]
    generated = [each for each in functions if not isinstance(each, LibraryFunction)]
    return entries + generated[:: max(1, -(-len(generated) // programs))]


def measure(
    model: Annotated[list[str], typer.Option(help=f"one of {', '.join(zoo.MODELS)}")] = ["resnet18"],  # noqa: B006
    target: Annotated[str, typer.Option(help=f"one of {', '.join(PLACES)}")] = CPU,
    programs: Annotated[int, typer.Option(min=1, help="how many generated programs")] = 8,
    json_file: Annotated[Path | None, typer.Option("--json", help="where the figures go")] = None,
) -> None:
    """Measures and prints."""
    zoo.refuse_unknown(model)
    zoo.refuse_unknown([target], PLACES, "target")
    functions = functions_of(model, target)
    rows: list[dict[str, Any]] = []
    with _targeted(target) as device:
        walk = [each for each in functions if isinstance(each, LibraryFunction) and each.entry == WALK]
        base = cost(walk, device)
        rows.append({"function": "a library with the walk alone", "cpu_seconds": round(base, 1)})
        for each in track(_chosen(functions, programs), "libraries", console=Console(stderr=True)):
            rows.append({"function": each.symbol, "cpu_seconds": round(cost([*walk, each], device) - base, 1)})
    title = f"{', '.join(model)} for {target}: {len(functions)} functions"
    table = Table("function", "CPU seconds", title=title)
    for row in rows:
        table.add_row(row["function"], f"{row['cpu_seconds']:.1f}")
    Console().print(table)
    if json_file is not None:
        facts = {"models": model, "target": target, "functions": len(functions)}
        records.write(json_file, {**facts, **records.provenance(torch.device("cpu")), "rows": rows})


def main() -> None:
    """Reads the options."""
    typer.run(measure)


if __name__ == "__main__":
    main()
