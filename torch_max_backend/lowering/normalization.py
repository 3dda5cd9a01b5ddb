"""Batch, group and layer normalization.

Batch normalization's reductions are Mojo kernels over channels-last memory; normalizing is elementwise in the graph,
so it runs in one generated program with the activation or the addition that follows. Everything is computed in float32
(float64 for float64) and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from max.dtype import DType
from max.graph import Dim, StaticDim, TensorValue
from torch.fx import Node

from torch_max_backend.dtypes import accumulation_dtype, max_dtype
from torch_max_backend.errors import CannotLower
from torch_max_backend.ir import ops
from torch_max_backend.ir.layout import GraphTensor, aligned, contiguous_order
from torch_max_backend.lowering import numerics
from torch_max_backend.lowering.context import LoweringContext
from torch_max_backend.lowering.reduction import mean_of
from torch_max_backend.lowering.registry import Layout, lowering
from torch_max_backend.lowering.shape import reshaped, view_order
from torch_max_backend.mojo_ops.normalization import batch_norm_gradient_sums, batch_norm_statistics

aten = torch.ops.aten


def _supports(node: Node) -> str | None:
    x = node.args[0].meta["val"]
    if not x.is_floating_point():
        return f"normalization of {x.dtype}"
    if any(isinstance(size, torch.SymInt) for size in x.shape[1:2]):
        return "the number of channels is dynamic"
    return None


def _wide(value: TensorValue) -> TensorValue:
    return numerics.cast(value, accumulation_dtype(value.dtype))


def _rows(x: GraphTensor) -> TensorValue:
    """``x`` as [rows, C], channels-last."""
    value = x.channels_last()
    rows = Dim(1)
    for size in value.shape[:-1]:
        rows = rows * size
    return ops.reshape(value, [rows, value.shape[-1]])


def _cast_results(ctx: LoweringContext, values: Sequence[TensorValue | None]) -> list[GraphTensor | None]:
    """Per-channel results in the dtypes that PyTorch promised; ``values`` follow the node's first result."""
    results: list[GraphTensor | None] = []
    for value, meta in zip(values, ctx.meta[1:], strict=True):
        cast = None if value is None else numerics.cast(value, max_dtype(meta.dtype))
        results.append(None if cast is None else GraphTensor.contiguous(cast))
    return results


def _normalized(
    ctx: LoweringContext,
    x: GraphTensor,
    mean: TensorValue,
    invstd: TensorValue,
    weight: GraphTensor | None,
    bias: GraphTensor | None,
) -> GraphTensor:
    """(x - mean) * invstd * weight + bias, channels-last."""
    value = x.channels_last()
    scale = invstd if weight is None else invstd * numerics.cast(weight.value, invstd.dtype)
    result = (_wide(value) - mean) * scale
    if bias is not None:
        result = result + numerics.cast(bias.value, result.dtype)
    return GraphTensor.from_channels_last(numerics.cast(result, ctx.max_dtype))


def _with_batch_statistics(
    ctx: LoweringContext,
    x: GraphTensor,
    weight: GraphTensor | None,
    bias: GraphTensor | None,
    running_mean: GraphTensor | None,
    running_var: GraphTensor | None,
    momentum: float,
    eps: float,
) -> tuple[GraphTensor, tuple[TensorValue | None, ...]]:
    if not isinstance(momentum, (int, float)):
        raise CannotLower("a momentum that is known at run time only")
    if running_mean is None and _has_rows(x):
        return _rows_standardized(ctx, x, weight, bias, eps)
    statistics = batch_norm_statistics(
        _rows(x),
        None if running_mean is None else _wide(running_mean.value),
        None if running_var is None else _wide(running_var.value),
        float(momentum),
        float(eps),
    )
    return _normalized(ctx, x, statistics.mean, statistics.invstd, weight, bias), statistics


def _has_rows(x: GraphTensor) -> bool:
    """Whether each channel is one row of memory: a single sample, as where filters are standardized."""
    if x.rank < 3 or x.shape[0] != 1:
        return False
    return x.order.index(1) < min(map(x.order.index, range(2, x.rank)))


