"""Whole training steps beside eager PyTorch and Inductor: forward, loss, backward, SGD with momentum.

    python -m benchmarks training_step --model resnet18 --batch 64 [--device cuda] [--amp bf16] [--json FILE]

The contenders train copies of one model on one batch; their steps are timed in turn, after warming up, and the medians
are reported with the CPU time of a step and the time to the first step. On a CPU eager PyTorch is a contender in both
memory formats. On a GPU ours and Inductor run with device graphs (``mode="reduce-overhead"``), too; steps are timed in
a queue as well, without waiting for each, and the memory that a contender takes from the device is reported.
``--threads 1`` keeps OpenMP's threads, which go on turning for milliseconds after an operator, from the next
contender's time. ``--mode inference`` times forward passes of the model in ``eval()`` without gradients; there Inductor
is timed with frozen weights, too, which no other contender may take for constants.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks import records, zoo
from benchmarks.contenders import (
    EAGER,
    EAGER_CHANNELS_LAST,
    INDUCTOR,
    INDUCTOR_CAPTURED,
    INDUCTOR_FROZEN,
    MAX,
    MAX_CAPTURED,
    compiled,
)
from benchmarks.steps import MEMORY_FORMATS, drawn, in_turns, inference, queued, stepper, timed


@dataclass(frozen=True)
class _Warmed:
    """A contender that has run four times: its step, the seconds of the first one, and what it takes of a GPU, GiB."""

    step: Callable[[], None]
    first: float
    gib_taken: float


def _warmed(name: str, model: nn.Module, x: torch.Tensor, y: torch.Tensor, *, half: bool, mode: str) -> _Warmed:
    """A contender, with a copy of the model."""
    on_gpu = x.device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(x.device)[0] if on_gpu else 0
    own = copy.deepcopy(model)
    if name == MAX:
        torch._dynamo.reset()
    if name == EAGER_CHANNELS_LAST:
        own, x = (each.to(memory_format=MEMORY_FORMATS[x.dim()]) for each in (own, x))
    runner = compiled(own, name)
    step = stepper(own, runner, x, y, half) if mode == "training" else inference(runner, x, half)
    first = timed(step, x.device)
    for _ in range(3):
        step()
    taken = 0
    if on_gpu:
        torch.cuda.synchronize()
        taken = free - torch.cuda.mem_get_info(x.device)[0]
    return _Warmed(step, first, round(taken / 2**30, 2))


def train(
    model: Annotated[str, typer.Option(help=f"one of {', '.join(zoo.MODELS)}")] = "resnet18",
    batch: Annotated[int, typer.Option(min=1)] = 16,
    size: Annotated[int, typer.Option(min=0, help="height and width of an image; 0 for the model's own")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    amp: Annotated[str, typer.Option(help="none or bf16")] = "none",
    steps: Annotated[int, typer.Option(min=1)] = 20,
    inductor: Annotated[bool, typer.Option(help="time Inductor too")] = True,
    channels_last: Annotated[bool, typer.Option(help="the user's model and images are channels_last")] = False,
    mode: Annotated[str, typer.Option(help="training or inference")] = "training",
    search: Annotated[bool, typer.Option(help="cuDNN times its kernels first, minutes for depthwise models")] = True,
    threads: Annotated[int, typer.Option(min=0, help="PyTorch's threads on the CPU; 0 for as many as it takes")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="where the figures go")] = None,
) -> None:
    """Times training steps of one model."""
    zoo.refuse_unknown([model])
    zoo.refuse_unknown([mode], ("training", "inference"), "mode")
    if threads:
        torch.set_num_threads(threads)
    where = torch.device(device)
    torch.backends.cudnn.benchmark = search
    base, x, y = drawn(model, batch, size, where)
    base.train(mode == "training")
    shape = tuple(x.shape[1:])
    if channels_last:
        base, x = (each.to(memory_format=MEMORY_FORMATS[x.dim()]) for each in (base, x))
    names = [MAX, EAGER, *([INDUCTOR] if inductor else [])]
    if where.type == "cpu" and not channels_last:
        names.insert(2, EAGER_CHANNELS_LAST)
    if where.type == "cuda":
        names += [MAX_CAPTURED, *([INDUCTOR_CAPTURED] if inductor else [])]
    if mode == "inference" and inductor:
        names.append(INDUCTOR_FROZEN)
    warmed = {name: _warmed(name, base, x, y, half=amp == "bf16", mode=mode) for name in names}
    contenders = {name: contender.step for name, contender in warmed.items()}
    first = {name: contender.first for name, contender in warmed.items()}
    load = os.getloadavg()[0]
    times = in_turns(contenders, steps, where)
    medians = {name: each.median for name, each in times.items()}
    processor = {name: each.median_processor for name, each in times.items()}
    on_gpu: dict[str, dict[str, float]] = {}
    if where.type == "cuda":
        on_gpu["queued_seconds"] = {name: queued(step, steps, where) for name, step in contenders.items()}
        on_gpu["gib_taken"] = {name: contender.gib_taken for name, contender in warmed.items()}
    table = Table("backend", "median step, ms", "CPU time, ms", "images/s", "max's time over it", "first step, s")
    for name in names:
        table.add_row(
            name, f"{medians[name] * 1e3:.2f}", f"{processor[name] * 1e3:.2f}", f"{batch / medians[name]:.0f}",
            f"{medians[MAX] / medians[name]:.2f}", f"{first[name]:.1f}",
        )  # fmt: skip
    Console().print(f"{model}, batch {batch}, {'x'.join(map(str, shape))}, {device}, amp {amp}, {mode}")
    Console().print(table)
    if json_file is not None:
        facts = {
            "model": model, "batch": batch, "shape": shape, "amp": amp, "mode": mode, "channels_last": channels_last,
            "cudnn_benchmark": search,
            "torch_threads": torch.get_num_threads(), "load_average": round(load, 1),
            "steps": steps, "median_seconds": medians, "median_cpu_seconds": processor, "first_step_seconds": first,
            **on_gpu, **records.provenance(where),
        }  # fmt: skip
        records.write(json_file, facts)


def main() -> None:
    """Reads the options."""
    typer.run(train)


if __name__ == "__main__":
    main()
