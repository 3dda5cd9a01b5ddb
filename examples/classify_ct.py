"""Trains a 3-D CNN to tell volumes with a lesion from those without, with average and max pooling over three axes.

    uv run examples/classify_ct.py [--device cpu|cuda] [--steps N]

The volumes are made up like CT: an ellipsoid body of soft tissue with denser rods in it, noise, in half of them a small
round lesion. Writes ct.png: the middle slices of some, with the network's verdict.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from common import autocast, console, draw_images, progress_bars
from torch import nn

SIDE = 24


class VolumeNet(nn.Module):
    """Convolutions over volumes; one path averages and one takes maxima, which is what finds small bright things."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv3d(1, width, 3, padding=1, bias=False), nn.BatchNorm3d(width), nn.ReLU())
        self.middle = nn.Sequential(
            nn.Conv3d(2 * width, 2 * width, 3, padding=1, bias=False), nn.BatchNorm3d(2 * width), nn.ReLU()
        )
        self.head = nn.Linear(4 * width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits [N] of volumes [N, 1, D, H, W]."""
        y = self.stem(x)
        y = self.middle(
            torch.cat([F.avg_pool3d(y, 3, stride=2, padding=1), F.max_pool3d(y, 3, stride=2, padding=1)], 1)
        )
        y = F.max_pool3d(y, 2)
        return self.head(torch.cat([y.mean((2, 3, 4)), y.amax((2, 3, 4))], 1)).squeeze(1)


def volumes(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Volumes [N, 1, 24, 24, 24], whether they hold a lesion [N], and the depths of the lesions' centres [N]."""
    axis = torch.linspace(-1, 1, SIDE)
    z, y, x = torch.meshgrid(axis, axis, axis, indexing="ij")

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator)

    made, depths = [], []
    sick = torch.arange(count) % 2
    for has_lesion in sick.tolist():
        a, b, c = (0.7 + 0.25 * uniform(3)).tolist()
        body = ((z / a) ** 2 + (y / b) ** 2 + (x / c) ** 2 < 1).float()
        volume = 0.4 * body
        for _ in range(3):
            v, u = (uniform(2) - 0.5).tolist()
            volume += 0.25 * body * ((y - v) ** 2 + (x - u) ** 2 < 0.012)
        centre = (uniform(3) - 0.5).tolist()
        if has_lesion:
            distance = (z - centre[0]) ** 2 + (y - centre[1]) ** 2 + (x - centre[2]) ** 2
            volume += 0.6 * torch.exp(-distance / 0.04)
        made.append(volume + 0.05 * torch.randn(volume.shape, generator=generator))
        depths.append(round((centre[0] + 1) / 2 * (SIDE - 1)))
    return torch.stack(made)[:, None], sick.float(), torch.tensor(depths)


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    amp: Annotated[str, typer.Option(help="none or bf16")] = "none",
    steps: Annotated[int, typer.Option(min=1, help="training steps")] = 150,
    batch: Annotated[int, typer.Option(min=2, help="volumes of a step")] = 8,
    width: Annotated[int, typer.Option(min=1, help="channels of the first layer")] = 8,
    plot: Annotated[Path, typer.Option(help="where the picture goes")] = Path("ct.png"),
) -> None:
    """Trains, measures on new volumes, and draws slices of some."""
    where = torch.device(device)
    torch.manual_seed(0)
    net = VolumeNet(width).to(where)
    compiled = torch.compile(net, backend="max")
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    losses: list[float] = []
    with progress_bars() as progress:
        task = progress.add_task("3-D CNN", total=steps)
        for _ in range(steps):
            x, sick, _ = volumes(batch, generator)
            optimizer.zero_grad()
            with autocast(where, amp):
                loss = F.binary_cross_entropy_with_logits(compiled(x.to(where)).float(), sick.to(where))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            progress.advance(task)
    x, sick, depths = volumes(64, torch.Generator().manual_seed(2))
    net.eval()
    with torch.no_grad():
        verdict = (net(x.to(where)).cpu() > 0).float()
    slices = x[torch.arange(len(x)), 0, depths]
    share = (verdict == sick).float().mean().item()
    rows = {
        f"{'with' if truth else 'without'} a lesion, {'right' if right else 'wrong'}": slices[chosen][:8]
        for truth in (1, 0)
        for right in (True, False)
        if (chosen := (sick == truth) & ((verdict == sick) == right)).any()
    }
    draw_images(rows, plot, f"{share:.0%} of 64 new volumes right after {steps} steps")
    console.print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}, {share:.0%} right; drawn in {plot}")


if __name__ == "__main__":
    typer.run(main)