def _per_channel(value: TensorValue, like: GraphTensor) -> TensorValue:
    """[C] beside ``like``."""
    shape = [1, value.shape[0], *[1] * (like.rank - 2)]
    return GraphTensor.contiguous(ops.reshape(value, shape)).to_order(like.order).value


def _rows_standardized(
    ctx: LoweringContext, x: GraphTensor, weight: GraphTensor | None, bias: GraphTensor | None, eps: float
) -> tuple[GraphTensor, tuple[TensorValue, TensorValue]]:
    """Batch normalization of a single sample, as a normalization of rows, and mean and reciprocal root [C]."""
    y, mean, rstd = _standardized(x.with_value(_wide(x.value)), range(2, x.rank), float(eps))
    for parameter, combine in ((weight, ops.mul), (bias, ops.add)):
        if parameter is not None:
            y = combine(y, numerics.cast(_per_channel(parameter.value, x), y.dtype))
    saved = [ops.reshape(value, [x.shape[1]]) for value in (mean, rstd)]
    return x.with_value(numerics.cast(y, ctx.max_dtype)), (saved[0], saved[1])


def _rows_gradients(
    dy: GraphTensor, x: GraphTensor, weight: GraphTensor | None, mean: TensorValue, rstd: TensorValue
) -> tuple[GraphTensor, TensorValue, TensorValue]:
    """The gradients of a single sample and of weight and bias [C]."""
    spatial = range(2, x.rank)
    wide = x.with_value(_wide(dy.to_order(x.order).value))
    scale = _per_channel(rstd, x)
    standardized = (_wide(x.value) - _per_channel(mean, x)) * scale
    means = [mean_of(x.with_value(value), spatial, True).value for value in (wide.value * standardized, wide.value)]
    if weight is not None:
        scale = scale * numerics.cast(_per_channel(weight.value, x), scale.dtype)
    dx = (wide.value - means[1] - standardized * means[0]) * scale
    count = numerics.constant(means[0], math.prod(int(x.shape[dim]) for dim in spatial))
    sums = [ops.reshape(each * count, [x.shape[1]]) for each in means]
    return x.with_value(numerics.cast(dx, x.dtype)), sums[0], sums[1]


def _with_running_statistics(
    ctx: LoweringContext,
    x: GraphTensor,
    weight: GraphTensor | None,
    bias: GraphTensor | None,
    running_mean: GraphTensor | None,
    running_var: GraphTensor | None,
    eps: float,
) -> GraphTensor:
    wide = accumulation_dtype(x.dtype)
    mean, invstd = _running(running_mean, running_var, eps, wide)
    return _normalized(ctx, x, mean, invstd, weight, bias)


def _running(
    mean: GraphTensor | None, variance: GraphTensor | None, eps: float, dtype: DType
) -> tuple[TensorValue, TensorValue]:
    if mean is None or variance is None:
        raise CannotLower("evaluation without running statistics")
    wide = numerics.cast(variance.value, dtype)
    return numerics.cast(mean.value, dtype), ops.rsqrt(wide + numerics.constant(wide, eps))


def _empty_statistics(ctx: LoweringContext, count: int) -> list[GraphTensor]:
    """The values that PyTorch saves in evaluation: empty tensors."""
    metas = ctx.meta[1 : 1 + count]
    return [
        GraphTensor.contiguous(ops.broadcast_to(ctx.scalar(0, max_dtype(meta.dtype)), ctx.dims(meta.shape)))
        for meta in metas
    ]


@lowering(aten._native_batch_norm_legit_functional.default, layout=Layout.RAW, supports=_supports)
def batch_norm_functional(
    ctx: LoweringContext,
    x: GraphTensor,
    weight: GraphTensor | None,
    bias: GraphTensor | None,
    running_mean: GraphTensor,
    running_var: GraphTensor,
    training: bool,
    momentum: float,
    eps: float,
) -> list[GraphTensor | None]:
    """Batch normalization that returns the new running statistics beside the result."""
    if training:
        y, statistics = _with_batch_statistics(ctx, x, weight, bias, running_mean, running_var, momentum, eps)
        return [y, *_cast_results(ctx, statistics)]
    y = _with_running_statistics(ctx, x, weight, bias, running_mean, running_var, eps)
    return [y, *_empty_statistics(ctx, 2), running_mean, running_var]


