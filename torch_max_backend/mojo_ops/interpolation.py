"""Interpolation and its gradient, one typed function each.

An activation is [N, D, H, W, C] and contiguous; a contiguous NCHW tensor goes in as [N * C, D, H, W, 1]. The spatial
extents are those of the axes; N and C may be symbolic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
from max.dtype import DType
from max.graph import StaticDim, TensorType, TensorValue
from numpy.typing import NDArray

from torch_max_backend.checked import beartype
from torch_max_backend.ir import ops
from torch_max_backend.mojo_ops import functions
from torch_max_backend.mojo_ops.signatures import Family, Signature, Tensor
from torch_max_backend.problems.interpolation import Axes

_FLOATS = (DType.float32, DType.bfloat16, DType.float16, DType.float64)
_TABLES = tuple(
    Tensor(f"{what}_{axis}", dtype, 2)
    for axis in "dhw"
    for what, dtype in (("places", DType.int32), ("weights", "acc"))
)
FAMILY = Family(
    "interpolation",
    Signature("interpolate", (Tensor("y", "dtype", 5),), (Tensor("x", "dtype", 5), *_TABLES), listed="spans"),
)


def interpolation_function(target: Literal["cpu", "gpu"], dtype: DType) -> functions.LibraryFunction:
    """The library function for tensors of ``dtype``, forward and backward."""
    table = f"{target}.dispatch.INTERPOLATE_KERNELS"
    return functions.function_of(FAMILY, "interpolate", target, (dtype,), table=table)


@functions.variants(FAMILY.folder)
def _variants(target: functions.Target, dtypes: Sequence[DType]) -> Iterator[functions.LibraryFunction]:
    for dtype in dtypes:
        yield interpolation_function(target, dtype)


@beartype
def tables_of(axes: Axes, dtype: DType, *, gradient: bool) -> tuple[list[NDArray[Any]], list[int]]:
    """The tables of the axes for the kernels: places and weights of D, H and W, and the spans of W.

    Args:
        axes: D, H and W.
        dtype: of the tensors.
        gradient: whether the gradient is wanted.
    """
    precise = np.float64 if dtype == DType.float64 else np.float32
    tables = [axis.gradient_table() if gradient else axis.table() for axis in axes]
    pairs = [(table.places, np.ascontiguousarray(table.weights, precise)) for table in tables]
    return [array for pair in pairs for array in pair], tables[-1].spans.tolist()


@beartype
def interpolate(x: TensorValue, axes: Axes) -> TensorValue:
    """``x`` [N, D, H, W, C] interpolated along the axes: F.interpolate, for each of its modes but "area".

    Raises:
        ValueError: rank, extents or dtype of ``x`` do not fit.
    """
    return _call("x", x, axes, gradient=False)


@beartype
def interpolate_dgrad(dy: TensorValue, axes: Axes) -> TensorValue:
    """The gradient of ``interpolate`` for ``dy``, that of its result: each element gathers the results that read it, in
    float32, or float64 in float64. Deterministic.

    Raises:
        ValueError: rank, extents or dtype of ``dy`` do not fit.
    """
    return _call("dy", dy, axes, gradient=True)


def _call(name: str, x: TensorValue, axes: Axes, *, gradient: bool) -> TensorValue:
    if x.rank != 5:
        raise ValueError(f"{name} has shape {list(x.shape)}: must have rank 5, [N, D, H, W, C]")
    if x.dtype not in _FLOATS:
        raise ValueError(f"{name} has dtype {x.dtype}: must be one of {[str(dtype) for dtype in _FLOATS]}")
    if x.dtype == DType.float64 and x.device.is_gpu():
        raise ValueError(f"{name} has dtype {x.dtype}: float64 is supported on the CPU only")
    given = [axis.output if gradient else axis.input for axis in axes]
    if any(
        not isinstance(dim, StaticDim) or int(dim) != extent for dim, extent in zip(x.shape[1:4], given, strict=True)
    ):
        raise ValueError(f"{name} has spatial extents {list(x.shape[1:4])}: the axes have {given}")
    results = [axis.input if gradient else axis.output for axis in axes]
    types = [TensorType(x.dtype, (x.shape[0], *results, x.shape[4]), x.device)]
    tables, spans = tables_of(axes, x.dtype, gradient=gradient)
    constants = [ops.constant(table, DType.from_numpy(table.dtype), device=x.device) for table in tables]
    function = interpolation_function(functions.target_of(x.device), x.dtype)
    return functions.call(FAMILY["interpolate"], function, [x, *constants], types, spans)[0]
