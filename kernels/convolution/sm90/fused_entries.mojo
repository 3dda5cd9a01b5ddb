"""Entries of convolutions whose store takes in a pointwise program (kernels/pointwise/program.mojo), and the sums over
what is stored that batch normalization asks for. `FusedCall` (fused.mojo) says what a call gets.
"""

from std.bit import pop_count
from std.math import ceildiv

from max.gpu.host import DeviceContext
from std.utils.index import IndexList
from std.utils.static_tuple import StaticTuple

from ...common.library import Arguments, scratch
from ...common.pointer import Ptr
from ...common.widening import wide
from ...normalization.gpu import (
    MERGE_CHANNELS,
    MERGE_LANES,
    merge_moments_kernel,
    merge_sums_kernel,
)
from ...normalization.numbers import NormalizationNumbers
from ...normalization.partials import Slots
from ...pointwise.program import ProgramOperands, RunPositions
from ..epilogue_callback import NO_EPILOGUE
from ..fused import FusedCall
from ..kernel import ConvolutionTensors
from ..passes import MOMENTS, NO_SUMS, PRODUCTS
from .aligned import AS_IT_IS
from .beside import (
    SLOTS,
    Addresses,
    Beside,
    Epilogue,
    Factor,
    Reader,
    operand_ahead,
)
from .dispatch import runs_fused
from .epilogue import apply_epilogue
from .gemm import (
    compiles_fused,
    fused_recast,
    run_fused,
    slots_of_sums,
    sums_are_worth_it,
)
from .launch import NOWHERE