def _updates_in_place(node: Node) -> str | None:
    if node.args[5] and node.args[3] is not None:
        return "running statistics updated in place; functionalized graphs have an op that returns them"
    return _supports(node)


@lowering(aten.native_batch_norm.default, layout=Layout.RAW, supports=_updates_in_place)
def batch_norm(
    ctx: LoweringContext,
    x: GraphTensor,
    weight: GraphTensor | None,
    bias: GraphTensor | None,
    running_mean: GraphTensor | None,
    running_var: GraphTensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> list[GraphTensor | None]:
    """Batch normalization that leaves the running statistics alone."""
    if not training:
        y = _with_running_statistics(ctx, x, weight, bias, running_mean, running_var, eps)
        return [y, *_empty_statistics(ctx, 2)]
    if running_mean is not None:
        raise CannotLower("running statistics updated in place")
    y, statistics = _with_batch_statistics(ctx, x, weight, bias, None, None, momentum, eps)
    return [y, *_cast_results(ctx, statistics[:2])]


@lowering(aten._native_batch_norm_legit.no_stats, layout=Layout.RAW, supports=_supports)
def batch_norm_without_running_statistics(
    ctx: LoweringContext,
    x: GraphTensor,
    weight: GraphTensor | None,
    bias: GraphTensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> list[GraphTensor | None]:
    """Batch normalization by the batch's own statistics, also in evaluation."""
    y, statistics = _with_batch_statistics(ctx, x, weight, bias, None, None, momentum, eps)
    return [y, *_cast_results(ctx, statistics[:2])]


@lowering(aten._native_batch_norm_legit_no_training.default, layout=Layout.RAW, supports=_supports)
def batch_norm_evaluation(
    ctx: LoweringContext,
    x: GraphTensor,
    weight: GraphTensor | None,
    bias: GraphTensor | None,
    running_mean: GraphTensor,
    running_var: GraphTensor,
    momentum: float,
    eps: float,
) -> list[GraphTensor]:
    """Batch normalization by the running statistics."""
    y = _with_running_statistics(ctx, x, weight, bias, running_mean, running_var, eps)
    return [y, *_empty_statistics(ctx, 2)]


@lowering(aten.native_batch_norm_backward.default, layout=Layout.RAW, supports=_supports)
def batch_norm_backward(
    ctx: LoweringContext,
    grad: GraphTensor,
    x: GraphTensor,
    weight: GraphTensor | None,
    running_mean: GraphTensor | None,
    running_var: GraphTensor | None,
    save_mean: GraphTensor | None,
    save_invstd: GraphTensor | None,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> list[GraphTensor | None]:
    """Gradients of input, weight and bias; those that ``output_mask`` leaves out are None."""
    wide = accumulation_dtype(x.dtype)
    if train and save_mean is not None and save_mean.dtype == wide:
        mean, invstd = save_mean.value, save_invstd.value
    elif train:
        # On the CPU PyTorch promises saved statistics in the input's dtype: too coarse for a narrow one.
        mean, invstd, *_ = batch_norm_statistics(_rows(x), None, None, 0.0, float(eps))
    else:
        mean, invstd = _running(running_mean, running_var, eps, wide)
    dy = grad.with_value(numerics.cast(grad.value, x.dtype))
    if train and running_mean is None and _has_rows(x) and all(isinstance(size, StaticDim) for size in x.shape):
        dx, *totals = _rows_gradients(dy, x, weight, mean, invstd)
        return [dx if output_mask[0] else None, *_wanted(ctx, totals, output_mask)]
    sums = None
    if train or output_mask[1] or output_mask[2]:
        sums = batch_norm_gradient_sums(_rows(dy), _rows(x), mean, invstd)
    result = None
    if output_mask[0]:
        value = _wide(dy.channels_last())
        if train:
            value = value - sums.mean_dy - (_wide(x.channels_last()) - mean) * sums.projection
        scale = invstd if weight is None else invstd * numerics.cast(weight.value, wide)
        result = GraphTensor.from_channels_last(numerics.cast(value * scale, x.dtype))
    return [result, *_wanted(ctx, [sums and sums.grad_weight, sums and sums.sum_dy], output_mask)]


def _wanted(
    ctx: LoweringContext, totals: Sequence[TensorValue | None], output_mask: Sequence[bool]
) -> list[GraphTensor | None]:
    """The gradients of weight and bias that are asked for."""
    pairs = zip(totals, output_mask[1:], strict=True)
    return _cast_results(ctx, [total if wanted else None for total, wanted in pairs])


def _standardized(x: GraphTensor, dims: Sequence[int], eps: float) -> tuple[TensorValue, TensorValue, TensorValue]:
    """(x - mean) / sqrt(variance + eps), the mean and the reciprocal root, in ``x``'s memory order."""
    mean = mean_of(x, dims, True).value
    centered = x.value - mean
    variance = mean_of(x.with_value(centered * centered), dims, True).value
    rstd = ops.rsqrt(variance + numerics.constant(variance, eps))
    return centered * rstd, mean, rstd


@lowering(aten.native_layer_norm.default, layout=Layout.RAW)
def layer_norm(
    ctx: LoweringContext,
    x: GraphTensor,
    normalized_shape: Sequence[int | torch.SymInt],
    weight: GraphTensor | None,
    bias: GraphTensor | None,
    eps: float,
) -> list[GraphTensor]:
    """Normalization over the last dimensions, in any memory order."""
    dims = list(range(x.rank - len(normalized_shape), x.rank))
    y, mean, rstd = _standardized(x.with_value(_wide(x.value)), dims, eps)
    if weight is not None:
        y = y * numerics.cast(aligned(weight, x.rank, x.order), y.dtype)
    if bias is not None:
        y = y + numerics.cast(aligned(bias, x.rank, x.order), y.dtype)
    results = [
        numerics.cast(value, max_dtype(meta.dtype)) for value, meta in zip((y, mean, rstd), ctx.meta, strict=True)
    ]
    return [x.with_value(value) for value in results]


@lowering(aten.native_group_norm.default, layout=Layout.RAW)
def group_norm(
    ctx: LoweringContext,
    x: GraphTensor,
    weight: GraphTensor | None,
    bias: GraphTensor | None,
    batch: int | torch.SymInt,
    channels: int | torch.SymInt,
    pixels: int | torch.SymInt,
    groups: int,
    eps: float,
) -> list[GraphTensor]:
    """Normalization over the pixels of a group of channels; channels-last memory stays as it is."""
    if not isinstance(channels, int):
        raise CannotLower("the number of channels is dynamic")
    shape = [batch, groups, channels // groups, pixels]
    old = list(ctx.arg_meta(0).shape)
    order = view_order(old, shape, x.order)
    if order is None:
        x, order = x.to_order(contiguous_order(x.rank)), contiguous_order(len(shape))
    grouped = reshaped(x, ctx.dims(shape), order)
    y, mean, rstd = _standardized(grouped.with_value(_wide(grouped.value)), (2, 3), eps)
    for parameter, combine in ((weight, ops.mul), (bias, ops.add)):
        if parameter is not None:
            split = GraphTensor.contiguous(ops.reshape(parameter.value, [1, groups, channels // groups, 1]))
            y = combine(y, numerics.cast(split.to_order(order).value, y.dtype))
    result = reshaped(GraphTensor(numerics.cast(y, ctx.max_dtype), order), ctx.out_shape(), x.order)
    # In memory the groups may come before the batch.
    saved = [
        numerics.cast(ops.reshape(GraphTensor(value, order).logical(), shape), max_dtype(meta.dtype))
        for value, shape, meta in zip((mean, rstd), map(ctx.out_shape, (1, 2)), ctx.meta[1:], strict=True)
    ]
    return [result, *map(GraphTensor.contiguous, saved)]
