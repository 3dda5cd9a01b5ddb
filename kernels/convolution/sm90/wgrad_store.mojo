"""Conversion of a thread's sums to elements of dw."""

from std.memory import bitcast
from std.utils.static_tuple import StaticTuple

from ...common.pointer import Ptr
from ...common.ptx import exchange_lanes
from .tile import pack_pair
from .wgrad_plan import PANEL, WgradPlan, WgradShape

comptime HALF_PANEL_GROUPS = 4
"""Accumulator groups, of 8 columns each, in half a panel: one for each of the four lanes that hold a row."""


@always_inline
def _turn(words: SIMD[DType.uint32, 4], lane: Int32) -> SIMD[DType.uint32, 4]:
    """Transposes four words of each of four neighbouring lanes: lane j gets word j of every lane, in the order of the
    lanes."""
    var odd = lane % 2 == 1
    var high = lane % 4 >= 2
    var turned = words
    comptime for pair in range(2):
        var even_word = words[2 * pair]
        var odd_word = words[2 * pair + 1]
        var got = exchange_lanes(even_word if odd else odd_word, 1)
        turned[2 * pair] = got if odd else even_word
        turned[2 * pair + 1] = odd_word if odd else got
    var first = exchange_lanes(turned[0] if high else turned[2], 2)
    var second = exchange_lanes(turned[1] if high else turned[3], 2)
    return SIMD[DType.uint32, 4](
        first if high else turned[0],
        second if high else turned[1],
        turned[2] if high else first,
        turned[3] if high else second,
    )


@always_inline
def store_half_panel[
    dtype: DType, shape: WgradShape
](
    plan: WgradPlan,
    dw: Ptr[dtype],
    tile: Int32,
    row_block: Int32,
    lane_in_group: Int32,
    half_panel: Int32,
    values: StaticTuple[SIMD[DType.float32, 4], HALF_PANEL_GROUPS],
):
    """Writes one thread's sums of four accumulator groups, 32 columns, to dw. Every lane of a warp takes part.

    The lanes of a row turn their words so that each stores 16 bytes, wherever channels are a multiple of 8.
    """
    var lane = lane_in_group % 32
    var row_tile, column_tile = plan.column_tiles.divide(tile)
    var filters, row = plan.filters(row_tile, shape.rows())
    row += row_block * 64 + lane_in_group // 32 * 16 + lane // 4
    var panel = column_tile * Int32(shape.panels()) + half_panel // 2
    var inside = panel < plan.taps * plan.channel_blocks.value
    var tap, block = plan.channel_blocks.divide(panel)
    var first = block * PANEL + half_panel % 2 * 32
    if plan.c % 8 == 0 and not plan.makes_float32:
        var c = first + lane % 4 * 8
        comptime for half in range(2):
            var words = SIMD[DType.uint32, 4](0)
            comptime for group in range(HALF_PANEL_GROUPS):
                words[group] = pack_pair[dtype](
                    values[group][half * 2], values[group][half * 2 + 1]
                )
            words = _turn(words, lane)
            if inside and c < plan.c and row + Int32(half * 8) < plan.k:
                dw.unsafe_store[alignment=16](
                    _offset(plan, filters, row + Int32(half * 8), tap, c),
                    bitcast[dtype, 8](words),
                )
    else:
        comptime for group in range(HALF_PANEL_GROUPS):
            var c = first + Int32(group * 8) + lane % 4 * 2
            if inside:
                _store_pairs[dtype](
                    plan, dw, filters, row, tap, c, values[group]
                )


@always_inline
def store_group[
    dtype: DType, shape: WgradShape
](
    plan: WgradPlan,
    dw: Ptr[dtype],
    tile: Int32,
    row_block: Int32,
    lane_in_group: Int32,
    group: Int32,
    values: SIMD[DType.float32, 4],
):
    """Writes one thread's four sums of accumulator group `group` (two rows, two columns) to dw.
    """
    var warp = lane_in_group // 32
    var lane = lane_in_group % 32
    var row_tile, column_tile = plan.column_tiles.divide(tile)
    var filters, row = plan.filters(row_tile, shape.rows())
    row += row_block * 64 + warp * 16 + lane // 4
    var panel = column_tile * Int32(shape.panels()) + group // 8
    if panel >= plan.taps * plan.channel_blocks.value:
        return
    var tap, block = plan.channel_blocks.divide(panel)
    var c = block * PANEL + group % 8 * 8 + (lane % 4) * 2
    _store_pairs[dtype](plan, dw, filters, row, tap, c, values)


@always_inline
def _offset(
    plan: WgradPlan, group: Int32, row: Int32, tap: Int32, c: Int32
) -> Int:
    """Returns the offset of a channel of one of a group's filters."""
    return Int(
        (Int64(group * plan.k + row) * Int64(plan.taps) + Int64(tap))
        * Int64(plan.c)
        + Int64(c)
    )


@always_inline
def _store_pairs[
    dtype: DType
](
    plan: WgradPlan,
    dw: Ptr[dtype],
    group: Int32,
    row: Int32,
    tap: Int32,
    c: Int32,
    values: SIMD[DType.float32, 4],
):
    comptime for half in range(2):
        if c < plan.c and row + Int32(half * 8) < plan.k:
            var place = _offset(plan, group, row + Int32(half * 8), tap, c)
            var pair = SIMD[DType.float32, 2](
                values[half * 2], values[half * 2 + 1]
            )
            if plan.makes_float32:
                Ptr[DType.float32](unsafe_from_address=Int(dw)).unsafe_store[
                    alignment=8
                ](place, pair)
            else:
                dw.unsafe_store[alignment=4](place, pair.cast[dtype]())
