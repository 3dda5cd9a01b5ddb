"""Small images that have something to learn, drawn from a seed."""

from __future__ import annotations

import torch


def discs(count: int, side: int, classes: int = 4, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Noisy images with one disc each.

    Returns:
        images [count, 3, side, side] with values around [0, 1]; classes [count], the disc's colour; masks
        [count, side, side] of int64, 1 where the disc is.
    """
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (count,), generator=generator)
    colours = torch.rand(classes, 3, generator=torch.Generator().manual_seed(99))
    centre = (0.25 + 0.5 * torch.rand(count, 2, 1, 1, generator=generator)) * side
    radius = (0.12 + 0.15 * torch.rand(count, 1, 1, generator=generator)) * side
    rows = torch.arange(side)[:, None] - centre[:, 0]
    columns = torch.arange(side)[None, :] - centre[:, 1]
    inside = rows.square() + columns.square() < radius.square()
    noise = 0.2 * torch.rand(count, 3, side, side, generator=generator)
    images = noise + 0.7 * inside[:, None] * colours[labels][:, :, None, None]
    return images, labels, inside.long()
