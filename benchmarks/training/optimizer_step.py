"""Compiled optimizers' steps beside eager PyTorch's foreach and fused ones and Inductor's, for one model's parameters.

    python -m benchmarks optimizer_step [--model resnet18] [--device cuda] [--json FILE]

All contenders run in one process, in turns, each on parameters, gradients and state of its own. On a GPU the time is
the device's; launches are the calls of a launch list (on a GPU a call over many tensors is one kernel for some forty of
them, and one that reduces two), copies the tensors that PyTorch copies afterwards.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks import records, zoo
from benchmarks.contenders import EAGER_FOREACH, EAGER_FUSED, INDUCTOR, MAX, compiled
from torch_max_backend import backend
from torch_max_backend.bench.timing import interleaved
from torch_max_backend.graph.compiled import CompiledGraph
from torch_max_backend.runtime.executable import Executable

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD, momentum": (torch.optim.SGD, {"lr": 1e-4, "momentum": 0.9, "weight_decay": 1e-4}),
    "Adam": (torch.optim.Adam, {"lr": 1e-5}),
    "AdamW": (torch.optim.AdamW, {"lr": 1e-5}),
    "AdamW, clipped": (torch.optim.AdamW, {"lr": 1e-5}),
}
CHOSEN = (MAX, INDUCTOR, EAGER_FOREACH, EAGER_FUSED)


def _stepper(
    parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, clipped: bool, contender: str
) -> Callable[[], object]:
    def step() -> None:
        if clipped:
            nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()

    return compiled(step, contender)


def _counts(step: Callable[[], object], graphs: list[CompiledGraph]) -> dict[str, int]:
    """The launches and copies of the graphs that a step runs."""
    ran: list[Executable] = []

    def noted(executable: Executable, run: Callable[..., Any]) -> Callable[..., Any]:
        def noting(args: Sequence[Any]) -> Any:
            ran.append(executable)
            return run(args)

        return noting

    for graph in graphs:
        for each in graph.executables:
            if each.runner is not None:
                each.runner.run = noted(each, each.runner.run)
    step()
    listings = [each.listing for each in ran if each.listing is not None]
    writes = sum(len(each.built.writes) for each in ran)
    return {
        "launches": sum(len(listing.launches) for listing in listings),
        "copies": writes - sum(len(listing.updates) for listing in listings),
    }


def _row(kind: str, parameters: list[nn.Parameter], device: torch.device, runs: int) -> dict[str, Any]:
    make, settings = OPTIMIZERS[kind]
    steps: dict[str, list[Callable[[], object]]] = {}
    counts: dict[str, int] = {}
    for contender in CHOSEN:
        torch.compiler.reset()
        own = copy.deepcopy(parameters)
        for each in own:
            each.grad = torch.randn_like(each)
        capturable = {} if device.type == "cpu" or make is torch.optim.SGD else {"capturable": True}
        which = {"fused": True} if contender == EAGER_FUSED else {"foreach": True, **capturable}
        step = _stepper(own, make(own, **settings, **which), "clipped" in kind, contender)
        with backend.recorded_graphs() as graphs:
            # The first step with momenta makes them.
            for _ in range(3):
                step()
        if contender == MAX:
            counts = _counts(step, graphs)
        steps[contender] = [step]
    times = interleaved(steps, runs, device)
    milliseconds = {name: round(each.median * 1e3, 2) for name, each in times.items()}
    return {"optimizer": kind, **counts, "milliseconds": milliseconds}


def measure(
    model: Annotated[str, typer.Option(help=f"one of {', '.join(zoo.MODELS)}")] = "resnet18",
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    runs: Annotated[int, typer.Option(min=1)] = 30,
    optimizer: Annotated[list[str], typer.Option(help="which; may be given again")] = list(OPTIMIZERS),  # noqa: B006
    json_file: Annotated[Path | None, typer.Option("--json", help="where the figures go")] = None,
) -> None:
    """Measures and prints."""
    zoo.refuse_unknown([model])
    zoo.refuse_unknown(optimizer, OPTIMIZERS, "optimizer")
    where = torch.device(device)
    torch.manual_seed(0)
    parameters = list(zoo.MODELS[model][0]().to(where).parameters())
    rows = [_row(kind, parameters, where, runs) for kind in optimizer]
    table = Table("optimizer", "launches", "copies", *CHOSEN, title=f"{model}, {device}, ms")
    for row in rows:
        times = [f"{row['milliseconds'][name]:.2f}" for name in CHOSEN]
        table.add_row(row["optimizer"], str(row.get("launches", "")), str(row.get("copies", "")), *times)
    Console().print(table)
    if json_file is not None:
        sizes = {"model": model, "tensors": len(parameters), "elements": sum(each.numel() for each in parameters)}
        records.write(json_file, {**sizes, "runs": runs, **records.provenance(where), "rows": rows})


def main() -> None:
    """Reads the options."""
    typer.run(measure)


if __name__ == "__main__":
    main()
