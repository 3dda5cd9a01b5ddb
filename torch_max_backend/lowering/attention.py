"""Scaled dot product attention, forward and backward, in every form that PyTorch picks on a CPU or a GPU.

The forms differ in what they hand from forward to backward beside the output: ``logsumexp``, the logarithm of the sum
of a row's exponentials, in a shape of their own, and a generator's state, which without dropout says nothing. Here all
are one computation. With ``S = scale * Q @ K.T + bias`` over one head's queries and keys,

    P = exp(S - logsumexp)      output = P @ V
    dV = P.T @ dO               dS = P * (dO @ V.T - rowsum(dO * output))
    dQ = scale * dS @ K         dK = scale * dS.T @ Q            dbias = dS

Backward forms S again, so that the probabilities of no layer are kept. S and everything until the last rounding are
float32 for the narrow floats. A row that a mask hides completely has output 0, gradient 0 and logsumexp 0, as in
PyTorch's CPU kernel; a row with a NaN is NaN (that kernel gives 0).

S of a whole batch is held in memory, up to ``MOST_SCORES`` elements at once: longer sequences run by blocks of queries,
and those that need more than ``MOST_BLOCKS`` stay in PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from max.dtype import DType
from max.graph import TensorValue
from torch.fx import Node

from torch_max_backend.dtypes import LOW_PRECISION, max_dtype
from torch_max_backend.graph import ops
from torch_max_backend.graph.layout import GraphTensor, Order
from torch_max_backend.lowering import numerics
from torch_max_backend.lowering.context import LoweringContext
from torch_max_backend.lowering.linear import matrix_product
from torch_max_backend.lowering.registry import Layout, lowering

aten = torch.ops.aten

#: Elements of S that are held at once: 512 MiB in float32. Backward holds about four such tensors.
MOST_SCORES = 1 << 27
MOST_BLOCKS = 16

_NOTE = "without dropout; S is formed in memory, by blocks of queries where it is large"


def _argument(node: Node, name: str, default: Any = None) -> Any:
    """An argument by its name in the op's schema."""
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.name == name:
            return node.args[position] if position < len(node.args) else node.kwargs.get(name, default)
    return default


def _supports(node: Node) -> str | None:
    """Why a call stays in PyTorch."""
    if _argument(node, "dropout_p", 0.0):
        return "its dropout draws inside PyTorch's kernel, from numbers that only that kernel makes"
    if _argument(node, "return_debug_mask", False):
        return "the debug mask is PyTorch's kernel's own"
    query, key = (_argument(node, name).meta["val"] for name in ("query", "key"))
    if query.dim() != 4:
        return f"a query of rank {query.dim()}"
    sizes = (*query.shape, *key.shape)
    if not all(isinstance(size, int) for size in sizes):
        return "sizes that are known only at run time"
    if 0 in sizes:
        return "a tensor without elements"
    aligned_at_end = "for_cpu" not in str(node.target) and "efficient" not in str(node.target)
    if _argument(node, "is_causal", False) and aligned_at_end and query.shape[2] != key.shape[2]:
        return "a causal mask over unequal numbers of queries and keys, which this form aligns at their ends"
    if query.shape[1] % key.shape[1]:
        return f"{query.shape[1]} heads over {key.shape[1]}"
    blocks = _block_count(query.shape, key.shape)
    if blocks > min(MOST_BLOCKS, query.shape[2]):
        return (
            f"{math.prod(query.shape[:3]) * key.shape[2]} scores: more than {MOST_BLOCKS} blocks of {MOST_SCORES}, "
            "which the lowering forms in memory"
        )
    return None


