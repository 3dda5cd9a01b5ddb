"""Matrix products.

A product of two matrices is a 1x1 convolution: its three passes are a @ b with b, neither or a transposed in memory, so
no operand is copied. Batches of matrices have kernels of their own, and so has float64 on a GPU, which the convolution
kernels do not support there.

A product of integers on a CPU is a reduction of a broadcast product.
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
from torch_max_backend.mojo_ops.matmul import matmul

aten = torch.ops.aten


def _is_empty(*tensors: GraphTensor) -> bool:
    return any(isinstance(size, StaticDim) and int(size) == 0 for tensor in tensors for size in tensor.shape)


def _swapped(value: TensorValue) -> TensorValue:
    return ops.transpose(value, value.rank - 2, value.rank - 1)


def matrix_product(a: GraphTensor, b: GraphTensor) -> GraphTensor:
    """a @ b for two matrices, or two batches of them; operands are read as they lie."""
    if a.dtype != b.dtype:
        raise CannotLower(f"a product of {a.dtype} and {b.dtype}")
    rank = a.rank
    if _is_empty(a, b):
        shape = [*a.shape[:-1], b.shape[-1]]
        return GraphTensor.contiguous(ops.broadcast_to(numerics.constant(a.value, 0), shape))
    if a.dtype.is_integral():
        if a.value.device.is_gpu():
            raise CannotLower("a product of integers on a GPU")
        left, right = ops.unsqueeze(a.logical(), rank - 1), ops.unsqueeze(_swapped(b.logical()), rank - 2)
        return GraphTensor.contiguous(ops.squeeze(ops.sum(ops.mul(left, right), axis=rank), rank))
    if rank == 3 and a.shape[0] != 1:
        return _batched_product(a, b)
    flat = [_matrix(each) for each in (a, b)]
    product = _pointwise_convolution(*flat) if _as_convolution(*flat) else _one_product(*flat)
    if rank == 2:
        return product
    return GraphTensor(ops.unsqueeze(product.value, 0), (0, *(1 + dim for dim in product.order)))


def _matrix(tensor: GraphTensor) -> GraphTensor:
    """A batch of one matrix as that."""
    if tensor.rank == 2:
        return tensor
    order = tuple(dim - 1 for dim in tensor.order if dim)
    return GraphTensor(ops.squeeze(tensor.value, tensor.axis(0)), order, tensor.argument)


def _as_convolution(a: GraphTensor, b: GraphTensor) -> bool:
    """Whether the convolutions' kernels form the product; of the extents all but the rows must be known."""
    known = [*b.shape, *([a.shape[0]] if a.order == (1, 0) else [])]
    if not all(isinstance(size, StaticDim) for size in known):
        return False
    return not (a.value.device.is_gpu() and a.dtype == DType.float64)


def products_allow_tf32() -> bool:
    """Whether the user lets PyTorch round float32 factors of matrix products to TF32."""
    return torch.get_float32_matmul_precision() != "highest"


def _pointwise_convolution(a: GraphTensor, b: GraphTensor) -> GraphTensor:
    """a @ b as the pass of a 1x1 convolution that reads both operands as they lie in memory."""
    left, right = (ops.reshape(m.value, [m.value.shape[0], 1, 1, 1, m.value.shape[1]]) for m in (a, b))
    point = (1, 1, 1)
    turned = (1, 0)
    geometry = Geometry(allow_tf32=a.value.device.is_gpu() and products_allow_tf32())
    if a.order == turned and b.order == turned:
        return _pointwise_convolution(b.permuted([1, 0]), a.permuted([1, 0])).permuted([1, 0])
    if a.order == turned:
        product = conv_wgrad(right, left, geometry, filter_size=point)
    elif b.order == turned:
        product = conv_fprop(left, right, geometry, output_size=point)
    else:
        product = conv_dgrad(left, right, geometry, input_size=point)
    return GraphTensor.contiguous(ops.reshape(product, [a.shape[0], b.shape[1]]))


def _batched_product(a: GraphTensor, b: GraphTensor) -> GraphTensor:
    """Batches of products; of operands in another order than these two a launch list makes no copy either."""
    plain, turned = (0, 1, 2), (0, 2, 1)
    a, b = (each if each.order in (plain, turned) else each.to_order(plain) for each in (a, b))
    product = matmul(
        a.value, b.value, a_turned=a.order == turned, b_turned=b.order == turned, allow_tf32=products_allow_tf32()
    )  # fmt: skip
    return GraphTensor.contiguous(product)


def _one_product(a: GraphTensor, b: GraphTensor) -> GraphTensor:
    batches = [GraphTensor(ops.unsqueeze(m.value, 0), (0, *(1 + dim for dim in m.order))) for m in (a, b)]
    return GraphTensor.contiguous(ops.squeeze(_batched_product(*batches).value, 0))


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
