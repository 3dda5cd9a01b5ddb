"""Fine-tunes a timm classifier on handwritten digits, with mixed precision, and goes on from its checkpoint.

    uv run examples/finetune_timm.py [--model NAME] [--device cpu|cuda] [--amp none|bf16|fp16] [--epochs N] [--resume]

The digits are scikit-learn's, enlarged to 32x32 colour images. Only --pretrained downloads something: timm's weights.
Writes finetune.pt (the checkpoint) and finetune.png (some images with what the model says).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import timm
import timm.optim
import torch
import torch.nn.functional as F
import typer
from common import autocast, console, draw_images, progress_bars
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CLASSES = 10


def datasets(most: int | None) -> tuple[TensorDataset, TensorDataset]:
    """Training and test images [3, 32, 32] in [0, 1], with labels, ``most`` in all."""
    digits = load_digits()
    grey = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    images = F.interpolate(grey, size=(32, 32), mode="bilinear").expand(-1, 3, -1, -1).contiguous()
    parts = train_test_split(images[:most], torch.tensor(digits.target)[:most], test_size=0.2, random_state=0)
    return TensorDataset(parts[0], parts[2]), TensorDataset(parts[1], parts[3])


@torch.no_grad()
def predictions(model: nn.Module, loader: DataLoader, device: torch.device, amp: str) -> torch.Tensor:
    """The model's label for every image of a loader."""
    model.eval()
    with autocast(device, amp):
        found = [model(x.to(device)).argmax(1).cpu() for x, _ in loader]
    model.train()
    return torch.cat(found)


def main(
    model: Annotated[str, typer.Option(help="a name of timm's")] = "resnet18",
    pretrained: Annotated[bool, typer.Option(help="begin with timm's weights (a download)")] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    amp: Annotated[str, typer.Option(help="none, bf16 or fp16")] = "none",
    epochs: Annotated[int, typer.Option(min=1, help="passes over the training images")] = 3,
    batch: Annotated[int, typer.Option(min=1, help="images of a step")] = 64,
    images: Annotated[int | None, typer.Option(min=50, help="how many there are, all by default")] = None,
    workers: Annotated[int, typer.Option(min=0, help="processes that load data")] = 2,
    resume: Annotated[bool, typer.Option(help="go on from the checkpoint")] = False,
    checkpoint: Annotated[Path, typer.Option(help="where the checkpoint lies")] = Path("finetune.pt"),
    plot: Annotated[Path, typer.Option(help="where the picture goes")] = Path("finetune.png"),
) -> None:
    """Trains, keeps a checkpoint after each epoch, and draws what the model says at the end."""
    if amp not in ("none", "bf16", "fp16"):
        raise typer.BadParameter(f"--amp is none, bf16 or fp16, not {amp!r}")
    where = torch.device(device)
    torch.manual_seed(0)
    net = timm.create_model(model, pretrained=pretrained, num_classes=CLASSES).to(where)
    average = ModelEmaV3(net, decay=0.99)
    optimizer = timm.optim.create_optimizer_v2(net, opt="adamw", lr=1e-3, weight_decay=0.01)
    schedule = CosineLRScheduler(optimizer, t_initial=epochs, warmup_t=1, warmup_lr_init=1e-4)
    scaler = torch.amp.GradScaler(where.type, enabled=amp == "fp16")
    first = 0
    losses: list[float] = []
    if resume:
        kept = torch.load(checkpoint, weights_only=True)
        for part, name in ((net, "model"), (average.module, "average"), (optimizer, "optimizer"), (scaler, "scaler")):
            part.load_state_dict(kept[name])
        first, losses = kept["epoch"], kept["losses"]
        console.print(f"goes on after epoch {first}")

    # Compiled last: checkpoints hold the names of the model itself.
    compiled = torch.compile(net, backend="max")
    train, test = datasets(images)
    loader = DataLoader(train, batch, shuffle=True, drop_last=True, num_workers=workers)
    with progress_bars() as progress:
        task = progress.add_task(model, total=(epochs - first) * len(loader))
        for epoch in range(first, epochs):
            schedule.step(epoch)
            for x, y in loader:
                optimizer.zero_grad()
                with autocast(where, amp):
                    loss = F.cross_entropy(compiled(x.to(where)), y.to(where), label_smoothing=0.1)
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                average.update(net)
                losses.append(loss.item())
                progress.advance(task)
            torch.save(
                {
                    "model": net.state_dict(),
                    "average": average.module.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "scaler": scaler.state_dict(),
                    "epoch": epoch + 1,
                    "losses": losses,
                },
                checkpoint,
            )
        labels = predictions(net, DataLoader(test, batch), where, amp)
    shown, truth = test.tensors
    share = (labels == truth).float().mean().item()
    groups = {f"taken for a {d}": shown[labels == d][:8] for d in range(CLASSES) if (labels == d).any()}
    draw_images(groups, plot, f"{model}: {share:.1%} of {len(truth)} test images right")
    console.print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}, {share:.1%} right; {checkpoint}, {plot}")


if __name__ == "__main__":
    typer.run(main)
