"""Interpolation in one to three dimensions, forward and backward, and adaptive average pooling: its mode "area"."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from max.graph import Dim, TensorValue
from torch.fx import Node

from torch_max_backend.custom_ops.interpolation import BACKWARD, FORWARD
from torch_max_backend.dtypes import device_ref, max_dtype
from torch_max_backend.errors import InvalidArgumentError
from torch_max_backend.ir import ops
from torch_max_backend.ir.layout import GraphTensor, Order, channels_last_order, contiguous_order
from torch_max_backend.lowering import reduction
from torch_max_backend.lowering.context import LoweringContext
from torch_max_backend.lowering.registry import Layout, lowering
from torch_max_backend.lowering.shape import prefer_channels_last
from torch_max_backend.mojo_ops import interpolation as kernels
from torch_max_backend.mojo_ops.functions import LibraryFunction, target_of
from torch_max_backend.problems.interpolation import Axes, Mode, interpolation_axes
from torch_max_backend.torch_compat import OpOverload

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


aten = torch.ops.aten


def _spatial_rank(node: Node) -> int:
    """1 to 3, from the op's name."""
    return next(rank for rank in (1, 2, 3) if f"{rank}d" in str(node.target))


def _supports(node: Node) -> str | None:
    x = cast(Node, node.args[0]).meta["val"]
    if x.dtype not in _FLOATS:
        return f"interpolation runs in {', '.join(map(str, _FLOATS))}, not {x.dtype}"
    if x.dtype == torch.float64 and x.device.type != "cpu":
        return "interpolation in float64 runs on the CPU only"
    rank = _spatial_rank(node)
    sizes = (*x.shape[-rank:], *node.meta["val"].shape[-rank:])
    if not all(isinstance(size, int) for size in sizes):
        return "the tables of interpolation need known extents"
    return None


def _functions(node: Node) -> Iterable[LibraryFunction]:
    """The library functions that a node calls."""
    if _supports(node) is None:
        fake = node.meta["val"]
        yield kernels.interpolation_function(target_of(device_ref(fake.device)), max_dtype(fake.dtype))


def _axes(
    ctx: LoweringContext,
    modes: Mapping[OpOverload, Mode],
    input: Sequence[int],
    output: Sequence[int],
    rest: Sequence[Any],
) -> Axes:
    """The axes of the op, whose arguments behind the sizes are ``rest``."""
    mode = modes[cast(OpOverload, ctx.node.target)]
    corners, factors = False, list(rest)
    if mode not in (Mode.NEAREST, Mode.NEAREST_EXACT):
        corners, *factors = factors
    factors += [None] * (len(input) - len(factors))
    try:
        return interpolation_axes(mode, input, output, corners, factors, is_gpu=ctx.device.is_gpu())
    except ValueError as error:
        raise InvalidArgumentError(f"interpolation: {error}") from None


def by_kernel(
    x: GraphTensor, spatial_rank: int, shape: Sequence[Dim], kernel: Callable[[TensorValue], TensorValue]
) -> GraphTensor:
    """The result of a kernel on ``x``, shown as [N, D, H, W, C], as a tensor of the logical ``shape``.

    A channels-last tensor shows its channels; a contiguous one is shown as N x C planes of one channel, which spares
    the conversion.
    """
    last = channels_last_order(x.rank)
    by_channels = x.rank == spatial_rank + 2 and x.order == last
    order: Order = last if by_channels else contiguous_order(x.rank)
    value = x.to_order(order).value
    full = [*[1] * (3 - spatial_rank), *x.shape[-spatial_rank:]]
    if by_channels:
        y = kernel(ops.reshape(value, [x.shape[0], *full, x.shape[1]]))
    else:
        planes = functools.reduce(operator.mul, x.shape[:-spatial_rank], Dim(1))
        y = kernel(ops.reshape(value, [planes, *full, 1]))
    return GraphTensor(ops.reshape(y, [shape[dim] for dim in order]), order)


