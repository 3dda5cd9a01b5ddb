"""Gathers and scatters by index tensors.

A gather reads along one axis: several indexed dimensions that are adjacent in memory are read as one, so that nothing
but the elements that are read is copied. Scatters run in kernels with a fixed order. An index outside its dimension
stays outside for the kernels to report (``runtime.launching.reports``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from max.dtype import DType
from max.graph import DeviceRef, Dim, StaticDim, TensorValue
from torch.fx import Node

from torch_max_backend.errors import CannotLower
from torch_max_backend.ir import ops
from torch_max_backend.ir.layout import GraphTensor, Order, aligned, contiguous_order
from torch_max_backend.lowering import numerics
from torch_max_backend.lowering.context import LoweringContext
from torch_max_backend.lowering.registry import Layout, lowering
from torch_max_backend.mojo_ops.indexing import SEVERAL, Base, Zeros, gather_elements, scatter_elements, scatter_rows
from torch_max_backend.mojo_ops.indexing import gather as gather_at

aten = torch.ops.aten


def _product(dims: Sequence[Dim]) -> Dim:
    total = Dim(1)
    for dim in dims:
        total = total * dim
    return total


def _size(dim: Dim, device: DeviceRef) -> TensorValue:
    if isinstance(dim, Dim) and not str(dim).isdigit():
        value = ops.cast(TensorValue(dim), DType.int64)
        return value if value.device == device else ops.transfer_to(value, device)
    return ops.constant(int(dim), DType.int64, device=device)


def places(index: TensorValue, size: Dim) -> TensorValue:
    """``index`` in int64, negative ones counted from the end where that is inside."""
    index = numerics.cast(index, DType.int64)
    zero, from_end = ops.constant(0, DType.int64, device=index.device), ops.add(index, _size(size, index.device))
    counted = ops.logical_and(ops.greater(zero, index), ops.greater_equal(from_end, zero))
    return ops.where(counted, from_end, index)


def _is_outside(place: TensorValue, size: Dim) -> TensorValue:
    zero = ops.constant(0, DType.int64, device=place.device)
    return ops.logical_or(ops.greater(zero, place), ops.greater_equal(place, _size(size, place.device)))


def take(x: GraphTensor, dim: int, index: TensorValue) -> TensorValue:
    """Entries of dimension ``dim``, in ``x``'s memory order; the axes of ``index`` replace that dimension's."""
    return gather_at(x.value, numerics.cast(index, DType.int64), x.axis(dim))


@lowering(aten.embedding.default, layout=Layout.RAW)
def embedding(
    ctx: LoweringContext,
    weight: GraphTensor,
    indices: GraphTensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> GraphTensor:
    """Rows of a table."""
    table = weight.with_value(weight.logical()) if weight.order != (0, 1) else weight
    return GraphTensor.contiguous(take(GraphTensor.contiguous(table.value), 0, indices.logical()))


@lowering(aten.index_select.default, layout=Layout.RAW)
def index_select(ctx: LoweringContext, x: GraphTensor, dim: int, index: GraphTensor) -> GraphTensor:
    """Entries of one dimension."""
    if x.rank == 0:
        return x
    return x.with_value(take(x, dim, ops.reshape(index.value, [ctx.out_shape()[dim]])))


class Indexed:
    """The dimensions of a tensor that index tensors speak of, merged into one axis.

    Attributes:
        value: the tensor with the indexed dimensions as axis ``axis``.
        index: one place on that axis for each element of the broadcast index.
        order: memory order of the indexed result.
        sizes: of the dimensions that became one, where there are several.
    """

    def __init__(self, x: GraphTensor, indices: Sequence[GraphTensor | None]) -> None:
        named = [dim for dim, index in enumerate(indices) if index is not None]
        tensors = [index for index in indices if index is not None]
        if any(index.dtype == DType.bool for index in tensors):
            raise CannotLower("a mask as index: the result's shape depends on data")
        x = x.to_order(_joined(x.order, named))
        self.x = x
        first = x.order.index(named[0])
        physical = list(x.value.shape)
        self.before = physical[:first]
        self.after = physical[first + len(named) :]
        self.axis = first
        merged = [*self.before, _product([x.shape[dim] for dim in named]), *self.after]
        self.value = ops.reshape(x.value, merged)
        rank = max(index.rank for index in tensors)
        flat: TensorValue | None = None
        outside: TensorValue | None = None
        for dim, index in zip(named, tensors, strict=True):
            size = x.shape[dim]
            place = places(aligned(index, rank, contiguous_order(rank)), size)
            if len(named) > 1:
                beyond = _is_outside(place, size)
                outside = beyond if outside is None else ops.logical_or(outside, beyond)
            flat = place if flat is None else ops.add(ops.mul(flat, _size(size, place.device)), place)
        assert flat is not None
        self.index, self.sizes = flat, list[int]()
        if outside is not None:
            # One outside its dimension may come to lie inside the axis.
            self.index = ops.where(outside, ops.constant(SEVERAL, DType.int64, device=flat.device), flat)
            self.sizes = [int(x.shape[dim]) for dim in named if isinstance(x.shape[dim], StaticDim)]
        # Where the index's dimensions stand in the result: in place of the indexed ones, or in front of all.
        neighbours = named == list(range(named[0], named[-1] + 1))
        at = named[0] if neighbours else 0
        rest = [dim for dim in range(x.rank) if dim not in named]
        logical = {dim: i if i < at else i + rank for i, dim in enumerate(rest)}
        kept = [logical[dim] for dim in x.order if dim not in named]
        self.order: Order = (*kept[:first], *range(at, at + rank), *kept[first:])


def _joined(order: Order, dims: Sequence[int]) -> Order:
    """``order`` with ``dims`` next to each other, in their own sequence."""
    at = min(order.index(dim) for dim in dims)
    if order[at : at + len(dims)] == tuple(dims):
        return order
    rest = [dim for dim in order if dim not in dims]
    return (*rest[:at], *dims, *rest[at:])


@lowering(aten.index.Tensor, layout=Layout.RAW)
def index_tensor(ctx: LoweringContext, x: GraphTensor, indices: Sequence[GraphTensor | None]) -> GraphTensor:
    """Advanced indexing by tensors of places."""
    indexed = Indexed(x, indices)
    result = GraphTensor(gather_at(indexed.value, indexed.index, indexed.axis, indexed.sizes), indexed.order)
    shape = ctx.out_shape()
    physical = [shape[dim] for dim in result.order]
    if list(result.value.shape) != physical:
        result = result.with_value(ops.reshape(result.value, physical))
    return result


@lowering(aten.index_put.default, layout=Layout.RAW)
def index_put(
    ctx: LoweringContext,
    x: GraphTensor,
    indices: Sequence[GraphTensor | None],
    values: GraphTensor,
    accumulate: bool = False,
) -> GraphTensor:
    """Advanced indexing, written to; accumulation is in float32 for narrow floats."""
    tensors = [index for index in indices if index is not None]
    if len(tensors) == 1 and tensors[0].dtype == DType.bool:
        return _where_masked(ctx, x, indices, values, accumulate)
    wide = ctx.compute_dtype if accumulate else ctx.max_dtype
    if accumulate and ctx.max_dtype == DType.bool:
        raise CannotLower("accumulation of bools")
    indexed = Indexed(x.with_value(numerics.cast(x.value, wide)), indices)
    shape = [*indexed.before, *indexed.index.shape, *indexed.after]
    rank = len(shape)
    source = numerics.cast(aligned(values, rank, indexed.order), wide)
    if list(source.shape) != shape:
        source = ops.broadcast_to(source, shape)
    outer, inner = _product(indexed.before), _product(indexed.after)
    count = _product(indexed.index.shape)
    places_of_base = indexed.value.shape[indexed.axis]
    base = Zeros(places_of_base) if _is_zero(ctx) else ops.reshape(indexed.value, [outer, places_of_base, inner])
    flat = ops.reshape(indexed.index, [count])
    deterministic = torch.are_deterministic_algorithms_enabled()
    write = functools.partial(scatter_rows, deterministic=deterministic, sizes=indexed.sizes)
    written = _written(base, flat, ops.reshape(source, [outer, count, inner]), accumulate, write)
    result = ops.reshape(written, indexed.x.value.shape)
    return indexed.x.with_value(numerics.cast(result, ctx.max_dtype))


def _is_zero(ctx: LoweringContext) -> bool:
    """Whether what is written to is zero everywhere, as for gradients."""
    node = ctx.node.args[0]
    return isinstance(node, Node) and node.target is aten.full.default and bool(node.args[1] == 0)


def _written(
    base: Base,
    index: TensorValue,
    source: TensorValue,
    accumulate: bool,
    write: Callable[[Base, TensorValue, TensorValue, bool], TensorValue],
) -> TensorValue:
    """A kernel's result; bools travel as bytes."""
    if source.dtype == DType.bool:
        base = base if isinstance(base, Zeros) else ops.cast(base, DType.uint8)
        as_bytes = write(base, index, ops.cast(source, DType.uint8), accumulate)
        return numerics.nonzero(as_bytes)
    return write(base, index, source, accumulate)