def _block_count(query: Sequence[int], key: Sequence[int]) -> int:
    return -(-math.prod(query[:3]) * key[2] // MOST_SCORES)


@dataclass(frozen=True)
class _Attention:
    """One call: B batches, G groups of heads that share keys and values, R query heads in each.

    Inside, matrices are ``[B * G, rows, columns]``; a query's row is one of ``R * queries``.
    """

    ctx: LoweringContext
    query: GraphTensor
    key: GraphTensor
    value: GraphTensor
    bias: GraphTensor | None
    is_causal: bool
    scale: float

    @staticmethod
    def of(
        ctx: LoweringContext,
        query: GraphTensor,
        key: GraphTensor,
        value: GraphTensor,
        bias: GraphTensor | None,
        is_causal: bool,
        scale: float | None,
    ) -> _Attention:
        """Without a scale it is 1 / sqrt(head size)."""
        wide = DType.float64 if query.dtype == DType.float64 else DType.float32
        operands = (x.with_value(ctx.cast(x.value, wide)) for x in (query, key, value))
        chosen = 1 / math.sqrt(int(query.shape[3])) if scale is None else scale
        return _Attention(ctx, *operands, bias, is_causal, chosen)

    @property
    def batch(self) -> int:
        return int(self.query.shape[0])

    @property
    def groups(self) -> int:
        return int(self.key.shape[1])

    @property
    def repeats(self) -> int:
        return int(self.query.shape[1]) // self.groups

    @property
    def keys(self) -> int:
        return int(self.key.shape[2])

    @property
    def masked(self) -> bool:
        """Whether a row may be hidden completely."""
        return self.bias is not None

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Ranges of queries whose scores are held together."""
        queries = int(self.query.shape[2])
        count = _block_count([int(size) for size in self.query.shape], [int(size) for size in self.key.shape])
        step = -(-queries // count)
        for start in range(0, queries, step):
            yield start, min(start + step, queries)

    def as_matrices(self, x: GraphTensor, order: Order) -> GraphTensor:
        """``[batch, heads, rows, columns]`` as ``[B * G, R * rows, columns]`` that a product takes without another
        copy: it likes ``order``."""
        batch, heads, rows, columns = (int(size) for size in x.shape)
        if heads != self.groups:
            shape = [batch * self.groups, heads // self.groups * rows, columns]
            return GraphTensor.contiguous(ops.reshape(x.logical(), shape))
        places: dict[int, tuple[int, ...]] = {0: (0, 1), 1: (2,), 2: (3,)}
        extents = (batch * heads, rows, columns)
        memory = x.to_order(tuple(axis for dim in order for axis in places[dim]))
        return GraphTensor(ops.reshape(memory.value, [extents[dim] for dim in order]), order)

    def as_heads(self, x: GraphTensor, heads: int) -> GraphTensor:
        """The way back: ``[batch, heads, rows, columns]``."""
        rows, columns = int(x.shape[1]) * self.groups // heads, int(x.shape[2])
        if heads == self.groups and x.order == (1, 0, 2):
            return GraphTensor(ops.reshape(x.value, [rows, self.batch, heads, columns]), (2, 0, 1, 3))
        return GraphTensor.contiguous(ops.reshape(x.logical(), [self.batch, heads, rows, columns]))

    def left(self, x: GraphTensor) -> GraphTensor:
        """``x`` as the first operand of a product."""
        return self.as_matrices(x, (1, 0, 2) if self._own_kernels else (0, 1, 2))

    def right(self, x: GraphTensor, *, transposed: bool) -> GraphTensor:
        """``x`` or its transpose as the second one."""
        order = (0, 2, 1) if self._own_kernels and not transposed else (0, 1, 2)
        matrices = self.as_matrices(x, order)
        return matrices.permuted([0, 2, 1]) if transposed else matrices

    @property
    def _own_kernels(self) -> bool:
        """Whether products are grouped convolutions, which like operands in another order."""
        return not self.ctx.device.is_gpu()

    def product(self, a: GraphTensor, b: GraphTensor) -> GraphTensor:
        """a @ b. Of narrow floats all factors are exact in TF32, which MAX takes on a GPU; sums are float32."""
        if self.ctx.device.is_gpu() and self.ctx.dtype in LOW_PRECISION:
            return GraphTensor.contiguous(ops.matmul(a.logical(), b.logical()))
        return matrix_product(a, b)

    def scores(self, query: GraphTensor, start: int) -> GraphTensor:
        """S of some queries, of which ``start`` is the first: ``[B * G, R * queries, keys]``; -inf where hidden."""
        product = self.product(self.left(query), self.right(self.key, transposed=True))
        value = ops.mul(product.value, self.ctx.scalar(self.scale, product.dtype))
        if self.bias is None and not self.is_causal:
            return product.with_value(value)
        rows = int(query.shape[2])
        split, order = self._split(product.order, rows)
        physical = value.shape
        value = ops.reshape(value, [split[dim] for dim in order])
        if self.bias is not None:
            bias = self._bias(start, rows).to_order(order).value
            if bias.dtype == DType.bool:
                value = ops.where(bias, value, self.ctx.scalar(-math.inf, value.dtype))
            else:
                value = ops.add(value, self.ctx.cast(bias, value.dtype))
        if self.is_causal:
            value = ops.where(self._causal(start, rows, order), value, self.ctx.scalar(-math.inf, value.dtype))
        return product.with_value(ops.reshape(value, list(physical)))

    def _split(self, order: Order, rows: int) -> tuple[list[int], Order]:
        """The extents (B, G, R, rows, keys) of ``[B * G, R * rows, keys]``, and their order in memory."""
        places: dict[int, tuple[int, ...]] = {0: (0, 1), 1: (2, 3), 2: (4,)}
        extents = [self.batch, self.groups, self.repeats, rows, self.keys]
        return extents, tuple(axis for dim in order for axis in places[dim])

    def _bias(self, start: int, rows: int) -> GraphTensor:
        """The bias of some queries, broadcastable against (B, G, R, rows, keys)."""
        assert self.bias is not None
        value = self.bias.logical()
        extents = [1] * (4 - value.rank) + [int(size) for size in value.shape]
        value = ops.reshape(value, extents)
        if extents[2] != 1 and rows != extents[2]:
            value = ops.slice_tensor(value, [slice(None), slice(None), slice(start, start + rows), slice(None)])
            extents[2] = rows
        heads = [1, 1] if extents[1] == 1 else [self.groups, self.repeats]
        return GraphTensor.contiguous(ops.reshape(value, [extents[0], *heads, *extents[2:]]))

    def _causal(self, start: int, rows: int, order: Order) -> TensorValue:
        """Which keys each query may see: those up to its own position."""
        if rows * self.keys <= ops.MOST_ELEMENTS:
            table = torch.ones(rows, self.keys, dtype=torch.bool).tril(start)
            mask = ops.constant(table, device=self.ctx.device)
        else:
            first, last = (
                ops.range(begin, begin + count, 1, out_dim=count, dtype=DType.int32, device=self.ctx.device)
                for begin, count in ((start, rows), (0, self.keys))
            )
            mask = ops.greater_equal(ops.reshape(first, [rows, 1]), ops.reshape(last, [1, self.keys]))
        return GraphTensor.contiguous(ops.reshape(mask, [1, 1, 1, rows, self.keys])).to_order(order).value

    def rows_of(self, x: GraphTensor, start: int, stop: int) -> GraphTensor:
        """Some rows of ``[batch, heads, rows, columns]``."""
        if (start, stop) == (0, int(x.shape[2])):
            return x
        index = [slice(None)] * 4
        index[x.axis(2)] = slice(start, stop)
        return x.with_value(ops.slice_tensor(x.value, index))


def _joined(parts: Sequence[GraphTensor], dim: int) -> GraphTensor:
    if len(parts) == 1:
        return parts[0]
    return parts[0].with_value(ops.concat([part.value for part in parts], axis=parts[0].axis(dim)))


def _summed(parts: Sequence[GraphTensor]) -> GraphTensor:
    total = parts[0]
    for part in parts[1:]:
        total = total.with_value(ops.add(total.value, part.to_order(total.order).value))
    return total


def _forward(call: _Attention) -> tuple[GraphTensor, GraphTensor]:
    """The output in the query's dtype, and logsumexp ``[batch, heads, queries]``."""
    outputs, sums = [], []
    heads = int(call.query.shape[1])
    values = call.right(call.value, transposed=False)
    for start, stop in call.blocks():
        scores = call.scores(call.rows_of(call.query, start, stop), start)
        largest = ops.max(scores.value, axis=-1)
        if call.masked:
            hidden = ops.equal(largest, numerics.constant(largest, -math.inf))
            largest = ops.where(hidden, numerics.constant(largest, 0), largest)
        powers = scores.with_value(numerics.exp(ops.sub(scores.value, largest)))
        total = ops.sum(powers.value, axis=-1)
        one = numerics.constant(total, 1)
        if call.masked:
            # Of a hidden row all is 0: a sum of 1 gives an output of 0, and a logarithm of 0.
            total = ops.where(ops.equal(total, numerics.constant(total, 0)), one, total)
        product = call.product(powers, values)
        inverse = scores.with_value(ops.div(one, total)).to_order(product.order).value
        output = product.with_value(call.ctx.cast(ops.mul(product.value, inverse), call.ctx.max_dtype))
        outputs.append(call.as_heads(output, heads))
        logarithm = scores.with_value(ops.add(largest, numerics.log(total)))
        sums.append(call.as_heads(logarithm, heads))
    logsumexp = _joined([GraphTensor.contiguous(part.logical()) for part in sums], 2)
    flat = ops.reshape(logsumexp.value, list(logsumexp.shape[:3]))
    return _joined(outputs, 2), GraphTensor.contiguous(flat)


def _backward(
    call: _Attention, grad: GraphTensor, output: GraphTensor, logsumexp: TensorValue, bias_meta: Any
) -> list[GraphTensor | None]:
    """The gradients of query, key and value, and of the bias where it has a ``bias_meta``."""
    dtype = call.query.dtype
    grad, output = (x.with_value(call.ctx.cast(x.value, dtype)) for x in (grad, output))
    heads = int(call.query.shape[1])
    totals = GraphTensor.contiguous(ops.reshape(logsumexp, [*call.query.shape[:3], 1]))
    deltas = grad.with_value(ops.sum(ops.mul(grad.value, output.to_order(grad.order).value), axis=grad.axis(3)))
    queries, keys, values, biases = [], [], [], []
    right = call.right(call.key, transposed=False)
    turned = call.right(call.value, transposed=True)
    for start, stop in call.blocks():
        query, incoming, total, delta = (call.rows_of(x, start, stop) for x in (call.query, grad, totals, deltas))
        scores = call.scores(query, start)
        order = scores.order
        shifted = ops.sub(scores.value, call.as_matrices(total, order).to_order(order).value)
        powers = numerics.exp(shifted)
        if call.masked:
            hidden = ops.equal(scores.value, numerics.constant(scores.value, -math.inf))
            powers = ops.where(hidden, numerics.constant(powers, 0), powers)
        probabilities = scores.with_value(powers)
        rows = call.left(incoming)
        of_probabilities = call.product(rows, turned).to_order(order).value
        delta_rows = call.as_matrices(delta, order).to_order(order).value
        of_scores = scores.with_value(ops.mul(powers, ops.sub(of_probabilities, delta_rows)))
        queries.append(call.as_heads(call.product(of_scores, right), heads))
        keys.append(call.product(of_scores.permuted([0, 2, 1]), call.right(query, transposed=False)))
        values.append(call.product(probabilities.permuted([0, 2, 1]), call.right(incoming, transposed=False)))
        if bias_meta is not None:
            biases.append(call.as_heads(of_scores, heads))
    scale = call.ctx.scalar(call.scale, dtype)
    query_grad, key_grad = _joined(queries, 2), call.as_heads(_summed(keys), call.groups)
    gradients = [
        query_grad.with_value(ops.mul(query_grad.value, scale)),
        key_grad.with_value(ops.mul(key_grad.value, scale)),
        call.as_heads(_summed(values), call.groups),
    ]
    narrow: list[GraphTensor | None] = [x.with_value(call.ctx.cast(x.value, call.ctx.max_dtype)) for x in gradients]
    narrow.append(_bias_gradient(call, biases, bias_meta) if bias_meta is not None else None)
    return narrow


def _bias_gradient(call: _Attention, parts: Sequence[GraphTensor], meta: torch.Tensor) -> GraphTensor:
    """dS summed over the dimensions in which the bias is broadcast."""
    whole = _joined([GraphTensor.contiguous(part.logical()) for part in parts], 2)
    value = whole.value
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
    queries = int(logsumexp.shape[2])
    value = ctx.cast(logsumexp.value, max_dtype(fake.dtype))
    if fake.dim() == 4:
        return GraphTensor.contiguous(ops.reshape(value, list(fake.shape)))
    if fake.shape[2] == 0:
        return None
    if fake.shape[2] > queries:
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
    call = _Attention.of(ctx, query, key, value, bias, is_causal, scale)
    sums = logsumexp.logical()
    queries = int(query.shape[2])
    if sums.rank == 3 and int(sums.shape[2]) > queries:
        sums = ops.slice_tensor(sums, [slice(None), slice(None), slice(0, queries)])
    sums = ctx.cast(sums, call.query.dtype)
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
