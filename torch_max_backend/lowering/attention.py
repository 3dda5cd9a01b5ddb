"""Scaled dot product attention, forward and backward, in every form that PyTorch chooses on a CPU or a GPU.

The forms differ in what they pass to the backward pass beside the output: ``logsumexp``, the logarithm of the sum of a
row's exponentials, in different shapes, and a generator's state, which is unused without dropout. Here all are one
computation, the kernels of ``kernels/attention``, which store no probabilities: the backward pass recomputes the
scores. 16-bit floats are summed in float32.

A row that a mask hides completely has output 0, gradient 0 and logsumexp 0, as in PyTorch's CPU kernel; a row with a
NaN is NaN (that kernel gives 0).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from max.dtype import DType
from max.graph import TensorValue
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from torch_max_backend.custom_ops.attention import BACKWARD, FORWARD
from torch_max_backend.dtypes import accumulation_dtype, max_dtype
from torch_max_backend.ir import ops
from torch_max_backend.ir.layout import GraphTensor, Order
from torch_max_backend.lowering import numerics
from torch_max_backend.lowering.context import LoweringContext
from torch_max_backend.lowering.registry import Layout, lowering
from torch_max_backend.mojo_ops import attention as kernels
from torch_max_backend.torch_compat import schema_of

aten = torch.ops.aten

_NOTE = "without dropout"

#: [batch, rows, heads, elements]: PyTorch's order of an output, which a model's next linear layer reads as it is.
_HEADS_INSIDE: Order = (0, 2, 1, 3)


def _argument(node: Node, name: str, default: Any = None) -> Any:
    """An argument by its name in the op's schema."""
    for position, argument in enumerate(schema_of(node.target).arguments):
        if argument.name == name:
            return node.args[position] if position < len(node.args) else node.kwargs.get(name, default)
    return default


def _supports(node: Node) -> str | None:
    """Why a call stays in PyTorch."""
    if _argument(node, "dropout_p", 0.0):
        return "its dropout draws inside PyTorch's kernel, from numbers that only that kernel makes"
    if _argument(node, "return_debug_mask", False):
        return "the debug mask is PyTorch's kernel's own"
    query, key, value = (_argument(node, name).meta["val"] for name in ("query", "key", "value"))
    if query.dim() != 4:
        return f"a query of rank {query.dim()}"
    form = str(node.target)
    known = [*query.shape[1::2], *key.shape[1::2], value.shape[3]]
    if "efficient" in form:
        # Its logsumexp is padded to a multiple of 32 queries.
        known.append(query.shape[2])
    if not all(isinstance(size, int) for size in known):
        return "sizes that are known only at run time"
    if 0 in [size for size in (*query.shape, *key.shape, *value.shape) if isinstance(size, int)]:
        return "a tensor without elements"
    if query.dtype == torch.float64 and query.device.type != "cpu":
        return "float64 on a GPU"
    equal = statically_known_true(query.shape[2] == key.shape[2])
    if _argument(node, "is_causal", False) and "cudnn" in form and not equal:
        return "a causal mask over unequal numbers of queries and keys, which this form does not define"
    if query.shape[1] % key.shape[1]:
        return f"{query.shape[1]} heads over {key.shape[1]}"
    return None


def _with_rows(x: GraphTensor) -> GraphTensor:
    """``[batch, heads, rows, elements]`` in any memory order with the elements last."""
    return x if x.order[3] == 3 else x.to_order(_HEADS_INSIDE)