def _where_masked(
    ctx: LoweringContext,
    x: GraphTensor,
    indices: Sequence[GraphTensor | None],
    values: GraphTensor,
    accumulate: bool,
) -> GraphTensor:
    if values.rank != 0:
        raise CannotLower("as many values as a mask has true elements: known at run time only")
    first, mask = next((dim, index) for dim, index in enumerate(indices) if index is not None)
    shape = [Dim(1)] * first + mask.shape + [Dim(1)] * (x.rank - first - mask.rank)
    spread = GraphTensor.contiguous(ops.reshape(mask.logical(), shape)).to_order(x.order).value
    value = numerics.cast(values.value, x.dtype)
    return x.with_value(ops.where(spread, x.value + value if accumulate else value, x.value))


@lowering(aten.gather.default, layout=Layout.RAW)
def gather(
    ctx: LoweringContext, x: GraphTensor, dim: int, index: GraphTensor, *, sparse_grad: bool = False
) -> GraphTensor:
    """For each element of ``index`` the element of ``x`` at that place of ``dim``, all else being equal."""
    if x.rank == 0:
        return GraphTensor(x.value, ())
    dim %= x.rank
    order = x.order
    at = numerics.cast(index.to_order(order).value, DType.int64)
    value, axis = x.value, x.axis(dim)
    # The index may be smaller in other dimensions.
    others = [slice(None) if position == axis else slice(0, _plain(at.shape[position])) for position in range(x.rank)]
    if any(position != axis and at.shape[position] != value.shape[position] for position in range(x.rank)):
        value = ops.slice_tensor(value, others)
    if _is_one_list(ctx.arg_meta(2), dim):
        return GraphTensor(gather_at(value, _list_of(at, axis), axis), order)
    outer, inner = _product(at.shape[:axis]), _product(at.shape[axis + 1 :])
    found = gather_elements(
        ops.reshape(value, [outer, value.shape[axis], inner]), ops.reshape(at, [outer, at.shape[axis], inner])
    )
    return GraphTensor(ops.reshape(found, at.shape), order)


