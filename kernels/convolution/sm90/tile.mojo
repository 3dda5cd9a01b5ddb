"""Building blocks of the tensor-core kernels: the shape of a block and of its tile, and the way wgmma finds a tile in
shared memory."""

from std.math import ceildiv
from std.memory import bitcast

from ...common.gpu import VECTOR_BYTES
from .plan import STAGE_LENGTH, ROW_BYTES

comptime THREADS = 384
"""Threads of a block: a warpgroup that copies, and the consumers."""
comptime CONSUMERS = 2
"""Warpgroups that multiply."""
comptime PANEL_COLUMNS = 64
"""Columns of one staged output panel: one swizzled 128-byte row."""
comptime CONSUMER_THREADS = 128
comptime CONSUMER_BARRIER = 3
"""Number of the named barrier of the first consumer's threads; the kernel has those before."""
comptime LANE_ROWS = 4
"""Rows of which a lane stores a vector each: every fourth one of those that its warp stages."""
comptime _FEW_ROWS = 2
"""Rows that are computed at once where a program is heavy, or the queue short."""
comptime _QUEUE_BYTES = 32 * 1024
"""What a consumer may have under way of tensors beside the tile. An H200's memory wants some 40 KB on each of its
multiprocessors; two consumers have more than that, since they wait at times."""
comptime _SHORT_QUEUE_BYTES = 19 * 1024
"""The same beside stages of several taps, whose ring leaves no more."""


