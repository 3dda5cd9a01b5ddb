"""Reductions over any dimensions, in whatever memory order the operand has.

MAX reduces one axis at a time. Axes that are neighbours in memory are merged by a reshape first, so that the
sum over N, H and W of a channels-last tensor is a single reduction. Narrow floats are accumulated in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from max.dtype import DType
from max.graph import Dim, StaticDim, TensorValue

from torch_max_backend.dtypes import NARROW_FLOATS
from torch_max_backend.ir import ops
from torch_max_backend.ir.layout import GraphTensor, is_unit
from torch_max_backend.lowering import numerics
from torch_max_backend.lowering.context import LoweringContext
from torch_max_backend.lowering.registry import Layout, lowering
from torch_max_backend.mojo_ops.reduction import cumsum as running_sums

aten = torch.ops.aten
Reduction = Callable[[TensorValue, int], TensorValue]


def reduced_dims(x: GraphTensor, dim: Sequence[int] | int | None) -> list[int]:
    """The logical dimensions that ``dim`` names; None and an empty list name all of them."""
    if dim is None or (isinstance(dim, Sequence) and not dim):
        return list(range(x.rank))
    if isinstance(dim, int):
        dim = [dim]
    return sorted({d % x.rank for d in dim}) if x.rank else []


def reduce(
    x: GraphTensor, dims: Sequence[int], keepdim: bool, reduction: Reduction, identity: float | int | bool
) -> GraphTensor:
    """``x`` reduced over logical ``dims``; ``identity`` is the result over no elements at all."""
    axes = {x.axis(dim) for dim in dims}
    value = reduce_axes(x.value, axes, reduction, identity)
    return reshaped(x, value, dims, keepdim)


def reshaped(x: GraphTensor, value: TensorValue, dims: Sequence[int], keepdim: bool) -> GraphTensor:
    """The reduced ``value`` (unit dimensions where ``x`` was reduced) with those dimensions kept or dropped."""
    if keepdim:
        return x.with_value(value)
    kept = [dim for dim in x.order if dim not in dims]
    logical = sorted(kept)
    shape = [value.shape[x.axis(dim)] for dim in kept]
    return GraphTensor(ops.reshape(value, shape), tuple(logical.index(dim) for dim in kept))


def reduce_axes(value: TensorValue, axes: set[int], reduction: Reduction, identity: float | int | bool) -> TensorValue:
    """``value`` with the physical ``axes`` reduced to size 1."""
    shape = list(value.shape)
    final = [Dim(1) if axis in axes else size for axis, size in enumerate(shape)]
    if any(isinstance(size, StaticDim) and int(size) == 0 for size in shape):
        return ops.broadcast_to(numerics.constant(value, identity), final)
    # Runs of neighbouring axes that are all reduced or all kept; unit axes join any run.
    runs: list[tuple[bool, Dim]] = []
    for axis, size in enumerate(shape):
        if is_unit(size):
            continue
        if runs and runs[-1][0] == (axis in axes):
            runs[-1] = (runs[-1][0], runs[-1][1] * size)
        else:
            runs.append((axis in axes, size))
    if not any(is_reduced for is_reduced, _ in runs):
        return ops.reshape(value, final) if len(shape) else value
    value = ops.reshape(value, [size for _, size in runs])
    for axis, (is_reduced, _) in enumerate(runs):
        if is_reduced:
            value = reduction(value, axis)
    return ops.reshape(value, final)


def element_count(x: GraphTensor, dims: Sequence[int]) -> Dim:
    """The number of elements that each result gathers."""
    count = Dim(1)
    for dim in dims:
        count = count * x.shape[dim]
    return count


def maximum(value: TensorValue, axis: int) -> TensorValue:
    """The largest element along ``axis``, NaN if any is: MAX's own reduction passes over NaN."""
    return _with_nan(value, axis, ops.max)


def minimum(value: TensorValue, axis: int) -> TensorValue:
    """The smallest element along ``axis``, NaN if any is."""
    return _with_nan(value, axis, ops.min)


