"""Implicit products and outer products of bfloat16 in tile registers (common/amx.mojo), of packed panels."""

from std.math import ceildiv, iota
from std.sys.intrinsics import masked_load

from ...common.amx import (
    TILE,
    TILE_ELEMENTS,
    TILE_STEPS,
    begin_sums,
    configure,
    load_columns,
    load_rows,
    load_sums,
    multiply,
    release,
    store_sums,
    write_row,
)
from ...common.pointer import Ptr
from ...common.vectors import first_lanes
from .microkernel import PtrTable, packed_type
from .row_table import PassOperands

comptime _IRREGULAR = Int.MIN


@always_inline
def _bytes_apart[dtype: DType](rows: PtrTable[dtype]) -> Int:
    """Returns how many bytes lie between neighbours of 16 rows, `_IRREGULAR` where these differ.
    """
    comptime half = TILE // 2
    var addresses = rows.unsafe_bitcast[Int64]()
    var first = addresses[]
    var apart = addresses[unsafe_offset=1] - first
    var steps = iota[DType.int64, half]() * apart + first
    var low = addresses.unsafe_load[width=half]()
    var high = addresses.unsafe_offset(half).unsafe_load[width=half]()
    if (
        low.eq(steps).reduce_and()
        and high.eq(steps + half * apart).reduce_and()
    ):
        return Int(apart)
    return _IRREGULAR


@always_inline
def _gather_rows[
    number: Int, dtype: DType
](rows: PtrTable[dtype], apart: Int, at: Int, steps: Int, copy: Ptr[dtype]):
    """Loads the steps from `at` on of 16 rows, zeros where there are less than a register's.
    """
    if apart != _IRREGULAR and steps >= TILE_STEPS:
        load_rows[number](rows[].unsafe_offset(at), apart)
        return
    var mask = first_lanes[TILE_STEPS](steps)
    comptime for row in range(TILE):
        var source = rows[unsafe_offset=row].unsafe_offset(at)
        var target = copy.unsafe_offset(row * TILE_STEPS)
        if steps >= TILE_STEPS:
            target.unsafe_store(source.unsafe_load[width=TILE_STEPS]())
        else:
            target.unsafe_store(
                masked_load[TILE_STEPS](
                    source, mask, SIMD[dtype, TILE_STEPS](0)
                )
            )
    load_rows[number](copy)


@always_inline
def _gather_tiles[
    dtype: DType, rows: Int, columns: Int
](
    ops: PassOperands[dtype],
    panel: Ptr[dtype],
    panel_columns: Int,
    table: PtrTable[dtype],
    results: PtrTable[dtype],
    live: MutPointer[Int, MutUntrackedOrigin],
    lines: Int,
    count: Int,
    pitch: Int,
    offset: Int,
    column: Int,
    lanes: Int,
    copies: Ptr[dtype],
    sums: Ptr[DType.float32],
):
    """Multiplies the first `rows` registers of rows of a table by `columns` registers of a panel.
    """
    begin_sums[rows, columns]()
    var depth = ops.depth()
    var tap_size = ops.packed_depth() * panel_columns
    var apart = Array[Int, rows](fill=0)
    for i in range(lines):
        var line = table.unsafe_offset(i * pitch)
        var b = panel.unsafe_offset(live[unsafe_offset=i] * tap_size)
        comptime for row in range(rows):
            apart[row] = _bytes_apart[dtype](line.unsafe_offset(row * TILE))
        for at in range(0, depth, TILE_STEPS):
            comptime for row in range(rows):
                _gather_rows[row](
                    line.unsafe_offset(row * TILE),
                    apart[row],
                    offset + at,
                    depth - at,
                    copies.unsafe_offset(row * TILE_ELEMENTS),
                )
            comptime for each in range(columns):
                load_columns[each](
                    b.unsafe_offset(2 * TILE * each), 4 * panel_columns
                )
            multiply[rows, columns]()
            b = b.unsafe_offset(TILE_STEPS * panel_columns)
    store_sums[rows, columns](sums, TILE * columns)
    for row in range(min(count, rows * TILE)):
        write_row[columns](
            results[unsafe_offset=row].unsafe_offset(column),
            sums.unsafe_offset(row * TILE * columns),
            lanes,
        )


