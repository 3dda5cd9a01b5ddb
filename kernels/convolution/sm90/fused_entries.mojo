"""Entries of convolutions whose store takes in a pointwise program (kernels/pointwise/program.mojo), and the sums over
what is stored that batch normalization asks for.

A call has the convolution's numbers and shapes (operands.mojo), where running statistics are moved momentum and epsilon,
a list with the extents and strides of the program's operands, and addresses: the program's result and inputs, then x or
dy, and w.

A `heavy` program needs many registers for a vector.
"""

from std.math import ceildiv

from max.gpu.host import DeviceContext
from std.utils.index import IndexList
from std.utils.static_tuple import StaticTuple

from ...common.library import Arguments, Call, scratch
from ...common.pointer import Ptr
from ...normalization.gpu import (
    MERGED,
    MERGERS,
    merge_moments_kernel,
    merge_sums_kernel,
)
from ...normalization.partials import Slots
from ...normalization.settings import Settings
from ...pointwise.entries import operands_of
from ...pointwise.program import ProgramOperands, Places
from ..finish import NOTHING
from ..kernel import ConvolutionTensors
from ..passes import FPROP
from ..operands import FusedConvolution
from ..problem import ConvolutionProblem
from .column_sums import MOMENTS, Factor
from .dispatch import Sm90Speed
from .gemm import (
    Gemm,
    compiles_for,
    run_with_epilogue,
    run_with_sums,
    slots_of_sums,
    sums_are_worth_it,
)
from .epilogue import apply_epilogue
from .store import Epilogue
from .packed import needs_packing


@no_inline
def _fits[
    dtype: DType, pass_: Int, room: Int
](t: ConvolutionTensors[dtype], p: ConvolutionProblem) -> Bool:
    """Whether the kernel, which has room for so many phases, runs the problem as it is.
    """
    return (
        (pass_ == FPROP or p.stride_h * p.stride_w <= room)
        and Sm90Speed.pays[Gemm, dtype, pass_](p)
        and not Gemm.can_implement[dtype, pass_](t, p)
        and not needs_packing[dtype](p)
    )


