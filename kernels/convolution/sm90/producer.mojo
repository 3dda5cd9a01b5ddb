"""The warpgroup of an implicit matrix product that copies: the tiles that a block walks, and the parts of x, dy and w
that each one needs."""

from max.gpu import block_idx, grid_dim

from ...common.ptx import (
    Im2col,
    load_im2col,
    load_tile_3d,
    load_tile_3d_multicast,
    made_here,
    mbarrier_expect,
    mbarrier_wait,
)
from . import plan as fields
from .plan import AXIS_D, AXIS_H, AXIS_W, ROW_BYTES, Im2colPlan
from .tensor_map import TensorMaps
from .tile import PipelineState, TileShape


@fieldwise_init
struct TileOrigin(ImplicitlyCopyable, TrivialRegisterPassable):
    """The place of one tile."""

    var phase: Int
    var row: Int32
    var column: Int32
    var first: Int32
    """Pipeline stage of the tile's reduction that the block begins with."""
    var steps: Int32
    """Pipeline stages that the block takes."""


@always_inline
def tile_of_block[
    phases: Int, shape: TileShape, sums: Bool
](plan: Im2colPlan[phases], block: Int32) -> Int32:
    """Returns the first tile of a block of the grid; given the number of blocks, the step from a tile to the next one.
    """
    comptime if shape.may_split(phases, sums):
        return block >> plan.split_bits()
    return block // Int32(shape.cluster)


@always_inline
def locate[
    phases: Int, shape: TileShape, sums: Bool
](plan: Im2colPlan[phases], tile: Int32, rank: Int32) -> TileOrigin:
    """Returns the place of a tile, for the block of this rank in its cluster.
    """
    var phase = 0
    comptime for i in range(1, phases):
        if tile >= plan.phase(i, fields.FIRST_TILE):
            phase = i
    var local = tile - plan.phase(phase, fields.FIRST_TILE)
    var row_tile, column_tile = plan.tile_place(local)
    var steps = plan.taps(phase) * plan.channel_blocks()
    var first = Int32(0)
    comptime if shape.may_split(phases, sums):
        first = rank * steps >> plan.split_bits()
        steps = ((rank + 1) * steps >> plan.split_bits()) - first
    else:
        row_tile = row_tile * Int32(shape.cluster) + rank
    return TileOrigin(
        phase,
        row_tile * Int32(shape.rows()),
        column_tile * plan.column_step(),
        first,
        steps,
    )


@fieldwise_init
struct TileSource(ImplicitlyCopyable, TrivialRegisterPassable):
    """A tile, and the source pixel that its first row begins with."""

    var at: TileOrigin
    var n: Int32
    var d: Int32
    var h: Int32
    var w: Int32


@always_inline
def copies_of[
    phases: Int, shape: TileShape, sums: Bool
](plan: Im2colPlan[phases], tile: Int32, rank: Int32) -> TileSource:
    var at = locate[phases, shape, sums](plan, tile, rank)
    # The second block of a cluster may stand past the last row: it reads row 0 and stores nothing.
    var row = at.row if at.row < plan.phase(at.phase, fields.ROWS) else 0
    var n, l, j, i = plan.pixel(at.phase, row)
    at.column = made_here(at.column)
    return TileSource(
        at,
        made_here(n),
        made_here(source_of[AXIS_D](plan, at.phase, l)),
        made_here(source_of[AXIS_H](plan, at.phase, j)),
        made_here(source_of[AXIS_W](plan, at.phase, i)),
    )


@always_inline
def source_of[
    axis: Int, phases: Int
](plan: Im2colPlan[phases], phase: Int, at: Int32) -> Int32:
    """Returns the source pixel that a phase's pixel reads at tap offset 0, along an axis.
    """
    return at * plan.source_step(axis) + plan.phase(phase, fields.LOWER + axis)


@fieldwise_init
struct TapWalk(ImplicitlyCopyable, TrivialRegisterPassable):
    """A place among a phase's taps, W fastest: one loop for all axes takes fewer registers than a nest.
    """

    var tap: Int32
    """Index of the tap in the filter's taps."""
    var offsets: Int32
    """Packed offsets of the tap, in source pixels."""
    var left_w: Int32
    var left_h: Int32

    @staticmethod
    @always_inline
    def first[phases: Int](plan: Im2colPlan[phases], phase: Int) -> Self:
        return Self(
            plan.phase(phase, fields.TAP),
            plan.phase(phase, fields.OFFSETS),
            plan.phase(phase, fields.TAPS + AXIS_W),
            plan.phase(phase, fields.TAPS + AXIS_H),
        )

    @always_inline
    def advance[phases: Int](mut self, plan: Im2colPlan[phases], phase: Int):
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
    def _step[
        phases: Int
    ](mut self, plan: Im2colPlan[phases], axis: Int, by: Int32):
        self.tap += plan.tap_step(axis) * by
        self.offsets += plan.offset_step(axis) * by


@fieldwise_init
struct StageWalk(ImplicitlyCopyable, TrivialRegisterPassable):
    """A place among the pipeline stages of a phase's reduction: blocks of channels of one tap, then the next tap.
    """

    var taps: TapWalk
    var block: Int32

    @staticmethod
    @always_inline
    def first[phases: Int](plan: Im2colPlan[phases], phase: Int) -> Self:
        return Self(TapWalk.first(plan, phase), 0)

    @always_inline
    def skip[
        phases: Int
    ](mut self, plan: Im2colPlan[phases], phase: Int, stages: Int32):
        """Skips `stages` stages, from the first one on."""
        var taps = stages // plan.channel_blocks()
        self.block = stages - taps * plan.channel_blocks()
        for _ in range(Int(taps)):
            self.taps.advance(plan, phase)

    @always_inline
    def advance[phases: Int](mut self, plan: Im2colPlan[phases], phase: Int):
        self.block += 1
        if self.block == plan.channel_blocks():
            self.block = 0
            self.taps.advance(plan, phase)

    @always_inline
    def is_short[phases: Int](self, plan: Im2colPlan[phases]) -> Bool:
        return plan.ends_short() and self.block == plan.channel_blocks() - 1


