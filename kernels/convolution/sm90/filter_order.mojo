"""A filter with its two kinds of channels exchanged, for products that want it along the output channels."""

from std.math import ceildiv
from std.memory import stack_allocation

from max.gpu import barrier, block_idx, thread_idx
from max.gpu.host import DeviceContext

from ...common.arithmetic import divide
from ...common.pointer import Ptr
from ..problem import ConvolutionProblem

comptime _SIDE = 32
"""Side of the square that a block exchanges: 128 bytes of float32 both ways."""
comptime MAX_FILTERS = 65535
"""Most filters that are exchanged at once: rows of a grid."""
comptime _LINES = 8
"""Lines of the square that a block reads at a time."""


@__name(t"conv_filter_order_{dtype}")
def _filter_order_kernel[
    dtype: DType
](
    target: Ptr[dtype],
    source: Ptr[dtype],
    k: Int32,
    taps: Int32,
    c: Int32,
    reverses: Int32,
):
    """Writes target [C, taps, K] of source [K, taps, C], with `reverses` the taps from the last to the first; one
    square of one tap for each block, and a filter for each of the grid's rows.
    """
    var filter = Int(block_idx.y) * Int(k * taps) * Int(c)
    # One more column, so that neither way meets a bank twice.
    var square = stack_allocation[
        _SIDE * (_SIDE + 1), Scalar[dtype], address_space=AddressSpace.SHARED
    ]()
    var line, tile_c = divide(Int32(block_idx.x), ceildiv(c, Int32(_SIDE)))
    var tile_k, tap = divide(line, taps)
    var target_tap = taps - 1 - tap if reverses != 0 else tap
    var first_c = tile_c * _SIDE
    var first_k = tile_k * _SIDE
    var across, down = (
        Int32(thread_idx.x) % _SIDE,
        Int32(thread_idx.x) // _SIDE,
    )
    comptime for i in range(0, _SIDE, _LINES):
        var row = down + Int32(i)
        if first_k + row < k and first_c + across < c:
            square[unsafe_offset=Int(row * (_SIDE + 1) + across)] = source[
                unsafe_offset=filter
                + (Int(first_k + row) * Int(taps) + Int(tap)) * Int(c)
                + Int(first_c + across)
            ]
    barrier()
    comptime for i in range(0, _SIDE, _LINES):
        var row = down + Int32(i)
        if first_c + row < c and first_k + across < k:
            target[
                unsafe_offset=filter
                + (Int(first_c + row) * Int(taps) + Int(target_tap)) * Int(k)
                + Int(first_k + across)
            ] = square[unsafe_offset=Int(across * (_SIDE + 1) + row)]


@no_inline
def exchange_channels[
    dtype: DType
](
    target: Ptr[dtype],
    w: Ptr[dtype],
    problem: ConvolutionProblem,
    ctx: DeviceContext,
    reverses: Bool = False,
    filters: Int = 1,
) raises:
    """Writes w [K, R, S, C] of a problem as [C, R, S, K], and so many `filters` that lie one behind the other; with
    `reverses` the last tap of each axis comes first.
    """
    var p = problem
    ctx.enqueue_function[_filter_order_kernel[dtype]](
        target,
        w,
        Int32(p.k),
        Int32(p.taps()),
        Int32(p.c),
        Int32(reverses),
        grid_dim=(
            ceildiv(p.c, _SIDE) * ceildiv(p.k, _SIDE) * p.taps(),
            filters,
        ),
        block_dim=(_SIDE * _LINES,),
    )
