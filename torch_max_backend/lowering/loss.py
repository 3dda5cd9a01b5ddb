"""The negative log likelihood, forward and backward; PyTorch decomposes the other losses.

The target's class is found by comparing class numbers with targets, not by an indexed load: the comparison fuses with
the reduction, and a target out of range reads nothing. It is reported (``runtime.launching.reports``) by the forward
pass.
"""

from __future__ import annotations

import torch
from max.dtype import DType
from max.graph import StaticDim, TensorValue

from torch_max_backend.ir import ops
from torch_max_backend.ir.layout import GraphTensor
from torch_max_backend.lowering import numerics
from torch_max_backend.lowering.context import LoweringContext
from torch_max_backend.lowering.reduction import iota, reduce, reduce_axes, reshaped, total
from torch_max_backend.lowering.registry import Layout, lowering
from torch_max_backend.mojo_ops.checks import check_indices

aten = torch.ops.aten
_NONE, _MEAN = 0, 1


class _Selection:
    """Scores against targets: which element of each score vector its target names, and its weight."""

    def __init__(
        self,
        scores: GraphTensor,
        target: GraphTensor,
        weight: GraphTensor | None,
        ignore_index: int,
        dtype: DType,
    ) -> None:
        self.scores = scores
        self.classes = 0 if scores.rank == 1 else 1
        self.axis = scores.axis(self.classes)
        rank = scores.rank
        labels = ops.cast(self.along(target), DType.int64)
        numbers = iota(scores.value.shape[self.axis], self.axis, rank, scores.value)
        ignored = ops.equal(labels, ops.constant(ignore_index, DType.int64, device=scores.value.device))
        self.chosen = ops.logical_and(ops.equal(numbers, labels), ops.logical_not(ignored))
        self.weight = (
            ops.constant(1, dtype, device=scores.value.device)
            if weight is None
            else ops.reshape(
                numerics.cast(weight.value, dtype),
                [weight.shape[0] if place == self.axis else 1 for place in range(rank)],
            )
        )

    def along(self, x: GraphTensor) -> TensorValue:
        """``x``, shaped like the targets, broadcastable against the scores in their memory order."""
        if x.rank == 0:
            return ops.reshape(x.value, [1] * self.scores.rank)
        rest = [dim for dim in self.scores.order if dim != self.classes]
        order = tuple(sorted(rest).index(dim) for dim in rest)
        value = x.to_order(order).value if x.rank == len(order) else x.value
        return ops.unsqueeze(value, self.axis)

    def per_target(self, value: TensorValue) -> GraphTensor:
        """The sum of ``value`` over the classes, shaped like the targets."""
        summed = reduce_axes(value, {self.axis}, total, 0)
        return reshaped(self.scores, summed, [self.classes], False)


def _everything(x: GraphTensor) -> GraphTensor:
    return reduce(x, range(x.rank), False, total, 0)


@lowering(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default, layout=Layout.RAW)
def nll_loss_forward(
    ctx: LoweringContext,
    scores: GraphTensor,
    target: GraphTensor,
    weight: GraphTensor | None,
    reduction: int,
    ignore_index: int,
) -> tuple[GraphTensor, GraphTensor]:
    """Minus the weighted score of each target's class, reduced, and the sum of the weights."""
    dtype = ctx.compute_dtype
    selection = _Selection(scores, target, weight, ignore_index, dtype)
    classes = scores.shape[selection.classes]
    if isinstance(classes, StaticDim):
        check_indices(numerics.cast(ops.reshape(target.value, [-1]), DType.int64), int(classes), ignore_index)
    zero = ctx.scalar(0, dtype)
    value = ctx.cast(scores.value, dtype)
    losses = selection.per_target(ops.where(selection.chosen, ops.negate(ops.mul(value, selection.weight)), zero))
    if reduction == _NONE:
        return losses.with_value(ctx.cast(losses.value, ctx.max_dtype)), _scalar(ctx, zero)
    chosen = ops.where(selection.chosen, selection.weight, zero)
    weights = _everything(scores.with_value(chosen)).value
    loss = _everything(losses).value
    if reduction == _MEAN:
        loss = ops.div(loss, weights)
    return _scalar(ctx, loss), _scalar(ctx, weights)


def _scalar(ctx: LoweringContext, value: TensorValue) -> GraphTensor:
    return GraphTensor.contiguous(ctx.cast(value, ctx.max_dtype))


@lowering(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default, layout=Layout.RAW)
def nll_loss_backward(
    ctx: LoweringContext,
    grad: GraphTensor,
    scores: GraphTensor,
    target: GraphTensor,
    weight: GraphTensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: GraphTensor,
) -> GraphTensor:
    """Minus the incoming gradient, weighted, at each target's class; zero elsewhere."""
    dtype = ctx.compute_dtype
    selection = _Selection(scores, target, weight, ignore_index, dtype)
    gradient = ops.negate(ops.mul(ctx.cast(selection.along(grad), dtype), selection.weight))
    if reduction == _MEAN:
        gradient = ops.div(gradient, ctx.cast(total_weight.value, dtype))
    value = ops.where(selection.chosen, gradient, ctx.scalar(0, dtype))
    return scores.with_value(ctx.cast(value, ctx.max_dtype))
