"""Decompositions of antialiased interpolation: a filter as wide as the step from one result to the next, along each
axis.

A result is a weighted sum along its row and its column: two products with matrices that the sizes determine, so that
they are constants of the graph. A pixel that is no number reaches its whole row and column.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_max_backend.torch_compat import OpOverload

aten = torch.ops.aten

#: The constant of the cubic filter (the one of images, not PyTorch's cubic convolution without antialiasing).
_A = -0.5


def _linear(distance: Tensor) -> Tensor:
    return (1 - distance).clamp(min=0)


def _cubic(distance: Tensor) -> Tensor:
    near = ((_A + 2) * distance - (_A + 3)) * distance * distance + 1
    far = (((distance - 5) * distance + 8) * distance - 4) * _A
    return torch.where(distance < 1, near, torch.where(distance < 2, far, 0.0))


def _shares(
    filter: Callable[[Tensor], Tensor], size: int, results: int, align_corners: bool, factor: float | None, like: Tensor
) -> Tensor:
    """[results, size]: the share of each pixel of an axis in each result."""
    if align_corners:
        step = (size - 1) / (results - 1) if results > 1 else 0.0
    else:
        step = 1 / factor if factor else size / results
    # In float64: they are computed once.
    centres = (torch.arange(results, dtype=torch.float64, device=like.device) + 0.5) * step
    pixels = torch.arange(size, dtype=torch.float64, device=like.device) + 0.5
    shares = filter((pixels - centres[:, None]).abs() / max(step, 1.0))
    return (shares / shares.sum(1, keepdim=True)).to(like.dtype)


def _along(x: Tensor, dim: int, matrix: Tensor) -> Tensor:
    """``x`` with dimension ``dim`` multiplied by ``matrix`` [results, size]."""
    return torch.matmul(x.movedim(dim, -1), matrix.t()).movedim(-1, dim)


def _forward(filter: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def resize(
        x: Tensor,
        output_size: Sequence[int],
        align_corners: bool,
        scales_h: float | None = None,
        scales_w: float | None = None,
    ) -> Any:
        if not x.is_floating_point():
            return NotImplemented
        y = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        for dim, results, factor in ((3, output_size[1], scales_w), (2, output_size[0], scales_h)):
            # An axis that keeps its size stays as it is, whatever the factor.
            if x.shape[dim] != results:
                y = _along(y, dim, _shares(filter, x.shape[dim], results, align_corners, factor, y))
        return y.to(x.dtype).contiguous()

    return resize


def _backward(filter: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def gradient(
        grad: Tensor,
        output_size: Sequence[int],
        input_size: Sequence[int],
        align_corners: bool,
        scales_h: float | None = None,
        scales_w: float | None = None,
    ) -> Tensor:
        y = grad.float() if grad.dtype in (torch.bfloat16, torch.float16) else grad
        for dim, results, factor in ((2, output_size[0], scales_h), (3, output_size[1], scales_w)):
            y = _along(y, dim, _shares(filter, input_size[dim], results, align_corners, factor, y).t())
        return y.to(grad.dtype).contiguous()

    return gradient


def resize_decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """The table of these decompositions."""
    return {
        aten._upsample_bilinear2d_aa.default: _forward(_linear),
        aten._upsample_bilinear2d_aa_backward.default: _backward(_linear),
        aten._upsample_bicubic2d_aa.default: _forward(_cubic),
        aten._upsample_bicubic2d_aa_backward.default: _backward(_cubic),
    }