def _is_one_list(index: torch.Tensor, dim: int) -> bool:
    """Whether an index was expanded from the places of one list along ``dim``."""
    sizes = zip(index.shape, index.stride(), strict=True)
    return index.dim() > 1 and all(
        isinstance(size, int) and (size == 1 or stride == 0) for axis, (size, stride) in enumerate(sizes) if axis != dim
    )


def _list_of(index: TensorValue, axis: int) -> TensorValue:
    """The list that ``index`` was expanded from."""
    first = [slice(None) if position == axis else slice(0, 1) for position in range(index.rank)]
    return ops.reshape(ops.slice_tensor(index, first), [index.shape[axis]])


def _scattered(
    ctx: LoweringContext,
    x: GraphTensor,
    dim: int,
    index: GraphTensor,
    source: GraphTensor | float,
    accumulate: bool,
) -> GraphTensor:
    if x.rank == 0:
        new = source.value if isinstance(source, GraphTensor) else ctx.scalar(source, x.dtype)
        return x.with_value(x.value + new if accumulate else new)
    wide = ctx.compute_dtype if accumulate else ctx.max_dtype
    dim %= x.rank
    for other in range(x.rank):
        if other != dim and index.shape[other] != x.shape[other]:
            raise CannotLower("an index that is smaller than the tensor in another dimension")
    order = x.order
    axis = x.axis(dim)
    at = numerics.cast(index.to_order(order).value, DType.int64)
    if not isinstance(source, GraphTensor):
        new = ops.broadcast_to(ctx.scalar(source, wide), at.shape)
    else:
        new = numerics.cast(source.to_order(order).value, wide)
        if list(new.shape) != list(at.shape):
            new = ops.slice_tensor(new, [slice(0, _plain(size)) for size in at.shape])
    physical = list(x.value.shape)
    outer, inner = _product(physical[:axis]), _product(physical[axis + 1 :])
    count = at.shape[axis]
    base: Base = Zeros(physical[axis])
    if not _is_zero(ctx):
        base = ops.reshape(numerics.cast(x.value, wide), [outer, physical[axis], inner])
    new = ops.reshape(new, [outer, count, inner])
    deterministic = torch.are_deterministic_algorithms_enabled()
    if _is_one_list(ctx.arg_meta(2), dim):
        write = functools.partial(scatter_rows, deterministic=deterministic)
        written = _written(base, _list_of(at, axis), new, accumulate, write)
    else:
        write = functools.partial(scatter_elements, deterministic=deterministic)
        written = _written(base, ops.reshape(at, [outer, count, inner]), new, accumulate, write)
    return x.with_value(numerics.cast(ops.reshape(written, physical), ctx.max_dtype))


