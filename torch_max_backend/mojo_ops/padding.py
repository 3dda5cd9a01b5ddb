"""Gradients of mirrored and repeated borders."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from beartype import beartype
from max.dtype import DType
from max.graph import DeviceRef, StaticDim, TensorType, TensorValue

from torch_max_backend.ir import ops
from torch_max_backend.mojo_ops import functions

_FLOATS = (DType.float32, DType.bfloat16, DType.float16, DType.float64)


@beartype
def border_dgrad(dy: TensorValue, borders: Sequence[tuple[int, int]], *, mirrored: bool) -> TensorValue:
    """The gradient of F.pad in mode "reflect" or "replicate": each element gathers the places that show it, in float32,
    or float64 in float64. Deterministic.

    Args:
        dy: [N, D, H, W, C], contiguous; a contiguous NCHW tensor goes in as [N * C, D, H, W, 1].
        borders: of D, H and W, in front and behind; negative ones crop.
        mirrored: borders show the elements beside the outermost ones back to front, else the outermost ones.

    Raises:
        ValueError: rank, extents or dtype of ``dy`` do not fit, or a mirrored border is as long as its axis.
    """
    if dy.rank != 5:
        raise ValueError(f"dy has shape {list(dy.shape)}: must have rank 5, [N, D, H, W, C]")
    if dy.dtype not in _FLOATS:
        raise ValueError(f"dy has dtype {dy.dtype}: must be one of {[str(dtype) for dtype in _FLOATS]}")
    if len(borders) != 3:
        raise ValueError(f"borders={borders}: must be three, of D, H and W")
    extents = []
    for dim, (low, high) in zip(dy.shape[1:4], borders, strict=True):
        if not isinstance(dim, StaticDim):
            raise ValueError(f"dy has shape {list(dy.shape)}: the spatial extents must be known")
        extents.append(int(dim) - low - high)
        if extents[-1] < 1 or (mirrored and max(low, high) >= extents[-1] and max(low, high) > 0):
            raise ValueError(f"borders={borders}: they leave {extents[-1]} of an extent of {int(dim)}")
    geometry = np.array([*(count for border in borders for count in border), int(mirrored)], np.int64)
    values = [dy, ops.constant(geometry, DType.int64, device=DeviceRef.CPU())]
    types = [TensorType(dy.dtype, (dy.shape[0], *extents, dy.shape[4]), dy.device)]
    return functions.call("padding", "border_dgrad", dy.device, values, types, (dy.dtype,))[0]
