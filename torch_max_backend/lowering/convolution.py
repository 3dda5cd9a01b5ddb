"""aten.convolution and aten.convolution_backward, 1-D to 3-D, grouped, dilated, transposed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from max.dtype import DType
from max.graph import TensorValue
from torch.fx import Node

from torch_max_backend.dtypes import FLOATS, NARROW_FLOATS, device_ref, max_dtype
from torch_max_backend.errors import InvalidArgumentError
from torch_max_backend.ir import ops
from torch_max_backend.ir.layout import GraphTensor, contiguous_order, dense_order
from torch_max_backend.lowering import numerics
from torch_max_backend.lowering.context import LoweringContext
from torch_max_backend.lowering.reduction import reduce_axes, total
from torch_max_backend.lowering.registry import Layout, lowering
from torch_max_backend.mojo_ops.convolution import (
    Geometry,
    Grouping,
    conv_dgrad,
    conv_fprop,
    conv_wgrad,
    convolution_function,
    workspace_limit,
)
from torch_max_backend.mojo_ops.functions import LibraryFunction, target_of
from torch_max_backend.problems.convolution import ConvolutionProblem, Pass

aten = torch.ops.aten

_FEW_CHANNELS, _MOST_PHASES = 4, 16


def _problem(x: torch.Tensor, weight: torch.Tensor, geometry: Sequence[Any]) -> ConvolutionProblem:
    """The problem that ``aten.convolution(x, weight, ..., *geometry)`` poses.

    Raises:
        InvalidArgumentError: an argument breaks a rule of the op.
    """
    if x.dtype != weight.dtype:
        raise InvalidArgumentError(f"convolution: weight has dtype {weight.dtype}: must be input's, {x.dtype}")
    if x.device != weight.device:
        raise InvalidArgumentError(f"convolution: weight is on {weight.device}: must be input's device, {x.device}")
    stride, padding, dilation, transposed, output_padding, groups = geometry
    try:
        return ConvolutionProblem.from_aten(
            list(x.shape), list(weight.shape), stride, padding, dilation, transposed, output_padding, groups
        )
    except ValueError as error:
        raise InvalidArgumentError(f"convolution: {error}") from None


def _unsupported(x: torch.Tensor, weight: torch.Tensor) -> str | None:
    if x.dtype not in FLOATS:
        return f"convolution runs in {', '.join(map(str, FLOATS))}, not {x.dtype}"
    if any(isinstance(size, torch.SymInt) for size in weight.shape):
        return "the filter's shape is dynamic"
    return None


def _fake(node: Node, index: int) -> Any:
    arg = node.args[index]
    return arg.meta["val"] if isinstance(arg, Node) else arg


def _forward_supports(node: Node) -> str | None:
    x, weight = _fake(node, 0), _fake(node, 1)
    reason = _unsupported(x, weight)
    if reason is None:
        _problem(x, weight, node.args[3:9])
    return reason


def _backward_supports(node: Node) -> str | None:
    grad, x, weight = (_fake(node, index) for index in range(3))
    reason = _unsupported(x, weight)
    if reason is not None:
        return reason
    problem = _problem(x, weight, node.args[4:10])
    try:
        problem.check_grad_output(list(grad.shape))
    except ValueError as error:
        raise InvalidArgumentError(f"convolution_backward: {error}") from None
    if grad.dtype != x.dtype:
        raise InvalidArgumentError(
            f"convolution_backward: grad_output has dtype {grad.dtype}: must be input's, {x.dtype}"
        )
    return None


def _forward_functions(node: Node) -> Iterator[LibraryFunction]:
    transposed, groups = bool(_fake(node, 6)), _fake(node, 8)
    yield from _functions(_fake(node, 0), _fake(node, 1), groups, [Pass.DGRAD if transposed else Pass.FPROP])


def _backward_functions(node: Node) -> Iterator[LibraryFunction]:
    transposed, groups, mask = bool(_fake(node, 7)), _fake(node, 9), _fake(node, 10)
    data_gradient = Pass.FPROP if transposed else Pass.DGRAD
    wanted = [which for which, asked in zip((data_gradient, Pass.WGRAD), mask, strict=False) if asked]
    yield from _functions(_fake(node, 1), _fake(node, 2), groups, wanted)


def _functions(x: torch.Tensor, weight: torch.Tensor, groups: int, passes: Sequence[Pass]) -> Iterator[LibraryFunction]:
    if x.dtype in FLOATS:
        target = target_of(device_ref(x.device))
        filters, group_channels = weight.shape[:2]
        if _is_multiplied(filters, group_channels, groups, target == "gpu"):
            groups = filters
        grouping = Grouping.of(groups, group_channels, filters)
        for which in passes:
            deep = x.dim() == 5
            yield from convolution_function(which.value, target, max_dtype(x.dtype), grouping, deep).at_once


def _is_multiplied(filters: int, group_channels: int, groups: int, on_gpu: bool) -> bool:
    """Whether channels are repeated for a depthwise convolution with several filters for each channel.

    On a GPU, where the kernels of groups of channels take several times as long as that and a plain depthwise one.
    """
    return on_gpu and group_channels == 1 and filters > groups > 1


def with_repeated_channels(problem: ConvolutionProblem, on_gpu: bool) -> ConvolutionProblem:
    """The plain depthwise convolution that runs in the place of ``problem``, which may be the same."""
    p = problem
    multiplied = _is_multiplied(p.k, p.c // p.groups, p.groups, on_gpu)
    return replace(p, c=p.k, groups=p.k) if multiplied else p


def is_widened(p: ConvolutionProblem, dtype: DType, on_gpu: bool) -> bool:
    """Whether a data gradient of 16 bits is computed in float32, of few channels and with more phases than the kernels
    for 16 bits have (gpu/gemm_col2im.mojo). Products of widened numbers are exact in TF32."""
    few = p.groups == 1 and p.c <= _FEW_CHANNELS and p.k % _FEW_CHANNELS == 0
    return on_gpu and dtype in NARROW_FLOATS and few and math.prod(p.stride) > _MOST_PHASES


def _repeated(x: TensorValue, channels: int) -> TensorValue:
    """x [..., C] with each channel as often as there are ``channels`` then."""
    *rest, c = x.shape
    if c == channels:
        return x
    wide = ops.broadcast_to(ops.reshape(x, [*x.shape, 1]), [*x.shape, channels // int(c)])
    return ops.reshape(wide, [*rest, channels])


def _joined(x: TensorValue, channels: int) -> TensorValue:
    """The gradient of ``_repeated``: sums of neighbouring channels, of which ``channels`` are left."""
    *rest, wide = x.shape
    if wide == channels:
        return x
    parts = ops.reshape(x, [*rest, channels, int(wide) // channels])
    parts = numerics.cast(parts, DType.float32) if x.dtype in NARROW_FLOATS else parts
    summed = reduce_axes(parts, {len(rest) + 1}, total, 0)
    return numerics.cast(ops.reshape(summed, [*rest, channels]), x.dtype)


def _activation(tensor: GraphTensor) -> TensorValue:
    """[N, D, H, W, C]: channels-last, with unit extents for the axes that the problem lacks."""
    value = tensor.channels_last()
    n, *spatial, c = value.shape
    return ops.reshape(value, [n, *[1] * (3 - len(spatial)), *spatial, c])


def _filter(weight: GraphTensor) -> tuple[TensorValue, bool]:
    """A filter [K, C/G, *spatial] as the kernels take it, and whether its taps lie inside.

    That is [K, T, R, S, C/G]. Kernels for CPUs pack a filter anyway, and take a contiguous one as it is.
    """
    if weight.value.device.is_gpu() or weight.order != contiguous_order(weight.rank):
        return _activation(weight), False
    k, c, *spatial = weight.value.shape
    return ops.reshape(weight.value, [k, c, *[1] * (3 - len(spatial)), *spatial]), True


def _restored(value: TensorValue, spatial_rank: int) -> GraphTensor:
    """The inverse of ``_activation``."""
    n, *spatial, c = value.shape
    return GraphTensor.from_channels_last(ops.reshape(value, [n, *spatial[3 - spatial_rank :], c]))


def _filter_gradient(dw: TensorValue, taps_inside: bool, spatial_rank: int) -> GraphTensor:
    """The gradient of a filter as the kernels make it."""
    if not taps_inside:
        return _restored(dw, spatial_rank)
    k, c, *spatial = dw.shape
    return GraphTensor.contiguous(ops.reshape(dw, [k, c, *spatial[3 - spatial_rank :]]))


def _geometry(problem: ConvolutionProblem, like: GraphTensor, taps_inside: bool) -> Geometry:
    """For operands with the dtype and device of ``like``, with the precision that PyTorch's setting for cuDNN asks for
    while the graph is compiled."""
    return Geometry(
        problem.stride,
        problem.padding,
        problem.dilation,
        problem.groups,
        workspace_limit(problem, like.dtype.size_in_bytes, like.value.device.is_gpu()),
        allow_tf32=allows_tf32(),
        taps_inside=taps_inside,
    )


def allows_tf32() -> bool:
    """``torch.backends.cudnn.allow_tf32``, or the newer setting where that one has been used."""
    try:
        return torch.backends.cudnn.allow_tf32
    except RuntimeError:
        newer: Any = torch.backends.cudnn
        return newer.conv.fp32_precision == "tf32"


def _run(
    ctx: LoweringContext,
    problem: ConvolutionProblem,
    which: Pass,
    source: GraphTensor,
    weight: GraphTensor,
    after: Sequence[TensorValue] = (),
) -> GraphTensor:
    """fprop or dgrad of ``source`` (x or dy); dgrad runs ``after`` the gradients of filter and bias."""
    size = ctx.dims(problem.output_size if which is Pass.FPROP else problem.input_size)
    w, taps_inside = _filter(weight)
    run = with_repeated_channels(problem, source.value.device.is_gpu())
    geometry = _geometry(run, source, taps_inside)
    if which is Pass.FPROP:
        value = conv_fprop(_repeated(_activation(source), run.c), w, geometry, output_size=size)
    else:
        dy, dtype = _activation(source), source.dtype
        if is_widened(run, dtype, source.value.device.is_gpu()):
            dy, w = (numerics.cast(each, DType.float32) for each in (dy, w))
            limit = workspace_limit(run, DType.float32.size_in_bytes, on_gpu=True)
            geometry = replace(geometry, workspace_limit=limit, allow_tf32=True)
        value = conv_dgrad(dy, w, geometry, input_size=size, after=after)
        value = _joined(numerics.cast(value, dtype), problem.c)
    return _restored(value, problem.spatial_rank)


@lowering(aten.convolution.default, layout=Layout.RAW, supports=_forward_supports, functions=_forward_functions)
def convolution(
    ctx: LoweringContext, x: GraphTensor, weight: GraphTensor, bias: GraphTensor | None, *geometry: Any
) -> GraphTensor:
    """Forward; a transposed convolution is the data gradient of the one it transposes."""
    problem = _problem(ctx.arg_meta(0), ctx.arg_meta(1), geometry)
    result = _run(ctx, problem, problem.forward_pass, x, weight)
    return result if bias is None else result.with_value(result.value + bias.value)


@lowering(
    aten.convolution_backward.default, layout=Layout.RAW, supports=_backward_supports, functions=_backward_functions
)
def convolution_backward(
    ctx: LoweringContext,
    grad: GraphTensor,
    x: GraphTensor,
    weight: GraphTensor,
    bias_sizes: Sequence[int] | None,
    *arguments_and_mask: Any,
) -> tuple[GraphTensor | None, GraphTensor | None, GraphTensor | None]:
    """Gradients of input, weight and bias, those that ``output_mask`` asks for."""
    *arguments, mask = arguments_and_mask
    problem = _problem(ctx.arg_meta(1), ctx.arg_meta(2), arguments)
    rank = problem.spatial_rank
    dy = _activation(grad)
    grad_input = grad_weight = grad_bias = None
    others = []
    if mask[1]:
        large, small = (dy, _activation(x)) if problem.transposed else (_activation(x), dy)
        promised = ctx.meta[1]
        taps_inside = not dy.device.is_gpu() and dense_order(promised) == contiguous_order(rank + 2)
        run = with_repeated_channels(problem, dy.device.is_gpu())
        geometry = _geometry(run, grad, taps_inside)
        dw = conv_wgrad(_repeated(large, run.c), small, geometry, filter_size=problem.filter_size)
        grad_weight = _filter_gradient(dw, taps_inside, rank)
        others.append(dw)
    if mask[2]:
        db = bias_gradient(dy)
        grad_bias = GraphTensor.contiguous(db)
        others.append(ops.reshape(db, [*db.shape, 1, 1, 1, 1]))
    if mask[0]:
        grad_input = _run(ctx, problem, problem.grad_input_pass, grad, weight, others)
    return grad_input, grad_weight, grad_bias


def bias_gradient(dy: TensorValue) -> TensorValue:
    """dy [N, O, P, Q, K] summed over all axes but the last, a vector."""
    wide = numerics.cast(dy, DType.float32) if dy.dtype in NARROW_FLOATS else dy
    summed = reduce_axes(wide, {0, 1, 2, 3}, total, 0)
    return numerics.cast(ops.reshape(summed, [dy.shape[4]]), dy.dtype)