def _plain(dim: Dim) -> int | Dim:
    return int(dim) if str(dim).isdigit() else dim


@lowering(aten.scatter.src, layout=Layout.RAW)
def scatter(ctx: LoweringContext, x: GraphTensor, dim: int, index: GraphTensor, src: GraphTensor) -> GraphTensor:
    """Elements of ``src`` put at places of ``dim``; of equal places the last one wins."""
    return _scattered(ctx, x, dim, index, src, False)


@lowering(aten.scatter.value, layout=Layout.RAW)
def scatter_value(ctx: LoweringContext, x: GraphTensor, dim: int, index: GraphTensor, value: float) -> GraphTensor:
    """One number put at places of ``dim``."""
    return _scattered(ctx, x, dim, index, value, False)


@lowering(aten.scatter_add.default, layout=Layout.RAW)
def scatter_add(ctx: LoweringContext, x: GraphTensor, dim: int, index: GraphTensor, src: GraphTensor) -> GraphTensor:
    """Elements of ``src`` added at places of ``dim``."""
    return _scattered(ctx, x, dim, index, src, True)


def _rows_written(
    ctx: LoweringContext, x: GraphTensor, dim: int, index: GraphTensor, source: GraphTensor, alpha: float | None
) -> GraphTensor:
    """Slices of ``source`` put at the places of a list along ``dim``, or added ``alpha`` times; unlike advanced
    indexing, places count from zero alone."""
    if source.rank != x.rank:
        raise CannotLower("a source of another rank")
    if alpha is not None and ctx.max_dtype == DType.bool:
        raise CannotLower("accumulation of bools")
    wide = ctx.compute_dtype if alpha is not None else ctx.max_dtype
    new = numerics.cast(source.to_order(x.order).value, wide)
    if alpha is not None and alpha != 1:
        new = ops.mul(new, ctx.scalar(alpha, wide))
    physical = list(x.value.shape)
    axis = x.axis(dim % x.rank) if x.rank else 0
    outer, inner = _product(physical[:axis]), _product(physical[axis + 1 :])
    extent, count = (each[axis] if x.rank else Dim(1) for each in (physical, list(new.shape)))
    base: Base = Zeros(extent)
    if not _is_zero(ctx):
        base = ops.reshape(numerics.cast(x.value, wide), [outer, extent, inner])
    at = ops.reshape(numerics.cast(index.value, DType.int64), [count])
    write = functools.partial(scatter_rows, deterministic=torch.are_deterministic_algorithms_enabled())
    written = _written(base, at, ops.reshape(new, [outer, count, inner]), alpha is not None, write)
    return x.with_value(numerics.cast(ops.reshape(written, physical), ctx.max_dtype))


@lowering(aten.index_add.default, layout=Layout.RAW)
def index_add(
    ctx: LoweringContext, x: GraphTensor, dim: int, index: GraphTensor, source: GraphTensor, *, alpha: float = 1
) -> GraphTensor:
    """Slices of ``source``, ``alpha`` times, added at the places of a list."""
    return _rows_written(ctx, x, dim, index, source, alpha)


@lowering(aten.index_copy.default, layout=Layout.RAW)
def index_copy(ctx: LoweringContext, x: GraphTensor, dim: int, index: GraphTensor, source: GraphTensor) -> GraphTensor:
    """Slices of ``source`` put at the places of a list; of equal places the last one wins."""
    return _rows_written(ctx, x, dim, index, source, None)
