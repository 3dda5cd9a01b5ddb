"""Views, and operators that move whole slices: nothing here computes.

A view copies nothing as long as strides can express the new shape: unit dimensions come and go for free, and dimensions
merge where they are adjacent in memory, whatever the memory order is.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from max.dtype import DType
from max.graph import DeviceRef, Dim, StaticDim

from torch_max_backend.errors import CannotLower
from torch_max_backend.ir import ops
from torch_max_backend.ir.layout import (
    MAX_RANK,
    GraphTensor,
    Order,
    channels_last_order,
    common_order,
    contiguous_order,
    is_unit,
    moves_data,
)
from torch_max_backend.lowering import numerics
from torch_max_backend.lowering.context import LoweringContext, max_dim, scalar
from torch_max_backend.lowering.registry import Layout, lowering
from torch_max_backend.mojo_ops.indexing import gather

aten = torch.ops.aten

Size = int | torch.SymInt


def order_with_units(shape: Sequence[Dim | Size], kept: Sequence[int]) -> Order:
    """The memory order of a tensor whose non-unit dimensions lie in memory as ``kept`` says.

    Unit dimensions lie anywhere, so they are put where a contiguous or else a channels-last tensor has them.
    """
    rank = len(shape)
    for order in (contiguous_order(rank), channels_last_order(rank)):
        if [dim for dim in order if not is_unit(shape[dim])] == list(kept):
            return order
    placed = list(kept)
    for dim in range(rank):
        if is_unit(shape[dim]):
            placed.insert(placed.index(dim - 1) + 1 if dim else 0, dim)
    return tuple(placed)


def reshaped(x: GraphTensor, shape: Sequence[Dim], order: Order) -> GraphTensor:
    """The memory of ``x`` read as ``shape`` kept in ``order``."""
    physical = [shape[dim] for dim in order]
    return GraphTensor(x.value if list(x.value.shape) == physical else ops.reshape(x.value, physical), order)


def prefer_channels_last(x: GraphTensor) -> GraphTensor:
    """``x`` relabelled channels-last where that moves nothing: [N, C, 1, 1] is both."""
    order = channels_last_order(x.rank)
    if x.rank < 3 or x.order == order:
        return x
    permutation = [x.order.index(dim) for dim in order]
    return x if moves_data(list(x.value.shape), permutation) else x.to_order(order)


def _key(size: Size) -> Any:
    return size if isinstance(size, int) else size.node.expr


def view_order(old: Sequence[Size], new: Sequence[Size], order: Order) -> Order | None:
    """The memory order of a view as ``new`` of a tensor of ``old`` kept in ``order``; None if data must move.

    Both shapes are cut into the shortest runs of dimensions with equal products; a run of several old
    dimensions must be a run in memory too.
    """
    if any(isinstance(size, int) and size == 0 for size in old):
        return contiguous_order(len(new))
    old_dims = [dim for dim in range(len(old)) if not is_unit(_static(old[dim]))]
    new_dims = [dim for dim in range(len(new)) if not is_unit(_static(new[dim]))]
    old_ends = list(itertools.accumulate((_key(old[dim]) for dim in old_dims), _times))
    new_ends = list(itertools.accumulate((_key(new[dim]) for dim in new_dims), _times))
    groups: dict[int, tuple[list[int], list[int]]] = {}
    old_from = new_from = 0
    for old_at, end in enumerate(old_ends):
        if end in new_ends[new_from:]:
            new_at = new_ends.index(end, new_from)
            groups[old_dims[old_from]] = (
                old_dims[old_from : old_at + 1],
                new_dims[new_from : new_at + 1],
            )
            old_from, new_from = old_at + 1, new_at + 1
    if old_from != len(old_dims) or new_from != len(new_dims):
        return None
    memory = [dim for dim in order if dim in old_dims]
    kept: list[int] = []
    while memory:
        if memory[0] not in groups:
            return None
        source, target = groups[memory[0]]
        if memory[: len(source)] != source:
            return None
        kept += target
        memory = memory[len(source) :]
    return order_with_units(new, kept)


def _static(size: Size) -> Size | Dim:
    return size if isinstance(size, int) else max_dim(size)


def _times(a: Any, b: Any) -> Any:
    product = a * b
    return product if isinstance(product, int) else product.expand()


@lowering(aten.view.default, layout=Layout.RAW)
def view(ctx: LoweringContext, x: GraphTensor, size: Sequence[Size]) -> GraphTensor:
    """Another shape over the same elements; a copy only where memory order forbids it."""
    old, new = list(ctx.arg_meta(0).shape), list(ctx.meta.shape)
    if old == new:
        return x
    order = view_order(old, new, x.order)
    if order is None:
        x = x.to_order(contiguous_order(x.rank))
        order = contiguous_order(len(new))
    return reshaped(x, ctx.out_shape(), order)


@lowering(aten.permute.default, layout=Layout.RAW)
def permute(ctx: LoweringContext, x: GraphTensor, dims: Sequence[int]) -> GraphTensor:
    """Dimensions renamed."""
    return x.permuted(dims)


@lowering(aten.expand.default, layout=Layout.RAW)
def expand(ctx: LoweringContext, x: GraphTensor, size: Sequence[Size], *, implicit: bool = False) -> GraphTensor:
    """Unit dimensions repeated."""
    shape = ctx.out_shape()
    if x.rank < len(shape):
        padded = [Dim(1)] * (len(shape) - x.rank) + x.shape
        shift = len(shape) - x.rank
        kept = [dim + shift for dim in x.order if not is_unit(x.shape[dim])]
        x = reshaped(x, padded, order_with_units(padded, kept))
    if x.rank < 3 or x.shape[1] == shape[1]:
        # Repeated channels would be innermost there, across the rows of tokens that they are added to.
        x = prefer_channels_last(x)
    physical = [shape[dim] for dim in x.order]
    return x if list(x.value.shape) == physical else x.with_value(ops.broadcast_to(x.value, physical))


@lowering(aten.unsqueeze.default, aten.squeeze.dims, layout=Layout.RAW)
def unit_dimensions(ctx: LoweringContext, x: GraphTensor, *dims: Any) -> GraphTensor:
    """Unit dimensions added or dropped."""
    return view(ctx, x, ())


@lowering(aten.cat.default, layout=Layout.RAW)
def cat(ctx: LoweringContext, tensors: Sequence[GraphTensor], dim: int = 0) -> GraphTensor:
    """Tensors one after the other; the old exception for empty 1-D tensors included."""
    rank = len(ctx.out_shape())
    dim %= max(rank, 1)
    parts = [x for x in tensors if x.rank == rank and x.shape[dim] != Dim(0)]
    if not parts:
        parts = [next(x for x in tensors if x.rank == rank)]
    order = common_order(parts, rank)
    values = [ctx.cast(x.to_order(order).value, ctx.max_dtype) for x in parts]
    axis = order.index(dim)
    return GraphTensor(values[0] if len(values) == 1 else ops.concat(values, axis), order)


def sliced(x: GraphTensor, dim: int, start: Dim, length: Dim, step: int = 1) -> GraphTensor:
    """``length`` slices of dimension ``dim`` from ``start`` on, every ``step``-th."""
    axis = x.axis(dim)
    if start == Dim(0) and step == 1 and length == x.value.shape[axis]:
        return x
    index: list[slice] = [slice(None)] * x.rank
    stop = start + length if step == 1 else start + (length - 1) * step + 1
    index[axis] = slice(_plain(start), _plain(stop), step)
    value = ops.slice_tensor(x.value, index)
    wanted = list(x.value.shape)
    wanted[axis] = length
    return x.with_value(value if list(value.shape) == wanted else ops.rebind(value, wanted))


def _plain(dim: Dim) -> int | Dim:
    return int(dim) if isinstance(dim, StaticDim) else dim


def slice_start(size: Size, start: Size | None) -> Size:
    """Where a slice of a dimension of ``size`` begins, after PyTorch's clamping."""
    if start is None:
        return 0
    if isinstance(size, int) and isinstance(start, int):
        return min(max(start + size if start < 0 else start, 0), size)
    if isinstance(start, int):
        return start if start >= 0 else size + start
    raise CannotLower("a slice that begins at a run-time position")


