"""The copies of the wgrad kernel: tiles of dy, and of x behind each tap, to the ring in shared memory, for one block or
for several neighbours at a time."""

from std.utils.static_tuple import StaticTuple

from max.gpu import block_idx

from ...common.ptx import (
    Im2col,
    load_im2col,
    load_im2col_multicast,
    load_tile_2d,
    load_tile_2d_multicast,
    made_here,
    mbarrier_expect,
    mbarrier_wait,
)
from .plan import STAGE_LENGTH
from .tensor_map import TensorMaps
from .tile import ROW_BYTES, PipelineState
from .wgrad_plan import PANEL, PANEL_BYTES, WgradPlan, WgradShape, work_unit_of


@always_inline
def receivers(
    plan: WgradPlan, rank_row: Int32, rank_column: Int32
) -> Tuple[UInt16, UInt16]:
    """Returns the blocks, as masks, to which a block's share of dy and its share of x go.
    """
    var row = UInt32((Int32(1) << plan.share_columns.value) - 1) << UInt32(
        rank_row * plan.share_columns.value
    )
    var column = UInt32(0)
    for i in range(Int(plan.share_rows.value)):
        column |= UInt32(1) << UInt32(
            Int32(i) * plan.share_columns.value + rank_column
        )
    return UInt16(row), UInt16(column)


@fieldwise_init
struct WorkUnitSource[panels: Int](ImplicitlyCopyable, TrivialRegisterPassable):
    """Copies that a block makes for one piece of a tile, and the pixel that it begins with.
    """

    var steps: Int32
    var row: Int32
    """First filter of the piece's rows."""
    var channel: Int32
    """First channel of the filters' group."""
    var pixel: Int32
    """Pixel of dy."""
    var n: Int32
    """Image and, in o, p and q, place in the result of x's pixel: with shared copies it differs from dy's."""
    var o: Int32
    var p: Int32
    var q: Int32
    var taps: StaticTuple[UInt32, Self.panels]
    """For each panel, the tap's packed offsets, and above 16 bits the channel over PANEL."""


@always_inline
def _shifts(plan: WgradPlan) -> Tuple[Int32, Int32]:
    """Returns the first pixels of dy and of x that this block brings of every stage, among those that its row or column
    of blocks shares."""
    var _, rank = plan.shared.divide(Int32(block_idx.x))
    var rank_row, rank_column = plan.share_columns.divide(rank)
    return (
        plan.share_columns.divide(rank_column * STAGE_LENGTH)[0],
        plan.share_rows.divide(rank_row * STAGE_LENGTH)[0],
    )


@always_inline
def copies_of[
    shape: WgradShape
](plan: WgradPlan, index: Int32) -> WorkUnitSource[shape.panels()]:
    """Returns the copies for a block's piece `index`; no steps past the last one.
    """
    var dy_shift, x_shift = _shifts(plan)
    var unit = work_unit_of(plan, Int32(block_idx.x), index)
    var row_tile, column_tile = plan.column_tiles.divide(unit.tile)
    var taps = StaticTuple[UInt32, shape.panels()](fill=0)
    comptime for panel in range(shape.panels()):
        var at = column_tile * Int32(shape.panels()) + Int32(panel)
        var tap, block = plan.channel_blocks.divide(at)
        # A panel past the last one lies past the last channel: it arrives as zeros and costs no traffic.
        if tap >= plan.taps:
            tap = 0
            block = plan.channel_blocks.value
        var line, tap_w = plan.filter_s.divide(tap)
        var tap_d, tap_h = plan.filter_r.divide(line)
        taps[panel] = UInt32(
            made_here(
                block << 16
                | tap_d * plan.offset_step_d
                | tap_h * plan.offset_step_h
                | tap_w * plan.dilation_w
            )
        )
    var group, filter = plan.filters(row_tile, shape.rows())
    var pixel = unit.first * STAGE_LENGTH
    var line, q = plan.q.divide(pixel + x_shift)
    var plane, p = plan.p.divide(line)
    var n, o = plan.o.divide(plane)
    return WorkUnitSource[shape.panels()](
        made_here(unit.count),
        made_here(group * plan.k + filter),
        made_here(group * plan.c),
        made_here(pixel + dy_shift),
        made_here(n),
        made_here(o),
        made_here(p),
        made_here(q),
        taps,
    )


