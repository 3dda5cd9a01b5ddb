"""aten's affine grids, traced as the products that they are.

PyTorch's own gradient takes no symbolic sizes and no axis of extent 1 while it is traced, with any backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from torch_max_backend.torch_compat import tracing_kernels

Size = int | torch.SymInt


def affine_grids_as_products() -> AbstractContextManager[None]:
    """A context in which ``aten.affine_grid_generator`` is traced as a product of matrices."""
    return tracing_kernels({torch.ops.aten.affine_grid_generator.default: _affine_grid}, {})


def _affine_grid(theta: Tensor, size: Sequence[Size], align_corners: bool) -> Tensor:
    """Where each pixel of an output lies in the input, from -1 to 1 along each axis, as eager computes it.

    Args:
        theta: [N, D, D + 1], the affine maps of D axes.
        size: [N, C, ...] of the output, with D last axes.
        align_corners: whether -1 and 1 are the centers of the outermost pixels, else their outer edges.

    Returns:
        [N, ..., D], the last axis from the innermost coordinate to the outermost.
    """
    batch, _, *extents = size
    wide = torch.float64 if theta.dtype == torch.float64 else torch.float32
    axes = []
    for axis, extent in enumerate(extents):
        # As many pixels on one side of the center as on the other.
        steps = torch.arange(extent, dtype=wide, device=theta.device) * 2 - (extent - 1)
        steps = (steps / (torch.sym_max(extent - 1, 1) if align_corners else extent)).to(theta.dtype)
        axes.append(steps.view([-1 if other == axis else 1 for other in range(len(extents))]).expand(extents))
    ones = torch.ones(extents, dtype=theta.dtype, device=theta.device)
    places = torch.stack([*reversed(axes), ones], dim=-1)
    grid = places.view(1, -1, len(extents) + 1).expand(batch, -1, -1).bmm(theta.transpose(1, 2))
    return grid.view(batch, *extents, len(extents))
