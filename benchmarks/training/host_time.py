"""Host time of a compiled model's forward and backward call, by part.

    python -m benchmarks host_time [--device cuda] [--tensors 10] [--model resnet18 --batch 8] [--json FILE]

A graph of N tensors takes N parameters and gives the backward graph N activations, which gives N gradients; its kernels
are as good as empty. Microseconds, medians of many calls: checking arguments and taking their addresses, queueing the
launches (on a CPU: running them), making results, and what Dynamo and AOTAutograd do around it. In graphs that MAX
compiles, the first and the third part are handing tensors over.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks import records, zoo
from torch_max_backend import backend
from torch_max_backend.runtime import executable as executables

PARTS = ("hand-over in", "execute", "hand-over out", "around")


class ManyTensors(nn.Module):
    """As many parameters, activations and gradients as asked for, of a few numbers each."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.parameters_ = nn.ParameterList(torch.randn(64) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[64] to [count, 64]."""
        return torch.stack([torch.tanh(parameter) for parameter in self.parameters_]) + x


class Clock:
    """Adds up the seconds that functions take."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def wrapped(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, with its time added to ``part``."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            result = function(*args, **kwargs)
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - begun
            return result

        return timed

    def taken(self) -> dict[str, float]:
        """What has been added up since the last call."""
        taken, self.seconds = self.seconds, {}
        return taken


def _watch(executable: executables.Executable, clock: Clock) -> None:
    """Times the parts of the executable's calls."""
    owners: list[tuple[Any, str, str]] = [
        (executable.inputs, "buffers", PARTS[0]), (executable.outputs, "collect", PARTS[2]),
    ]  # fmt: skip
    if executable.runner is not None:
        owners = [
            (executable.inputs, "tensors", PARTS[0]), (executable.runner, "walk", PARTS[1]),
            (executable.runner, "fresh", PARTS[2]), (executable.outputs.leaving, "picked", PARTS[2]),
        ]  # fmt: skip
    for owner, method, part in owners:
        setattr(owner, method, clock.wrapped(part, getattr(owner, method)))


def _rows(name: str, model: nn.Module, x: torch.Tensor, calls: int) -> list[dict[str, Any]]:
    """The forward call's and the backward call's row."""
    device = x.device
    torch._dynamo.reset()
    run = torch.compile(model, backend="max")
    parameters = list(model.parameters())
    with backend.recorded_graphs() as graphs:
        gradient = torch.ones_like(run(x))
    clock = Clock()
    for graph in graphs:
        for each in graph.executables:
            _watch(each, clock)
    plain = executables.execute
    executables.execute = clock.wrapped(PARTS[1], plain)
    samples: dict[str, list[dict[str, float]]] = {"forward": [], "backward": []}
    try:
        for call in range(calls + 10):
            if device.type == "cuda" and call % 10 == 0:
                # The queue has a limit, behind which the host waits.
                torch.cuda.synchronize()
            clock.taken()
            begun = time.perf_counter()
            out = run(x)
            middle = time.perf_counter()
            forward = clock.taken()
            after = time.perf_counter()
            torch.autograd.grad(out, parameters, gradient)
            ended = time.perf_counter()
            for kind, parts, total in (
                ("forward", forward, middle - begun),
                ("backward", clock.taken(), ended - after),
            ):
                if call >= 10:
                    samples[kind].append({**parts, "around": total - sum(parts.values()), "total": total})
    finally:
        executables.execute = plain
    made = {graph.name: graph.executables for graph in graphs}
    return [
        {
            "model": name,
            "call": kind,
            "inputs": sum(len(each.built.inputs) for each in made[kind]),
            "outputs": sum(len(each.built.outputs) + len(each.built.writes) for each in made[kind]),
            "microseconds": {
                part: round(statistics.median(sample.get(part, 0.0) for sample in samples[kind]) * 1e6, 1)
                for part in (*PARTS, "total")
            },
        }
        for kind in ("forward", "backward")
    ]


def measure(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    tensors: Annotated[list[int], typer.Option(min=1, help="parameters of a graph; may be given again")] = [  # noqa: B006
        10,
        100,
        500,
    ],
    model: Annotated[list[str], typer.Option(help=f"also {', '.join(zoo.MODELS)}")] = [],  # noqa: B006
    batch: Annotated[int, typer.Option(min=1, help="for --model")] = 8,
    calls: Annotated[int, typer.Option(min=1)] = 200,
    json_file: Annotated[Path | None, typer.Option("--json", help="where the figures go")] = None,
) -> None:
    """Measures and prints."""
    if device not in ("cpu", "cuda"):
        raise typer.BadParameter(f"--device is cpu or cuda, not {device!r}")
    zoo.refuse_unknown(model)
    where = torch.device(device)
    torch.manual_seed(0)
    rows = []
    for count in tensors:
        rows += _rows(f"{count} tensors", ManyTensors(count).to(where), torch.randn(64, device=where), calls)
    for name in model:
        make, shape = zoo.MODELS[name]
        rows += _rows(f"{name}, batch {batch}", make().to(where), torch.randn(batch, *shape, device=where), calls)
    table = Table("model", "call", "inputs", "outputs", *PARTS, "total", title=f"Host time on {device}, µs")
    for row in rows:
        times = [f"{row['microseconds'][part]:.0f}" for part in (*PARTS, "total")]
        table.add_row(row["model"], row["call"], str(row["inputs"]), str(row["outputs"]), *times)
    Console().print(table)
    if json_file is not None:
        records.write(json_file, {"calls": calls, **records.provenance(where), "rows": rows})


def main() -> None:
    """Reads the options."""
    typer.run(measure)


if __name__ == "__main__":
    main()