@lowering(aten.slice.Tensor, layout=Layout.RAW)
def slice_tensor(
    ctx: LoweringContext,
    x: GraphTensor,
    dim: int = 0,
    start: Size | None = None,
    end: Size | None = None,
    step: int = 1,
) -> GraphTensor:
    """Every ``step``-th slice of one dimension."""
    begin = ctx.dim(slice_start(ctx.arg_meta(0).shape[dim], start))
    length = ctx.out_shape()[dim]
    if length == Dim(0):
        begin, step = Dim(0), 1
    return sliced(x, dim, begin, length, step)


def without(x: GraphTensor, dim: int) -> GraphTensor:
    """``x`` less its unit dimension ``dim``."""
    dim %= x.rank
    axis = x.axis(dim)
    physical = [size for at, size in enumerate(x.value.shape) if at != axis]
    order = tuple(d - (d > dim) for d in x.order if d != dim)
    return GraphTensor(ops.reshape(x.value, physical), order)


@lowering(aten.select.int, layout=Layout.RAW)
def select(ctx: LoweringContext, x: GraphTensor, dim: int, index: Size) -> GraphTensor:
    """One slice of one dimension, without the dimension."""
    if not isinstance(index, int):
        raise CannotLower("a slice at a run-time position")
    size = x.shape[dim]
    return without(sliced(x, dim, Dim(index) if index >= 0 else size + index, Dim(1)), dim)


