"""Entries of convolutions whose store takes in a pointwise program (kernels/pointwise/program.mojo).

The geometry is a host tensor of int64: the convolution's own (problem.mojo), the shapes of its result, x or dy, and w,
each of rank 5, and then the extents and strides of the program's operands. The operands are addresses: the program's
result and inputs, then x or dy, and w.
"""

from max.gpu.host import DeviceContext
from std.utils.index import IndexList

from ...library import Arguments, Call, Operand, scratch
from ...pointwise.entries import operands_of
from ...pointwise.program import Operands, Place
from ..common import FPROP, Ptr
from ..entries import problem_of
from ..problem import GEOMETRY_LENGTH
from .dispatch import (
    are_aligned,
    can_implement,
    compiles_for,
    run_with_epilogue,
)
from .epilogue import apply_epilogue
from .packed import needs_packing


@no_inline
def _shape(geometry: Operand[DType.int64, 1], number: Int) -> IndexList[5]:
    var shape = IndexList[5]()
    for axis in range(5):
        shape[axis] = Int(geometry[GEOMETRY_LENGTH + 5 * number + axis])
    return shape


def conv_pointwise[
    target: StaticString,
    dtype: DType,
    pass_: Int,
    narrow: Bool,
    room: Int,
    plain: StaticString,
    count: Int,
    dims: Int,
    run: def[width: Int](
        Operands[count, dims], Place[dims], SIMD[dtype, width]
    ) thin -> SIMD[dtype, width],
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """fprop or dgrad, by the Hopper kernel with the program in its store; for a problem or an address that it does not
    take, by the library function `plain` into a buffer and a pass over that.
    """
    var geometry = arguments.take[DType.int64, 1]()
    var operands = operands_of[count, dims](
        geometry, GEOMETRY_LENGTH + 15, arguments
    )
    var result = Ptr[dtype](unsafe_from_address=operands.data[0])
    var a = Ptr[dtype](unsafe_from_address=arguments.take_word())
    var b = Ptr[dtype](unsafe_from_address=arguments.take_word())
    var values = IndexList[GEOMETRY_LENGTH]()
    for i in range(GEOMETRY_LENGTH):
        values[i] = Int(geometry[i])
    var shape = _shape(geometry, 0)
    var large = _shape(geometry, 1) if pass_ == FPROP else shape
    var small = shape if pass_ == FPROP else _shape(geometry, 1)
    var problem = problem_of(large, _shape(geometry, 2), small, values)
    var h = shape[2]
    var w = shape[3]
    var c = shape[4]
    var together = 0
    comptime for n in range(count):
        together |= operands.data[n]

    # By value: the kernel cannot follow an address on the host's stack.
    @__parameter
    @__copy_capture(operands, h, w, c)
    @always_inline
    def finish[
        width: Int
    ](index: IndexList[5], value: SIMD[dtype, width]) -> SIMD[dtype, width]:
        var row = (index[0] * h + index[2]) * w + index[3]
        return run[width](operands, operands.place(row * c + index[4]), value)

    comptime if compiles_for[dtype]():
        if (
            not can_implement[dtype, pass_](problem)
            and not needs_packing(problem)
            and together % 16 == 0
            and are_aligned[dtype](result, a, b)
        ):
            run_with_epilogue[dtype, pass_, narrow, room, finish](
                result, a, b, problem, ctx
            )
            return
    var buffer = scratch[dtype](ctx, shape.flattened_length())
    var call = Call()
    call.append_at(Int(buffer.unsafe_ptr()), shape)
    call.append_at(Int(a), _shape(geometry, 1))
    call.append_at(Int(b), _shape(geometry, 2))
    call.append_at(Int(geometry.data), IndexList[1](GEOMETRY_LENGTH))
    call.run[plain](ctx)
    apply_epilogue[dtype, finish](
        result,
        Ptr[dtype](unsafe_from_address=Int(buffer.unsafe_ptr())),
        IndexList[4](shape[0], shape[2], shape[3], shape[4]),
        ctx,
    )
    _ = buffer^