@lowering(*FORWARD, layout=Layout.RAW, supports=_supports, functions=_functions)
def interpolate(
    ctx: LoweringContext, x: GraphTensor, output_size: Sequence[int], *rest: Any, **named: Any
) -> GraphTensor:
    """Sums with weights along each axis; one pixel is repeated."""
    shape = ctx.out_shape()
    axes = _axes(ctx, FORWARD, ctx.arg_meta(0).shape[2:], output_size, (*rest, *named.values()))
    if x.shape == shape and all(axis.factor is None for axis in axes):
        return x
    if all(axis.input == 1 for axis in axes):
        x = prefer_channels_last(x)
        return x.with_value(ops.broadcast_to(x.value, [shape[dim] for dim in x.order]))
    only_returned = all(user.op == "output" for user in ctx.node.users)
    if only_returned and ctx.meta.is_contiguous() and ctx.meta.numel() > ctx.arg_meta(0).numel():
        # Converted while it is small: PyTorch expects the result in this order.
        x = x.to_order(contiguous_order(x.rank))
    return by_kernel(x, x.rank - 2, shape, lambda value: kernels.interpolate(value, axes))


@lowering(*BACKWARD, layout=Layout.RAW, supports=_supports, functions=_functions)
def interpolate_backward(
    ctx: LoweringContext,
    grad: GraphTensor,
    output_size: Sequence[int],
    input_size: Sequence[int],
    *rest: Any,
    **named: Any,
) -> GraphTensor:
    """Each pixel gathers the results that read it: deterministic. What came from one pixel is added up.

    ATen's own gradient of bicubic interpolation, and of the antialiased ones, does not belong to its results where an
    axis keeps its size under a factor that is not 1; this one does.
    """
    shape = ctx.out_shape()
    axes = _axes(ctx, BACKWARD, input_size[2:], output_size, (*rest, *named.values()))
    if grad.shape == shape and all(axis.factor is None for axis in axes):
        return grad
    if all(axis.input == 1 for axis in axes):
        dims = list(range(2, grad.rank))
        return reduction.in_result_dtype(
            ctx, reduction.reduce(reduction.compute(ctx, grad), dims, True, reduction.total, 0)
        )
    return by_kernel(grad, grad.rank - 2, shape, lambda value: kernels.interpolate_dgrad(value, axes))


@lowering(
    aten._adaptive_avg_pool2d.default,
    aten._adaptive_avg_pool3d.default,
    layout=Layout.RAW,
    supports=_supports,
    functions=_functions,
)
def adaptive_avg_pool(ctx: LoweringContext, x: GraphTensor, output_size: Sequence[int]) -> GraphTensor:
    """Averages over windows that cover the input evenly. (PyTorch makes a mean of those over whole planes.)"""
    rank = _spatial_rank(ctx.node)
    axes = _area(ctx.arg_meta(0).shape[-rank:], ctx.meta.shape[-rank:])
    return by_kernel(x, rank, ctx.out_shape(), lambda value: kernels.interpolate(value, axes))


@lowering(
    aten._adaptive_avg_pool2d_backward.default,
    aten._adaptive_avg_pool3d_backward.default,
    layout=Layout.RAW,
    supports=_supports,
    functions=_functions,
)
def adaptive_avg_pool_backward(ctx: LoweringContext, grad: GraphTensor, x: GraphTensor) -> GraphTensor:
    """Each pixel gathers its shares of the windows over it: deterministic."""
    rank = _spatial_rank(ctx.node)
    axes = _area(ctx.meta.shape[-rank:], ctx.arg_meta(0).shape[-rank:])
    return by_kernel(grad, rank, ctx.out_shape(), lambda value: kernels.interpolate_dgrad(value, axes))


def _area(input: Sequence[int], output: Sequence[int]) -> Axes:
    try:
        return interpolation_axes(Mode.AREA, input, output)
    except ValueError as error:
        raise InvalidArgumentError(f"adaptive pooling: {error}") from None