@always_inline
def _copy_filter[
    shape: TileShape, filter_k_major: Bool, stage_length: Int
](
    filter_tile: UInt32,
    filter_map: UInt64,
    barrier: UInt32,
    channel: Int32,
    tap: Int32,
    column: Int32,
    share: Int32,
    panels: Int32,
    rank: Int32,
):
    """Copies one stage's filter; in a cluster each block brings its `share` of the rows to all of them.
    """
    comptime cluster = shape.cluster
    comptime if filter_k_major:
        # Channels of one tap for the tile's columns.
        comptime if cluster == 1:
            load_tile_3d(filter_tile, filter_map, barrier, channel, tap, column)
        else:
            load_tile_3d_multicast(
                filter_tile + UInt32(rank * share) * ROW_BYTES,
                filter_map,
                barrier,
                channel,
                tap,
                column + rank * share,
                UInt16((1 << cluster) - 1),
            )
    else:
        # 64 columns (input channels) at a time for the filters of the reduction.
        comptime for panel in range(shape.columns // 64):
            comptime offset = panel * stage_length * ROW_BYTES
            if Int32(panel) < panels:
                comptime if cluster == 1:
                    load_tile_3d(
                        filter_tile + UInt32(offset),
                        filter_map,
                        barrier,
                        column + Int32(panel * 64),
                        tap,
                        channel,
                    )
                else:
                    load_tile_3d_multicast(
                        filter_tile
                        + UInt32(offset)
                        + UInt32(rank * share) * ROW_BYTES,
                        filter_map,
                        barrier,
                        column + Int32(panel * 64),
                        tap,
                        channel + rank * share,
                        UInt16((1 << cluster) - 1),
                    )


@always_inline
def produce[
    phases: Int,
    shape: TileShape,
    filter_k_major: Bool,
    sums: Bool,
    stage_length: Int,
](
    source_maps: TensorMaps[phases],
    filter_map: TensorMaps[1],
    short_maps: TensorMaps[2],
    plan: Im2colPlan[phases],
    ring: UInt32,
    full: UInt32,
    empty: UInt32,
    rank: Int32,
    first: TileSource,
):
    comptime cluster = shape.cluster
    var copies = first
    var ring_at = PipelineState[shape.stages](0, 0)
    var tile = tile_of_block[phases, shape, sums](plan, Int32(block_idx.x))
    var stride = tile_of_block[phases, shape, sums](plan, Int32(grid_dim.x))
    var keeps_filter = False
    comptime if phases == 1:
        keeps_filter = shape.keeps_filter(
            Int(plan.taps(0) * plan.channel_blocks()),
            Int(stride),
            Int(plan.column_tiles()),
        )
    # Whether the slot at hand has its filter from the round before.
    var has_filter = False
    while tile < plan.tiles():
        var at = copies.at
        var walk = StageWalk.first(plan, at.phase)
        # What is not copied of a filter tile multiplies into columns that are not stored.
        var panels = Int32(0)
        var share = plan.column_step() // Int32(cluster)
        var filter_bytes = plan.column_step() * ROW_BYTES
        comptime if not filter_k_major:
            panels = min(
                Int32(shape.columns // 64),
                (plan.columns() - at.column + 63) // 64,
            )
            share = Int32(stage_length // cluster)
            filter_bytes = panels * Int32(stage_length * ROW_BYTES)
        comptime if shape.may_split(phases, sums):
            walk.skip(plan, at.phase, at.first)
        for _ in range(Int(at.steps)):
            var slot = ring_at.slot
            var barrier = full + slot * 8
            var source_map = source_maps.address(at.phase)
            var filter_address = filter_map.address(0)
            var rows = Int32(shape.rows())
            var taps = Int32(1)
            comptime if shape.taps > 1:
                taps = plan.shared_taps()
                rows += taps - 1
            var bytes = rows * ROW_BYTES + (
                0 if has_filter else taps * filter_bytes
            )
            comptime if shape.has_short_stages(phases, sums):
                if walk.is_short(plan):
                    source_map = short_maps.address(0)
                    filter_address = short_maps.address(1)
                    bytes //= 2
            mbarrier_wait(empty + slot * 8, ring_at.parity ^ 1)
            mbarrier_expect(barrier, Int(bytes))
            var source_tile = ring + slot * UInt32(shape.stage_bytes())
            var channel = walk.block * Int32(stage_length)
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
                    UInt32(walk.taps.offsets),
                ),
                plan.is_deep(),
            )
            if not has_filter:
                var filter_tile = source_tile + UInt32(shape.source_bytes())
                var tap = walk.taps.tap
                for _ in range(Int(taps)):
                    _copy_filter[shape, filter_k_major, stage_length](
                        filter_tile,
                        filter_address,
                        barrier,
                        channel,
                        tap,
                        at.column,
                        share,
                        panels,
                        rank,
                    )
                    filter_tile += UInt32(shape.filter_bytes())
                    tap += plan.tap_step(AXIS_W)
            ring_at.advance()
            if ring_at.slot == 0:
                has_filter = keeps_filter
            walk.advance(plan, at.phase)
        tile += stride
        if tile < plan.tiles():
            copies = copies_of[phases, shape, sums](plan, tile, rank)
