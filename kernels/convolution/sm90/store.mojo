"""Stores of the tile that a warpgroup has multiplied: through shared memory, so that a lane has 16 bytes of one pixel.
"""

from std.sys import size_of
from std.utils.static_tuple import StaticTuple

from ...common.async_copy import commit_copies
from ...common.gpu import VECTOR_BYTES
from ...common.pointer import Ptr, Shared
from ...common.ptx import named_barrier_sync, store_matrices, syncwarp
from ...common.warpgroup import vector_of
from . import plan as fields
from ..passes import MOMENTS
from .beside import Addresses, Beside, BesideQueue, Epilogue, Factor, Reader
from .column_sums import ColumnSums, Products
from .plan import AXIS_D, AXIS_H, AXIS_W, ROW_BYTES, Im2colPlan
from .producer import TileOrigin
from .tile import (
    CONSUMER_BARRIER,
    CONSUMER_THREADS,
    LANE_ROWS,
    TileShape,
    pack_pair,
)

comptime Sums[shape: TileShape] = StaticTuple[
    StaticTuple[Float32, shape.fragment()], shape.products()
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
    """Bytes of the 16 rows that each warp stores. Where it has multiplied them, too, only the warp has to agree."""

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
    def first_block(self) -> UInt32:
        """Returns the first of the consumer's 64-row blocks of a tile."""
        comptime if Self.shape.alternate:
            return 0
        return UInt32(self.index) * UInt32(Self.shape.row_blocks)


@always_inline
def _line_width[phases: Int](plan: Im2colPlan[phases], phase: Int) -> Int32:
    """Returns how many of a line's rows are the result's, where stages serve several taps.
    """
    return plan.extent(phase, AXIS_W) - plan.shared_taps() + 1


@always_inline
def result_row[
    phases: Int, shape: TileShape
](plan: Im2colPlan[phases], phase: Int, row: Int32) -> Int32:
    """Returns the result's pixel, counted through all of them, of a phase's row; of one that is not the result's, the
    last pixel before it.
    """
    comptime if shape.taps > 1:
        var line, place = plan.line_place(phase, row)
        var width = _line_width(plan, phase)
        return line * width + min(place, width - 1)
    elif phases == 1:
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
](
    by: Consumer[shape], warp: UInt32, panel: Int, row: UInt32, chunk: UInt32
) -> UInt32:
    """Returns the address of 16 bytes of a row that a warp stores, one of 16. The rows that are written at a time have
    them in different banks."""
    var key = row % 8
    comptime if dtype == DType.float32:
        # Half a warp writes two chunks of four rows.
        key = row % 4 * 2 + key // 4
    return (
        by.staging
        + warp * UInt32(by.warp_bytes)
        + UInt32(panel * _WARP_PANEL)
        + row * ROW_BYTES
        + ((chunk ^ key) * 16)
    )


@always_inline
def _agree[shape: TileShape](by: Consumer[shape]):
    """Waits for all who stage what the warp stores: itself, or the whole consumer where the filter comes first.
    """
    comptime if shape.filter_first():
        named_barrier_sync(CONSUMER_BARRIER + by.index, CONSUMER_THREADS)
    else:
        syncwarp()