struct TileShape(ImplicitlyCopyable, TrivialRegisterPassable):
    """The amount of work that one compiled kernel computes at a time."""

    var row_blocks: Int
    """Number of 64-row blocks of each consumer warpgroup."""
    var columns: Int
    var stages: Int
    var cluster: Int
    """Blocks that share each filter tile by multicast: 1 or 2, neighbours along the rows."""
    var alternate: Bool
    """Whether each consumer takes every other tile by itself, so that one stores while the other multiplies; else both
    share each tile."""
    var heavy: Bool
    """Whether the store's program needs so many registers that it runs on few vectors at a time."""
    var slots: Int
    """Tensors that the store reads beside the tile (beside.mojo)."""
    var taps: Int
    """Taps along W that a stage may serve: it has some rows more, and the filters of all these taps. So narrow a tile's
    time is that of its copies, not of its products: 3x3 filters of 64 channels have a third of them."""

    def __init__(
        out self,
        *,
        row_blocks: Int,
        columns: Int,
        stages: Int,
        cluster: Int,
        alternate: Bool,
        heavy: Bool = False,
        slots: Int = 0,
        taps: Int = 1,
    ):
        self.row_blocks = row_blocks
        self.columns = columns
        self.stages = stages
        self.cluster = cluster
        self.alternate = alternate
        self.heavy = heavy
        self.slots = slots
        self.taps = taps

    def rows(self) -> Int:
        return 64 * self.row_blocks * (1 if self.alternate else CONSUMERS)

    def column_step(self, columns: Int, filter_k_major: Bool) -> Int:
        """Returns how many columns each tile computes of a result with `columns` columns.

        To fill what lies outside of a tensor takes the copy engine several times as long as to copy it, so rows of a
        filter tile past the last column are not asked for: tiles are equally wide. A filter that lies across the
        reduction comes in whole panels, of which the last ones are left out.
        """
        if not filter_k_major:
            return self.columns
        var unit = 8 * self.cluster
        return ceildiv(columns, ceildiv(columns, self.columns) * unit) * unit

    def has_short_stages(self, phases: Int, sums: Bool) -> Bool:
        """Returns whether a kernel takes stages of half a row each: with sums over columns it has no registers for
        that."""
        return phases == 1 and self.cluster == 1 and self.taps == 1 and not sums

    def may_split(self, phases: Int, sums: Bool) -> Bool:
        """Returns whether the blocks of a cluster may share a tile's reduction: one consumer of each multiplies.
        """
        return self.alternate and self.has_short_stages(phases, sums)

    def keeps_filter(self, steps: Int, stride: Int, column_tiles: Int) -> Bool:
        """Returns whether a slot of the ring gets the same stage of the filter in every round, so that it is copied
        once: all tiles of a walk have the same columns, and the `steps` of a tile's reduction divide the ring.
        """
        return (
            steps > 0
            and self.stages % steps == 0
            and stride % column_tiles == 0
        )

    def source_bytes(self) -> Int:
        """Returns the bytes of a stage's rows, up to a multiple of the swizzle's 8 rows.
        """
        return (self.rows() + (8 if self.taps > 1 else 0)) * ROW_BYTES

    def filter_bytes(self) -> Int:
        """Returns the bytes of one tap's filter."""
        return self.columns * ROW_BYTES

    def stage_bytes(self) -> Int:
        return self.source_bytes() + self.taps * self.filter_bytes()

    def filter_first(self) -> Bool:
        """Returns whether a product's first operand is the filter, 64 columns of the result, and its second one all
        rows of a consumer. A product reads both from shared memory: with rows first it would read the filter again for
        every 64 rows, which would take longer than the copies that are left."""
        return self.taps > 1

    def products(self) -> Int:
        """Returns the number of products that a consumer needs for a step of the reduction.
        """
        return 1 if self.filter_first() else self.row_blocks

    def product_columns(self) -> Int:
        """Returns the extent of a product whose other one is 64."""
        return 64 * self.row_blocks if self.filter_first() else self.columns

    def fragment(self) -> Int:
        """Returns the number of registers that a consumer thread has of a product's sums.
        """
        return self.product_columns() // 2

    def accumulators(self) -> Int:
        """Returns the number of registers that each consumer thread sums in."""
        return self.products() * self.fragment()

    def panels_staged(self) -> Int:
        """Returns the number of rows of ROW_BYTES that are staged at a time of each row of the tile.
        """
        return 2 if self.columns // PANEL_COLUMNS % 2 == 0 else 1

    def staging_bytes(self) -> Int:
        return CONSUMERS * self.panels_staged() * 64 * ROW_BYTES

    def rows_at_once(self) -> Int:
        """Returns the number of rows that a lane computes at once."""
        var few = self.heavy or (self.taps > 1 and self.slots > 1)
        return _FEW_ROWS if few else LANE_ROWS

    def piece_bytes(self) -> Int:
        """Returns the bytes that a consumer reads beside the tile for the rows of a panel that it computes at once.
        """
        return (
            self.slots * self.rows_at_once() * CONSUMER_THREADS * VECTOR_BYTES
        )

    def queue_depth(self) -> Int:
        """Returns the number of such pieces that are under way, all of a tile at most.
        """
        if self.slots == 0:
            return 0
        var pieces = (
            self.row_blocks
            * (self.columns // PANEL_COLUMNS)
            * (LANE_ROWS // self.rows_at_once())
        )
        var bytes = _QUEUE_BYTES if self.taps == 1 else _SHORT_QUEUE_BYTES
        return min(bytes // self.piece_bytes(), pieces)

    def queue_bytes(self) -> Int:
        return CONSUMERS * self.queue_depth() * self.piece_bytes()

    def shared_bytes(self) -> Int:
        return (
            1024
            + self.stages * self.stage_bytes()
            + self.staging_bytes()
            + self.queue_bytes()
            + 256
        )


@fieldwise_init
struct PipelineState[stages: Int](ImplicitlyCopyable, TrivialRegisterPassable):
    """A place in the ring, counted up: a quotient for each step would stand between two products.
    """

    var slot: UInt32
    var parity: UInt32
    """Parity of the round."""

    @always_inline
    def advance(mut self):
        self.slot += 1
        if self.slot == UInt32(Self.stages):
            self.slot = 0
            self.parity ^= 1

    @always_inline
    def skip(mut self, steps: Int32):
        var rounds = (self.slot + UInt32(steps)) // UInt32(Self.stages)
        self.slot += UInt32(steps) - rounds * UInt32(Self.stages)
        self.parity ^= rounds & 1


@always_inline
def k_major_descriptor[row_bytes: Int = ROW_BYTES](address: UInt32) -> Int64:
    """Returns the descriptor of rows of swizzled bytes along the reduction, 128 or 64 each; groups of 8 rows follow
    each other."""
    comptime swizzle = Int64(1 << 62) if row_bytes == 128 else Int64.MIN
    return (
        Int64((address & 0x3FFFF) >> 4)
        | swizzle
        | Int64((row_bytes * 8 // 16) << 32)
        | Int64(1 << 16)
    )


@always_inline
def mn_major_descriptor(address: UInt32) -> Int64:
    """Returns the descriptor of rows of 128 swizzled bytes across the reduction: 64 columns for each of STAGE_LENGTH
    reduction elements.

    Groups of 8 reduction elements are 1024 bytes apart, blocks of 64 columns STAGE_LENGTH rows apart.
    """
    return (
        Int64((address & 0x3FFFF) >> 4)
        | Int64(1 << 62)
        | Int64(64 << 32)
        | Int64((STAGE_LENGTH * ROW_BYTES // 16) << 16)
    )


@always_inline
def pack_pair[dtype: DType](low: Float32, high: Float32) -> UInt32:
    return bitcast[DType.uint32, 1](
        SIMD[DType.float32, 2](low, high).cast[dtype]()
    )