@dataclass(frozen=True)
class _Attention:
    """One call.

    Attributes:
        order: the output's in memory.
        bias: of rank 4, None without a mask.
    """

    ctx: LoweringContext
    query: GraphTensor
    key: GraphTensor
    value: GraphTensor
    order: Order
    bias: TensorValue | None
    settings: dict[str, Any]

    @staticmethod
    def of(
        ctx: LoweringContext,
        query: GraphTensor,
        key: GraphTensor,
        value: GraphTensor,
        bias: GraphTensor | None,
        is_causal: bool,
        scale: float | None,
        order: Order = _HEADS_INSIDE,
        *,
        hidden_is_nan: bool = False,
    ) -> _Attention:
        """Without a scale it is 1 / sqrt(head size). A causal mask of the flash form aligns the last query with the
        last key."""
        query, key, value = (_with_rows(x) for x in (query, key, value))
        orders = (query.order, key.order, value.order, order)
        settings = {
            "axes": tuple(tuple(each.index(dim) for dim in range(3)) for each in orders),
            "scale": float(1 / math.sqrt(int(query.shape[3])) if scale is None else scale),
            "is_causal": bool(is_causal),
            "aligned_at_end": "flash_attention." in str(ctx.node.target)
            or "flash_attention_backward" in str(ctx.node.target),
            "hidden_is_nan": hidden_is_nan,
        }
        return _Attention(ctx, query, key, value, order, _as_bias(ctx, bias, query.dtype), settings)


def _as_bias(ctx: LoweringContext, mask: GraphTensor | None, dtype: DType) -> TensorValue | None:
    """A mask as what is added to the scores, of rank 4; True is what a query sees."""
    if mask is None:
        return None
    # PyTorch spreads a mask over all heads and queries for its kernels; ours read it as it was.
    value = mask.with_value(ops.before_broadcast(mask.value)).logical()
    if value.dtype == DType.bool:
        value = ops.where(value, ctx.scalar(0, dtype), ctx.scalar(-math.inf, dtype))
    return ops.reshape(value, [1] * (4 - value.rank) + list(value.shape))


def _forward(call: _Attention) -> tuple[GraphTensor, GraphTensor]:
    """The output in the query's dtype, and logsumexp ``[batch, heads, queries]``."""
    query, key, value = call.query.value, call.key.value, call.value.value
    output, logsumexp = kernels.attention_fprop(query, key, value, call.bias, **call.settings)
    return GraphTensor(output, call.order), GraphTensor.contiguous(logsumexp)


def _gradients(
    call: _Attention, grad: GraphTensor, output: GraphTensor, logsumexp: TensorValue, scores_wanted: bool
) -> list[GraphTensor | None]:
    """The gradients of query, key and value, and of the scores where it is wanted."""
    *gradients, scores = kernels.attention_dgrad(
        grad.to_order(call.order).value,
        call.query.value,
        call.key.value,
        call.value.value,
        output.value,
        logsumexp,
        call.bias,
        **call.settings,
        bias_wanted=scores_wanted,
    )
    results: list[GraphTensor | None] = [
        x.with_value(value) for x, value in zip((call.query, call.key, call.value), gradients, strict=True)
    ]
    return [*results, None if scores is None else GraphTensor.contiguous(scores)]


def _backward(
    call: _Attention, grad: GraphTensor, output: GraphTensor, logsumexp: TensorValue, bias_meta: Any
) -> list[GraphTensor | None]:
    """The gradients of query, key and value, and of the bias where it has a ``bias_meta``."""
    *results, scores = _gradients(call, grad, output, logsumexp, bias_meta is not None)
    return [*results, None if scores is None else _bias_gradient(call, scores.value, bias_meta)]


def _bias_gradient(call: _Attention, whole: TensorValue, meta: torch.Tensor) -> GraphTensor:
    """dS summed over the dimensions in which the bias is broadcast."""
    value = whole
    for axis, size in enumerate([1] * (4 - meta.dim()) + list(meta.shape)):
        if size == 1 and int(value.shape[axis]) != 1:
            value = ops.sum(value, axis=axis)
    return GraphTensor.contiguous(call.ctx.cast(ops.reshape(value, list(meta.shape)), max_dtype(meta.dtype)))


def _completed(ctx: LoweringContext, results: Sequence[GraphTensor | None]) -> list[Any]:
    """The form's results: ours, and for what says nothing without dropout (a generator's state) zeros."""
    completed: list[Any] = []
    for position, fake in enumerate(ctx.meta):
        if position < len(results) and results[position] is not None:
            completed.append(results[position])
        elif isinstance(fake, torch.Tensor):
            zero = ctx.scalar(0, max_dtype(fake.dtype))
            completed.append(GraphTensor.contiguous(ops.broadcast_to(zero, list(fake.shape))))
        else:
            completed.append(fake)
    return completed


