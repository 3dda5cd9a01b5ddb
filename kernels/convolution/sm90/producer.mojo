"""The warpgroup of an implicit matrix product that copies: which tiles a block walks, and what of x, dy and w each one needs.
"""

from max.gpu import block_idx, grid_dim

from . import plan as fields
from .plan import ROW_BYTES, Plan
from ...ptx import (
    load_im2col,
    load_tile_3d,
    load_tile_3d_multicast,
    made_here,
    mbarrier_expect,
    mbarrier_wait,
)
from .tensor_map import TensorMaps
from .tile import RingPlace, TileShape


@fieldwise_init
struct Tile(ImplicitlyCopyable, TrivialRegisterPassable):
    """Where one tile lies."""

    var phase: Int
    var row: Int32
    var column: Int32
    var steps: Int32
    """Pipeline stages of its reduction."""


@always_inline
def locate[
    phases: Int, rows: Int, columns: Int, cluster: Int
](plan: Plan[phases], tile: Int32, rank: Int32) -> Tile:
    var phase = 0
    comptime for i in range(1, phases):
        if tile >= plan.phase(i, fields.FIRST_TILE):
            phase = i
    var local = tile - plan.phase(phase, fields.FIRST_TILE)
    var row_tile, column_tile = plan.tile_place(local)
    return Tile(
        phase,
        (row_tile * Int32(cluster) + rank) * Int32(rows),
        column_tile * Int32(columns),
        plan.phase(phase, fields.TAPS_H)
        * plan.phase(phase, fields.TAPS_W)
        * plan.channel_blocks(),
    )


@fieldwise_init
struct Copies(ImplicitlyCopyable, TrivialRegisterPassable):
    """A tile, and the source pixel that its first row begins with."""

    var at: Tile
    var n: Int32
    var h: Int32
    var w: Int32


@always_inline
def copies_of[
    phases: Int, shape: TileShape
](plan: Plan[phases], tile: Int32, rank: Int32) -> Copies:
    var at = locate[phases, shape.rows(), shape.columns, shape.cluster](
        plan, tile, rank
    )
    # The second block of a cluster may stand past the last row: it reads row 0 and stores nothing.
    var row = at.row if at.row < plan.phase(at.phase, fields.ROWS) else 0
    var n, j, i = plan.pixel(at.phase, row)
    at.column = made_here(at.column)
    return Copies(
        at,
        made_here(n),
        made_here(
            j * plan.source_step_h() + plan.phase(at.phase, fields.LOWER_H)
        ),
        made_here(
            i * plan.source_step_w() + plan.phase(at.phase, fields.LOWER_W)
        ),
    )


@always_inline
def produce[
    phases: Int, shape: TileShape, filter_k_major: Bool, block_k: Int
](
    source_maps: TensorMaps[phases],
    filter_map: TensorMaps[1],
    plan: Plan[phases],
    ring: UInt32,
    full: UInt32,
    empty: UInt32,
    rank: Int32,
    first: Copies,
):
    comptime cluster = shape.cluster
    var copies = first
    var ring_at = RingPlace[shape.stages](0, 0)
    var tile = Int32(block_idx.x) // Int32(cluster)
    while tile < plan.tiles():
        var at = copies.at
        var source_map = source_maps.address(at.phase)
        var filter_address = filter_map.address(0)
        var tap_h = plan.phase(at.phase, fields.TAP_H)
        var offset_h = plan.phase(at.phase, fields.OFFSET_H)
        for _ in range(Int(plan.phase(at.phase, fields.TAPS_H))):
            var tap_w = plan.phase(at.phase, fields.TAP_W)
            var offset_w = plan.phase(at.phase, fields.OFFSET_W)
            for _ in range(Int(plan.phase(at.phase, fields.TAPS_W))):
                var tap = tap_h * plan.filter_s() + tap_w
                for block in range(Int(plan.channel_blocks())):
                    var slot = ring_at.slot
                    var barrier = full + slot * 8
                    mbarrier_wait(empty + slot * 8, ring_at.parity ^ 1)
                    mbarrier_expect(barrier, shape.stage_bytes())
                    var source_tile = ring + slot * UInt32(shape.stage_bytes())
                    var filter_tile = source_tile + UInt32(shape.source_bytes())
                    var channel = Int32(block * block_k)
                    load_im2col(
                        source_tile,
                        source_map,
                        barrier,
                        channel,
                        copies.w,
                        copies.h,
                        copies.n,
                        UInt16(offset_w),
                        UInt16(offset_h),
                    )
                    comptime if filter_k_major:
                        # Channels of one tap for `columns` filters; each block of a cluster brings its share.
                        comptime share = shape.columns // cluster
                        comptime if cluster == 1:
                            load_tile_3d(
                                filter_tile,
                                filter_address,
                                barrier,
                                channel,
                                tap,
                                at.column,
                            )
                        else:
                            load_tile_3d_multicast(
                                filter_tile
                                + UInt32(rank) * UInt32(share * ROW_BYTES),
                                filter_address,
                                barrier,
                                channel,
                                tap,
                                at.column + rank * Int32(share),
                                UInt16((1 << cluster) - 1),
                            )
                    else:
                        # 64 columns (input channels) at a time for block_k filters (the reduction).
                        comptime share = block_k // cluster
                        comptime for panel in range(shape.columns // 64):
                            comptime offset = panel * block_k * ROW_BYTES
                            comptime if cluster == 1:
                                load_tile_3d(
                                    filter_tile + UInt32(offset),
                                    filter_address,
                                    barrier,
                                    at.column + Int32(panel * 64),
                                    tap,
                                    channel,
                                )
                            else:
                                load_tile_3d_multicast(
                                    filter_tile
                                    + UInt32(offset)
                                    + UInt32(rank) * UInt32(share * ROW_BYTES),
                                    filter_address,
                                    barrier,
                                    at.column + Int32(panel * 64),
                                    tap,
                                    channel + rank * Int32(share),
                                    UInt16((1 << cluster) - 1),
                                )
                    ring_at.advance()
                tap_w += plan.phase(at.phase, fields.TAP_STEP_W)
                offset_w += plan.phase(at.phase, fields.OFFSET_STEP_W)
            tap_h += plan.phase(at.phase, fields.TAP_STEP_H)
            offset_h += plan.phase(at.phase, fields.OFFSET_STEP_H)
        tile += Int32(grid_dim.x) // Int32(cluster)
        if tile < plan.tiles():
            copies = copies_of[phases, shape](plan, tile, rank)
