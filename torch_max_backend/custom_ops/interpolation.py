"""aten's interpolation operators, kept whole while a graph is traced.

PyTorch would decompose them into indexing before autograd, and the gradient of indexing is a scattered addition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from torch_max_backend.problems.interpolation import Mode
from torch_max_backend.torch_compat import OpOverload, OpOverloadPacket, tracing_kernels

aten = torch.ops.aten
Size = int | torch.SymInt

#: By their names in ``torch.ops.aten``; PyTorch 2.15 brings the last one.
_MODES = {
    "upsample_nearest1d": Mode.NEAREST,
    "upsample_nearest2d": Mode.NEAREST,
    "upsample_nearest3d": Mode.NEAREST,
    "_upsample_nearest_exact1d": Mode.NEAREST_EXACT,
    "_upsample_nearest_exact2d": Mode.NEAREST_EXACT,
    "_upsample_nearest_exact3d": Mode.NEAREST_EXACT,
    "upsample_linear1d": Mode.LINEAR,
    "upsample_bilinear2d": Mode.LINEAR,
    "upsample_trilinear3d": Mode.LINEAR,
    "upsample_bicubic2d": Mode.CUBIC,
    "_upsample_bilinear2d_aa": Mode.LINEAR_ANTIALIASED,
    "_upsample_bicubic2d_aa": Mode.CUBIC_ANTIALIASED,
    "_upsample_lanczos2d_aa": Mode.LANCZOS_ANTIALIASED,
}
_PACKETS: dict[OpOverloadPacket, Mode] = {
    getattr(aten, name): mode for name, mode in _MODES.items() if hasattr(aten, name)
}
FORWARD: dict[OpOverload, Mode] = {packet.default: mode for packet, mode in _PACKETS.items()}
"""The ops that interpolate, with sizes and factors for each axis."""
BACKWARD: dict[OpOverload, Mode] = {
    getattr(aten, f"{packet.__name__}_backward").default: mode for packet, mode in _PACKETS.items()
}
"""Their gradients."""


def interpolations_whole() -> AbstractContextManager[None]:
    """A context in which these operators are traced whole."""
    kernels: dict[OpOverload, Callable[..., Any] | None] = dict.fromkeys(FORWARD)
    kernels |= {packet.vec: _with_sizes(packet.default) for packet in _PACKETS}
    shapes = dict.fromkeys(BACKWARD, _gradient_like)
    return tracing_kernels(kernels, shapes)


def _with_sizes(op: OpOverload) -> Callable[..., Tensor]:
    """The overload that takes sizes or factors, as that which takes sizes."""

    def interpolate(x: Tensor, output_size: Sequence[Size] | None, *corners_and_factors: Any, **named: Any) -> Tensor:
        *corners, factors = (*corners_and_factors, *named.values())
        if output_size is None:
            output_size = [_scaled(size, factor) for size, factor in zip(x.shape[2:], factors, strict=True)]
        if isinstance(x.shape[0], int) and x.shape[0] == 0 and 0 not in x.shape[1:]:
            # PyTorch's account of the nearest modes' shapes raises for an empty batch.
            empty = x.sum(tuple(range(2, x.dim())), keepdim=True, dtype=x.dtype)
            return empty.expand(*x.shape[:2], *output_size).clone(memory_format=torch.contiguous_format)
        return op(x, output_size, *corners, *(factors or ()))

    return interpolate


def _scaled(size: Size, factor: float) -> Size:
    return size * int(factor) if factor == int(factor) else torch.sym_int(size * factor)


def _gradient_like(grad: Tensor, output_size: Sequence[int], input_size: Sequence[int], *_: Any, **__: Any) -> Tensor:
    """The fake gradient; PyTorch has it only for fixed sizes."""
    made = grad.new_empty(input_size)
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(grad.dim())
    if last is not None and grad.is_contiguous(memory_format=last) and not grad.is_contiguous():
        return made.to(memory_format=last)
    return made