@lowering(aten.split_with_sizes.default, layout=Layout.RAW)
def split_with_sizes(ctx: LoweringContext, x: GraphTensor, sizes: Sequence[Size], dim: int = 0) -> list[GraphTensor]:
    """Consecutive parts of one dimension."""
    parts: list[GraphTensor] = []
    start = Dim(0)
    for size in sizes:
        length = ctx.dim(size)
        parts.append(sliced(x, dim, start, length))
        start = start + length
    return parts


@lowering(aten.copy.default, layout=Layout.RAW)
def copy(ctx: LoweringContext, x: GraphTensor, source: GraphTensor, non_blocking: bool = False) -> GraphTensor:
    """``source`` in the shape and dtype of ``x``."""
    cast = source.with_value(numerics.cast(source.value, ctx.max_dtype))
    return expand(ctx, cast, ctx.meta.shape)


def padded(
    ctx: LoweringContext, x: GraphTensor, counts: dict[int, tuple[Size, Size]], value: float | int | bool = 0
) -> GraphTensor:
    """``x`` with ``value`` before and after it along the dimensions in ``counts``; a negative count crops."""
    paddings = [0] * (2 * x.rank)
    for dim, (low, high) in counts.items():
        if not (isinstance(low, int) and isinstance(high, int)):
            raise CannotLower(f"padding by a run-time count, {low} before and {high} after dimension {dim}")
        axis = x.axis(dim)
        if low < 0 or high < 0:
            size = x.value.shape[axis]
            x = sliced(x, dim, Dim(max(-low, 0)), size - max(-low, 0) - max(-high, 0))
        paddings[2 * axis], paddings[2 * axis + 1] = max(low, 0), max(high, 0)
    if not any(paddings):
        return x
    if any(isinstance(size, StaticDim) and int(size) == 0 for size in x.value.shape):
        # No kernel reads an empty tensor.
        shape = [size + sum(paddings[2 * axis : 2 * axis + 2]) for axis, size in enumerate(x.value.shape)]
        return x.with_value(ops.broadcast_to(scalar(value, x.dtype, ctx.device), shape))
    if x.dtype == DType.bool:
        # MAX pads numbers only.
        filler = scalar(bool(value), DType.uint8, DeviceRef.CPU())
        numbers = ops.pad(ops.cast(x.value, DType.uint8), paddings, filler)
        return x.with_value(ops.cast(numbers, DType.bool))
    filler = scalar(value, x.dtype, DeviceRef.CPU())
    return x.with_value(ops.pad(x.value, paddings, filler))


