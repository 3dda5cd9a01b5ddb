"""The plan of a wgrad launch: the tile of one block, and the pieces into which the reduction is cut."""

from std.builtin.device_passable import DevicePassable, DeviceTypeEncoder

from ...common.arithmetic import Divisor
from .plan import STAGE_LENGTH
from .tile import CONSUMERS

comptime PANEL = 64
"""Channels of one copy: 128 bytes."""
comptime PANEL_BYTES = STAGE_LENGTH * 128
comptime ONES_BYTES = 256
"""Shared memory of a column of ones: 8 equal columns, the fewest that wgmma takes, of 16 pixels."""
comptime MAX_CLUSTER = 8
"""The largest cluster that every launch may ask for."""


@fieldwise_init
struct WgradShape(ImplicitlyCopyable, TrivialRegisterPassable):
    """The amount of work that one compiled kernel computes at a time."""

    var row_blocks: Int
    """Number of 64-row blocks (filters) of each consumer warpgroup."""
    var columns: Int
    """Columns of the tile: 64-channel panels of one or several taps."""
    var stages: Int
    var split_steps: Bool
    """Both consumers sum the same tile, each from every other step, and their sums meet in shared memory; else they
    share the tile's rows. For results with few filters. `stages` is even then: a slot of the ring belongs to one
    consumer, which waits for every round of it in turn."""

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

    def shared_bytes(self, bias: Bool) -> Int:
        """Returns the bytes of the ring, of the barriers, and with a `bias` gradient of the ones.
        """
        return 1024 + self.ones_offset() + (ONES_BYTES if bias else 0)

    def ones_offset(self) -> Int:
        """Returns where the ones lie, behind the barriers."""
        return self.stages * self.stage_bytes() + 256

    def slot_elements(self) -> Int:
        """Returns the number of floats of one tile's sums."""
        return self.rows() * self.columns

    def swap_bytes(self) -> Int:
        """Returns the bytes that each of two blocks that join sends the other.
        """
        return self.slot_elements() * 4 // 2

    def copies(self) -> Int:
        """Returns the number of sums of the tile that one block holds."""
        return CONSUMERS if self.split_steps else 1


@fieldwise_init
struct WgradChoice(ImplicitlyCopyable):
    """The way a launch divides the work."""

    var shape: Int
    """Index into WGRAD_SHAPES."""
    var splits: Int
    """Equal parts of each tile's reduction, or 0: all steps spread evenly over the blocks."""
    var cluster: Int
    """1, 2, 4 or 8 blocks that each sum one part of one tile and join their sums in shared memory, or 0: a block takes
    any number of parts and joins nothing."""
    var share_rows: Int
    """Number of rows of neighbouring tiles, and below of columns, 1, 2 or 4 each, whose blocks share their copies;
    without joining."""
    var share_columns: Int


