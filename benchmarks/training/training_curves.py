"""Loss curves of vision models at their own sizes beside eager PyTorch's and Inductor's, under autocast.

    python -m benchmarks training_curves [--device cuda] [--model resnet50 ...] [--amp bf16 --amp fp16] [--json FILE]

All three begin with the same weights and see the same images. Two runs in 16 bits drift apart whoever computes them, so
Inductor's distance from eager PyTorch is the measure of ours. float16 trains with ``torch.amp.GradScaler``.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from torch import nn

from benchmarks import records, zoo
from benchmarks.contenders import EAGER, INDUCTOR, MAX, compiled
from benchmarks.steps import MEMORY_FORMATS, drawn

CHOSEN = (EAGER, MAX, INDUCTOR)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
#: Different batches, each seen again and again, so that there is something to learn.
BATCHES = 4
#: Steps whose mean loss counts as the end of a curve.
LAST = 10


def curve(
    model: nn.Module, call: Callable[..., Any], x: torch.Tensor, y: torch.Tensor, amp: str, steps: int
) -> list[float]:
    """The losses of so many steps of SGD with momentum."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scaler = torch.amp.GradScaler(x.device.type, enabled=amp == "fp16", init_scale=2.0**12)
    losses = []
    for step in range(steps):
        images, labels = x[step % BATCHES], y[step % BATCHES]
        torch.manual_seed(step)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(x.device.type, DTYPES[amp]) if amp in DTYPES else contextlib.nullcontext():
            loss = F.cross_entropy(call(images), labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def distance(losses: list[float], reference: list[float]) -> dict[str, float]:
    """Relative differences of two curves: of the first step's loss, the largest of all, and of the last steps' mean."""
    a, b = torch.tensor(losses, dtype=torch.float64), torch.tensor(reference, dtype=torch.float64)
    apart = (a - b).abs() / b.abs().mean()
    end = abs(a[-LAST:].mean() - b[-LAST:].mean()) / b[-LAST:].mean()
    return {"first": float(apart[0]), "largest": float(apart.max()), "end": float(end)}


def measure(
    model: Annotated[list[str], typer.Option(help=f"one of {', '.join(zoo.MODELS)}")] = list(zoo.MODELS),  # noqa: B006
    amp: Annotated[list[str], typer.Option(help="none, bf16 or fp16")] = ["bf16"],  # noqa: B006
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    batch: Annotated[int, typer.Option(min=1)] = 16,
    size: Annotated[int, typer.Option(min=0, help="height and width of an image; 0 for the model's own")] = 0,
    steps: Annotated[int, typer.Option(min=LAST)] = 50,
    json_file: Annotated[Path | None, typer.Option("--json", help="where the curves go")] = None,
) -> None:
    """Trains, prints and writes after each model."""
    zoo.refuse_unknown(model)
    for each in amp:
        if each not in ("none", *DTYPES):
            raise typer.BadParameter(f"--amp is none, bf16 or fp16, not {each!r}")
    where, console, rows = torch.device(device), Console(), []
    for kind, name in itertools.product(amp, model):
        base, x, y = drawn(name, batch * BATCHES, size, where)
        base = base.to(memory_format=MEMORY_FORMATS[x.dim()])
        # A class's images, or its pixels, have a mean of their own: something to learn that survives rounding.
        means = torch.randn(10, device=where)[y]
        x = x + (means.unsqueeze(1) if name in zoo.PIXELWISE else means.view(-1, *[1] * (x.dim() - 1)))
        x, y = x.unflatten(0, (BATCHES, batch)), y.unflatten(0, (BATCHES, batch))
        losses: dict[str, list[float]] = {}
        for who in CHOSEN:
            torch._dynamo.reset()
            own = copy.deepcopy(base)
            losses[who] = [round(value, 5) for value in curve(own, compiled(own, who), x, y, kind, steps)]
        apart = {who: distance(losses[who], losses[EAGER]) for who in CHOSEN if who != EAGER}
        row = {"model": name, "amp": kind, "batch": batch, "shape": tuple(x.shape[2:]), **apart, "losses": losses}
        rows.append(row)
        words = [f"{who}: " + ", ".join(f"{key} {value:.1e}" for key, value in apart[who].items()) for who in apart]
        console.print(f"{name}, {kind}: {losses[EAGER][0]:.3f} to {losses[EAGER][-1]:.3f}; " + "; ".join(words))
        if json_file is not None:
            records.write(json_file, {"steps": steps, **records.provenance(where), "rows": rows})


def main() -> None:
    """Reads the options."""
    typer.run(measure)


if __name__ == "__main__":
    main()
