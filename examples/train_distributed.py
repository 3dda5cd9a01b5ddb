"""Trains a small CNN on handwritten digits in several processes, with DistributedDataParallel or FSDP.

    uv run torchrun --standalone --nproc-per-node 2 examples/train_distributed.py [--engine ddp|fsdp] [--device cuda]

Every process takes its part of each batch. The losses of all processes together are drawn in distributed_loss.png.
"""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from common import console, draw_curves, progress_bars
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

BATCH = 128


class Engine(StrEnum):
    """Who adds the gradients up."""

    DDP = "ddp"
    FSDP = "fsdp"


def network() -> nn.Module:
    """8x8 grey images to ten classes."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


def wrapped(model: nn.Module, engine: Engine, device: torch.device) -> nn.Module:
    """The model for several processes; what it returns is compiled."""
    if engine is Engine.FSDP:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        fully_shard(model, mesh=mesh)
        return model
    return DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)


def main(
    engine: Annotated[Engine, typer.Option(help="ddp: whole parameters everywhere; fsdp: parts")] = Engine.DDP,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    epochs: Annotated[int, typer.Option(min=1, help="passes over the training images")] = 8,
    plot: Annotated[Path, typer.Option(help="where the loss curve goes")] = Path("distributed_loss.png"),
) -> None:
    """One process of several, as torchrun starts it."""
    if "LOCAL_RANK" not in os.environ:
        raise typer.BadParameter(
            "start it with: torchrun --standalone --nproc-per-node 2 examples/train_distributed.py"
        )
    if device not in ("cpu", "cuda"):
        raise typer.BadParameter(f"--device is cpu or cuda, not {device!r}")
    where = torch.device("cpu")
    if device == "cuda":
        where = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(where)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    first = dist.get_rank() == 0

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    data = TensorDataset(images, torch.tensor(digits.target))
    sampler: DistributedSampler = DistributedSampler(data, seed=1, drop_last=True)
    loader = DataLoader(data, batch_size=BATCH // dist.get_world_size(), sampler=sampler, drop_last=True)

    torch.manual_seed(0)
    # The graph stays whole: it compiles and runs faster, and DDP gets gradients bucket by bucket all the same.
    torch._dynamo.config.optimize_ddp = False
    model = wrapped(network().to(where), engine, where)
    compiled = torch.compile(model, backend="max")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses: list[torch.Tensor] = []
    with progress_bars(show=first) as progress:
        task = progress.add_task(f"{engine}, {dist.get_world_size()} processes", total=epochs * len(loader))
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for x, y in loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(compiled(x.to(where)), y.to(where))
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
                progress.advance(task)

    # All at once, since adding up a number in each step would make the processes wait for each other.
    mean = torch.stack(losses)
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    right = torch.zeros((), device=where)
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            right += (model(x.to(where)).argmax(1) == y.to(where)).sum()
    dist.all_reduce(right)
    if first:
        draw_curves({"cross entropy": mean.tolist()}, plot, f"Digits, {engine}, {dist.get_world_size()} processes")
        share = right.item() / (len(loader) * BATCH)
        console.print(f"loss {mean[0]:.3f} to {mean[-1]:.3f}, {share:.1%} of the images right; drawn in {plot}")
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
