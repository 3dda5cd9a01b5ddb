"""Pooling operations of the Mojo package, one typed function each.

Every activation is [N, D, H, W, C] and contiguous; a contiguous NCHW tensor goes in as [N * C, D, H, W, 1]. Every
extent may be symbolic; the static ones are those of the problem, and `extents` are the result's [D, H, W] where they
are not all static. Indices are int64, flat in the unpadded D * H * W plane; offsets are the number of the winning tap
within its window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from max.dtype import DType
from max.graph import Dim, DimLike, StaticDim, TensorType, TensorValue

from torch_max_backend.checked import beartype
from torch_max_backend.mojo_ops import functions
from torch_max_backend.mojo_ops.operands import check_float
from torch_max_backend.mojo_ops.signatures import Cost, Family, Signature, Tensor, ints
from torch_max_backend.problems.pooling import NUMBERS, AdaptivePoolingProblem, Extents, PoolingProblem

_X, _Y, _DX, _DY = (Tensor(name, "dtype", 5) for name in ("x", "y", "dx", "dy"))
_ARGMAXES, _INDICES = Tensor("argmaxes", "argmax", 5), Tensor("indices", DType.int64, 5)
_NUMBERS = ints(*NUMBERS)
FAMILY = Family(
    "pooling",
    Signature("max_pool_fprop", (_Y, _ARGMAXES), (_X,), _NUMBERS, cost=Cost(0.7, 2.5)),
    Signature("max_pool_dgrad", (_DX,), (_DY, _ARGMAXES), _NUMBERS, cost=Cost(0.9, 7.0)),
    Signature("avg_pool_fprop", (_Y,), (_X,), _NUMBERS, cost=Cost(0.7, 1.8)),
    Signature("avg_pool_dgrad", (_DX,), (_DY,), _NUMBERS, cost=Cost(0.9, 6.0)),
    Signature("max_pool_dgrad_scatter", (_DX,), (_DY, _INDICES), cost=Cost(0.9, 7.0)),
    Signature("max_unpool_fprop", (_Y,), (_X, _INDICES), reports=True),
    Signature("max_unpool_dgrad", (_DX,), (_DY, _INDICES)),
    first={"cpu": 0.6, "gpu": 0.7},
)


def _check_tensor(name: str, value: TensorValue, extents: Extents | None = None) -> None:
    if len(value.shape) != 5:
        raise ValueError(f"{name} has shape {list(value.shape)}: must have rank 5, [N, D, H, W, C]")
    if extents is not None and any(
        isinstance(dim, StaticDim) and int(dim) != extent for dim, extent in zip(value.shape[1:4], extents, strict=True)
    ):
        raise ValueError(f"{name} has spatial extents {list(value.shape[1:4])}: the problem has {extents}")


def _check_companion(name: str, value: TensorValue, other: str, like: TensorValue, dtype: DType) -> None:
    """Indices and offsets lie element for element beside the tensor that they belong to."""
    if value.dtype != dtype:
        raise ValueError(f"{name} has dtype {value.dtype}: must be {dtype}")
    if list(value.shape) != list(like.shape):
        raise ValueError(f"{name} has shape {list(value.shape)}: must be that of {other}, {list(like.shape)}")
    if value.device != like.device:
        raise ValueError(f"{name} is on {value.device}: must be on {like.device} as {other} is")


def _resized(like: TensorValue, extents: Sequence[DimLike], dtype: DType | None = None) -> TensorType:
    batch, *_, channels = like.shape
    return TensorType(dtype or like.dtype, (batch, *map(Dim, extents), channels), like.device)


def _check_offsets(problem: PoolingProblem) -> None:
    if not problem.has_byte_offsets:
        raise ValueError(f"window={problem.window}: an offset is one byte, which counts 255 taps")


@beartype
def pool_op(
    entry: str,
    values: Sequence[TensorValue],
    result_types: Sequence[TensorType],
    numbers: Sequence[int] | TensorValue = (),
    *,
    adaptive: bool = False,
    deep: bool = True,
) -> list[TensorValue]:
    """A library's entry; as a host tensor its numbers are checked at run time: one graph then serves every problem.

    `values` begin with x or dy, whose dtype the kernels are made for. What the forward pass keeps for each maximum is
    an int64 index or a uint8 offset. `adaptive` and `deep` as in ``pool_function``.
    """
    kept = {"max_pool_fprop": result_types, "max_pool_dgrad": values}.get(entry)
    target = functions.target_of(values[0].device)
    function = pool_function(entry, target, values[0].dtype, kept and kept[1].dtype, adaptive, deep)
    return functions.call(FAMILY[entry], function, values, result_types, numbers)


def pool_function(
    entry: str,
    target: Literal["cpu", "gpu"],
    dtype: DType,
    kept: DType | None = None,
    adaptive: bool = False,
    deep: bool = True,
) -> functions.LibraryFunction:
    """The library function of an entry.

    Args:
        entry: of kernels/pooling.
        target: MAX's word for the kind of device.
        dtype: of x or dy.
        kept: the dtype of what a maximum's forward pass keeps for the backward pass.
        adaptive: windows are those of adaptive pooling, for maxima.
        deep: windows may reach over several slabs of D. Without, gradients on a GPU compile in half the time.
    """
    parameters: tuple[DType | bool, ...] = (dtype,) if kept is None else (dtype, kept)
    if not FAMILY[entry].takes_numbers:
        # What follows stored indices knows no windows.
        return functions.function_of(FAMILY, entry, target, parameters, module="unpool_entries")
    if kept is not None:
        parameters += (adaptive,)
    way = entry.rpartition("_")[2]
    deep = deep and not adaptive and (target, way) == ("gpu", "dgrad")
    table = f"{target}.{way}_dispatch.{'DEEP_' if deep else ''}{way.upper()}_KERNELS"
    return functions.function_of(FAMILY, entry, target, parameters, table=table)


@functions.variants(FAMILY.folder)
def _variants(target: functions.Target, dtypes: Sequence[DType]) -> Iterator[functions.LibraryFunction]:
    for entry in (signature.name for signature in FAMILY.signatures):
        # Adaptive windows may have more taps than a byte counts.
        kinds: list[tuple[DType | None, bool]] = [(DType.uint8, False), (DType.int64, False), (DType.int64, True)]
        if entry not in ("max_pool_fprop", "max_pool_dgrad"):
            kinds = [(None, False)]
        for kept, adaptive in kinds:
            for dtype in dtypes:
                for deep in (False, True):
                    yield pool_function(entry, target, dtype, kept, adaptive, deep)


@beartype
def max_pool_fprop(
    x: TensorValue, problem: PoolingProblem, extents: Sequence[DimLike] | None = None
) -> tuple[TensorValue, TensorValue]:
    """The maxima of `x` and their int64 indices."""
    return _maxima(x, problem, extents)


@beartype
def max_pool_fprop_offsets(x: TensorValue, problem: PoolingProblem) -> tuple[TensorValue, TensorValue]:
    """The maxima of `x` and, for each, the number of its tap in one byte: for windows of at most 255 taps."""
    _check_tensor("x", x, problem.input)
    check_float("x", x)
    _check_offsets(problem)
    types = [_resized(x, problem.output), _resized(x, problem.output, DType.uint8)]
    y, offsets = pool_op("max_pool_fprop", [x], types, problem.numbers())
    return y, offsets


#: Up to so many rows under a window a GPU's threads keep their own sums; past them, and from so many windows over one
#: position on, adding atomically is faster than comparing them all.
_MAX_ROWS = 104
_ATOMIC_FROM = 48


@beartype
def max_pool_dgrad(
    dy: TensorValue,
    indices: TensorValue,
    problem: PoolingProblem,
    extents: Sequence[DimLike] | None = None,
    *,
    deterministic: bool = True,
) -> TensorValue:
    """Gradient of max pooling; an index outside its window's plane is ignored.

    Gathers, or scatters in a fixed order. With `deterministic` false, very tall windows that overlap a lot go to
    `max_pool_dgrad_scatter` on a GPU, where channels-last tensors would be gathered.
    """
    _check_tensor("dy", dy, problem.output)
    several_channels = dy.shape[4] != 1
    tall = problem.dilation[1] * (problem.window[1] - 1) + 1 > _MAX_ROWS and problem.windows_above >= _ATOMIC_FROM
    if not deterministic and dy.device.is_gpu() and several_channels and tall:
        return max_pool_dgrad_scatter(dy, indices, problem, extents)
    check_float("dy", dy)
    _check_companion("indices", indices, "dy", dy, DType.int64)
    types = [_resized(dy, extents or problem.input)]
    return pool_op("max_pool_dgrad", [dy, indices], types, problem.numbers(), deep=problem.is_deep)[0]


@beartype
def max_pool_dgrad_offsets(dy: TensorValue, offsets: TensorValue, problem: PoolingProblem) -> TensorValue:
    """Gradient of max pooling by gathering, from offsets. Deterministic."""
    _check_tensor("dy", dy, problem.output)
    check_float("dy", dy)
    _check_companion("offsets", offsets, "dy", dy, DType.uint8)
    _check_offsets(problem)
    types = [_resized(dy, problem.input)]
    return pool_op("max_pool_dgrad", [dy, offsets], types, problem.numbers(), deep=problem.is_deep)[0]


@beartype
def max_pool_dgrad_scatter(
    dy: TensorValue,
    indices: TensorValue,
    problem: PoolingProblem | AdaptivePoolingProblem,
    extents: Sequence[DimLike] | None = None,
) -> TensorValue:
    """Gradient of max pooling by scattering to the indices, whatever made them; one outside the plane is
    ignored. On a GPU the additions are atomic: not deterministic."""
    _check_tensor("dy", dy, problem.output)
    check_float("dy", dy)
    _check_companion("indices", indices, "dy", dy, DType.int64)
    return pool_op("max_pool_dgrad_scatter", [dy, indices], [_resized(dy, extents or problem.input)])[0]


@beartype
def avg_pool_fprop(x: TensorValue, problem: PoolingProblem, extents: Sequence[DimLike] | None = None) -> TensorValue:
    """The averages of `x`."""
    _check_tensor("x", x, problem.input)
    check_float("x", x)
    _check_undilated(problem)
    return pool_op("avg_pool_fprop", [x], [_resized(x, extents or problem.output)], problem.numbers())[0]


@beartype
def avg_pool_dgrad(dy: TensorValue, problem: PoolingProblem, extents: Sequence[DimLike] | None = None) -> TensorValue:
    """Gradient of average pooling by gathering. Deterministic."""
    _check_tensor("dy", dy, problem.output)
    check_float("dy", dy)
    _check_undilated(problem)
    types = [_resized(dy, extents or problem.input)]
    return pool_op("avg_pool_dgrad", [dy], types, problem.numbers(), deep=problem.is_deep)[0]


def _maxima(
    x: TensorValue,
    problem: PoolingProblem | AdaptivePoolingProblem,
    extents: Sequence[DimLike] | None,
    *,
    adaptive: bool = False,
) -> tuple[TensorValue, TensorValue]:
    _check_tensor("x", x, problem.input)
    check_float("x", x)
    extents = extents or problem.output
    types = [_resized(x, extents), _resized(x, extents, DType.int64)]
    y, indices = pool_op("max_pool_fprop", [x], types, problem.numbers(), adaptive=adaptive)
    return y, indices


def _check_undilated(problem: PoolingProblem) -> None:
    if problem.dilation != (1, 1, 1):
        raise ValueError(f"dilation={problem.dilation}: average pooling has none")


@beartype
def adaptive_max_pool_fprop(
    x: TensorValue, problem: AdaptivePoolingProblem, extents: Sequence[DimLike] | None = None
) -> tuple[TensorValue, TensorValue]:
    """The maxima of `x` over adaptive windows and their int64 indices."""
    return _maxima(x, problem, extents, adaptive=True)


@beartype
def adaptive_max_pool_dgrad(
    dy: TensorValue, indices: TensorValue, problem: AdaptivePoolingProblem, extents: Sequence[DimLike] | None = None
) -> TensorValue:
    """Gradient of adaptive max pooling by gathering. Deterministic."""
    _check_tensor("dy", dy, problem.output)
    check_float("dy", dy)
    _check_companion("indices", indices, "dy", dy, DType.int64)
    types = [_resized(dy, extents or problem.input)]
    return pool_op("max_pool_dgrad", [dy, indices], types, problem.numbers(), adaptive=True)[0]


@beartype
def max_unpool_fprop(x: TensorValue, indices: TensorValue, output: Sequence[DimLike]) -> TensorValue:
    """Zeros of spatial extents `output` (D, H, W) with `x` at `indices`; one outside the plane is ignored, and
    reported (``runtime.launching.reports``)."""
    _check_tensor("x", x)
    check_float("x", x)
    _check_companion("indices", indices, "x", x, DType.int64)
    if any(isinstance(dim, StaticDim) and int(dim) < 1 for dim in map(Dim, output)):
        raise ValueError(f"output={output}: every extent must be at least 1")
    return pool_op("max_unpool_fprop", [x, indices], [_resized(x, output)])[0]


@beartype
def max_unpool_dgrad(dy: TensorValue, indices: TensorValue) -> TensorValue:
    """Gradient of max unpooling: `dy` at `indices`, zero where one points outside the plane."""
    _check_tensor("dy", dy)
    check_float("dy", dy)
    _check_tensor("indices", indices)
    if indices.dtype != DType.int64:
        raise ValueError(f"indices has dtype {indices.dtype}: must be {DType.int64}")
    batch, *_, channels = dy.shape
    if indices.shape[0] != batch or indices.shape[4] != channels:
        raise ValueError(f"indices has shape {list(indices.shape)}: N and C must be those of dy, {list(dy.shape)}")
    types = [TensorType(dy.dtype, indices.shape, dy.device)]
    return pool_op("max_unpool_dgrad", [dy, indices], types)[0]