@lowering(aten.constant_pad_nd.default, layout=Layout.RAW)
def constant_pad_nd(
    ctx: LoweringContext, x: GraphTensor, pad: Sequence[Size], value: float | int | bool = 0
) -> GraphTensor:
    """A constant border, given from the last dimension to the first; negative counts crop."""
    counts = {x.rank - 1 - i: (pad[2 * i], pad[2 * i + 1]) for i in range(len(pad) // 2)}
    result = padded(ctx, x, counts, value)
    return rebound(result, ctx.out_shape())


def rebound(x: GraphTensor, shape: Sequence[Dim]) -> GraphTensor:
    """``x`` with the logical shape that PyTorch derived, where MAX's own derivation is written otherwise."""
    physical = [shape[dim] for dim in x.order]
    return x if list(x.value.shape) == physical else x.with_value(ops.rebind(x.value, physical))


def placed(ctx: LoweringContext, source: GraphTensor, dim: int, size: Size, start: Size, step: int) -> GraphTensor:
    """Zeros of extent ``size`` along ``dim`` with ``source`` at every ``step``-th place from ``start`` on."""
    dim %= source.rank
    if not (isinstance(size, int) and isinstance(start, int)):
        raise CannotLower("a slice written at a run-time position")
    axis = source.axis(dim)
    count = source.value.shape[axis]
    if not isinstance(count, StaticDim):
        raise CannotLower("a slice of run-time extent")
    length = int(count)
    if step > 1 and length:
        # [.., L, 1, ..] with zeros around it is [.., blocks, step, ..]; both are read as one axis.
        apart = list(source.value.shape)
        apart.insert(axis + 1, Dim(1))
        (block, place), blocks = divmod(start, step), -(-size // step)
        paddings = [0] * (2 * len(apart))
        paddings[2 * axis : 2 * axis + 4] = block, blocks - block - length, place, step - 1 - place
        zero = scalar(0, source.dtype, DeviceRef.CPU())
        value = ops.pad(ops.reshape(source.value, apart), paddings, zero)
        joined = list(source.value.shape)
        joined[axis] = Dim(blocks * step)
        return sliced(source.with_value(ops.reshape(value, joined)), dim, Dim(0), Dim(size))
    return padded(ctx, source, {dim: (start, size - start - length)})


@lowering(aten.slice_backward.default, layout=Layout.RAW)
def slice_backward(
    ctx: LoweringContext,
    grad: GraphTensor,
    sizes: Sequence[Size],
    dim: int,
    start: Size,
    end: Size,
    step: int,
) -> GraphTensor:
    """Gradient of a slice: zeros outside it."""
    size = sizes[dim]
    return placed(ctx, grad, dim, size, slice_start(size, start), step)


@lowering(aten.select_backward.default, layout=Layout.RAW)
def select_backward(
    ctx: LoweringContext, grad: GraphTensor, sizes: Sequence[Size], dim: int, index: Size
) -> GraphTensor:
    """Gradient of one slice: zeros at the others."""
    dim %= len(sizes)
    if not isinstance(index, int):
        raise CannotLower("a slice at a run-time position")
    return placed(ctx, with_unit(grad, dim), dim, sizes[dim], index % sizes[dim], 1)


def with_unit(x: GraphTensor, dim: int) -> GraphTensor:
    """``x`` with a unit dimension at ``dim``."""
    shape = x.shape
    shape.insert(dim, Dim(1))
    kept = [d + (d >= dim) for d in x.order]
    return reshaped(x, shape, order_with_units(shape, [d for d in kept if not is_unit(shape[d])]))


def _between(
    ctx: LoweringContext, x: GraphTensor, source: GraphTensor, dim: int, start: Size, step: int
) -> GraphTensor:
    """``x`` with ``source`` in place of every ``step``-th slice of ``dim`` from ``start`` on."""
    dim %= x.rank
    size = ctx.meta.shape[dim]
    source = source.to_order(x.order)
    source = source.with_value(ctx.cast(source.value, x.dtype))
    axis = x.axis(dim)
    count = source.value.shape[axis]
    if not (isinstance(size, int) and isinstance(start, int) and isinstance(count, StaticDim)):
        raise CannotLower("a slice written at a run-time position")
    if step == 1 or int(count) <= 1:
        parts = [
            sliced(x, dim, Dim(0), Dim(start)),
            source,
            sliced(x, dim, Dim(start + int(count)), Dim(size - start - int(count))),
        ]
        values = [part.value for part in parts if part.value.shape[axis] != Dim(0)]
        return x.with_value(ops.concat(values, axis)) if values else x
    mask = np.zeros([size if d == axis else 1 for d in range(x.rank)], dtype=np.bool_)
    mask.reshape(-1)[start : start + (int(count) - 1) * step + 1 : step] = True
    chosen = ops.constant(mask, DType.bool, device=ctx.device)
    new = placed(ctx, source, dim, size, start, step)
    return x.with_value(ops.where(chosen, new.value, x.value))


@lowering(aten.slice_scatter.default, layout=Layout.RAW)
def slice_scatter(
    ctx: LoweringContext,
    x: GraphTensor,
    source: GraphTensor,
    dim: int = 0,
    start: Size | None = None,
    end: Size | None = None,
    step: int = 1,
) -> GraphTensor:
    """A slice replaced."""
    return _between(ctx, x, source, dim, slice_start(ctx.meta.shape[dim], start), step)


@lowering(aten.select_scatter.default, layout=Layout.RAW)
def select_scatter(ctx: LoweringContext, x: GraphTensor, source: GraphTensor, dim: int, index: Size) -> GraphTensor:
    """One slice replaced."""
    dim %= x.rank
    if not (isinstance(index, int) and isinstance(ctx.meta.shape[dim], int)):
        raise CannotLower("a slice at a run-time position")
    return _between(ctx, x, with_unit(source, dim), dim, index % ctx.meta.shape[dim], 1)


def flipped(x: GraphTensor, dim: int) -> GraphTensor:
    """``x`` back to front along one dimension."""
    axis = x.axis(dim)
    size = x.value.shape[axis]
    if size == Dim(0) or is_unit(size):
        return x
    # MAX's slice with a negative step returns its input unreversed where one axis alone has one.
    if not isinstance(size, StaticDim):
        raise CannotLower("a flip along a dimension of run-time extent")
    back = ops.constant(np.arange(int(size))[::-1].copy(), DType.int64, device=x.value.device)
    return x.with_value(gather(x.value, back, axis))


@lowering(aten.flip.default, layout=Layout.RAW)
def flip(ctx: LoweringContext, x: GraphTensor, dims: Sequence[int]) -> GraphTensor:
    """Back to front along each of ``dims``."""
    for dim in dims:
        x = flipped(x, dim)
    return x


@lowering(aten.roll.default, layout=Layout.RAW)
def roll(
    ctx: LoweringContext, x: GraphTensor, shifts: Sequence[Size] | Size, dims: Sequence[int] | int = ()
) -> GraphTensor:
    """Entries moved along ``dims``, those that leave coming in at the other end."""
    shape = list(ctx.meta.shape)
    given = list(shifts) if isinstance(shifts, Sequence) else [shifts]
    along = [dims] if isinstance(dims, int) else list(dims)
    amounts = [amount for amount in given if isinstance(amount, int)]
    if len(amounts) < len(given):
        raise CannotLower("a roll by a run-time amount")
    if not along:
        flat = reshaped(x.to_order(contiguous_order(x.rank)), [_product(ctx.out_shape())], (0,))
        flat = _rolled(flat, 0, amounts[0], torch.Size(shape).numel())
        return reshaped(flat, ctx.out_shape(), contiguous_order(len(shape)))
    for amount, dim in zip(amounts, along, strict=True):
        x = _rolled(x, dim, amount, shape[dim])
    return x


def _rolled(x: GraphTensor, dim: int, amount: int, size: Size) -> GraphTensor:
    if not isinstance(size, int):
        raise CannotLower("a roll along a dimension of run-time extent")
    shift = amount % size if size else 0
    if shift == 0:
        return x
    tail, head = sliced(x, dim, Dim(size - shift), Dim(shift)), sliced(x, dim, Dim(0), Dim(size - shift))
    return x.with_value(ops.concat([tail.value, head.value], x.axis(dim)))


def _product(dims: Sequence[Dim]) -> Dim:
    total = Dim(1)
    for dim in dims:
        total = total * dim
    return total


@lowering(aten.repeat.default, layout=Layout.RAW)
def repeat(ctx: LoweringContext, x: GraphTensor, repeats: Sequence[Size]) -> GraphTensor:
    """The whole tensor ``repeats[i]`` times along dimension i; leading dimensions are added as needed."""
    for _ in range(len(repeats) - x.rank):
        x = with_unit(x, 0)
    # [a, b, c] -> [1, a, b, 1, c] -> [r, a, b, s, c] -> [r * a, b, s * c], in memory order, repeated axes only
    apart: list[Dim] = []
    spread: list[Dim] = []
    for extent, dim in zip(x.value.shape, x.order, strict=True):
        if not is_unit(repeats[dim]):
            apart.append(Dim(1))
            spread.append(ctx.dim(repeats[dim]))
        apart.append(extent)
        spread.append(extent)
    if len(apart) > MAX_RANK:
        raise CannotLower(f"repeating this many dimensions takes {len(apart)}, MAX has {MAX_RANK}")
    shape = ctx.out_shape()
    value = ops.broadcast_to(ops.reshape(x.value, apart), spread)
    return x.with_value(ops.reshape(value, [shape[dim] for dim in x.order]))


@lowering(aten.diagonal.default, layout=Layout.RAW)
def diagonal(ctx: LoweringContext, x: GraphTensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> GraphTensor:
    """The diagonal of two dimensions, as a new last dimension."""
    dim1, dim2 = dim1 % x.rank, dim2 % x.rank
    sizes = ctx.arg_meta(0).shape
    rows, columns, length = sizes[dim1], sizes[dim2], ctx.meta.shape[-1]
    if not (isinstance(rows, int) and isinstance(columns, int)):
        raise CannotLower("the diagonal of a matrix of run-time extent")
    others = [dim for dim in range(x.rank) if dim not in (dim1, dim2)]
    x = x.permuted([*others, dim1, dim2]).to_order(contiguous_order(x.rank))
    outer = x.shape[:-2]
    flat = reshaped(x, [*outer, Dim(rows * columns)], contiguous_order(x.rank - 1))
    start = offset if offset >= 0 else -offset * columns
    if length == 0:
        return sliced(flat, -1, Dim(0), Dim(0))
    return sliced(flat, -1, Dim(start), Dim(length), columns + 1)
