"""Trains a small diffusion model on handwritten digits and draws new ones.

    uv run examples/diffuse_digits.py [--device cpu|cuda] [--amp none|bf16] [--steps N]

Ho et al. (2020), Denoising diffusion probabilistic models, with Nichol and Dhariwal's cosine schedule (2021). Writes
diffusion.png: digits on their way out of noise.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from common import autocast, console, draw_images, progress_bars
from sklearn.datasets import load_digits
from torch import nn

TIMES = 100


class Block(nn.Module):
    """A residual block that is told the time."""

    def __init__(self, inside: int, outside: int, embedding: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, padding=1)
        self.time = nn.Linear(embedding, outside)
        self.norm = nn.GroupNorm(4, outside)
        self.second = nn.Conv2d(outside, outside, 3, padding=1)
        self.skip = nn.Conv2d(inside, outside, 1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        y = self.first(x) + self.time(time)[:, :, None, None]
        return self.skip(x) + self.second(F.silu(self.norm(y)))


class Denoiser(nn.Module):
    """A UNet of three sizes that says which noise is in an image."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        embedding = 2 * width
        self.width = width
        self.embed = nn.Sequential(nn.Linear(width, embedding), nn.SiLU(), nn.Linear(embedding, embedding), nn.SiLU())
        self.down = nn.ModuleList(
            Block(a, b, embedding) for a, b in ((1, width), (width, 2 * width), (2 * width, 2 * width))
        )
        self.up = nn.ModuleList(Block(a, b, embedding) for a, b in ((4 * width, width), (2 * width, width)))
        self.head = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """The noise [N, 1, H, W] in images [N, 1, H, W] at times [N] in [0, 1]."""
        frequencies = torch.exp(torch.arange(self.width // 2, device=x.device) * (-math.log(1e3) / (self.width // 2)))
        angles = 1e3 * time[:, None] * frequencies
        told = self.embed(torch.cat([angles.sin(), angles.cos()], 1))
        fine = self.down[0](x, told)
        middle = self.down[1](F.avg_pool2d(fine, 2), told)
        coarse = self.down[2](F.avg_pool2d(middle, 2), told)
        y = self.up[0](torch.cat([F.interpolate(coarse, scale_factor=2.0), middle], 1), told)
        y = self.up[1](torch.cat([F.interpolate(y, scale_factor=2.0), fine], 1), told)
        return self.head(y)


def signal(time: torch.Tensor) -> torch.Tensor:
    """The share of an image's variance that is left of it at times [N] in [0, 1]."""
    return torch.cos((time + 0.008) / 1.008 * math.pi / 2).square().clamp(1e-4, 0.9999)


@torch.no_grad()
def drawn(model: nn.Module, count: int, device: torch.device, keep: int) -> list[torch.Tensor]:
    """``count`` new images, and ``keep`` states on the way to them, by ancestral sampling."""
    x = torch.randn(count, 1, 8, 8, device=device)
    states = []
    for step in reversed(range(TIMES)):
        now, before = (signal(torch.tensor(value / TIMES)).item() for value in (step + 1, step))
        noise = model(x, torch.full((count,), (step + 1) / TIMES, device=device))
        clean = ((x - math.sqrt(1 - now) * noise) / math.sqrt(now)).clamp(-1, 1)
        ratio = now / before
        mean = (math.sqrt(before) * (1 - ratio) * clean + math.sqrt(ratio) * (1 - before) * x) / (1 - now)
        spread = math.sqrt((1 - ratio) * (1 - before) / (1 - now)) if step else 0.0
        x = mean + spread * torch.randn_like(x)
        if step % (TIMES // keep) == 0:
            states.append(x[:, 0].cpu() / 2 + 0.5)
    return states


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    amp: Annotated[str, typer.Option(help="none or bf16")] = "none",
    steps: Annotated[int, typer.Option(min=1, help="training steps")] = 1500,
    batch: Annotated[int, typer.Option(min=1, help="images of a step")] = 64,
    width: Annotated[int, typer.Option(min=8, help="channels at full size, a multiple of 8")] = 32,
    plot: Annotated[Path, typer.Option(help="where the picture goes")] = Path("diffusion.png"),
) -> None:
    """Trains, then draws digits."""
    where = torch.device(device)
    torch.manual_seed(0)
    images = torch.tensor(load_digits().images, dtype=torch.float32, device=where)[:, None] / 8 - 1
    net = Denoiser(width).to(where)
    compiled = torch.compile(net, backend="max")
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses: list[torch.Tensor] = []
    with progress_bars() as progress:
        task = progress.add_task("diffusion", total=steps)
        for _ in range(steps):
            x = images[torch.randint(0, len(images), (batch,), device=where)]
            time, noise = torch.rand(batch, device=where), torch.randn_like(x)
            left = signal(time)[:, None, None, None]
            optimizer.zero_grad()
            with autocast(where, amp):
                loss = F.mse_loss(compiled(left.sqrt() * x + (1 - left).sqrt() * noise, time).float(), noise)
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.detach())
            progress.advance(task)
    net.eval()
    states = drawn(net, 10, where, keep=5)
    rows = {f"{number + 1} of {len(states)}": state for number, state in enumerate(states)}
    draw_images(rows, plot, f"digits out of noise, after {steps} steps")
    tail = torch.stack(losses[-50:]).mean().item()
    console.print(f"loss {losses[0].item():.3f} to {tail:.3f}; drawn in {plot}")


if __name__ == "__main__":
    typer.run(main)
