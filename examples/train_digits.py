"""Trains a small CNN on scikit-learn's handwritten digits with ``torch.compile(model, backend="max")``.

The same model is trained beside it by eager PyTorch from the same seed; the two loss curves are drawn together.

    uv run examples/train_digits.py [--device cpu|cuda] [--amp none|bf16] [--optimizer sgd|adamw] [--epochs N]
"""

from __future__ import annotations

import copy
import logging
import platform
import time
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from common import autocast, console, draw_curves, progress_bars
from rich.logging import RichHandler
from rich.progress import Progress
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import torch_max_backend

BATCH = 64
SEED = 20
COMPARED_STEPS = 50


class DigitsNet(nn.Module):
    """8x8 grey images to ten classes: plain, grouped and strided convolutions, pooling, a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1, groups=4),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(64, 128, 3, stride=2, padding=1),
            nn.BatchNorm2d(128),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
        )
        self.classifier = nn.Linear(128, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits [N, 10] of images [N, 1, 8, 8]."""
        return self.classifier(self.features(images).flatten(1))


def load(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Training images and labels, test images and labels; pixels scaled to [0, 1]."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target, dtype=torch.int64)
    parts = train_test_split(images, labels, test_size=0.2, random_state=SEED, stratify=labels)
    x_train, x_test, y_train, y_test = (part.to(device) for part in parts)
    return x_train, y_train, x_test, y_test


def batches(count: int, epochs: int) -> Iterator[torch.Tensor]:
    """Index batches, all of one size, shuffled anew in each epoch from a fixed seed."""
    generator = torch.Generator().manual_seed(SEED)
    for _ in range(epochs):
        order = torch.randperm(count, generator=generator)
        yield from order[: count - count % BATCH].split(BATCH)


def optimizer_for(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer by its option's name."""
    if name == "sgd":
        # A larger rate reaches the accuracy sooner, but lets one activation that rounds to the other side of ReLU's
        # zero grow into percents of the loss within 50 steps: eager float32 then differs so from eager float64.
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    return torch.optim.AdamW(model.parameters(), lr=2e-3)


def train(
    model: nn.Module, parameters_of: nn.Module, x: torch.Tensor, y: torch.Tensor,
    optimizer: str, device: torch.device, amp: str, epochs: int, progress: Progress, title: str,
) -> tuple[list[float], float, float]:  # fmt: skip
    """Trains in place. Returns the loss of every step, the seconds to the first step and per later step."""
    stepper = optimizer_for(optimizer, parameters_of)
    steps = epochs * (len(x) // BATCH)
    task = progress.add_task(title, total=steps)
    losses: list[torch.Tensor] = []
    begun = time.perf_counter()
    first = 0.0
    model.train()
    for index in batches(len(x), epochs):
        stepper.zero_grad(set_to_none=True)
        with autocast(device, amp):
            loss = F.cross_entropy(model(x[index]), y[index])
        loss.backward()
        stepper.step()
        losses.append(loss.detach())
        progress.advance(task)
        if not first:
            float(losses[0])
            first = time.perf_counter() - begun
    values = [float(loss) for loss in losses]
    return values, first, (time.perf_counter() - begun - first) / max(steps - 1, 1)


def accuracy(model: nn.Module, x: torch.Tensor, y: torch.Tensor, device: torch.device, amp: str) -> float:
    """The share of images that the model, in evaluation mode, labels right."""
    model.eval()
    with torch.no_grad(), autocast(device, amp):
        return (model(x).argmax(1) == y).float().mean().item()


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    amp: Annotated[str, typer.Option(help="none or bf16 (autocast)")] = "none",
    optimizer: Annotated[str, typer.Option(help="sgd or adamw")] = "sgd",
    epochs: Annotated[int, typer.Option(min=1, help="passes over the training images")] = 12,
    plot: Annotated[Path, typer.Option(help="where the loss curves go")] = Path("digits_loss.png"),
    verbose: Annotated[bool, typer.Option(help="log the backend's own messages")] = False,
) -> None:
    """Trains, compares with eager PyTorch, prints what ran where, writes the loss curves."""
    if amp not in ("none", "bf16"):
        raise typer.BadParameter(f"--amp is none or bf16, not {amp!r}")
    if optimizer not in ("sgd", "adamw"):
        raise typer.BadParameter(f"--optimizer is sgd or adamw, not {optimizer!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("--device cuda: PyTorch sees no CUDA device")
    if device not in ("cpu", "cuda"):
        raise typer.BadParameter(f"--device is cpu or cuda, not {device!r}")
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, handlers=[RichHandler(console=console)])
    where = torch.device(device)
    # Both sides multiply float32 in full: PyTorch's default lets cuDNN round to TF32, whose error would hide ours.
    torch.backends.cudnn.allow_tf32 = False
    x_train, y_train, x_test, y_test = load(where)

    torch.manual_seed(SEED)
    eager = DigitsNet().to(where)
    ours = copy.deepcopy(eager)
    compiled = torch.compile(ours, backend="max")

    with (
        torch_max_backend.backend.recorded_graphs() as counted,
        progress_bars() as progress,
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", category=FutureWarning)
        job = (x_train, y_train, optimizer, where, amp, epochs, progress)
        loss_ours, first_ours, step_ours = train(compiled, ours, *job, "backend max")
        loss_eager, _, step_eager = train(eager, eager, *job, "eager")
        reached = accuracy(compiled, x_test, y_test, where, amp)
    reference = accuracy(eager, x_test, y_test, where, amp)

    curves = {"backend max": loss_ours, "eager PyTorch": loss_eager}
    draw_curves(curves, plot, "Cross entropy of handwritten digits, same seed")
    pairs = list(zip(loss_ours, loss_eager, strict=True))[:COMPARED_STEPS]
    deviation = max(abs(a - b) / abs(b) for a, b in pairs)
    in_max = sum(executable.op_count for graph in counted for executable in graph.executables)
    in_torch = sum(len(graph.refusals) for graph in counted)

    table = Table("what", "value", title="Handwritten digits")
    name = (
        torch.cuda.get_device_name()
        if device == "cuda"
        else f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    )
    for row in (
        ("device", name),
        ("versions", f"torch {version('torch')}, max {version('max')}, mojo {version('mojo-compiler')}, "
                     f"torch-max-backend {torch_max_backend.__version__}, Python {platform.python_version()}"),
        ("precision, optimizer", f"{'float32' if amp == 'none' else 'bfloat16 autocast'}, {optimizer}"),
        ("aten ops in MAX / in PyTorch", f"{in_max} / {in_torch}"),
        ("test accuracy", f"{reached:.2%} (eager {reference:.2%})"),
        ("loss curves", f"largest relative difference over {len(pairs)} steps {deviation:.1e}, drawn in {plot}"),
        ("time to the first step", f"{first_ours:.1f} s"),
        ("time of a step", f"{step_ours * 1e3:.2f} ms (eager {step_eager * 1e3:.2f} ms)"),
    ):  # fmt: skip
        table.add_row(*row)
    console.print(table)
    if reached < 0.97:
        console.print(f"[red]the accuracy {reached:.2%} is below 97 %")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
