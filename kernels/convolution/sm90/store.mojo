"""Stores of the tile that a warpgroup has multiplied: through shared memory, so that a lane has 16 bytes of one pixel.
"""

from std.memory import Pointer
from std.sys import size_of
from std.utils.static_tuple import StaticTuple

from ...common.pointer import Ptr
from ...common.ptx import store_matrices, syncwarp
from . import plan as fields
from ..passes import MOMENTS
from .column_sums import ColumnSums, Factor, Products
from .plan import AXIS_D, AXIS_H, AXIS_W, ROW_BYTES, Im2colPlan
from .producer import TileOrigin
from .tile import TileShape, pack_pair

comptime Epilogue[dtype: DType] = def[width: Int, parts: Int](
    StaticTuple[Int, parts], Int, SIMD[dtype, width]
) capturing -> SIMD[dtype, width]
"""The elementwise ops that follow, applied to vectors of the result before they are stored: of some pixels, counted
through all of them, the same channels from one on."""

comptime Sums[shape: TileShape] = StaticTuple[
    StaticTuple[Float32, shape.columns // 2], shape.row_blocks
]
"""A thread's accumulators."""

comptime _WARP_PANEL = 16 * ROW_BYTES
"""Bytes of the 16 rows of a panel that a warp stages."""
comptime _LANE_ROWS = 4
"""Rows of which a lane stores a vector each: every fourth one of those that its warp stages."""
comptime _HEAVY_ROWS = 2
"""Rows that a heavy program computes at once."""


def vector_of[dtype: DType]() -> Int:
    """Returns the number of elements in the 16 bytes that a lane stores."""
    return 16 // size_of[dtype]()


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
def _column[
    dtype: DType, staged: Int
](first: Int32, pair: Int, panel: Int, lane: UInt32) -> Int32:
    """Returns the first channel of a lane's vector in a staged panel."""
    return (
        first
        + Int32((pair * staged + panel) * _panel_columns[dtype]())
        + Int32(lane % 8) * Int32(vector_of[dtype]())
    )


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


@always_inline
def _store_panels[
    dtype: DType,
    phases: Int,
    shape: TileShape,
    pair: Int,
    part: Int,
    panels: Int,
    rows_at_once: Int,
    epilogue: Optional[Epilogue[dtype]],
    kind: Int,
    factor: Optional[Factor],
](
    result: Ptr[dtype],
    plan: Im2colPlan[phases],
    at: TileOrigin,
    first_row: Int32,
    first: UInt32,
    by: Consumer[shape],
    mut column_sums: ColumnSums[dtype, kind, shape.columns],
):
    """Stores part number `part`, of `panels` panels, of the rows that a warp has staged: the lane's rows from number
    `first` on.

    All vectors are made before any is stored, so that what an epilogue reads is in flight together.
    """
    comptime staged = shape.panels_staged()
    comptime vector = vector_of[dtype]()
    var rows = plan.phase(at.phase, fields.ROWS)
    var end = min(plan.columns(), at.column + plan.column_step())
    var lane = by.lane()
    comptime whole = vector * rows_at_once
    var values = StaticTuple[SIMD[dtype, whole], panels](
        fill=SIMD[dtype, whole](0)
    )
    var products = Products(0, 0)
    # Past the edge the last vector stands in: no branch keeps the loads apart.
    var pixels = StaticTuple[Int, rows_at_once](fill=0)
    comptime for it in range(rows_at_once):
        var row = first_row + Int32((first + UInt32(it)) * 4)
        pixels[it] = Int(result_row(plan, at.phase, min(row, rows - 1)))
    comptime for n in range(panels):
        comptime p = part * panels + n
        var value = SIMD[dtype, whole](0)
        comptime for it in range(rows_at_once):
            var place = (first + UInt32(it)) * 4
            value = value.insert[offset=it * vector](
                _staged[dtype](by, p, place + lane // 8)
            )
        var channel = Int(
            min(
                _column[dtype, staged](at.column, pair, p, lane),
                end - Int32(vector),
            )
        )
        comptime if epilogue:
            comptime apply = epilogue.value()
            value = apply[whole, rows_at_once](pixels, channel, value)
        comptime if factor:
            comptime factors_at = factor.value()
            var factors = factors_at[whole, rows_at_once](pixels, channel)
            comptime for it in range(rows_at_once):
                var row = first_row + Int32((first + UInt32(it)) * 4)
                var own = rebind[SIMD[dtype, 8]](
                    value.slice[vector, offset=it * vector]()
                )
                products.add(
                    own if row < rows else SIMD[dtype, 8](0),
                    factors.slice[8, offset=it * 8](),
                )
        values[n] = value
    comptime for it in range(rows_at_once):
        var row = first_row + Int32((first + UInt32(it)) * 4)
        if row < rows:
            var target = result.unsafe_offset(
                Int(result_row(plan, at.phase, row)) * Int(plan.columns())
            )
            comptime for n in range(panels):
                comptime p = part * panels + n
                var column = _column[dtype, staged](at.column, pair, p, lane)
                var value = values[n].slice[vector, offset=it * vector]()
                if column < end:
                    target.unsafe_store[alignment=16](Int(column), value)
                comptime if kind == MOMENTS:
                    column_sums.add_moments[p, it == 0](
                        rebind[SIMD[dtype, 8]](value)
                    )
            comptime if kind == MOMENTS:
                column_sums.count += 1
    comptime if factor:
        column_sums.add_products[part](products, lane)


@always_inline
def store_tile[
    dtype: DType,
    phases: Int,
    shape: TileShape,
    epilogue: Optional[Epilogue[dtype]],
    kind: Int,
    factor: Optional[Factor],
](
    result: Ptr[dtype],
    plan: Im2colPlan[phases],
    at: TileOrigin,
    sums: Sums[shape],
    by: Consumer[shape],
    mut column_sums: ColumnSums[dtype, kind, shape.columns],
):
    """Stores a tile, behind the epilogue, and adds it to the sums over columns.
    """
    comptime staged = shape.panels_staged()
    # With a factor too there would be no room for the whole in the registers.
    comptime panels = 1 if factor else staged
    comptime for block in range(shape.row_blocks):
        var first_row = (
            at.row
            + Int32((by.first_block() + UInt32(block)) * 64 + by.warp() * 16)
            + Int32(by.lane() // 8)
        )
        comptime for pair in range(
            shape.columns // (_panel_columns[dtype]() * staged)
        ):
            syncwarp()
            _stage[dtype, shape, pair](sums[block], by)
            syncwarp()
            comptime for part in range(staged // panels):
                comptime store = _store_panels[
                    dtype,
                    phases,
                    shape,
                    pair,
                    part,
                    panels,
                    _HEAVY_ROWS if shape.heavy else _LANE_ROWS,
                    epilogue,
                    kind,
                    factor,
                ]
                comptime if factor:
                    # Panels behind the last column cost as much as others.
                    if at.column + Int32(
                        (pair * staged + part) * _panel_columns[dtype]()
                    ) >= min(plan.columns(), at.column + plan.column_step()):
                        continue
                comptime if shape.heavy:
                    for row in range(0, _LANE_ROWS, _HEAVY_ROWS):
                        store(
                            result,
                            plan,
                            at,
                            first_row,
                            UInt32(row),
                            by,
                            column_sums,
                        )
                else:
                    store(result, plan, at, first_row, 0, by, column_sums)