@fieldwise_init
struct WgradPlan(DevicePassable, ImplicitlyCopyable, TrivialRegisterPassable):
    """The integers of one launch."""

    var k: Int32
    """Output channels of one group."""
    var c: Int32
    """Input channels of one group."""
    var group_rows: Divisor
    """Rows of tiles of one group."""
    var deep: Bool
    """Whether x's tensor map has three spatial axes."""
    var makes_float32: Bool
    """Whether dw is float32, whatever the type of the operands."""
    var o: Divisor
    var p: Divisor
    var q: Divisor
    var taps: Int32
    var filter_r: Divisor
    var filter_s: Divisor
    var channel_blocks: Divisor
    """Panels of one tap."""
    var stride_d: Int32
    var stride_h: Int32
    var stride_w: Int32
    var offset_step_d: Int32
    """Distance from one tap to the next, in packed offsets."""
    var offset_step_h: Int32
    var dilation_w: Int32
    var lower_d: Int32
    var lower_h: Int32
    var lower_w: Int32
    var column_tiles: Divisor
    """A multiple of `share_columns`, and the rows of tiles one of `share_rows`: tiles past the last one compute zeros
    and store nothing."""
    var tiles: Divisor
    var steps: Divisor
    """Pipeline stages of the whole reduction."""
    var splits: Int32
    """Equal parts of every tile's reduction; 0 spreads all tiles' steps evenly over the blocks instead."""
    var part_steps: Int32
    """Steps of a part, with `splits`; the first `part_rest` parts have one more."""
    var part_rest: Int32
    var cluster: Int32
    """Blocks that sum neighbouring parts of one tile and join their sums in shared memory, each block having one part
    of one tile; with 0 every block takes any number of parts and gives each a slot."""
    var joined: Divisor
    """Number of blocks that join their sums: `cluster`, or 1."""
    var share_rows: Divisor
    """Rows of tiles that share copies, without joining: a cluster of share_rows x share_columns blocks takes that many
    neighbouring tiles, of the same pixels. The blocks of a row of tiles bring its dy together, those of a column its x,
    each a share of the pixels that goes to all of them at once."""
    var share_columns: Divisor
    var shared: Divisor
    """Blocks that walk together: share_rows * share_columns."""
    var column_groups: Divisor
    """Groups of columns that share copies: column_tiles / share_columns."""
    var groups: Int32
    """Groups of tiles that share copies: tiles / shared."""
    var blocks: Int32
    var walkers: Divisor
    """Walkers of the even spread, each with a range of all groups' steps: blocks / shared."""
    var range_groups: Int32
    """The even spread's ranges: groups * steps / walkers, as whole groups, steps of one more, and what is left over."""
    var range_steps: Int32
    var range_rest: Int32
    var slots_of_tile: Int32
    """Number of sums of one tile that reach memory, with equal parts."""

    comptime device_type: AnyType = Self

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        return "WgradPlan"

    @always_inline
    def filters(self, row_tile: Int32, rows: Int) -> Tuple[Int32, Int32]:
        """Returns the group of filters and channels of a row of tiles, and the first filter in it.
        """
        var group, row = self.group_rows.divide(row_tile)
        return group, row * Int32(rows)

    @always_inline
    def group_of(self, tile: Int32) -> Tuple[Int32, Int32]:
        """Returns the group of tiles that a tile belongs to, and the tile's place in it.
        """
        if self.shared.value == 1:
            return tile, Int32(0)
        var row, column = self.column_tiles.divide(tile)
        var group_row, rank_row = self.share_rows.divide(row)
        var group_column, rank_column = self.share_columns.divide(column)
        return (
            group_row * self.column_groups.value + group_column,
            rank_row * self.share_columns.value + rank_column,
        )

    @always_inline
    def tile_of(self, group: Int32, rank: Int32) -> Int32:
        if self.shared.value == 1:
            return group
        var row, column = self.column_groups.divide(group)
        var rank_row, rank_column = self.share_columns.divide(rank)
        return (
            (row * self.share_rows.value + rank_row) * self.column_tiles.value
            + column * self.share_columns.value
            + rank_column
        )

    @always_inline
    def part(self, index: Int32) -> Tuple[Int32, Int32]:
        """Returns the first step and the number of steps of a tile's part."""
        return (
            index * self.part_steps + min(index, self.part_rest),
            self.part_steps + Int32(index < self.part_rest),
        )

    @always_inline
    def range_start(self, walker: Int32) -> Tuple[Int32, Int32]:
        """Returns the group, and the step in it, where a walker's share of the even spread begins: share `walker` of
        all groups' steps, rounded down."""
        var rest, _ = self.walkers.divide(walker * self.range_rest)
        var group, step = self.steps.divide(walker * self.range_steps + rest)
        return walker * self.range_groups + group, step

    @always_inline
    def walker_of(self, step: Int64) -> Int64:
        """Returns the walker of the even spread that takes a step, counted through all groups.
        """
        return ((step + 1) * Int64(self.walkers.value) - 1) // (
            Int64(self.groups) * Int64(self.steps.value)
        )

    @always_inline
    def slots_of(self, tile: Int32) -> Tuple[Int64, Int64, Int64]:
        """Returns the first slot of a tile, how many it has, and the distance from one to the next.
        """
        if self.splits > 0:
            return (
                Int64(tile),
                Int64(self.slots_of_tile),
                Int64(self.tiles.value),
            )
        var group, rank = self.group_of(tile)
        var stride = Int64(self.shared.value)
        var begin = Int64(group) * Int64(self.steps.value)
        var walker = self.walker_of(begin)
        return (
            (Int64(group) + walker) * stride + Int64(rank),
            self.walker_of(begin + Int64(self.steps.value) - 1) - walker + 1,
            stride,
        )

    @always_inline
    def units(self) -> Int32:
        """Returns an upper bound of the number of slots."""
        return (
            self.tiles.value * self.slots_of_tile if self.splits
            > 0 else self.tiles.value + self.blocks
        )


@fieldwise_init
struct WorkUnit(ImplicitlyCopyable, TrivialRegisterPassable):
    """One block's piece of one tile."""

    var tile: Int32
    var first: Int32
    var count: Int32
    var slot: Int32


@always_inline
def work_unit_of(plan: WgradPlan, block: Int32, index: Int32) -> WorkUnit:
    """Returns piece `index` of a block; `count` is 0 past the last one. Blocks that share tiles have pieces of the same
    steps."""
    if plan.cluster > 0:
        if index > 0:
            return WorkUnit(0, 0, 0, 0)
        # The blocks of a cluster take neighbouring parts of one tile, neighbouring clusters the same pixels.
        var slot, rank = plan.joined.divide(block)
        var group, tile = plan.tiles.divide(slot)
        var first, count = plan.part(group * plan.cluster + rank)
        return WorkUnit(tile, first, count, slot)
    var walker = block
    var rank = Int32(0)
    if plan.shared.value > 1:
        walker, rank = plan.shared.divide(block)
    if plan.splits > 0:
        var unit = block + index * plan.blocks
        if unit >= plan.units():
            return WorkUnit(0, 0, 0, 0)
        # Neighbouring blocks take the same pixels of different tiles, so that the second-level cache serves them.
        var split, place = plan.tiles.divide(unit)
        var tile = place
        if plan.shared.value > 1:
            var group, _ = plan.shared.divide(place)
            tile = plan.tile_of(group, rank)
        var first, count = plan.part(split)
        return WorkUnit(tile, first, count, split * plan.tiles.value + tile)
    var group, begin = plan.range_start(walker)
    var last_group, stop = plan.range_start(walker + 1)
    if index > 0:
        group += index
        begin = 0
    if group < last_group:
        stop = plan.steps.value
    if group > last_group or begin >= stop:
        return WorkUnit(0, 0, 0, 0)
    return WorkUnit(
        plan.tile_of(group, rank),
        begin,
        stop - begin,
        (group + walker) * plan.shared.value + rank,
    )
