"""A block of a product of bfloat16 in tile registers (common/amx.mojo), from operands that are packed as these want
them."""

from std.math import ceildiv
from std.memory import bitcast
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
from ...common.vectors import first_lanes, transpose


@always_inline
def _pack_tile[
    dtype: DType, in_pairs: Bool
](
    target: Ptr[dtype],
    source: Ptr[dtype],
    outer: Int,
    step: Int,
    count: Int,
    steps: Int,
):
    """Packs up to 16 rows or columns, `outer` elements apart, of up to 32 steps, `step` elements apart, and zeros:
    [row][step], or with `in_pairs` [step / 2][column][2]."""
    var lines = Array[SIMD[DType.uint32, TILE], TILE](fill=0)
    if step == 1:
        var mask = first_lanes[TILE_STEPS](steps)
        for i in range(min(count, TILE)):
            lines[i] = bitcast[DType.uint32, TILE](
                masked_load[TILE_STEPS](
                    source.unsafe_offset(i * outer),
                    mask,
                    SIMD[dtype, TILE_STEPS](0),
                )
            )
        comptime if in_pairs:
            transpose[DType.uint32, TILE](lines)
    elif outer == 1:
        var mask = first_lanes[TILE](count)
        var none = SIMD[dtype, TILE](0)
        for i in range(0, min(steps, TILE_STEPS), 2):
            var at = source.unsafe_offset(i * step)
            var first = masked_load[TILE](at, mask, none)
            var second = none
            if i + 1 < steps:
                second = masked_load[TILE](at.unsafe_offset(step), mask, none)
            lines[i // 2] = bitcast[DType.uint32, TILE](
                first.interleave(second)
            )
        comptime if not in_pairs:
            transpose[DType.uint32, TILE](lines)
    else:
        for i in range(min(count, TILE)):
            var line = SIMD[dtype, TILE_STEPS](0)
            for k in range(min(steps, TILE_STEPS)):
                line[k] = source[unsafe_offset=i * outer + k * step]
            lines[i] = bitcast[DType.uint32, TILE](line)
        comptime if in_pairs:
            transpose[DType.uint32, TILE](lines)
    comptime for i in range(TILE):
        target.unsafe_bitcast[UInt32]().unsafe_offset(i * TILE).unsafe_store(
            lines[i]
        )


@no_inline
def pack_tiles[
    dtype: DType, in_pairs: Bool
](
    target: Ptr[dtype],
    source: Ptr[dtype],
    outer: Int,
    step: Int,
    count: Int,
    depth: Int,
):
    """Packs `count` rows or columns of `depth` steps into whole tiles: [tile][part of the reduction], each as a register
    wants it."""
    var parts = ceildiv(depth, TILE_STEPS)
    for tile in range(ceildiv(count, TILE)):
        for part in range(parts):
            _pack_tile[dtype, in_pairs](
                target.unsafe_offset((tile * parts + part) * TILE_ELEMENTS),
                source.unsafe_offset(
                    tile * TILE * outer + part * TILE_STEPS * step
                ),
                outer,
                step,
                count - tile * TILE,
                depth - part * TILE_STEPS,
            )


@always_inline
def _tiles[
    dtype: DType, rows: Int, columns: Int
](
    c: Ptr[dtype],
    c_row: Int,
    sums: Ptr[DType.float32],
    first: Bool,
    last: Bool,
    rows_left: Int,
    columns_left: Int,
    a: Ptr[dtype],
    b: Ptr[dtype],
    parts: Int,
):
    """Computes `rows` by `columns` tiles of C over some steps of the reduction: the `first` ones begin the sums, and
    after the `last` ones C is stored; in between sums are kept at `sums`."""
    comptime pitch = columns * TILE
    if first:
        begin_sums[rows, columns]()
    else:
        load_sums[rows, columns](sums, pitch)
    for part in range(parts):
        comptime for row in range(rows):
            load_rows[row](
                a.unsafe_offset((row * parts + part) * TILE_ELEMENTS)
            )
        comptime for column in range(columns):
            load_columns[column](
                b.unsafe_offset((column * parts + part) * TILE_ELEMENTS)
            )
        multiply[rows, columns]()
    store_sums[rows, columns](sums, pitch)
    if not last:
        return
    for row in range(min(rows_left, rows * TILE)):
        write_row[columns](
            c.unsafe_offset(row * c_row),
            sums.unsafe_offset(row * pitch),
            columns_left,
        )


@no_inline
def multiply_tiles[
    dtype: DType
](
    c: Ptr[dtype],
    c_row: Int,
    sums: Ptr[DType.float32],
    first: Bool,
    last: Bool,
    rows: Int,
    columns: Int,
    a: Ptr[dtype],
    b: Ptr[dtype],
    depth: Int,
):
    """Multiplies packed rows by packed columns; `sums` has room for whole pairs of tiles both ways.
    """
    var parts = ceildiv(depth, TILE_STEPS)
    configure()
    var place = sums
    for row in range(0, rows, 2 * TILE):
        for column in range(0, columns, 2 * TILE):

            @always_inline
            def tiles[row_tiles: Int, column_tiles: Int]() {imm}:
                _tiles[dtype, row_tiles, column_tiles](
                    c.unsafe_offset(row * c_row + column),
                    c_row,
                    place,
                    first,
                    last,
                    rows - row,
                    columns - column,
                    a.unsafe_offset(row * parts * TILE_STEPS),
                    b.unsafe_offset(column * parts * TILE_STEPS),
                    parts,
                )

            comptime for row_tiles in range(1, 3):
                comptime for column_tiles in range(1, 3):
                    if (
                        min(2, ceildiv(rows - row, TILE)) == row_tiles
                        and min(2, ceildiv(columns - column, TILE))
                        == column_tiles
                    ):
                        tiles[row_tiles, column_tiles]()
            place = place.unsafe_offset(4 * TILE * TILE)
    release()