def _with_nan(value: TensorValue, axis: int, reduction: Callable[..., TensorValue]) -> TensorValue:
    result = reduction(value, axis=axis)
    if not numerics.is_float(value.dtype):
        return result
    found = ops.max(ops.cast(ops.is_nan(value), DType.float32), axis=axis)
    return ops.where(numerics.nonzero(found), numerics.constant(value, math.nan), result)


def total(value: TensorValue, axis: int) -> TensorValue:
    """The sum along ``axis``."""
    return ops.sum(value, axis=axis)


def product(value: TensorValue, axis: int) -> TensorValue:
    """The product along ``axis``."""
    return ops.prod(value, axis=axis)


def compute(ctx: LoweringContext, x: GraphTensor) -> GraphTensor:
    """``x`` in the dtype to accumulate the node's result in."""
    return x.with_value(numerics.cast(x.value, ctx.compute_dtype))


def in_result_dtype(ctx: LoweringContext, x: GraphTensor) -> GraphTensor:
    """``x`` in the dtype of the node's result."""
    return x.with_value(numerics.cast(x.value, ctx.max_dtype))


@lowering(aten.sum.dim_IntList, aten.sum.default, layout=Layout.RAW)
def sum_(
    ctx: LoweringContext,
    x: GraphTensor,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> GraphTensor:
    """The sum; whole numbers and bools add up in int64."""
    return in_result_dtype(ctx, reduce(compute(ctx, x), reduced_dims(x, dim), keepdim, total, 0))


@lowering(aten.mean.default, aten.mean.dim, layout=Layout.RAW)
def mean(
    ctx: LoweringContext,
    x: GraphTensor,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> GraphTensor:
    """The mean; NaN over no elements."""
    return in_result_dtype(ctx, mean_of(compute(ctx, x), reduced_dims(x, dim), keepdim))


def mean_of(x: GraphTensor, dims: Sequence[int], keepdim: bool) -> GraphTensor:
    """The mean in ``x``'s own dtype."""
    summed = reduce(x, dims, keepdim, total, 0)
    size = element_count(x, dims)
    if isinstance(size, StaticDim):
        # MAX takes 0 / anything for 0.
        empty = int(size) == 0
        value = numerics.filled(summed.value, math.nan) if empty else numerics.divided(summed.value, int(size))
        return summed.with_value(value)
    return summed.with_value(ops.div(summed.value, numerics.dim_value(size, x.value, x.dtype)))


@lowering(aten.amax.default, layout=Layout.RAW)
def amax(ctx: LoweringContext, x: GraphTensor, dim: Sequence[int] = (), keepdim: bool = False) -> GraphTensor:
    """The largest element."""
    return _extremum(ctx, x, dim, keepdim, maximum)


@lowering(aten.amin.default, layout=Layout.RAW)
def amin(ctx: LoweringContext, x: GraphTensor, dim: Sequence[int] = (), keepdim: bool = False) -> GraphTensor:
    """The smallest element."""
    return _extremum(ctx, x, dim, keepdim, minimum)


@lowering(aten.max.default, layout=Layout.RAW)
def max_of_all(ctx: LoweringContext, x: GraphTensor) -> GraphTensor:
    """The largest element of all."""
    return _extremum(ctx, x, None, False, maximum)


@lowering(aten.min.default, layout=Layout.RAW)
def min_of_all(ctx: LoweringContext, x: GraphTensor) -> GraphTensor:
    """The smallest element of all."""
    return _extremum(ctx, x, None, False, minimum)


def _extremum(
    ctx: LoweringContext, x: GraphTensor, dim: Sequence[int] | None, keepdim: bool, reduction: Reduction
) -> GraphTensor:
    return in_result_dtype(ctx, reduce(ordered(x), reduced_dims(x, dim), keepdim, reduction, 0))


def ordered(x: GraphTensor) -> GraphTensor:
    """``x`` in a dtype that MAX compares and reduces: float32 for narrow floats, int32 for bools."""
    if x.dtype == DType.bool:
        return x.with_value(ops.cast(x.value, DType.int32))
    if x.dtype in NARROW_FLOATS:
        return x.with_value(ops.cast(x.value, DType.float32))
    return x


@lowering(aten.max.dim, layout=Layout.RAW)
def max_along(ctx: LoweringContext, x: GraphTensor, dim: int, keepdim: bool = False) -> tuple[GraphTensor, GraphTensor]:
    """The largest element along a dimension and where it first stands."""
    return _extremum_and_index(ctx, x, dim, keepdim, maximum)


@lowering(aten.min.dim, layout=Layout.RAW)
def min_along(ctx: LoweringContext, x: GraphTensor, dim: int, keepdim: bool = False) -> tuple[GraphTensor, GraphTensor]:
    """The smallest element along a dimension and where it first stands."""
    return _extremum_and_index(ctx, x, dim, keepdim, minimum)


def _extremum_and_index(
    ctx: LoweringContext, x: GraphTensor, dim: int, keepdim: bool, reduction: Reduction
) -> tuple[GraphTensor, GraphTensor]:
    dims = reduced_dims(x, dim)
    extremum, position = extremum_and_index(ordered(x), dims, keepdim, reduction)
    return in_result_dtype(ctx, extremum), position


@lowering(aten.argmax.default, layout=Layout.RAW)
def argmax(ctx: LoweringContext, x: GraphTensor, dim: int | None = None, keepdim: bool = False) -> GraphTensor:
    """The first index of the largest element."""
    return _index_of(x, dim, keepdim, maximum)


@lowering(aten.argmin.default, layout=Layout.RAW)
def argmin(ctx: LoweringContext, x: GraphTensor, dim: int | None = None, keepdim: bool = False) -> GraphTensor:
    """The first index of the smallest element."""
    return _index_of(x, dim, keepdim, minimum)


def _index_of(x: GraphTensor, dim: int | None, keepdim: bool, reduction: Reduction) -> GraphTensor:
    if dim is not None or x.rank == 0:
        return extremum_and_index(ordered(x), reduced_dims(x, dim), keepdim, reduction)[1]
    # Over all elements the index counts in logical order.
    count = element_count(x, range(x.rank))
    flat = GraphTensor.contiguous(ops.reshape(x.logical(), [count]))
    position = extremum_and_index(ordered(flat), [0], False, reduction)[1]
    return GraphTensor.contiguous(ops.reshape(position.value, [1] * x.rank)) if keepdim else position


def extremum_and_index(
    x: GraphTensor, dims: Sequence[int], keepdim: bool, reduction: Reduction
) -> tuple[GraphTensor, GraphTensor]:
    """The extremum over the one dimension in ``dims`` (none for rank 0) and the index of its first occurrence.

    MAX's argmax may return any of several equal elements on a GPU, and none that is NaN: the index is found as
    the smallest position that holds the extremum.
    """
    if not dims:
        zero = ops.constant(0, DType.int64, device=x.value.device)
        return x, GraphTensor.contiguous(zero)
    (dim,) = dims
    axis = x.axis(dim)
    if any(isinstance(size, StaticDim) and int(size) == 0 for size in x.shape):
        shape = [Dim(1) if place == axis else size for place, size in enumerate(x.value.shape)]
        empty = ops.broadcast_to(ops.constant(0, DType.int64, device=x.value.device), shape)
        values = ops.broadcast_to(numerics.constant(x.value, 0), shape)
        return reshaped(x, values, dims, keepdim), reshaped(x, empty, dims, keepdim)
    extremum = reduce_axes(x.value, {axis}, reduction, 0)
    found = ops.equal(x.value, extremum)
    if numerics.is_float(x.dtype):
        found = ops.logical_or(found, ops.is_nan(x.value))
    size = x.value.shape[axis]
    positions = iota(size, axis, x.value.rank, x.value)
    missing = numerics.dim_value(size, x.value, DType.int64)
    index = reduce_axes(ops.where(found, positions, missing), {axis}, _smallest, 0)
    return reshaped(x, extremum, dims, keepdim), reshaped(x, index, dims, keepdim)


def _smallest(value: TensorValue, axis: int) -> TensorValue:
    return ops.min(value, axis=axis)


def iota(size: Dim, axis: int, rank: int, like: TensorValue) -> TensorValue:
    """0, 1, ... along ``axis``, int64, broadcastable against tensors of ``rank``."""
    return ops.reshape(ops.iota(size, like.device), [size if place == axis else 1 for place in range(rank)])


@lowering(aten.prod.default, layout=Layout.RAW)
def prod(ctx: LoweringContext, x: GraphTensor, *, dtype: torch.dtype | None = None) -> GraphTensor:
    """The product of all elements."""
    return in_result_dtype(ctx, reduce(compute(ctx, x), reduced_dims(x, None), False, product, 1))


@lowering(aten.prod.dim_int, layout=Layout.RAW)
def prod_along(
    ctx: LoweringContext, x: GraphTensor, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> GraphTensor:
    """The product along a dimension."""
    return in_result_dtype(ctx, reduce(compute(ctx, x), reduced_dims(x, dim), keepdim, product, 1))


@lowering(aten.any.default, aten.any.dim, aten.any.dims, layout=Layout.RAW)
def any_(
    ctx: LoweringContext, x: GraphTensor, dim: Sequence[int] | int | None = None, keepdim: bool = False
) -> GraphTensor:
    """Whether any element is not zero."""
    if isinstance(dim, Sequence) and not dim and ctx.node.target is aten.any.dims:
        return in_result_dtype(ctx, x.with_value(numerics.nonzero(x.value)))
    flags = x.with_value(ops.cast(numerics.nonzero(x.value), DType.int32))
    found = reduce(flags, reduced_dims(x, dim), keepdim, _largest, 0)
    return in_result_dtype(ctx, found.with_value(numerics.nonzero(found.value)))


def _largest(value: TensorValue, axis: int) -> TensorValue:
    return ops.max(value, axis=axis)


@lowering(aten.var.correction, layout=Layout.RAW)
def var(
    ctx: LoweringContext,
    x: GraphTensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | int | None = None,
    keepdim: bool = False,
) -> GraphTensor:
    """The variance, with the mean taken first and the squared distances from it after."""
    return in_result_dtype(ctx, _var_mean(compute(ctx, x), dim, correction, keepdim)[0])


@lowering(aten.var_mean.correction, layout=Layout.RAW)
def var_mean(
    ctx: LoweringContext,
    x: GraphTensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | int | None = None,
    keepdim: bool = False,
) -> tuple[GraphTensor, GraphTensor]:
    """The variance and the mean."""
    variance, average = _var_mean(compute(ctx, x), dim, correction, keepdim)
    return in_result_dtype(ctx, variance), in_result_dtype(ctx, average)


def _var_mean(
    x: GraphTensor, dim: Sequence[int] | None, correction: float | int | None, keepdim: bool
) -> tuple[GraphTensor, GraphTensor]:
    dims = reduced_dims(x, dim)
    average = mean_of(x, dims, True)
    distance = ops.sub(x.value, average.value)
    squares = reduce(x.with_value(ops.mul(distance, distance)), dims, keepdim, total, 0)
    variance = squares.with_value(_over_freedom(squares.value, element_count(x, dims), correction))
    return variance, average if keepdim else reshaped(x, average.value, dims, False)


def _over_freedom(squares: TensorValue, size: Dim, correction: float | int | None) -> TensorValue:
    """``squares`` over the degrees of freedom, of which there may be none."""
    less = 1 if correction is None else correction
    if isinstance(size, StaticDim) and int(size) <= less:
        infinite, invalid = numerics.constant(squares, math.inf), numerics.constant(squares, math.nan)
        return ops.where(ops.greater(squares, numerics.constant(squares, 0)), infinite, invalid)
    if isinstance(size, StaticDim):
        return numerics.divided(squares, int(size) - less)
    count = numerics.dim_value(size, squares, squares.dtype)
    return ops.div(squares, numerics.at_least(ops.sub(count, numerics.constant(count, less)), 0))


@lowering(aten.cumsum.default, layout=Layout.RAW)
def cumsum(ctx: LoweringContext, x: GraphTensor, dim: int, *, dtype: torch.dtype | None = None) -> GraphTensor:
    """The running sum along a dimension."""
    wide = compute(ctx, x)
    if x.rank == 0 or any(isinstance(size, StaticDim) and int(size) == 0 for size in x.shape):
        return in_result_dtype(ctx, wide)
    return in_result_dtype(ctx, wide.with_value(running_sums(wide.value, x.axis(dim))))
