"""The matrix products' entry in its libraries.

The geometry is a host tensor of GEOMETRY_LENGTH int64 values (problem.mojo). The operands are addresses: C, A and B.
"""

from max.gpu.host import DeviceContext
from std.utils.index import IndexList

from ..common.library import Arguments
from ..common.pointer import Ptr
from .dispatch import run
from .problem import GEOMETRY_LENGTH, problem_of


def matmul[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """C = A B for each matrix of a batch."""
    var geometry = arguments.take[DType.int64, 1]()
    if geometry.dim_size(0) != GEOMETRY_LENGTH:
        raise Error(
            t"matmul: geometry has {geometry.dim_size(0)} values: must be"
            t" {GEOMETRY_LENGTH}"
        )
    var values = IndexList[GEOMETRY_LENGTH]()
    for i in range(GEOMETRY_LENGTH):
        values[i] = Int(geometry[i])
    var c = Ptr[dtype](unsafe_from_address=arguments.take_word())
    var a = Ptr[dtype](unsafe_from_address=arguments.take_word())
    var b = Ptr[dtype](unsafe_from_address=arguments.take_word())
    run[target, dtype](c, a, b, problem_of(values), ctx)