def _shaped_logsumexp(ctx: LoweringContext, logsumexp: GraphTensor) -> GraphTensor | None:
    """In the form's own shape: with a unit dimension behind, padded with infinities, or left out."""
    fake = ctx.meta[1]
    value = ctx.cast(logsumexp.value, max_dtype(fake.dtype))
    if fake.dim() == 4:
        return GraphTensor.contiguous(ops.reshape(value, [*value.shape, 1]))
    if isinstance(fake.shape[2], int) and fake.shape[2] == 0:
        return None
    if "efficient" in str(ctx.node.target) and fake.shape[2] > (queries := int(logsumexp.shape[2])):
        infinite = ops.broadcast_to(numerics.constant(value, math.inf), [*fake.shape[:2], fake.shape[2] - queries])
        value = ops.concat([value, infinite], axis=2)
    return GraphTensor.contiguous(value)


def _forward_form(
    ctx: LoweringContext,
    query: GraphTensor,
    key: GraphTensor,
    value: GraphTensor,
    bias: GraphTensor | None,
    is_causal: bool,
    scale: float | None,
) -> list[Any]:
    output, logsumexp = _forward(_Attention.of(ctx, query, key, value, bias, is_causal, scale))
    return _completed(ctx, [output, _shaped_logsumexp(ctx, logsumexp)])


def _backward_form(
    ctx: LoweringContext,
    grad: GraphTensor,
    query: GraphTensor,
    key: GraphTensor,
    value: GraphTensor,
    bias: GraphTensor | None,
    output: GraphTensor,
    logsumexp: GraphTensor,
    is_causal: bool,
    scale: float | None,
    *,
    bias_wanted: bool = False,
) -> list[Any]:
    output = _with_rows(output)
    call = _Attention.of(ctx, query, key, value, bias, is_causal, scale, output.order)
    sums = logsumexp.logical()
    if sums.rank == 4:
        sums = ops.reshape(sums, list(sums.shape[:3]))
    elif "efficient" in str(ctx.node.target) and int(sums.shape[2]) > (queries := int(query.shape[2])):
        sums = ops.slice_tensor(sums, [slice(None), slice(None), slice(0, queries)])
    sums = ctx.cast(sums, accumulation_dtype(query.dtype))
    meta = ctx.meta[3] if bias_wanted else None
    return _completed(ctx, _backward(call, grad, output, sums, meta))


@lowering(aten._scaled_dot_product_flash_attention_for_cpu.default, layout=Layout.RAW, supports=_supports, note=_NOTE)
def flash_attention_for_cpu(
    ctx: LoweringContext,
    query: GraphTensor,
    key: GraphTensor,
    value: GraphTensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: GraphTensor | None = None,
    scale: float | None = None,
) -> list[Any]:
    """Attention as it is on a CPU: output and logsumexp."""
    return _forward_form(ctx, query, key, value, attn_mask, is_causal, scale)


@lowering(
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    layout=Layout.RAW,
    supports=_supports,
    note=_NOTE,
)
def flash_attention_for_cpu_backward(
    ctx: LoweringContext,
    grad: GraphTensor,
    query: GraphTensor,
    key: GraphTensor,
    value: GraphTensor,
    out: GraphTensor,
    logsumexp: GraphTensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: GraphTensor | None = None,
    scale: float | None = None,
) -> list[Any]:
    """Its gradients; the mask has none."""
    return _backward_form(ctx, grad, query, key, value, attn_mask, out, logsumexp, is_causal, scale)