def conv_pointwise_sums[
    target: StaticString,
    dtype: DType,
    pass_: Int,
    narrow: Int,
    taps: Int,
    max_phases: Int,
    plain: StaticString,
    heavy: Bool,
    ahead: Int,
    sums: Int,
    plain_sums: StaticString,
    has_program: Bool,
    count: Int,
    dims: Int,
    run: def[width: Int, parts: Int](
        ProgramOperands[count, dims],
        RunPositions[dims, parts],
        SIMD[dtype, width],
        Beside[dtype, width],
    ) thin -> SIMD[dtype, width],
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """fprop or dgrad, by the Hopper kernel with the program in its store, which also makes the `sums` of what it
    stores. For a problem or an address that it does not take, by the library function `plain`, into a buffer where a
    pass over that follows, and by the library function `plain_sums`. Without a program the result is the convolution's
    own.

    A `narrow` result has so many channels at most, with 0 any number; its kernel is made for filters of some `taps`
    along W, or takes one at a time. It has `max_phases` phases at most. A `heavy` program needs many registers for a
    vector. Of the program's operands those whose bit is set in `ahead` lie as the result does, are of its type, and are
    read before the program runs; SLOTS at most, with what sums read.
    """
    var call = FusedCall[count, dims, sums](arguments)
    var operands = call.operands
    var result = Ptr[dtype](unsafe_from_address=operands.data[0])
    var a = Ptr[dtype](unsafe_from_address=call.a)
    var b = Ptr[dtype](unsafe_from_address=call.b)
    var problem = call.convolution.problem[pass_]()
    var shape = call.convolution.result
    var c = shape[4]
    var rows = shape.flattened_length() // c
    var is_fused = False
    comptime if compiles_fused[dtype, pass_]():
        is_fused = call.is_aligned() and runs_fused[dtype, pass_, max_phases](
            ConvolutionTensors(result, a, b, NO_EPILOGUE), problem
        )
    var recast = fused_recast[dtype, pass_, narrow, sums](
        problem
    ) if is_fused else AS_IT_IS
    # What the kernel takes for a row of the result.
    var columns = c * recast.block
    var x = Ptr[dtype](unsafe_from_address=call.beside[0])
    var mean = Ptr[DType.float32](unsafe_from_address=call.beside[1])

    @__parameter
    @always_inline
    def places[
        parts: Int
    ](
        operands: ProgramOperands[count, dims],
        columns: Int,
        pixels: StaticTuple[Int, parts],
        channel: Int,
    ) -> RunPositions[dims, parts]:
        var places = RunPositions[dims, parts](
            operands.place(pixels[0] * columns + channel)
        )
        comptime for part in range(1, parts):
            var place = operands.place(pixels[part] * columns + channel)
            places.put[part](place, True)
        return places

    comptime of_program = pop_count(ahead)
    comptime slots = of_program + (1 if sums == PRODUCTS else 0)
    comptime assert slots <= SLOTS

    # By value: the kernel cannot follow an address on the host's stack.
    @__parameter
    @__copy_capture(operands, columns, x, c)
    @always_inline
    def read[
        parts: Int
    ](pixels: StaticTuple[Int, parts], channel: Int) -> Addresses[parts]:
        var addresses = Addresses[parts](fill=0)
        comptime for part in range(parts):
            var element = pixels[part] * columns + channel
            comptime for slot in range(of_program):
                addresses[slot * parts + part] = operands.address[
                    dtype, operand_ahead(ahead, slot)
                ](element)
            comptime if sums == PRODUCTS:
                addresses[of_program * parts + part] = Int(
                    x.unsafe_offset(pixels[part] * c + channel)
                )
        return addresses

    @__parameter
    @__copy_capture(operands, columns)
    @always_inline
    def epilogue[
        width: Int, parts: Int
    ](
        pixels: StaticTuple[Int, parts],
        channel: Int,
        value: SIMD[dtype, width],
        beside: Beside[dtype, width],
    ) -> SIMD[dtype, width]:
        return run[width, parts](
            operands,
            places(operands, columns, pixels, channel),
            value,
            beside,
        )

    @__parameter
    @__copy_capture(mean)
    @always_inline
    def deviation[
        width: Int, parts: Int
    ](channel: Int, value: SIMD[dtype, width]) -> SIMD[DType.float32, width]:
        comptime run_width = width // parts
        var center = mean.unsafe_offset(channel).unsafe_load[
            width=run_width, alignment=16
        ]()
        var result = wide(value)
        comptime for part in range(parts):
            result = result.insert[offset=part * run_width](
                result.slice[run_width, offset=part * run_width]() - center
            )
        return result

    comptime own = Optional[Epilogue[dtype]](
        epilogue
    ) if has_program else Optional[Epilogue[dtype]]()
    comptime factor = Optional[Factor[dtype]](
        deviation
    ) if sums == PRODUCTS else Optional[Factor[dtype]]()
    comptime reader = Optional[Reader[dtype]](read) if slots > 0 else Optional[
        Reader[dtype]
    ]()
    comptime launch = run_fused[
        dtype,
        pass_,
        narrow,
        taps,
        max_phases,
        heavy,
        slots,
        reader,
        own,
        sums,
        factor,
    ]
    comptime if compiles_fused[dtype, pass_]():
        if is_fused:
            comptime if sums == NO_SUMS:
                launch(result, a, b, NOWHERE, problem, recast, ctx)
                return
            else:
                if has_program or sums_are_worth_it[pass_, narrow](
                    problem, recast, ctx
                ):
                    var slots = slots_of_sums[pass_, narrow, taps](
                        problem, recast, ctx
                    )
                    var buffer = scratch[DType.float32](ctx, slots.elements())
                    var partials = Ptr[DType.float32](
                        unsafe_from_address=Int(buffer.unsafe_ptr())
                    )
                    launch(result, a, b, partials, problem, recast, ctx)
                    _merge[dtype, sums](
                        call.made,
                        call.beside,
                        call.statistics,
                        partials,
                        slots,
                        rows,
                        c,
                        ctx,
                    )
                    _ = buffer^
                    return
    comptime if has_program:
        var buffer = scratch[dtype](ctx, shape.flattened_length())
        var between = Int(buffer.unsafe_ptr())
        call.convolution.run[plain](between, call.a, call.b, ctx)
        apply_epilogue[dtype, reader, slots, epilogue](
            result, Ptr[dtype](unsafe_from_address=between), rows, c, ctx
        )
        _ = buffer^
    else:
        call.convolution.run[plain](Int(result), call.a, call.b, ctx)
    comptime if sums != NO_SUMS:
        call.run_sums[plain_sums](Int(result), rows, c, ctx)


comptime conv_pointwise[
    target: StaticString,
    dtype: DType,
    pass_: Int,
    narrow: Int,
    taps: Int,
    max_phases: Int,
    plain: StaticString,
    heavy: Bool,
    ahead: Int,
    count: Int,
    dims: Int,
    run: def[width: Int, parts: Int](
        ProgramOperands[count, dims],
        RunPositions[dims, parts],
        SIMD[dtype, width],
        Beside[dtype, width],
    ) thin -> SIMD[dtype, width],
] = conv_pointwise_sums[
    target,
    dtype,
    pass_,
    narrow,
    taps,
    max_phases,
    plain,
    heavy,
    ahead,
    NO_SUMS,
    "",
    True,
    count,
    dims,
    run,
]
"""The same without sums."""


@no_inline
def _merge[
    dtype: DType, sums: Int
](
    made: IndexList[4],
    beside: IndexList[3],
    statistics: NormalizationNumbers,
    partials: Ptr[DType.float32],
    slots: Slots,
    rows: Int,
    channels: Int,
    ctx: DeviceContext,
) raises:
    """What the sums in the slots make of each channel."""

    @always_inline
    def channel(address: Int) -> Ptr[DType.float32]:
        return Ptr[DType.float32](unsafe_from_address=address)

    # No row is left to be read by the second stage.
    var none = Ptr[dtype](unsafe_from_address=Int(partials))
    comptime if sums == MOMENTS:
        ctx.enqueue_function[
            merge_moments_kernel[dtype, DType.float32, True, Slots]
        ](
            channel(made[0]),
            channel(made[1]),
            channel(made[2]),
            channel(made[3]),
            partials,
            none,
            channel(beside[0]),
            channel(beside[1]),
            slots,
            Int64(rows),
            Int64(channels),
            statistics.momentum.cast[DType.float32](),
            statistics.epsilon.cast[DType.float32](),
            grid_dim=ceildiv(channels, MERGE_CHANNELS),
            block_dim=(MERGE_LANES, MERGE_CHANNELS),
        )
    else:
        ctx.enqueue_function[merge_sums_kernel[dtype, DType.float32, Slots]](
            channel(made[0]),
            channel(made[1]),
            channel(made[2]),
            channel(made[3]),
            partials,
            none,
            none,
            channel(beside[1]),
            channel(beside[2]),
            slots,
            Int64(rows),
            Int64(channels),
            grid_dim=ceildiv(channels, MERGE_CHANNELS),
            block_dim=(MERGE_LANES, MERGE_CHANNELS),
        )
