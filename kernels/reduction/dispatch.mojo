"""Selection of the kernel that runs a call."""

from max.gpu.host import DeviceContext
from max.gpu.host.info import is_cpu

from ..common.gpu import VECTOR_BYTES
from ..common.pointer import Ptr
from ..pointwise.many import TensorTable
from ..pointwise.program import ProgramOperands
from .cpu import reduction_cpu
from .gpu import reduction_gpu
from .many import reduction_many_cpu, reduction_many_gpu
from .program import ReductionProgram
from .scan import cumsum_columns_gpu, cumsum_cpu, cumsum_rows_gpu
from .values import Extents


@always_inline
def reduction[
    target: StaticString,
    P: ReductionProgram,
    vector: Int,
    parts: Int,
    rows: Bool,
](
    operands: ProgramOperands[P.COUNT, P.DIMS],
    extents: Extents,
    addresses: Int,
    ctx: DeviceContext,
) raises:
    """Writes the results of one program; `addresses` are the addresses of the tensors that it reads, joined by `or`.
    """
    comptime if is_cpu[target]():
        reduction_cpu[P, vector, rows](operands, extents)
    else:
        # `vector` divides the extent that lies together.
        if vector > 1 and addresses % VECTOR_BYTES == 0:
            reduction_gpu[P, vector, parts, rows](operands, extents, ctx)
        else:
            reduction_gpu[P, 1, parts, rows](operands, extents, ctx)


@always_inline
def reduction_many[
    target: StaticString, P: ReductionProgram, vector: Int, ordered: Int
](table: TensorTable[P.COUNT], ctx: DeviceContext) raises:
    """Writes the results of one program for each tensor of a table."""
    comptime if is_cpu[target]():
        reduction_many_cpu[P, vector](table)
    else:
        reduction_many_gpu[P, vector, ordered](table, ctx)


@always_inline
def cumsum[
    dtype: DType, //, target: StaticString
](y: Ptr[dtype], x: Ptr[dtype], extents: Extents, ctx: DeviceContext) raises:
    """Writes running sums, of which there are some."""
    comptime acc = DType.float32 if dtype == DType.bfloat16 or dtype == DType.float16 else dtype
    comptime if is_cpu[target]():
        cumsum_cpu[dtype, acc](y, x, extents)
    else:
        if extents.inner == 1:
            cumsum_rows_gpu[dtype, acc](y, x, extents, ctx)
        else:
            cumsum_columns_gpu[dtype, acc](y, x, extents, ctx)