def conv_pointwise[
    target: StaticString,
    dtype: DType,
    pass_: Int,
    narrow: Bool,
    room: Int,
    plain: StaticString,
    heavy: Bool,
    count: Int,
    dims: Int,
    run: def[width: Int, parts: Int](
        ProgramOperands[count, dims], Places[dims, parts], SIMD[dtype, width]
    ) thin -> SIMD[dtype, width],
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """fprop or dgrad, by the Hopper kernel with the program in its store; for a problem or an address that it does not
    take, by the library function `plain` into a buffer and a pass over that.
    """
    var given = FusedConvolution.take(arguments)
    var geometry = arguments.take_list()
    var operands = operands_of[count, dims](geometry, 0, arguments)
    var result = Ptr[dtype](unsafe_from_address=operands.data[0])
    var a = Ptr[dtype](unsafe_from_address=arguments.take_word())
    var b = Ptr[dtype](unsafe_from_address=arguments.take_word())
    var problem = given.problem[pass_]()
    var shape = given.result
    var c = shape[4]
    var together = 0
    comptime for n in range(count):
        together |= operands.data[n]

    # By value: the kernel cannot follow an address on the host's stack.
    @__parameter
    @__copy_capture(operands, c)
    @always_inline
    def finish[
        width: Int, parts: Int
    ](
        pixels: StaticTuple[Int, parts],
        channel: Int,
        value: SIMD[dtype, width],
    ) -> SIMD[dtype, width]:
        var places = Places[dims, parts](
            operands.place(pixels[0] * c + channel)
        )
        comptime for part in range(1, parts):
            var place = operands.place(pixels[part] * c + channel)
            places.put[part](place, True)
        return run[width, parts](operands, places, value)

    comptime if compiles_for[dtype, pass_]():
        if together % 16 == 0 and _fits[dtype, pass_, room](
            ConvolutionTensors(result, a, b, NOTHING), problem
        ):
            run_with_epilogue[dtype, pass_, narrow, room, heavy, finish](
                result, a, b, problem, ctx
            )
            return
    var buffer = scratch[dtype](ctx, shape.flattened_length())
    given.run[plain](Int(buffer.unsafe_ptr()), Int(a), Int(b), ctx)
    apply_epilogue[dtype, finish](
        result,
        Ptr[dtype](unsafe_from_address=Int(buffer.unsafe_ptr())),
        shape[0] * shape[2] * shape[3],
        c,
        ctx,
    )
    _ = buffer^


def conv_pointwise_sums[
    target: StaticString,
    dtype: DType,
    pass_: Int,
    narrow: Bool,
    room: Int,
    plain: StaticString,
    heavy: Bool,
    kind: Int,
    plain_sums: StaticString,
    has_program: Bool,
    count: Int,
    dims: Int,
    run: def[width: Int, parts: Int](
        ProgramOperands[count, dims], Places[dims, parts], SIMD[dtype, width]
    ) thin -> SIMD[dtype, width],
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """As `conv_pointwise`, and what batch normalization reduces of the result as it is stored; `plain_sums` is the library
    function for that alone. Without a program the result is the convolution's own.

    Four results for each channel come first. Behind the program's operands stand what `plain_sums` reads beside the
    result: the running mean and variance; or x, mean and invstd.
    """
    var given = FusedConvolution.take(arguments)
    var settings = Settings(0, 0)
    comptime if kind == MOMENTS:
        settings = Settings.take(arguments)
    var geometry = arguments.take_list()
    var made = arguments.take_words[4]()
    var operands = operands_of[count, dims](geometry, 0, arguments)
    var beside = IndexList[3]()
    for i in range(2 if kind == MOMENTS else 3):
        beside[i] = arguments.take_word()
    var result = Ptr[dtype](unsafe_from_address=operands.data[0])
    var a = Ptr[dtype](unsafe_from_address=arguments.take_word())
    var b = Ptr[dtype](unsafe_from_address=arguments.take_word())
    var problem = given.problem[pass_]()
    var shape = given.result
    var c = shape[4]
    var rows = shape[0] * shape[2] * shape[3]
    var together = 0
    comptime for n in range(count):
        together |= operands.data[n]
    comptime if kind != MOMENTS:
        for i in range(2):
            together |= beside[i]
    var x = Ptr[dtype](unsafe_from_address=beside[0])
    var mean = Ptr[DType.float32](unsafe_from_address=beside[1])

    @__parameter
    @__copy_capture(operands, c)
    @always_inline
    def finish[
        width: Int, parts: Int
    ](
        pixels: StaticTuple[Int, parts],
        channel: Int,
        value: SIMD[dtype, width],
    ) -> SIMD[dtype, width]:
        var places = Places[dims, parts](
            operands.place(pixels[0] * c + channel)
        )
        comptime for part in range(1, parts):
            var place = operands.place(pixels[part] * c + channel)
            places.put[part](place, True)
        return run[width, parts](operands, places, value)

    @__parameter
    @__copy_capture(x, mean, c)
    @always_inline
    def deviation[
        width: Int, parts: Int
    ](pixels: StaticTuple[Int, parts], channel: Int) -> SIMD[
        DType.float32, width
    ]:
        comptime run_width = width // parts
        var center = mean.unsafe_offset(channel).unsafe_load[
            width=run_width, alignment=16
        ]()
        var result = SIMD[DType.float32, width]()
        comptime for part in range(parts):
            var value = x.unsafe_offset(pixels[part] * c + channel).unsafe_load[
                width=run_width, alignment=2 * run_width
            ]()
            result = result.insert[offset=part * run_width](
                value.cast[DType.float32]() - center
            )
        return result

    comptime own = Optional[Epilogue[dtype]](
        finish
    ) if has_program else Optional[Epilogue[dtype]]()
    comptime factor = Optional[Factor](
        deviation
    ) if kind != MOMENTS else Optional[Factor]()
    comptime if compiles_for[dtype, pass_]():
        if (
            together % 16 == 0
            and _fits[dtype, pass_, room](
                ConvolutionTensors(result, a, b, NOTHING), problem
            )
            and (has_program or sums_are_worth_it[pass_, narrow](problem, ctx))
        ):
            var slots = slots_of_sums[pass_, narrow](problem, ctx)
            var buffer = scratch[DType.float32](ctx, slots.elements())
            run_with_sums[dtype, pass_, narrow, room, heavy, own, kind, factor](
                result,
                a,
                b,
                Ptr[DType.float32](
                    unsafe_from_address=Int(buffer.unsafe_ptr())
                ),
                problem,
                ctx,
            )
            _merge[dtype, kind](
                made,
                beside,
                settings,
                Ptr[DType.float32](
                    unsafe_from_address=Int(buffer.unsafe_ptr())
                ),
                slots,
                rows,
                c,
                ctx,
            )
            _ = buffer^
            return
    comptime if has_program:
        var buffer = scratch[dtype](ctx, shape.flattened_length())
        given.run[plain](Int(buffer.unsafe_ptr()), Int(a), Int(b), ctx)
        apply_epilogue[dtype, finish](
            result,
            Ptr[dtype](unsafe_from_address=Int(buffer.unsafe_ptr())),
            shape[0] * shape[2] * shape[3],
            c,
            ctx,
        )
        _ = buffer^
    else:
        given.run[plain](Int(result), Int(a), Int(b), ctx)
    var call = Call()
    comptime if kind == MOMENTS:
        settings.append_to(call)
    for i in range(4):
        call.append_at(made[i], IndexList[1](c))
    call.append_at(Int(result), IndexList[2](rows, c))
    comptime if kind == MOMENTS:
        call.append_at(beside[0], IndexList[1](c))
        call.append_at(beside[1], IndexList[1](c))
    else:
        call.append_at(beside[0], IndexList[2](rows, c))
        call.append_at(beside[1], IndexList[1](c))
        call.append_at(beside[2], IndexList[1](c))
    call.run[plain_sums](ctx)


@no_inline
def _merge[
    dtype: DType, kind: Int
](
    made: IndexList[4],
    beside: IndexList[3],
    settings: Settings,
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
    comptime if kind == MOMENTS:
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
            settings.momentum.cast[DType.float32](),
            settings.epsilon.cast[DType.float32](),
            grid_dim=ceildiv(channels, MERGED),
            block_dim=(MERGED, MERGERS),
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
            grid_dim=ceildiv(channels, MERGED),
            block_dim=(MERGED, MERGERS),
        )
