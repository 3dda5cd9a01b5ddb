"""Host time of a compiled model's forward and backward call: ours by part, and Inductor's.

    python -m benchmarks host_time [--device cuda] [--tensors 10] [--model resnet18 --batch 8] [--json FILE]

A graph of N tensors takes N parameters and gives the backward graph N activations, which gives N gradients; its kernels
are as good as empty. Microseconds, medians of many calls: checking arguments and taking their addresses, queueing the
launches or replaying them (on a CPU: running them), handing results out, and what Dynamo and AOTAutograd do around it.
On a GPU nothing is waited for.
"""

from __future__ import annotations

import copy
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
from benchmarks.contenders import INDUCTOR, INDUCTOR_CAPTURED, MAX, MAX_CAPTURED, compiled
from torch_max_backend import backend
from torch_max_backend.runtime.executable import Executable

PARTS = ("arguments", "launches", "results", "around")

PLAIN = (MAX, INDUCTOR)
CAPTURED = (MAX, MAX_CAPTURED, INDUCTOR, INDUCTOR_CAPTURED)

WARM = 20
"""Calls before those that count: device graphs are recorded in the first ones."""


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


def _watch(executable: Executable, clock: Clock) -> None:
    """Times the parts of the calls of an executable with a launch list."""
    for method, part in (("entered", "arguments"), ("launched", "launches"), ("picked", "results")):
        setattr(executable.runner, method, clock.wrapped(part, getattr(executable.runner, method)))


def rows_of(name: str, model: nn.Module, x: torch.Tensor, calls: int, contender: str) -> list[dict[str, Any]]:
    """One contender's forward call's and backward call's row."""
    device, clock = x.device, Clock()
    torch._dynamo.reset()
    run = compiled(model, contender)
    parameters = list(model.parameters())
    with backend.recorded_graphs() as graphs:
        gradient = torch.ones_like(run(x))
    for graph in graphs:
        for each in graph.executables:
            _watch(each, clock)
    samples: dict[str, list[dict[str, float]]] = {"forward": [], "backward": []}
    for call in range(calls + WARM):
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
        del out
        for kind, parts, total in (
            ("forward", forward, middle - begun),
            ("backward", clock.taken(), ended - after),
        ):
            if call >= WARM:
                around = {"around": total - sum(parts.values())} if graphs else {}
                samples[kind].append({**parts, **around, "total": total})
    return [
        {
            "model": name,
            "contender": contender,
            "call": kind,
            "microseconds": {
                part: round(statistics.median(sample[part] for sample in samples[kind]) * 1e6, 1)
                for part in samples[kind][0]
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
    contenders: Annotated[
        list[str] | None, typer.Option("--contender", help="ours and Inductor's; on a GPU with device graphs, too")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="where the figures go")] = None,
) -> None:
    """Measures and prints."""
    if device not in ("cpu", "cuda"):
        raise typer.BadParameter(f"--device is cpu or cuda, not {device!r}")
    zoo.refuse_unknown(model)
    where = torch.device(device)
    torch.manual_seed(0)
    cases = [(f"{count} tensors", ManyTensors(count), torch.randn(64)) for count in tensors]
    for name in model:
        make, shape = zoo.MODELS[name]
        cases.append((f"{name}, batch {batch}", make(), torch.randn(batch, *shape)))
    rows = []
    for name, made, x in cases:
        for contender in contenders or (CAPTURED if device == "cuda" else PLAIN):
            rows += rows_of(name, copy.deepcopy(made).to(where), x.to(where), calls, contender)
    table = Table("model", "contender", "call", *PARTS, "total", title=f"Host time on {device}, µs")
    for row in rows:
        found = row["microseconds"]
        times = [f"{found[part]:.0f}" if part in found else "" for part in (*PARTS, "total")]
        table.add_row(row["model"], row["contender"], row["call"], *times)
    Console().print(table)
    if json_file is not None:
        records.write(json_file, {"calls": calls, **records.provenance(where), "rows": rows})


def main() -> None:
    """Reads the options."""
    typer.run(measure)


if __name__ == "__main__":
    main()
