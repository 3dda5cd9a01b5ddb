"""What a wgrad launch does: the tile of one block, and how the reduction is cut into pieces."""

from std.builtin.device_passable import DevicePassable, DeviceTypeEncoder

from .implicit_gemm import CONSUMERS
from .plan import BLOCK_K
from .ptx import divide

comptime PANEL = 64
"""Channels of one copy: 128 bytes."""
comptime PANEL_BYTES = BLOCK_K * 128
comptime MAX_CLUSTER = 8
"""The largest cluster that every launch may ask for."""


@fieldwise_init
struct WgradShape(ImplicitlyCopyable, TrivialRegisterPassable):
    """What one compiled kernel computes at a time."""

    var row_blocks: Int
    """64-row blocks (filters) of each consumer warpgroup."""
    var columns: Int
    """Columns of the tile: 64-channel panels of one or several taps."""
    var stages: Int
    var split_steps: Bool
    """Both consumers sum the same tile, each from every other step, and their sums meet in shared memory; else they
    share the tile's rows. For results with few filters. `stages` is even then: a slot of the ring belongs to one consumer,
    which waits for every round of it in turn."""

    def rows(self) -> Int:
        return 64 * self.row_blocks * (1 if self.split_steps else CONSUMERS)

    def panels(self) -> Int:
        return self.columns // PANEL

    def row_panels(self) -> Int:
        return self.rows() // PANEL

    def stage_bytes(self) -> Int:
        return (self.panels() + self.row_panels()) * PANEL_BYTES

    def accumulators(self) -> Int:
        return self.row_blocks * self.columns // 2

    def shared_bytes(self) -> Int:
        return 1024 + self.stages * self.stage_bytes() + 256

    def slot_elements(self) -> Int:
        """Floats of one tile's sums."""
        return self.rows() * self.columns

    def copies(self) -> Int:
        """Sums of the tile that one block holds."""
        return CONSUMERS if self.split_steps else 1


@fieldwise_init
struct WgradPlan(DevicePassable, ImplicitlyCopyable, TrivialRegisterPassable):
    """The integers of one launch."""

    var k: Int32
    var c: Int32
    var p: Int32
    var q: Int32
    var taps: Int32
    var filter_s: Int32
    var stride_h: Int32
    var stride_w: Int32
    var dilation_h: Int32
    var dilation_w: Int32
    var lower_h: Int32
    var lower_w: Int32
    var row_tiles: Int32
    var column_tiles: Int32
    var steps: Int32
    """Pipeline stages of the whole reduction."""
    var splits: Int32
    """Equal parts of every tile's reduction; 0 spreads all tiles' steps evenly over the blocks instead."""
    var cluster: Int32
    """Blocks that sum neighbouring parts of one tile and join their sums in shared memory, each block having one part
    of one tile; with 0 every block takes any number of parts and gives each a slot."""
    var blocks: Int32

    comptime device_type: AnyType = Self

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        return "WgradPlan"

    @always_inline
    def tiles(self) -> Int32:
        return self.row_tiles * self.column_tiles

    @always_inline
    def channel_blocks(self) -> Int32:
        return (self.c + PANEL - 1) // PANEL

    @always_inline
    def work(self) -> Int64:
        return Int64(self.tiles()) * Int64(self.steps)

    @always_inline
    def range_start(self, block: Int64) -> Int64:
        """First step, counted through all tiles, of a block's even share."""
        return block * self.work() // Int64(self.blocks)

    @always_inline
    def block_of(self, step: Int64) -> Int64:
        return ((step + 1) * Int64(self.blocks) - 1) // self.work()

    @always_inline
    def slots_of_tile(self) -> Int32:
        """With equal parts: how many sums of one tile reach memory."""
        return self.splits // max(self.cluster, 1)

    @always_inline
    def units(self) -> Int32:
        """Upper bound of the slots."""
        return (
            self.tiles() * self.slots_of_tile() if self.splits
            > 0 else self.tiles() + self.blocks
        )


@fieldwise_init
struct Unit(ImplicitlyCopyable, TrivialRegisterPassable):
    """One block's piece of one tile."""

    var tile: Int32
    var first: Int32
    var count: Int32
    var slot: Int32


@always_inline
def unit_of(plan: WgradPlan, block: Int32, index: Int32) -> Unit:
    """Piece `index` of a block; `count` is 0 past the last one."""
    if plan.cluster > 0:
        if index > 0:
            return Unit(0, 0, 0, 0)
        # The blocks of a cluster take neighbouring parts of one tile, neighbouring clusters the same pixels.
        var slot, rank = divide(block, plan.cluster)
        var group, tile = divide(slot, plan.tiles())
        var part = Int64(group * plan.cluster + rank)
        var first = Int32(part * Int64(plan.steps) // Int64(plan.splits))
        var last = Int32((part + 1) * Int64(plan.steps) // Int64(plan.splits))
        return Unit(tile, first, last - first, slot)
    if plan.splits > 0:
        var unit = block + index * plan.blocks
        if unit >= plan.units():
            return Unit(0, 0, 0, 0)
        # Neighbouring blocks take the same pixels of different tiles, so that the second-level cache serves them.
        var split, tile = divide(unit, plan.tiles())
        var first = Int32(
            Int64(split) * Int64(plan.steps) // Int64(plan.splits)
        )
        var last = Int32(
            Int64(split + 1) * Int64(plan.steps) // Int64(plan.splits)
        )
        return Unit(tile, first, last - first, unit)
    var start = plan.range_start(Int64(block))
    var end = plan.range_start(Int64(block) + 1)
    var tile = Int32(start // Int64(plan.steps)) + index
    var begin = max(start, Int64(tile) * Int64(plan.steps))
    var stop = min(end, Int64(tile + 1) * Int64(plan.steps))
    if begin >= stop:
        return Unit(0, 0, 0, 0)
    return Unit(
        tile,
        Int32(begin - Int64(tile) * Int64(plan.steps)),
        Int32(stop - begin),
        tile + block,
    )
