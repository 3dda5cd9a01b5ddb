"""The matrix products' entry in its libraries.

Its first number tells the kind of the others. Strided matrices come with sizes and strides, and as addresses: C, A and
B. Contiguous ones are of rank 3, C [B, M, N], A [B, M, K] and B [B, K, N], of which A and B may lie transposed.
"""

from max.gpu.host import DeviceContext

from ..common.library import Arguments
from ..common.pointer import Ptr
from .dispatch import run
from .problem import MatmulProblem, contiguous


def matmul[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """C = A B for each matrix of a batch."""
    var problem: MatmulProblem
    var c: Ptr[dtype]
    var a: Ptr[dtype]
    var b: Ptr[dtype]
    if arguments.take_word() != 0:
        problem = MatmulProblem.take(arguments)
        c = Ptr[dtype](unsafe_from_address=arguments.take_word())
        a = Ptr[dtype](unsafe_from_address=arguments.take_word())
        b = Ptr[dtype](unsafe_from_address=arguments.take_word())
    else:
        var flags = arguments.take_words[3]()
        var c_whole = arguments.take[dtype, 3]()
        var a_whole = arguments.take[dtype, 3]()
        var b_whole = arguments.take[dtype, 3]()
        problem = contiguous(
            c_whole.shape(),
            a_whole.shape(),
            b_whole.shape(),
            flags[0],
            flags[1] != 0,
            flags[2] != 0,
        )
        c, a, b = c_whole.data, a_whole.data, b_whole.data
    run[target, dtype](c, a, b, problem, ctx)
