"""Matrix products.

On a CPU a product of two float matrices is a 1x1 convolution: its three passes are a @ b with b, neither or a
transposed in memory, so no operand is ever copied, and one compiled kernel serves every size, where MAX would compile
its own anew for each (20 s on 2 cores). A batch of products is one with groups. So is a product in 16 bits on Hopper,
where MAX's own takes half a minute to compile, and a float32 product on any GPU unless the user lets PyTorch round to
TF32 (``torch.set_float32_matmul_precision``), which MAX's product always does there.

A product of integers on a CPU is a reduction of a broadcast product, which MAX fuses into one kernel: compiling its
matrix product, which is not made for integers, takes a minute on 2 cores.

Elsewhere MAX multiplies row-major matrices, the second one optionally transposed. A transposed operand is no copy
where it can be that second one, or where the product of both can be formed transposed and relabelled.
"""

from __future__ import annotations

import torch
from max.dtype import DType
from max.graph import Dim, StaticDim, TensorValue

from torch_max_backend.errors import CannotLower
from torch_max_backend.ir import ops
from torch_max_backend.ir.layout import GraphTensor
from torch_max_backend.lowering import numerics
from torch_max_backend.lowering.context import LoweringContext
from torch_max_backend.lowering.registry import Layout, lowering
from torch_max_backend.mojo_ops.convolution import Geometry, conv_dgrad, conv_fprop, conv_wgrad
from torch_max_backend.mojo_ops.functions import is_hopper

aten = torch.ops.aten


def _is_empty(*tensors: GraphTensor) -> bool:
    return any(isinstance(size, StaticDim) and int(size) == 0 for tensor in tensors for size in tensor.shape)


def _swapped(value: TensorValue) -> TensorValue:
    return ops.transpose(value, value.rank - 2, value.rank - 1)


def matrix_product(a: GraphTensor, b: GraphTensor) -> GraphTensor:
    """a @ b for two matrices, or two batches of them.

    Of matrices none is copied unless only ``a`` is transposed; batches that run as a grouped convolution are put into
    its order.
    """
    if a.dtype != b.dtype:
        raise CannotLower(f"a product of {a.dtype} and {b.dtype}")
    rank = a.rank
    plain = tuple(range(rank))
    turned = (*range(rank - 2), rank - 1, rank - 2)
    if _is_empty(a, b):
        shape = [*a.shape[:-1], b.shape[-1]]
        return GraphTensor.contiguous(ops.broadcast_to(numerics.constant(a.value, 0), shape))
    if a.dtype.is_integral() and not a.value.device.is_gpu():
        left, right = ops.unsqueeze(a.logical(), rank - 1), ops.unsqueeze(_swapped(b.logical()), rank - 2)
        return GraphTensor.contiguous(ops.squeeze(ops.sum(ops.mul(left, right), axis=rank), rank))
    if rank == 3 and _as_convolution(a, b):
        return _grouped_convolution(a, b)
    if a.order not in (plain, turned):
        a = a.to_order(plain)
    if b.order not in (plain, turned):
        b = b.to_order(plain)
    if rank == 2 and _as_convolution(a, b):
        return _pointwise_convolution(a, b)
    if a.order == plain:
        right = b.value if b.order == plain else _swapped(b.value)
        return GraphTensor.contiguous(ops.matmul(a.value, right))
    if b.order == turned:
        return GraphTensor(ops.matmul(b.value, a.value), turned)
    if _smaller(b, a):
        return GraphTensor(ops.matmul(_swapped(b.value), a.value), turned)
    return GraphTensor.contiguous(ops.matmul(_swapped(a.value), b.value))


def _as_convolution(a: GraphTensor, b: GraphTensor) -> bool:
    """Whether the project's own kernels form the product; of the extents all but the rows must be known."""
    known = [*b.shape, *([a.shape[0]] if a.order == (1, 0) else [])]
    if not all(isinstance(size, StaticDim) for size in known):
        return False
    if a.value.device.is_gpu():
        if a.dtype in (DType.bfloat16, DType.float16) and a.rank == 2:
            return is_hopper()
        return a.dtype == DType.float32 and torch.get_float32_matmul_precision() == "highest"
    return a.dtype in (DType.float32, DType.float64, DType.bfloat16, DType.float16)


def _pointwise_convolution(a: GraphTensor, b: GraphTensor) -> GraphTensor:
    """a @ b as the pass of a 1x1 convolution that reads both operands as they lie in memory."""
    left, right = (ops.reshape(m.value, [m.value.shape[0], 1, 1, 1, m.value.shape[1]]) for m in (a, b))
    point = (1, 1, 1)
    turned = (1, 0)
    if a.order == turned and b.order == turned:
        return _pointwise_convolution(b.permuted([1, 0]), a.permuted([1, 0])).permuted([1, 0])
    if a.order == turned:
        product = conv_wgrad(right, left, filter_size=point)
    elif b.order == turned:
        product = conv_fprop(left, right, output_size=point)
    else:
        product = conv_dgrad(left, right, input_size=point)
    return GraphTensor.contiguous(ops.reshape(product, [a.shape[0], b.shape[1]]))