@always_inline
def _stage_rows[
    dtype: DType, shape: TileShape, block: Int, pair: Int
](sums: Sums[shape], by: Consumer[shape]):
    """Stages a warp's own 16 rows of the panels that are staged together, as `dtype`.
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
                    var chunk = UInt32(q * 2) + lane % 4 // 2
                    Shared[dtype](
                        unsafe_from_address=Int(
                            _staged_at[dtype](by, by.warp(), p, row, chunk)
                        )
                    ).unsafe_store[alignment=8](
                        Int(lane % 2) * 2,
                        SIMD[DType.float32, 2](
                            sums[block][base + half * 2],
                            sums[block][base + half * 2 + 1],
                        ).cast[dtype](),
                    )
        return
    var row = ((lane // 8) % 2) * 8 + lane % 8
    comptime for p in range(staged):
        comptime for q in range(4):
            comptime base = ((pair * staged + p) * 8 + q * 2) * 4
            var chunk = UInt32(q * 2) + lane // 16
            store_matrices(
                _staged_at[dtype](by, by.warp(), p, row, chunk),
                pack_pair[dtype](sums[block][base], sums[block][base + 1]),
                pack_pair[dtype](sums[block][base + 2], sums[block][base + 3]),
                pack_pair[dtype](sums[block][base + 4], sums[block][base + 5]),
                pack_pair[dtype](sums[block][base + 6], sums[block][base + 7]),
            )


@always_inline
def _stage_columns[
    dtype: DType, shape: TileShape, block: Int, panel: Int
](sums: Sums[shape], by: Consumer[shape]):
    """Stages a warp's 16 columns of a block of 64 rows, as `dtype`, where the filter comes first and they belong to the
    panel."""
    comptime assert shape.panels_staged() == 1
    var lane = by.lane()
    comptime if dtype == DType.float32:
        # A panel has the columns of two warps, a lane two rows of two columns of every 8 rows.
        if by.warp() // 2 != UInt32(panel):
            return
        comptime for element in range(32):
            comptime group = element // 4
            comptime half = element % 4 // 2
            var row = UInt32(group % 2 * 8 + element % 2) + lane % 4 * 2
            var column = by.warp() % 2 * 16 + UInt32(half * 8) + lane // 4
            Shared[dtype](
                unsafe_from_address=Int(
                    _staged_at[dtype](
                        by, UInt32(group // 2), 0, row, column // 4
                    )
                )
            ).unsafe_store(
                Int(column % 4), sums[0][block * 32 + element].cast[dtype]()
            )
        return
    var row = lane // 16 * 8 + lane % 8
    var chunk = by.warp() * 2 + lane // 8 % 2
    comptime for q in range(4):
        comptime base = block * 32 + q * 8
        store_matrices[transposed=True](
            _staged_at[dtype](by, UInt32(q), 0, row, chunk),
            pack_pair[dtype](sums[0][base], sums[0][base + 1]),
            pack_pair[dtype](sums[0][base + 2], sums[0][base + 3]),
            pack_pair[dtype](sums[0][base + 4], sums[0][base + 5]),
            pack_pair[dtype](sums[0][base + 6], sums[0][base + 7]),
        )


@always_inline
def _staged[
    dtype: DType, shape: TileShape
](by: Consumer[shape], panel: Int, row: UInt32) -> SIMD[
    dtype, vector_of[dtype]()
]:
    """Loads the lane's vector of a row that the warp stores."""
    return Shared[dtype](
        unsafe_from_address=Int(
            _staged_at[dtype](by, by.warp(), panel, row, by.lane() % 8)
        )
    ).unsafe_load[width=vector_of[dtype](), alignment=16]()


@always_inline
def is_stored[
    phases: Int, shape: TileShape
](plan: Im2colPlan[phases], phase: Int, row: Int32) -> Bool:
    """Returns whether a row of a phase is the result's."""
    var inside = row < plan.phase(phase, fields.ROWS)
    comptime if shape.taps > 1:
        inside &= plan.line_place(phase, row)[1] < _line_width(plan, phase)
    return inside


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
                result_row[shape=Self.shape](
                    plan, self.at.phase, min(row, self.rows(plan) - 1)
                )
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
                    own if is_stored[shape=shape](
                        plan, tile.at.phase, row
                    ) else SIMD[dtype, 8](0),
                    factors.slice[8, offset=it * 8](),
                )
        values[n] = value
    var columns = Int(plan.columns())
    var first = first_row + Int32(chunk * rows_at_once * 4)
    comptime some = shape.taps > 1
    comptime if kind == MOMENTS and (block == 0 or some):
        # A thread's first row is one of the tile's first, or any where only some are stored. It is counted with the last
        # panel.
        if (chunk == 0 or some) and column_sums.count == 0:
            comptime candidates = rows_at_once if some else 1
            comptime for i in range(candidates):
                comptime it = candidates - 1 - i
                if is_stored[shape=shape](
                    plan, tile.at.phase, first + Int32(it * 4)
                ):
                    comptime for n in range(panels):
                        column_sums.begin[panel + n](
                            rebind[SIMD[dtype, 8]](
                                values[n].slice[vector, offset=it * vector]()
                            )
                        )
    comptime for it in range(rows_at_once):
        # Where the pixels are the rows, a step instead of a product.
        var target = result.unsafe_offset(
            Int(first) * columns + it * (4 * columns) if phases == 1
            and shape.taps == 1 else pixels[it] * columns
        )
        if is_stored[shape=shape](plan, tile.at.phase, first + Int32(it * 4)):
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
            _agree(by)
            comptime if shape.filter_first():
                _stage_columns[dtype, shape, block, pair](sums, by)
            else:
                _stage_rows[dtype, shape, block, pair](sums, by)
            _agree(by)
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
