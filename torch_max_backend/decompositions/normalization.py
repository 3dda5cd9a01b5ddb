"""The gradients of aten's group normalization."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Size = int | torch.SymInt


def group_norm_backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    batch: Size,
    channels: Size,
    pixels: Size,
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """``aten.native_group_norm_backward``: the gradients of x, weight and bias; None where ``output_mask`` is False.

    PyTorch's own formula takes the sums of ``grad * x`` and ``grad``, and the mean times the latter from the former:
    little is left where the mean is large beside the standard deviation. Here the sums are of standardized values.

    Args:
        grad: [N, C, ...], as ``x``.
        x: [N, C, ...], with P elements behind N and C.
        mean: [N, G], of the groups of C / G channels.
        rstd: [N, G], the reciprocals of their standard deviations.
        weight: [C], None for ones.
        batch: N.
        channels: C.
        pixels: P.
        groups: G.
        output_mask: which gradients are wanted.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    grouped = [batch, groups, channels // groups, pixels]
    dy, value = (each.to(wide).reshape(grouped) for each in (grad, x))
    center, scale = (each.to(wide)[:, :, None, None] for each in (mean, rstd))
    standardized = (value - center) * scale
    along, total = (each.sum(3, keepdim=True) for each in (dy * standardized, dy))
    dx = dweight = dbias = None
    if output_mask[0]:
        gain = None if weight is None else weight.to(wide).reshape(1, groups, channels // groups, 1)
        means = [(each if gain is None else each * gain).sum(2, keepdim=True) for each in (along, total)]
        projection, average = (each / (channels // groups * pixels) for each in means)
        dx = ((dy if gain is None else dy * gain) - average - standardized * projection) * scale
        dx = dx.reshape(x.shape).to(x.dtype)
    parameter = x.dtype if weight is None else weight.dtype
    if output_mask[1]:
        dweight = along.sum(0).reshape(channels).to(parameter)
    if output_mask[2]:
        dbias = total.sum(0).reshape(channels).to(parameter)
    return dx, dweight, dbias