def _grouped_convolution(a: GraphTensor, b: GraphTensor) -> GraphTensor:
    """A batch of products as a 1x1 convolution with a group for each: [M, B*K] by [B*N, K] to [M, B*N]."""
    batch, depth, columns = b.shape
    rows = a.shape[1]
    left = ops.reshape(a.to_order((1, 0, 2)).value, [rows, 1, 1, 1, batch * depth])
    right = ops.reshape(b.to_order((0, 2, 1)).value, [batch * columns, 1, 1, 1, depth])
    product = conv_fprop(left, right, Geometry(groups=int(batch)), output_size=(1, 1, 1))
    return GraphTensor(ops.reshape(product, [rows, batch, columns]), (1, 0, 2))


def _smaller(a: GraphTensor, b: GraphTensor) -> bool:
    """Whether ``a`` is known to have fewer elements than ``b``."""
    if not all(isinstance(tensor.shape[-1], StaticDim) for tensor in (a, b)):
        return False
    ours, theirs = _count(a.shape), _count(b.shape)
    return ours is not None and theirs is not None and ours < theirs


def _count(shape: list[Dim]) -> int | None:
    count = 1
    for size in shape:
        if not isinstance(size, StaticDim):
            return None
        count *= int(size)
    return count


@lowering(aten.mm.default, layout=Layout.RAW)
def mm(ctx: LoweringContext, a: GraphTensor, b: GraphTensor) -> GraphTensor:
    """The product of two matrices."""
    return matrix_product(a, b)


@lowering(aten.bmm.default, layout=Layout.RAW)
def bmm(ctx: LoweringContext, a: GraphTensor, b: GraphTensor) -> GraphTensor:
    """The products of two batches of matrices."""
    return matrix_product(a, b)


@lowering(aten.addmm.default, layout=Layout.RAW)
def addmm(
    ctx: LoweringContext,
    bias: GraphTensor,
    a: GraphTensor,
    b: GraphTensor,
    *,
    beta: float | int = 1,
    alpha: float | int = 1,
) -> GraphTensor:
    """beta * bias + alpha * (a @ b); the bias may broadcast. A beta of 0 ignores NaN in the bias."""
    return _plus(ctx, bias, matrix_product(a, b), beta, alpha)


@lowering(aten.addmv.default, layout=Layout.RAW)
def addmv(
    ctx: LoweringContext,
    bias: GraphTensor,
    matrix: GraphTensor,
    vector: GraphTensor,
    *,
    beta: float | int = 1,
    alpha: float | int = 1,
) -> GraphTensor:
    """beta * bias + alpha * (matrix @ vector)."""
    column = GraphTensor.contiguous(ops.unsqueeze(vector.value, 1))
    product = matrix_product(matrix, column)
    flat = GraphTensor.contiguous(ops.reshape(product.value, [matrix.shape[0]]))
    return _plus(ctx, bias, flat, beta, alpha)


def _plus(
    ctx: LoweringContext, bias: GraphTensor, product: GraphTensor, beta: float | int, alpha: float | int
) -> GraphTensor:
    if any(isinstance(factor, torch.SymInt) for factor in (beta, alpha)):
        raise CannotLower("a factor that is known only at run time")
    dtype = ctx.compute_dtype
    result = ctx.cast(product.value, dtype)
    if alpha != 1:
        result = ops.mul(result, ctx.scalar(alpha, dtype))
    if beta != 0:
        missing = product.rank - bias.rank
        added = ops.reshape(bias.logical(), [1] * missing + bias.shape) if missing else bias.logical()
        added = GraphTensor.contiguous(ctx.cast(added, dtype)).to_order(product.order).value
        if beta != 1:
            added = ops.mul(added, ctx.scalar(beta, dtype))
        result = ops.add(result, added)
    return product.with_value(ctx.cast(result, ctx.max_dtype))


@lowering(aten.linear.default, layout=Layout.RAW)
def linear(ctx: LoweringContext, x: GraphTensor, weight: GraphTensor, bias: GraphTensor | None = None) -> GraphTensor:
    """x @ weight.T + bias over the last dimension of x."""
    if weight.rank != 2:
        raise CannotLower(f"a weight of rank {weight.rank}")
    rows = Dim(1)
    for size in x.shape[:-1]:
        rows = rows * size
    features = x.shape[-1]
    flat = x if x.rank == 2 else GraphTensor.contiguous(ops.reshape(x.logical(), [rows, features]))
    product = matrix_product(flat, weight.permuted([1, 0]))
    if bias is not None:
        product = _plus(ctx, bias, product, 1, 1)
    if x.rank == 2:
        return product
    return GraphTensor.contiguous(ops.reshape(product.logical(), ctx.out_shape()))
