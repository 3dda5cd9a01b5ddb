"""Sliding windows: F.unfold and F.fold (im2col and col2im), and ``Tensor.unfold`` with its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from max.dtype import DType
from max.graph import Dim
from torch.fx import Node

from torch_max_backend.dtypes import FLOATS
from torch_max_backend.errors import InvalidArgumentError
from torch_max_backend.ir import ops
from torch_max_backend.ir.layout import GraphTensor, Order, contiguous_order
from torch_max_backend.lowering.context import LoweringContext
from torch_max_backend.lowering.indexing import take
from torch_max_backend.lowering.registry import Layout, lowering
from torch_max_backend.mojo_ops import windows as kernels
from torch_max_backend.mojo_ops.windows import Windows

aten = torch.ops.aten


def _refused_dtype(x: torch.Tensor) -> str | None:
    if x.dtype not in FLOATS:
        return f"windows are laid out in {', '.join(map(str, FLOATS))}, not {x.dtype}"
    return "windows in float64 run on the CPU only" if x.dtype == torch.float64 and x.device.type != "cpu" else None


def _planes_are_known(node: Node) -> str | None:
    x = cast(Node, node.args[0]).meta["val"]
    image = x if node.target is aten.im2col.default else node.meta["val"]
    if not all(isinstance(size, int) for size in image.shape[-2:]):
        return "windows over extents that are known only at run time"
    return _refused_dtype(x)


def _windows(input: Sequence[int], taps: Any, dilation: Any, padding: Any, stride: Any) -> Windows:
    def pair(numbers: Sequence[int]) -> tuple[int, int]:
        return (numbers[0], numbers[-1])

    try:
        return Windows(pair(input), pair(taps), pair(stride), pair(padding), pair(dilation))
    except ValueError as error:
        raise InvalidArgumentError(f"windows: {error}") from None


def _product(dims: Sequence[Dim]) -> Dim:
    total = Dim(1)
    for dim in dims:
        total = total * dim
    return total


@lowering(aten.im2col.default, layout=Layout.LOGICAL, supports=_planes_are_known)
def im2col(
    ctx: LoweringContext,
    x: Any,
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Any:
    """Columns [N, C * R * S, P * Q] of x [N, C, H, W]; N may be missing."""
    windows = _windows(ctx.arg_meta(0).shape[-2:], kernel_size, dilation, padding, stride)
    planes = ops.reshape(x, [_product(x.shape[:-2]), *windows.input, 1])
    return ops.reshape(kernels.lay_out_windows(planes, windows, taps_first=True), ctx.out_shape())


@lowering(aten.col2im.default, layout=Layout.LOGICAL, supports=_planes_are_known)
def col2im(
    ctx: LoweringContext,
    x: Any,
    output_size: Sequence[int],
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Any:
    """[N, C, *output_size] from columns [N, C * R * S, P * Q]: each element is the sum of what they have for it."""
    shape = ctx.out_shape()
    windows = _windows(output_size, kernel_size, dilation, padding, stride)
    columns = ops.reshape(x, windows.columns_shape(_product(shape[:-2]), 1, taps_first=True))
    return ops.reshape(kernels.add_up_windows(columns, windows, taps_first=True), shape)


def _extent_is_known(node: Node) -> str | None:
    x = cast(Node, node.args[0]).meta["val"]
    if x.dim() == 0:
        return "a tensor of rank 0"
    dim = cast(int, node.args[1])
    return None if isinstance(x.shape[dim], int) else "an extent that is known only at run time"


def _behind(order: Order, dim: int, rank: int) -> Order:
    """``order`` with a new last dimension next to ``dim``."""
    at = order.index(dim) + 1
    return (*order[:at], rank, *order[at:])


def _along(extent: int, size: int, step: int) -> Windows:
    return _windows((1, extent), (1, size), (1, 1), (0, 0), (1, step))


@lowering(aten.unfold.default, layout=Layout.RAW, supports=_extent_is_known)
def unfold(ctx: LoweringContext, x: GraphTensor, dim: int, size: int, step: int) -> GraphTensor:
    """Windows of ``size`` along ``dim``, one every ``step``, whose elements lie in a new last dimension."""
    dim %= x.rank
    axis, extent = x.axis(dim), int(x.shape[dim])
    windows = _along(extent, size, step)
    count = windows.output[1]
    physical = list(x.value.shape)
    before, after = physical[:axis], physical[axis + 1 :]
    value = x.value
    if size == step and count * size == extent:
        # A view.
        pass
    elif _refused_dtype(ctx.meta):
        rows = (np.arange(count)[:, None] * step + np.arange(size)).reshape(-1)
        value = take(x, dim, ops.constant(rows, DType.int64, device=ctx.device))
    else:
        value = kernels.lay_out_windows(
            ops.reshape(value, [_product(before), 1, extent, _product(after)]), windows, taps_first=False
        )
    return GraphTensor(ops.reshape(value, [*before, count, size, *after]), _behind(x.order, dim, x.rank))


def _gradient_is_known(node: Node) -> str | None:
    sizes, dim = cast(Sequence[Any], node.args[1]), cast(int, node.args[2])
    if not sizes:
        return "a tensor of rank 0"
    if not isinstance(sizes[dim], int):
        return "an extent that is known only at run time"
    return _refused_dtype(node.meta["val"])


@lowering(aten.unfold_backward.default, layout=Layout.RAW, supports=_gradient_is_known)
def unfold_backward(
    ctx: LoweringContext, grad: GraphTensor, input_sizes: Sequence[int], dim: int, size: int, step: int
) -> GraphTensor:
    """Each element is the sum of what the windows over it have: deterministic."""
    rank = grad.rank - 1
    dim %= rank
    order = tuple(each for each in grad.order if each != rank)
    if grad.order == contiguous_order(grad.rank):
        order = contiguous_order(rank)
    grad = grad.to_order(_behind(order, dim, rank))
    axis, extent = order.index(dim), int(input_sizes[dim])
    windows = _along(extent, size, step)
    shape = ctx.out_shape()
    physical = [shape[each] for each in order]
    before, after = physical[:axis], physical[axis + 1 :]
    value = grad.value
    if size != step or windows.output[1] * size != extent:
        columns = windows.columns_shape(_product(before), _product(after), taps_first=False)
        value = kernels.add_up_windows(ops.reshape(value, columns), windows, taps_first=False)
    return GraphTensor(ops.reshape(value, physical), order)
