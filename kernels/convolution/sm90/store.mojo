"""Stores of the tile that a warpgroup has multiplied: through shared memory, so that a lane has 16 bytes of one pixel.
"""

from std.memory import Pointer
from std.sys import size_of
from std.utils.static_tuple import StaticTuple

from ...common.async_copy import commit_copies
from ...common.gpu import VECTOR_BYTES
from ...common.pointer import Ptr
from ...common.ptx import store_matrices, syncwarp
from ...common.warpgroup import vector_of
from . import plan as fields
from ..passes import MOMENTS
from .beside import Addresses, Beside, BesideQueue, Epilogue, Factor, Reader
from .column_sums import ColumnSums, Products
from .plan import AXIS_D, AXIS_H, AXIS_W, ROW_BYTES, Im2colPlan
from .producer import TileOrigin
from .tile import LANE_ROWS, TileShape, pack_pair

comptime Sums[shape: TileShape] = StaticTuple[
    StaticTuple[Float32, shape.columns // 2], shape.row_blocks
]
"""A thread's accumulators."""

comptime _WARP_PANEL = 16 * ROW_BYTES
"""Bytes of the 16 rows of a panel that a warp stages."""


def _panel_columns[dtype: DType]() -> Int:
    """Returns the columns of one staged panel: one swizzled row."""
    return ROW_BYTES // size_of[dtype]()


@fieldwise_init
struct Consumer[shape: TileShape](ImplicitlyCopyable, TrivialRegisterPassable):
    """A thread's place among those that multiply, and its warpgroup's shared memory.
    """

    comptime warp_bytes = Self.shape.panels_staged() * _WARP_PANEL
    """Bytes that each warp stages, its own 16 rows, so that only the warp has to agree."""

    var index: Int32
    """Index of the warpgroup."""
    var thread: UInt32
    """Index of the thread in the warpgroup."""
    var staging: UInt32
    """Address of the warpgroup's shared memory."""
    var queue: UInt32
    """Address of its memory for what is read beside the tile."""

    @always_inline
    def warp(self) -> UInt32:
        return self.thread // 32

    @always_inline
    def lane(self) -> UInt32:
        return self.thread % 32

    @always_inline
    def warp_staging(self) -> UInt32:
        return self.staging + self.warp() * UInt32(Self.warp_bytes)

    @always_inline
    def first_block(self) -> UInt32:
        """Returns the first of the consumer's 64-row blocks of a tile."""
        comptime if Self.shape.alternate:
            return 0
        return UInt32(self.index) * UInt32(Self.shape.row_blocks)


@always_inline
def result_row[
    phases: Int
](plan: Im2colPlan[phases], phase: Int, row: Int32) -> Int32:
    """Returns the result's pixel, counted through all of them, of a phase's row.
    """
    comptime if phases == 1:
        return row
    else:
        var n, l, j, i = plan.pixel(phase, row)
        var d = l * plan.out_step(AXIS_D) + plan.phase(
            phase, fields.FIRST + AXIS_D
        )
        var h = j * plan.out_step(AXIS_H) + plan.phase(
            phase, fields.FIRST + AXIS_H
        )
        var w = i * plan.out_step(AXIS_W) + plan.phase(
            phase, fields.FIRST + AXIS_W
        )
        return (
            (n * plan.out_extent(AXIS_D) + d) * plan.out_extent(AXIS_H) + h
        ) * plan.out_extent(AXIS_W) + w


@always_inline
def _staged_at[
    dtype: DType, shape: TileShape
](by: Consumer[shape], panel: Int, row: UInt32, chunk: UInt32) -> Pointer[
    Scalar[dtype], MutAnyOrigin, address_space=AddressSpace.SHARED
]:
    """Returns the address of 16 bytes of a row that the warp stages. The rows that are written at a time have them in
    different banks."""
    var key = row % 8
    comptime if dtype == DType.float32:
        # Half a warp writes two chunks of four rows.
        key = row % 4 * 2 + key // 4
    return {
        unsafe_from_address = Int(
            by.warp_staging()
            + UInt32(panel * _WARP_PANEL)
            + row * ROW_BYTES
            + ((chunk ^ key) * 16)
        )
    }


@always_inline
def _stage[
    dtype: DType, shape: TileShape, pair: Int
](sums: StaticTuple[Float32, shape.columns // 2], by: Consumer[shape]):
    """Stages a warp's 16 rows of the panels that are staged together, as `dtype`.
    """
    comptime staged = shape.panels_staged()
    var lane = by.lane()
    comptime if dtype == DType.float32:
        # A lane has two columns of two rows of every 8 columns.
        comptime for p in range(staged):
            comptime for q in range(4):
                comptime base = ((pair * staged + p) * 4 + q) * 4
                comptime for half in range(2):
                    var row = lane // 4 + UInt32(half * 8)
                    _staged_at[dtype, shape](
                        by, p, row, UInt32(q * 2) + lane % 4 // 2
                    ).unsafe_offset(Int(lane % 2) * 2).unsafe_store[
                        alignment=8
                    ](
                        0,
                        SIMD[DType.float32, 2](
                            sums[base + half * 2], sums[base + half * 2 + 1]
                        ).cast[dtype](),
                    )
        return
    var row = ((lane // 8) % 2) * 8 + lane % 8
    comptime for p in range(staged):
        comptime for q in range(4):
            comptime base = ((pair * staged + p) * 8 + q * 2) * 4
            var chunk = UInt32(q * 2) + lane // 16
            store_matrices(
                by.warp_staging()
                + UInt32(p * _WARP_PANEL)
                + row * ROW_BYTES
                + ((chunk ^ (lane % 8)) * 16),
                pack_pair[dtype](sums[base], sums[base + 1]),
                pack_pair[dtype](sums[base + 2], sums[base + 3]),
                pack_pair[dtype](sums[base + 4], sums[base + 5]),
                pack_pair[dtype](sums[base + 6], sums[base + 7]),
            )


@always_inline
def _staged[
    dtype: DType, shape: TileShape
](by: Consumer[shape], panel: Int, row: UInt32) -> SIMD[
    dtype, vector_of[dtype]()
]:
    """Loads the lane's vector of a row that the warp has staged."""
    return _staged_at[dtype, shape](by, panel, row, by.lane() % 8).unsafe_load[
        width=vector_of[dtype](), alignment=16
    ]()


@fieldwise_init
struct _Pieces[
    dtype: DType,
    phases: Int,
    shape: TileShape,
](ImplicitlyCopyable):
    """A tile in the order in which a warp stores it: of each block of rows the panels, some rows of a panel at a time.

    The plan is an argument: a copy of it would lie in local memory.
    """

    comptime rows_at_once = Self.shape.rows_at_once()
    comptime staged = Self.shape.panels_staged()
    comptime panels = 1 if Self.shape.slots > 0 else Self.staged
    """Panels of a piece. What is read beside one takes registers enough."""
    comptime chunks = LANE_ROWS // Self.rows_at_once
    comptime pairs = Self.shape.columns // (
        _panel_columns[Self.dtype]() * Self.staged
    )
    comptime in_block = Self.pairs * Self.staged // Self.panels * Self.chunks
    comptime count = Self.shape.row_blocks * Self.in_block
    comptime width = BesideQueue[Self.dtype, Self.shape].width

    var at: TileOrigin
    var by: Consumer[Self.shape]

    @always_inline
    def first_row(self, block: Int) -> Int32:
        """Returns the first row of the lane in a block of rows."""
        return (
            self.at.row
            + Int32(self.by.first_block() + UInt32(block)) * 64
            + Int32(self.by.warp() * 16 + self.by.lane() // 8)
        )

    @always_inline
    def rows(self, plan: Im2colPlan[Self.phases]) -> Int32:
        return plan.phase(self.at.phase, fields.ROWS)

    @always_inline
    def end(self, plan: Im2colPlan[Self.phases]) -> Int32:
        """Returns the channel behind the tile's last one."""
        return min(plan.columns(), self.at.column + plan.column_step())

    @always_inline
    def pixels(
        self, plan: Im2colPlan[Self.phases], first_row: Int32, chunk: Int
    ) -> StaticTuple[Int, Self.rows_at_once]:
        """Returns the lane's pixels of a piece. Past the edge the last one stands in: no branch keeps loads apart.
        """
        var pixels = StaticTuple[Int, Self.rows_at_once](fill=0)
        comptime for it in range(Self.rows_at_once):
            var row = first_row + Int32((chunk * Self.rows_at_once + it) * 4)
            pixels[it] = Int(
                result_row(plan, self.at.phase, min(row, self.rows(plan) - 1))
            )
        return pixels

    @always_inline
    def channel(self, panel: Int) -> Int32:
        """Returns the first channel of the lane's vectors in a panel, which may lie behind the last one.
        """
        return (
            self.at.column
            + Int32(panel * _panel_columns[Self.dtype]())
            + Int32(self.by.lane() % 8) * Int32(vector_of[Self.dtype]())
        )

    @always_inline
    def inside(self, plan: Im2colPlan[Self.phases], channel: Int32) -> Int:
        """Returns the channel, or where it lies behind the last vector, the channel of that.
        """
        return Int(
            min(channel, self.end(plan) - Int32(vector_of[Self.dtype]()))
        )

    @always_inline
    def sources[
        read: Reader[Self.dtype]
    ](self, plan: Im2colPlan[Self.phases], number: Int) -> Addresses[
        Self.rows_at_once
    ]:
        """Returns where to read what piece `number` needs of other tensors."""
        var in_block = number % Self.in_block
        return read[Self.rows_at_once](
            self.pixels(
                plan,
                self.first_row(number // Self.in_block),
                in_block % Self.chunks,
            ),
            self.inside(plan, self.channel(in_block // Self.chunks)),
        )


@always_inline
def _queue[
    dtype: DType, shape: TileShape
](by: Consumer[shape]) -> BesideQueue[dtype, shape]:
    return BesideQueue[dtype, shape](by.queue + by.thread * VECTOR_BYTES)


@always_inline
def read_first[
    dtype: DType,
    phases: Int,
    shape: TileShape,
    read: Optional[Reader[dtype]],
](plan: Im2colPlan[phases], at: TileOrigin, by: Consumer[shape]):
    """Starts to read what the first pieces that `store_tile` stores of a tile need.
    """
    comptime if read:
        var tile = _Pieces[dtype, phases, shape](at, by)
        comptime for number in range(shape.queue_depth()):
            _queue[dtype](by).copy(
                number, tile.sources[read.value()](plan, number)
            )


@always_inline
def _store_piece[
    dtype: DType,
    phases: Int,
    shape: TileShape,
    epilogue: Optional[Epilogue[dtype]],
    kind: Int,
    factor: Optional[Factor[dtype]],
    block: Int,
    panel: Int,
](
    tile: _Pieces[dtype, phases, shape],
    result: Ptr[dtype],
    plan: Im2colPlan[phases],
    first_row: Int32,
    chunk: Int,
    beside: Beside[dtype, _Pieces[dtype, phases, shape].width],
    mut column_sums: ColumnSums[dtype, kind, shape.columns],
):
    """Stores a piece that a warp has staged: of a block of rows the panels from number `panel` on.

    All vectors are made before any is stored, so that what an epilogue reads is in flight together.
    """
    comptime vector = vector_of[dtype]()
    comptime Pieces = _Pieces[dtype, phases, shape]
    comptime rows_at_once = Pieces.rows_at_once
    comptime panels = Pieces.panels
    comptime whole = Pieces.width
    var rows = tile.rows(plan)
    var end = tile.end(plan)
    var lane = tile.by.lane()
    var values = StaticTuple[SIMD[dtype, whole], panels](
        fill=SIMD[dtype, whole](0)
    )
    var products = Products(0, 0)
    var pixels = tile.pixels(plan, first_row, chunk)
    comptime for n in range(panels):
        comptime staged_panel = (panel + n) % Pieces.staged
        var value = SIMD[dtype, whole](0)
        comptime for it in range(rows_at_once):
            var place = UInt32((chunk * rows_at_once + it) * 4)
            value = value.insert[offset=it * vector](
                _staged[dtype](tile.by, staged_panel, place + lane // 8)
            )
        var channel = tile.inside(plan, tile.channel(panel + n))
        comptime if epilogue:
            comptime apply = epilogue.value()
            value = apply[whole, rows_at_once](pixels, channel, value, beside)
        comptime if factor:
            comptime factors_of = factor.value()
            var factors = factors_of[whole, rows_at_once](
                channel, beside[shape.slots - 1]
            )
            comptime for it in range(rows_at_once):
                var row = first_row + Int32((chunk * rows_at_once + it) * 4)
                var own = rebind[SIMD[dtype, 8]](
                    value.slice[vector, offset=it * vector]()
                )
                products.add(
                    own if row < rows else SIMD[dtype, 8](0),
                    factors.slice[8, offset=it * 8](),
                )
        values[n] = value
    comptime if kind == MOMENTS and block == 0:
        # No other row is a thread's first one. It is counted with the last panel.
        if chunk == 0 and column_sums.count == 0 and first_row < rows:
            comptime for n in range(panels):
                column_sums.begin[panel + n](
                    rebind[SIMD[dtype, 8]](values[n].slice[vector]())
                )
    var columns = Int(plan.columns())
    var first = first_row + Int32(chunk * rows_at_once * 4)
    comptime for it in range(rows_at_once):
        # Without phases the pixels are the rows: a step instead of a product.
        var target = result.unsafe_offset(
            Int(first) * columns + it * (4 * columns) if phases
            == 1 else pixels[it] * columns
        )
        if first + Int32(it * 4) < rows:
            comptime for n in range(panels):
                var column = tile.channel(panel + n)
                var value = values[n].slice[vector, offset=it * vector]()
                if column < end:
                    target.unsafe_store[alignment=16](Int(column), value)
                comptime if kind == MOMENTS:
                    column_sums.add_moments[panel + n](
                        rebind[SIMD[dtype, 8]](value)
                    )
            comptime if kind == MOMENTS and panel + panels == column_sums.panels:
                column_sums.count += 1
    comptime if factor:
        column_sums.add_products[panel](products, lane)


@always_inline
def store_tile[
    dtype: DType,
    phases: Int,
    shape: TileShape,
    read: Optional[Reader[dtype]],
    epilogue: Optional[Epilogue[dtype]],
    kind: Int,
    factor: Optional[Factor[dtype]],
](
    result: Ptr[dtype],
    plan: Im2colPlan[phases],
    at: TileOrigin,
    sums: Sums[shape],
    by: Consumer[shape],
    mut column_sums: ColumnSums[dtype, kind, shape.columns],
):
    """Stores a tile, behind the epilogue, and adds it to the sums over columns; behind `read_first`.
    """
    comptime Pieces = _Pieces[dtype, phases, shape]
    var tile = Pieces(at, by)
    comptime for block in range(shape.row_blocks):
        var first_row = tile.first_row(block)
        comptime for pair in range(Pieces.pairs):
            syncwarp()
            _stage[dtype, shape, pair](sums[block], by)
            syncwarp()
            comptime for part in range(Pieces.staged // Pieces.panels):
                comptime panel = pair * Pieces.staged + part * Pieces.panels
                comptime number = (
                    block * Pieces.in_block
                    + panel // Pieces.panels * Pieces.chunks
                )
                # A loop on purpose: more copies of a heavy program spill.
                for chunk in range(Pieces.chunks):
                    var queue = _queue[dtype](by)
                    var beside = queue.take(number + chunk)
                    comptime if read:
                        # An empty group behind the last piece: each place has one.
                        var next = number + chunk + shape.queue_depth()
                        if next < Pieces.count:
                            queue.copy(
                                next,
                                tile.sources[read.value()](plan, next),
                            )
                        else:
                            commit_copies()
                    comptime if factor:
                        # Panels behind the last column cost as much as others.
                        if at.column + Int32(
                            panel * _panel_columns[dtype]()
                        ) >= tile.end(plan):
                            continue
                    _store_piece[
                        dtype,
                        phases,
                        shape,
                        epilogue,
                        kind,
                        factor,
                        block,
                        panel,
                    ](
                        tile,
                        result,
                        plan,
                        first_row,
                        chunk,
                        beside,
                        column_sums,
                    )
