"""The warpgroup of an implicit matrix product that copies: which tiles a block walks, and what of x, dy and w each one needs.
"""

from max.gpu import block_idx, grid_dim

from . import plan as fields
from .plan import AXIS_D, AXIS_H, AXIS_W, ROW_BYTES, Plan
from ...ptx import (
    Im2col,
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
        plan.taps(phase) * plan.channel_blocks(),
    )


@fieldwise_init
struct Copies(ImplicitlyCopyable, TrivialRegisterPassable):
    """A tile, and the source pixel that its first row begins with."""

    var at: Tile
    var n: Int32
    var d: Int32
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
    var n, l, j, i = plan.pixel(at.phase, row)
    at.column = made_here(at.column)
    return Copies(
        at,
        made_here(n),
        made_here(source_of[AXIS_D](plan, at.phase, l)),
        made_here(source_of[AXIS_H](plan, at.phase, j)),
        made_here(source_of[AXIS_W](plan, at.phase, i)),
    )


@always_inline
def source_of[
    axis: Int, phases: Int
](plan: Plan[phases], phase: Int, at: Int32) -> Int32:
    """Source pixel that a phase's pixel reads at tap offset 0, along an axis.
    """
    return at * plan.source_step(axis) + plan.phase(phase, fields.LOWER + axis)


@fieldwise_init
struct TapWalk(ImplicitlyCopyable, TrivialRegisterPassable):
    """A place among a phase's taps, W fastest: one loop for all axes takes fewer registers than a nest.
    """

    var tap: Int32
    """Counted in the filter's taps."""
    var offsets: Int32
    """Packed, of the source's pixels."""
    var left_w: Int32
    var left_h: Int32

    @staticmethod
    @always_inline
    def first[phases: Int](plan: Plan[phases], phase: Int) -> Self:
        return Self(
            plan.phase(phase, fields.TAP),
            plan.phase(phase, fields.OFFSETS),
            plan.phase(phase, fields.TAPS + AXIS_W),
            plan.phase(phase, fields.TAPS + AXIS_H),
        )

    @always_inline
    def advance[phases: Int](mut self, plan: Plan[phases], phase: Int):
        self._step(plan, AXIS_W, 1)
        self.left_w -= 1
        if self.left_w == 0:
            self.left_w = plan.phase(phase, fields.TAPS + AXIS_W)
            self._step(plan, AXIS_W, -self.left_w)
            self._step(plan, AXIS_H, 1)
            self.left_h -= 1
            if self.left_h == 0:
                self.left_h = plan.phase(phase, fields.TAPS + AXIS_H)
                self._step(plan, AXIS_H, -self.left_h)
                self._step(plan, AXIS_D, 1)

    @always_inline
    def _step[phases: Int](mut self, plan: Plan[phases], axis: Int, by: Int32):
        self.tap += plan.tap_step(axis) * by
        self.offsets += plan.offset_step(axis) * by


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
        var taps = TapWalk.first(plan, at.phase)
        for _ in range(Int(plan.taps(at.phase))):
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
                    Im2col(
                        channel,
                        copies.w,
                        copies.h,
                        copies.d,
                        copies.n,
                        UInt32(taps.offsets),
                    ),
                    plan.is_deep(),
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
                            taps.tap,
                            at.column,
                        )
                    else:
                        load_tile_3d_multicast(
                            filter_tile
                            + UInt32(rank) * UInt32(share * ROW_BYTES),
                            filter_address,
                            barrier,
                            channel,
                            taps.tap,
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
                                taps.tap,
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
                                taps.tap,
                                channel + rank * Int32(share),
                                UInt16((1 << cluster) - 1),
                            )
                ring_at.advance()
            taps.advance(plan, at.phase)
        tile += Int32(grid_dim.x) // Int32(cluster)
        if tile < plan.tiles():
            copies = copies_of[phases, shape](plan, tile, rank)