@lowering(aten._scaled_dot_product_flash_attention.default, layout=Layout.RAW, supports=_supports, note=_NOTE)
def flash_attention(
    ctx: LoweringContext,
    query: GraphTensor,
    key: GraphTensor,
    value: GraphTensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> list[Any]:
    """Attention as it is on a GPU in bfloat16 and float16, without a mask."""
    return _forward_form(ctx, query, key, value, None, is_causal, scale)


@lowering(aten._scaled_dot_product_flash_attention_backward.default, layout=Layout.RAW, supports=_supports, note=_NOTE)
def flash_attention_backward(
    ctx: LoweringContext,
    grad: GraphTensor,
    query: GraphTensor,
    key: GraphTensor,
    value: GraphTensor,
    out: GraphTensor,
    logsumexp: GraphTensor,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: GraphTensor,
    philox_offset: GraphTensor,
    *,
    scale: float | None = None,
) -> list[Any]:
    """Its gradients."""
    return _backward_form(ctx, grad, query, key, value, None, out, logsumexp, is_causal, scale)


@lowering(aten._scaled_dot_product_efficient_attention.default, layout=Layout.RAW, supports=_supports, note=_NOTE)
def efficient_attention(
    ctx: LoweringContext,
    query: GraphTensor,
    key: GraphTensor,
    value: GraphTensor,
    attn_bias: GraphTensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> list[Any]:
    """Attention as it is on a GPU with a mask or in float32. Its logsumexp is padded to multiples of 32."""
    return _forward_form(ctx, query, key, value, attn_bias, is_causal, scale)


@lowering(
    aten._scaled_dot_product_efficient_attention_backward.default, layout=Layout.RAW, supports=_supports, note=_NOTE
)
def efficient_attention_backward(
    ctx: LoweringContext,
    grad: GraphTensor,
    query: GraphTensor,
    key: GraphTensor,
    value: GraphTensor,
    attn_bias: GraphTensor | None,
    out: GraphTensor,
    logsumexp: GraphTensor,
    philox_seed: GraphTensor,
    philox_offset: GraphTensor,
    dropout_p: float,
    grad_input_mask: Sequence[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> list[Any]:
    """Its gradients, the bias's too where it is wanted."""
    wanted = bool(grad_input_mask[3]) and attn_bias is not None
    return _backward_form(ctx, grad, query, key, value, attn_bias, out, logsumexp, is_causal, scale, bias_wanted=wanted)


@lowering(aten._scaled_dot_product_cudnn_attention.default, layout=Layout.RAW, supports=_supports, note=_NOTE)
def cudnn_attention(
    ctx: LoweringContext,
    query: GraphTensor,
    key: GraphTensor,
    value: GraphTensor,
    attn_bias: GraphTensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> list[Any]:
    """Attention as PyTorch may choose it on a Hopper."""
    return _forward_form(ctx, query, key, value, attn_bias, is_causal, scale)


@lowering(aten._scaled_dot_product_cudnn_attention_backward.default, layout=Layout.RAW, supports=_supports, note=_NOTE)
def cudnn_attention_backward(
    ctx: LoweringContext,
    grad: GraphTensor,
    query: GraphTensor,
    key: GraphTensor,
    value: GraphTensor,
    out: GraphTensor,
    logsumexp: GraphTensor,
    philox_seed: GraphTensor,
    philox_offset: GraphTensor,
    attn_bias: GraphTensor | None,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> list[Any]:
    """Its gradients; the bias has none."""
    return _backward_form(ctx, grad, query, key, value, attn_bias, out, logsumexp, is_causal, scale)


@lowering(FORWARD, layout=Layout.RAW, supports=_supports)
def written_attention(
    ctx: LoweringContext,
    query: GraphTensor,
    key: GraphTensor,
    value: GraphTensor,
    bias: GraphTensor | None,
    scale: float,
) -> list[Any]:
    """Attention that a model writes out: output and logsumexp."""
    return list(_forward(_Attention.of(ctx, query, key, value, bias, False, scale, hidden_is_nan=True)))


@lowering(BACKWARD, layout=Layout.RAW, supports=_supports)
def written_attention_backward(
    ctx: LoweringContext,
    grad: GraphTensor,
    query: GraphTensor,
    key: GraphTensor,
    value: GraphTensor,
    bias: GraphTensor | None,
    output: GraphTensor,
    logsumexp: GraphTensor,
    scale: float,
    scores_wanted: bool,
) -> list[Any]:
    """Its gradients, the scores' too where it is wanted."""
    output = _with_rows(output)
    call = _Attention.of(ctx, query, key, value, bias, False, scale, output.order, hidden_is_nan=True)
    query_grad, key_grad, value_grad, scores = _gradients(call, grad, output, logsumexp.logical(), scores_wanted)
    return _completed(ctx, [query_grad, key_grad, value_grad, scores])
