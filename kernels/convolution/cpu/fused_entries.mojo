"""Entries of convolutions on a CPU that compute a pointwise program of their result (kernels/pointwise/program.mojo) while
it lies in the cache.

The geometry is a list of numbers: the convolution's own (problem.mojo), the shapes of its result, x or dy, and w,
each of rank 5, and then the extents and strides of the program's operands. The operands are addresses: the program's
result and inputs, then x or dy, and w.
"""

from std.memory.alloc import unsafe_alloc

from max.gpu.host import DeviceContext
from std.utils.index import IndexList

from ...common.library import Arguments, Call, Operand
from ...common.pointer import Ptr
from ...pointwise.entries import operands_of
from ...pointwise.program import Operands, Places
from ..finish import Body
from ..problem import GEOMETRY_LENGTH


def _run_over[
    dtype: DType,
    vector: Int,
    count: Int,
    dims: Int,
    run: def[width: Int, parts: Int](
        Operands[count, dims], Places[dims, parts], SIMD[dtype, width]
    ) thin -> SIMD[dtype, width],
](context: Int, first: Int, last: Int) abi("C"):
    """The program over the elements [first, last) of the convolution's result, which become the program's.
    """
    ref operands = MutPointer[Operands[count, dims], MutUntrackedOrigin](
        unsafe_from_address=context
    )[]
    var data = Ptr[dtype](unsafe_from_address=operands.data[0])
    comptime inner = dims - 1
    var i = first
    while i < last:
        var place = operands.place(i)
        var stop = last
        comptime if dims > 1:
            stop = min(last, i + operands.extents[inner] - place.digits[inner])
        while i + vector <= stop:
            var at = data.unsafe_offset(i)
            at.unsafe_store(
                run[vector, 1](operands, place, at.unsafe_load[width=vector]())
            )
            i += vector
            place.index = i
            place.digits[inner] = place.digits[inner] + vector
        while i < stop:
            var at = data.unsafe_offset(i)
            at.unsafe_store(
                run[1, 1](operands, place, at.unsafe_load[width=1]())
            )
            i += 1
            place.index = i
            place.digits[inner] = place.digits[inner] + 1


@no_inline
def _append_shaped(
    mut call: Call,
    address: Int,
    geometry: Operand[DType.int64, 1],
    number: Int,
):
    var shape = IndexList[5]()
    for axis in range(5):
        shape[axis] = Int(geometry[GEOMETRY_LENGTH + 5 * number + axis])
    call.append_at(address, shape)


def conv_pointwise[
    target: StaticString,
    dtype: DType,
    plain: StaticString,
    vector: Int,
    count: Int,
    dims: Int,
    run: def[width: Int, parts: Int](
        Operands[count, dims], Places[dims, parts], SIMD[dtype, width]
    ) thin -> SIMD[dtype, width],
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """fprop or dgrad by the library function `plain`, which calls the program for what it has stored.
    """
    var geometry = arguments.take_list()
    var operands = unsafe_alloc[Operands[count, dims]](1)
    operands[] = operands_of[count, dims](
        geometry, GEOMETRY_LENGTH + 15, arguments
    )
    var a = arguments.take_word()
    var b = arguments.take_word()
    var body: Body = _run_over[dtype, vector, count, dims, run]
    comptime length = GEOMETRY_LENGTH + 2
    var values = unsafe_alloc[Int64](length)
    for i in range(GEOMETRY_LENGTH):
        values[unsafe_offset=i] = geometry[i]
    values[unsafe_offset=GEOMETRY_LENGTH] = Int64(
        Pointer(to=body).unsafe_bitcast[Int]()[]
    )
    values[unsafe_offset=GEOMETRY_LENGTH + 1] = Int64(Int(operands))
    var call = Call()
    _append_shaped(call, operands[].data[0], geometry, 0)
    _append_shaped(call, a, geometry, 1)
    _append_shaped(call, b, geometry, 2)
    call.append_at(Int(values), IndexList[1](length))
    try:
        call.run[plain](ctx)
    finally:
        values.unsafe_free()
        operands.unsafe_free()
