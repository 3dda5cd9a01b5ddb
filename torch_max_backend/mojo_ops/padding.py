"""Reflection and replication padding, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence

from max.graph import StaticDim, TensorType, TensorValue

from torch_max_backend.checked import beartype
from torch_max_backend.mojo_ops import functions
from torch_max_backend.mojo_ops.operands import check_float
from torch_max_backend.mojo_ops.signatures import Family, Signature, Tensor, ints

Borders = Sequence[tuple[int, int]]

_NUMBERS = ints("low_d", "high_d", "low_h", "high_h", "low_w", "high_w", "mirrored")
FAMILY = Family(
    "padding",
    Signature("border_fprop", (Tensor("y", "dtype", 5),), (Tensor("x", "dtype", 5),), _NUMBERS),
    Signature("border_dgrad", (Tensor("dx", "dtype", 5),), (Tensor("dy", "dtype", 5),), _NUMBERS),
)


@beartype
def border_fprop(x: TensorValue, borders: Borders, *, mirrored: bool) -> TensorValue:
    """F.pad of ``x`` in mode "reflect" or "replicate".

    Args:
        x: [N, D, H, W, C], contiguous; a contiguous NCHW tensor goes in as [N * C, D, H, W, 1].
        borders: of D, H and W, in front and behind; negative ones crop.
        mirrored: borders show the elements beside the outermost ones back to front, else the outermost ones.

    Raises:
        ValueError: rank, extents or dtype of ``x`` do not fit, or a mirrored border is as long as its axis.
    """
    return _call("x", x, borders, mirrored, gradient=False)


@beartype
def border_dgrad(dy: TensorValue, borders: Borders, *, mirrored: bool) -> TensorValue:
    """The gradient of ``border_fprop`` for ``dy``, that of its result: each element gathers the places that show it, in
    float32, or float64 in float64. Deterministic.

    Raises:
        ValueError: as ``border_fprop``.
    """
    return _call("dy", dy, borders, mirrored, gradient=True)


def _call(name: str, value: TensorValue, borders: Borders, mirrored: bool, *, gradient: bool) -> TensorValue:
    if value.rank != 5:
        raise ValueError(f"{name} has shape {list(value.shape)}: must have rank 5, [N, D, H, W, C]")
    check_float(name, value)
    if len(borders) != 3:
        raise ValueError(f"borders={borders}: must be three, of D, H and W")
    results = []
    for dim, (low, high) in zip(value.shape[1:4], borders, strict=True):
        if not isinstance(dim, StaticDim):
            raise ValueError(f"{name} has shape {list(value.shape)}: the spatial extents must be known")
        results.append(int(dim) - low - high if gradient else int(dim) + low + high)
        extent = results[-1] if gradient else int(dim)
        if min(extent, results[-1]) < 1 or (mirrored and max(low, high) >= extent and max(low, high) > 0):
            raise ValueError(f"borders={borders}: {(low, high)} do not fit an extent of {extent}")
    numbers = [*(count for border in borders for count in border), mirrored]
    types = [TensorType(value.dtype, (value.shape[0], *results, value.shape[4]), value.device)]
    entry = "border_dgrad" if gradient else "border_fprop"
    function = functions.function_of(FAMILY, entry, functions.target_of(value.device), (value.dtype,))
    return functions.call(FAMILY[entry], function, [value], types, numbers)[0]
