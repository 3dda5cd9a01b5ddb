"""Entries of convolutions on a CPU that compute a pointwise program of their result (kernels/pointwise/program.mojo)
while it lies in the cache. `FusedCall` (fused.mojo) says what a call gets.
"""

from std.memory.alloc import unsafe_alloc

from max.gpu.host import DeviceContext

from ...common.library import Arguments
from ...common.pointer import Ptr
from ...pointwise.program import ProgramOperands, RunPositions
from ..epilogue_callback import Body, EpilogueCallback
from ..fused import FusedCall


def _run_over[
    dtype: DType,
    vector: Int,
    count: Int,
    dims: Int,
    run: def[width: Int, parts: Int](
        ProgramOperands[count, dims],
        RunPositions[dims, parts],
        SIMD[dtype, width],
    ) thin -> SIMD[dtype, width],
](context: Int, first: Int, last: Int) abi("C"):
    """The program over the elements [first, last) of the convolution's result, which become the program's.
    """
    ref operands = MutPointer[ProgramOperands[count, dims], MutUntrackedOrigin](
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


def conv_pointwise[
    target: StaticString,
    dtype: DType,
    plain: StaticString,
    vector: Int,
    count: Int,
    dims: Int,
    run: def[width: Int, parts: Int](
        ProgramOperands[count, dims],
        RunPositions[dims, parts],
        SIMD[dtype, width],
    ) thin -> SIMD[dtype, width],
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """fprop or dgrad by the library function `plain`, which calls the program for what it has stored.
    """
    var call = FusedCall[count, dims](arguments)
    var operands = unsafe_alloc[ProgramOperands[count, dims]](1)
    operands[] = call.operands
    var body: Body = _run_over[dtype, vector, count, dims, run]
    var convolution = call.convolution
    convolution.numbers.epilogue = EpilogueCallback(
        Pointer(to=body).unsafe_bitcast[Int]()[], Int(operands), 0
    )
    try:
        convolution.run[plain](call.operands.data[0], call.a, call.b, ctx)
    finally:
        operands.unsafe_free()
