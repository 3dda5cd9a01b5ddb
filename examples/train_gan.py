"""Trains a generator and a discriminator on handwritten digits.

    uv run examples/train_gan.py [--device cpu|cuda] [--amp none|bf16] [--steps N]

Two compiled models in turn: transposed convolutions make images, strided ones judge them (Radford et al., 2015, DCGAN).
Writes gan.png: generated digits as the training goes on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from common import autocast, console, draw_images, progress_bars
from sklearn.datasets import load_digits
from torch import nn

LATENT = 32


def generator(width: int) -> nn.Module:
    """Images [N, 1, 8, 8] in [-1, 1] of latent vectors [N, 32, 1, 1]."""
    return nn.Sequential(
        nn.ConvTranspose2d(LATENT, 2 * width, 2, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.ConvTranspose2d(width, 1, 4, stride=2, padding=1),
        nn.Tanh(),
    )


def discriminator(width: int) -> nn.Module:
    """Logits [N, 1] of images [N, 1, 8, 8]: how real they look."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(8 * width, 1),
    )


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    amp: Annotated[str, typer.Option(help="none or bf16")] = "none",
    steps: Annotated[int, typer.Option(min=1, help="training steps")] = 1500,
    batch: Annotated[int, typer.Option(min=2, help="images of a step")] = 64,
    width: Annotated[int, typer.Option(min=1, help="channels of the outer layers")] = 32,
    plot: Annotated[Path, typer.Option(help="where the picture goes")] = Path("gan.png"),
) -> None:
    """Trains both, and draws what the generator makes of the same vectors from time to time."""
    where = torch.device(device)
    torch.manual_seed(0)
    images = torch.tensor(load_digits().images, dtype=torch.float32, device=where)[:, None] / 8 - 1
    nets = generator(width).to(where), discriminator(width).to(where)
    # Both are nn.Sequential, so Dynamo would take their inputs for one whose size changes.
    make, judge = (torch.compile(net, backend="max", dynamic=False) for net in nets)
    optimizers = [torch.optim.Adam(net.parameters(), lr=5e-4, betas=(0.5, 0.999)) for net in nets]
    shown = torch.randn(10, LATENT, 1, 1, device=where)
    rows: dict[str, torch.Tensor] = {}
    losses: list[tuple[torch.Tensor, torch.Tensor]] = []
    with progress_bars() as progress:
        task = progress.add_task("GAN", total=steps)
        for step in range(1, steps + 1):
            real = images[torch.randint(0, len(images), (batch,), device=where)]
            with autocast(where, amp):
                fake = make(torch.randn(batch, LATENT, 1, 1, device=where)).float()
                scores = judge(real), judge(fake.detach())
                judged = F.softplus(-scores[0].float()).mean() + F.softplus(scores[1].float()).mean()
            optimizers[1].zero_grad()
            judged.backward()
            optimizers[1].step()

            with autocast(where, amp):
                made = F.softplus(-judge(fake).float()).mean()
            optimizers[0].zero_grad()
            made.backward()
            optimizers[0].step()
            losses.append((judged.detach(), made.detach()))
            if step % max(1, steps // 5) == 0:
                nets[0].eval()
                with torch.no_grad():
                    rows[f"after {step} steps"] = nets[0](shown)[:, 0].cpu() / 2 + 0.5
                nets[0].train()
            progress.advance(task)
    rows["real"] = images[:10, 0].cpu() / 2 + 0.5
    draw_images(rows, plot, "generated digits")
    means = [torch.stack(list(part)[-50:]).mean().item() for part in zip(*losses, strict=True)]
    console.print(f"discriminator {means[0]:.2f}, generator {means[1]:.2f}; drawn in {plot}")


if __name__ == "__main__":
    typer.run(main)