@always_inline
def _produce[
    shape: WgradShape, shares_dy: Bool, shares_x: Bool
](
    dy_map: TensorMaps[1],
    x_map: TensorMaps[1],
    plan: WgradPlan,
    first: WorkUnitSource[shape.panels()],
    ring: UInt32,
    full: UInt32,
    empty: UInt32,
):
    var ahead_line, ahead_q = plan.q.divide(Int32(STAGE_LENGTH))
    var ahead_plane, ahead_p = plan.p.divide(ahead_line)
    var ahead_n, ahead_o = plan.o.divide(ahead_plane)
    var dy_shift = Int32(0)
    var x_shift = Int32(0)
    var row_mask = UInt16(0)
    var column_mask = UInt16(0)
    comptime if shares_dy or shares_x:
        dy_shift, x_shift = _shifts(plan)
        var _, rank = plan.shared.divide(Int32(block_idx.x))
        var rank_row, rank_column = plan.share_columns.divide(rank)
        row_mask, column_mask = receivers(plan, rank_row, rank_column)
    var place = PipelineState[shape.stages](0, 0)
    var index: Int32 = 1
    var at = first
    while at.steps > 0:
        var dy_address = dy_map.address(0)
        var x_address = x_map.address(0)
        for _ in range(Int(at.steps)):
            var slot = place.slot
            var barrier = full + slot * 8
            mbarrier_wait(empty + slot * 8, place.parity ^ 1)
            mbarrier_expect(barrier, shape.stage_bytes())
            var tile = (
                ring
                + slot * UInt32(shape.stage_bytes())
                + UInt32(dy_shift) * ROW_BYTES
            )
            comptime for panel in range(shape.row_panels()):
                comptime if shares_dy:
                    load_tile_2d_multicast(
                        tile + UInt32(panel * PANEL_BYTES),
                        dy_address,
                        barrier,
                        at.row + Int32(panel * PANEL),
                        at.pixel,
                        row_mask,
                    )
                else:
                    load_tile_2d(
                        tile + UInt32(panel * PANEL_BYTES),
                        dy_address,
                        barrier,
                        at.row + Int32(panel * PANEL),
                        at.pixel,
                    )
            tile = (
                ring
                + slot * UInt32(shape.stage_bytes())
                + UInt32(shape.row_panels() * PANEL_BYTES)
                + UInt32(x_shift) * ROW_BYTES
            )
            comptime for panel in range(shape.panels()):
                var tap = at.taps[panel]
                var place_in_x = Im2col(
                    Int32(tap >> 16) * PANEL + at.channel,
                    at.q * plan.stride_w + plan.lower_w,
                    at.p * plan.stride_h + plan.lower_h,
                    at.o * plan.stride_d + plan.lower_d,
                    at.n,
                    tap,
                )
                comptime if shares_x:
                    load_im2col_multicast(
                        tile + UInt32(panel * PANEL_BYTES),
                        x_address,
                        barrier,
                        place_in_x,
                        plan.deep,
                        column_mask,
                    )
                else:
                    load_im2col(
                        tile + UInt32(panel * PANEL_BYTES),
                        x_address,
                        barrier,
                        place_in_x,
                        plan.deep,
                    )
            place.advance()
            # The next pixels without a division, which would take longer than a small tile's products.
            at.pixel += STAGE_LENGTH
            at.q += ahead_q
            at.p += ahead_p
            at.o += ahead_o
            at.n += ahead_n
            if at.q >= plan.q.value:
                at.q -= plan.q.value
                at.p += 1
            if at.p >= plan.p.value:
                at.p -= plan.p.value
                at.o += 1
            if at.o >= plan.o.value:
                at.o -= plan.o.value
                at.n += 1
        at = copies_of[shape](plan, index)
        index += 1


@always_inline
def produce_shared[
    shape: WgradShape
](
    dy_map: TensorMaps[1],
    x_map: TensorMaps[1],
    plan: WgradPlan,
    first: WorkUnitSource[shape.panels()],
    ring: UInt32,
    full: UInt32,
    empty: UInt32,
):
    """Runs `_produce` with copies shared as the plan says."""
    comptime if shape.split_steps:
        _produce[shape, False, False](
            dy_map, x_map, plan, first, ring, full, empty
        )
    else:
        if plan.shared.value == 1:
            _produce[shape, False, False](
                dy_map, x_map, plan, first, ring, full, empty
            )
        elif plan.share_rows.value == 1:
            _produce[shape, True, False](
                dy_map, x_map, plan, first, ring, full, empty
            )
        elif plan.share_columns.value == 1:
            _produce[shape, False, True](
                dy_map, x_map, plan, first, ring, full, empty
            )
        else:
            _produce[shape, True, True](
                dy_map, x_map, plan, first, ring, full, empty
            )
