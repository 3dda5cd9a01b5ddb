"""Trains a UNet to find handwritten digits in photographs.

    uv run examples/segment_unet.py [--device cpu|cuda] [--amp none|bf16] [--steps N]

Images are scikit-learn's digits, drawn at random places and sizes into crops of its two photographs (china, flower).
Writes segment.png: images, what is searched, what the network finds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from common import autocast, console, draw_images, progress_bars
from sklearn.datasets import load_digits, load_sample_images
from torch import nn

SIDE = 64


class Double(nn.Sequential):
    """Two convolutions, each with normalization and ReLU."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__(
            *(
                part
                for c in (inside, outside)
                for part in (nn.Conv2d(c, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside), nn.ReLU())
            )
        )


class UNet(nn.Module):
    """Ronneberger et al. (2015), U-Net, with ``width`` channels at full size and ``depth`` halvings."""

    def __init__(self, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        widths = [width << level for level in range(depth + 1)]
        self.down = nn.ModuleList(Double(a, b) for a, b in zip([3, *widths[:-1]], widths, strict=True))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in reversed(widths[:-1]))
        self.join = nn.ModuleList(Double(2 * w, w) for w in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits [N, 1, H, W] of images [N, 3, H, W]; H and W are multiples of 2**depth."""
        kept: list[torch.Tensor] = []
        for level, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if level else x)
            kept.append(x)
        kept.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([kept.pop(), up(x)], 1))
        return self.head(x)


class Scenes:
    """Photographs with digits in them, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self.photographs = [torch.tensor(p).permute(2, 0, 1).float() / 255 for p in load_sample_images().images]
        self.digits = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 16
        self.generator = torch.Generator().manual_seed(seed)

    def _below(self, end: int) -> int:
        return int(torch.randint(0, end, (), generator=self.generator))

    def batch(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Images [N, 3, 64, 64] and where their digits are [N, 1, 64, 64]."""
        images, masks = [], []
        for _ in range(count):
            photograph = self.photographs[self._below(2)]
            top, left = (self._below(extent - SIDE) for extent in photograph.shape[1:])
            image = photograph[:, top : top + SIDE, left : left + SIDE].clone()
            mask = torch.zeros(1, SIDE, SIDE)
            for _ in range(1 + self._below(3)):
                size = 16 + self._below(17)
                digit = F.interpolate(self.digits[self._below(len(self.digits))][None], size=(size, size))[0]
                y, x = self._below(SIDE - size), self._below(SIDE - size)
                place = (slice(None), slice(y, y + size), slice(x, x + size))
                shade = torch.rand(3, 1, 1, generator=self.generator)
                image[place] = image[place] * (1 - digit) + shade * digit
                mask[place] = torch.maximum(mask[place], (digit > 0.5).float())
            images.append(image)
            masks.append(mask)
        return torch.stack(images), torch.stack(masks)


def overlap(logits: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """Intersection over union of what is found and what is searched."""
    found, searched = logits > 0, masks > 0.5
    return (found & searched).sum() / (found | searched).sum().clamp_min(1)


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    amp: Annotated[str, typer.Option(help="none or bf16")] = "none",
    steps: Annotated[int, typer.Option(min=1, help="training steps")] = 200,
    batch: Annotated[int, typer.Option(min=1, help="images of a step")] = 16,
    width: Annotated[int, typer.Option(min=1, help="channels at full size")] = 16,
    depth: Annotated[int, typer.Option(min=1, max=6, help="halvings of the image")] = 3,
    plot: Annotated[Path, typer.Option(help="where the picture goes")] = Path("segment.png"),
) -> None:
    """Trains, measures on new images, and draws some of them."""
    where = torch.device(device)
    torch.manual_seed(0)
    net = UNet(width, depth).to(where)
    compiled = torch.compile(net, backend="max")
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    scenes = Scenes(seed=1)
    losses: list[float] = []
    with progress_bars() as progress:
        task = progress.add_task("UNet", total=steps)
        for _ in range(steps):
            images, masks = (part.to(where) for part in scenes.batch(batch))
            optimizer.zero_grad()
            with autocast(where, amp):
                loss = F.binary_cross_entropy_with_logits(compiled(images).float(), masks)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            progress.advance(task, 1)
    images, masks = Scenes(seed=2).batch(batch)
    net.eval()
    with torch.no_grad():
        logits = net(images.to(where)).cpu()
    share = overlap(logits, masks).item()
    rows = {"images": images[:8], "searched": masks[:8, 0], "found": logits[:8, 0].sigmoid()}
    draw_images(rows, plot, f"intersection over union {share:.2f} after {steps} steps")
    console.print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}, overlap {share:.2f}; drawn in {plot}")


if __name__ == "__main__":
    typer.run(main)