@no_inline
def panel_rows_by_tiles[
    dtype: DType
](
    ops: PassOperands[dtype],
    panel: Ptr[dtype],
    vectors: Int,
    table: PtrTable[dtype],
    results: PtrTable[dtype],
    live: MutPointer[Int, MutUntrackedOrigin],
    lines: Int,
    count: Int,
    pitch: Int,
    offset: Int,
    column: Int,
    lanes: Int,
):
    """Multiplies all rows of a block by one panel, as `panel_rows` does."""
    configure()
    var copies = Array[SIMD[dtype, TILE_STEPS], 2 * TILE](fill=0)
    var sums = Array[SIMD[DType.float32, TILE], 4 * TILE](fill=0)
    for first in range(0, count, 2 * TILE):
        for vector in range(0, vectors, 2):

            @always_inline
            def tiles[rows: Int, columns: Int]() {imm}:
                _gather_tiles[dtype, rows, columns](
                    ops,
                    panel.unsafe_offset(2 * TILE * vector),
                    TILE * vectors,
                    table.unsafe_offset(first),
                    results.unsafe_offset(first),
                    live,
                    lines,
                    count - first,
                    pitch,
                    offset,
                    column + vector * TILE,
                    lanes - vector * TILE,
                    Ptr[dtype](unsafe_from_address=Int(copies.unsafe_ptr())),
                    Ptr[DType.float32](
                        unsafe_from_address=Int(sums.unsafe_ptr())
                    ),
                )

            comptime for columns in range(1, 3):
                if min(2, vectors - vector) == columns:
                    if count - first > TILE:
                        tiles[2, columns]()
                    else:
                        tiles[1, columns]()
    release()
    _ = copies^
    _ = sums^


@always_inline
def _outer_tiles[
    dtype: DType, rows: Int, columns: Int
](
    sums: Ptr[DType.float32],
    pitch: Int,
    a: Ptr[dtype],
    b: Ptr[dtype],
    b_columns: Int,
    count: Int,
    rows_left: Int,
    lanes: Int,
    first: Bool,
    edge: Ptr[DType.float32],
):
    """Adds a[i][row] * b[i][:] over i < count to `rows` by `columns` registers of sums; the `first` product is stored.
    """
    var is_whole = rows_left >= rows * TILE and lanes >= columns * TILE
    if first or not is_whole:
        begin_sums[rows, columns]()
    else:
        load_sums[rows, columns](sums, pitch)
    for at in range(0, count, TILE_STEPS):
        comptime for row in range(rows):
            load_rows[row](a.unsafe_offset(TILE * (row * count + at)))
        comptime for column in range(columns):
            load_columns[column](
                b.unsafe_offset(at * b_columns + 2 * TILE * column),
                4 * b_columns,
            )
        multiply[rows, columns]()
    if is_whole:
        store_sums[rows, columns](sums, pitch)
        return
    store_sums[rows, columns](edge, TILE * columns)
    for row in range(min(rows_left, rows * TILE)):
        for lane in range(min(lanes, columns * TILE)):
            var value = edge[unsafe_offset=row * TILE * columns + lane]
            if not first:
                value += sums[unsafe_offset=row * pitch + lane]
            sums[unsafe_offset=row * pitch + lane] = value


@no_inline
def outer_by_tiles[
    dtype: DType
](
    sums: Ptr[DType.float32],
    pitch: Int,
    a: Ptr[packed_type[dtype]],
    b: Ptr[packed_type[dtype]],
    count: Int,
    rows: Int,
    lanes: Int,
    first: Bool,
):
    """Adds a[i][row] * b[i][:] over i < count to `rows` rows of `pitch` sums, up to 32, and `lanes` columns; the `first`
    product is stored.

    `a` is in the order of `turn_rows`, `b` a packed tile of as many columns as fill whole registers.
    """
    comptime packed = packed_type[dtype]
    var edge = Array[SIMD[DType.float32, TILE], 4 * TILE](fill=0)
    var vectors = ceildiv(lanes, TILE)
    for vector in range(0, vectors, 2):

        @always_inline
        def tiles[rows_of: Int, columns: Int]() {imm}:
            _outer_tiles[packed, rows_of, columns](
                sums.unsafe_offset(vector * TILE),
                pitch,
                a,
                b.unsafe_offset(2 * TILE * vector),
                vectors * TILE,
                count,
                rows,
                lanes - vector * TILE,
                first,
                Ptr[DType.float32](unsafe_from_address=Int(edge.unsafe_ptr())),
            )

        comptime for columns in range(1, 3):
            if min(2, vectors - vector) == columns:
                if rows > TILE:
                    tiles[2, columns]()
                else:
                    tiles[1, columns]()
    _ = edge^
