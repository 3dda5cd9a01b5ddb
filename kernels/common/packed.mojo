"""Packed operands and their products, in the accumulation type.

A tile of ROWS rows by PANEL columns stays in registers. Rows are rounded up to ROWS and columns to whole vectors: who
packs leaves room for both.
"""

from std.math import ceildiv
from std.memory import bitcast
from std.sys.info import simd_width_of

from .pointer import Ptr

comptime REGISTERS = 32 if simd_width_of[DType.uint8]() == 64 else 16
"""Vector registers that a tile may count on: 32 with vectors of 64 bytes, else AVX2's 16."""
comptime ROWS = 6
"""Rows of a tile of sums in registers."""
comptime VECTORS = 4 if REGISTERS == 32 else 2
"""Vectors of a tile: 24 sums, or 12."""


def lanes[acc: DType]() -> Int:
    return simd_width_of[acc]()


def panel[acc: DType]() -> Int:
    """Returns the columns of a tile."""
    return VECTORS * simd_width_of[acc]()


def rounded(count: Int, to: Int) -> Int:
    """Returns `count` rounded up to a multiple of `to`."""
    return ceildiv(count, to) * to


@fieldwise_init
struct Matrix[acc: DType](ImplicitlyCopyable, TrivialRegisterPassable):
    """A packed operand, or a result."""

    var start: Ptr[Self.acc]
    var pitch: Int
    """Elements from one row to the next."""
    var panel_step: Int
    """Elements from one panel of columns to the next."""

    @staticmethod
    @always_inline
    def of_rows(
        memory: Ptr[Self.acc], mut used: Int, rows: Int, pitch: Int
    ) -> Self:
        """Places a matrix, row after row, in the first elements of `memory` that are not `used`.
        """
        var start = memory.unsafe_offset(used)
        used += rows * pitch
        return Self(start, pitch, panel[Self.acc]())

    @staticmethod
    @always_inline
    def of_panels(
        memory: Ptr[Self.acc], mut used: Int, rows: Int, columns: Int
    ) -> Self:
        """Places a matrix, panel after panel, in the first elements of `memory` that are not `used`.
        """
        comptime pitch = panel[Self.acc]()
        var start = memory.unsafe_offset(used)
        used += rows * columns
        return Self(start, pitch, rows * pitch)

    @always_inline
    def row(self, row: Int) -> Ptr[Self.acc]:
        return self.start.unsafe_offset(row * self.pitch)

    @always_inline
    def behind(self, *, rows: Int = 0, panels: Int = 0) -> Self:
        """Returns the part of the matrix that follows the first `rows` rows or `panels` panels.
        """
        var start = self.row(rows).unsafe_offset(panels * self.panel_step)
        return Self(start, self.pitch, self.panel_step)


@always_inline
def _tile[
    acc: DType, vectors: Int, transposed: Bool, add: Bool
](
    c: Ptr[acc],
    c_pitch: Int,
    a: Ptr[acc],
    a_pitch: Int,
    b: Ptr[acc],
    b_pitch: Int,
    depth: Int,
):
    comptime width = simd_width_of[acc]()
    var sums = Array[SIMD[acc, width], ROWS * vectors](fill=0)
    comptime if add:
        comptime for row in range(ROWS):
            comptime for v in range(vectors):
                sums[row * vectors + v] = c.unsafe_offset(
                    row * c_pitch + v * width
                ).unsafe_load[width=width]()
    var at = a
    var line = b
    for _ in range(depth):
        var right = Array[SIMD[acc, width], vectors](fill=0)
        comptime for v in range(vectors):
            right[v] = line.unsafe_offset(v * width).unsafe_load[width=width]()
        comptime for row in range(ROWS):
            var left: Scalar[acc]
            comptime if transposed:
                left = at[unsafe_offset=row]
            else:
                left = at[unsafe_offset=row * a_pitch]
            comptime for v in range(vectors):
                sums[row * vectors + v] = SIMD[acc, width](left).fma(
                    right[v], sums[row * vectors + v]
                )
        comptime if transposed:
            at = at.unsafe_offset(a_pitch)
        else:
            at = at.unsafe_offset(1)
        line = line.unsafe_offset(b_pitch)
    comptime for row in range(ROWS):
        comptime for v in range(vectors):
            c.unsafe_offset(row * c_pitch + v * width).unsafe_store(
                sums[row * vectors + v]
            )


@no_inline
def product[
    acc: DType, transposed: Bool, add: Bool
](
    c: Matrix[acc],
    a: Matrix[acc],
    b: Matrix[acc],
    rows: Int,
    columns: Int,
    depth: Int,
):
    """Computes c = a @ b or a.T @ b, or adds that to c: c [rows, columns], b [depth, columns].
    """
    comptime width = simd_width_of[acc]()
    var vectors = ceildiv(columns, width)
    var done = 0
    while done < vectors:
        var now = min(VECTORS, vectors - done)
        var right = b.start.unsafe_offset(done // VECTORS * b.panel_step)
        comptime for count in range(1, VECTORS + 1):
            if now == count:
                for row in range(0, rows, ROWS):
                    _tile[acc, count, transposed, add](
                        c.row(row).unsafe_offset(done * width),
                        c.pitch,
                        a.start.unsafe_offset(row) if transposed else a.row(
                            row
                        ),
                        a.pitch,
                        right,
                        b.pitch,
                        depth,
                    )
        done += now


@always_inline
def fill[acc: DType](target: Ptr[acc], count: Int, value: Scalar[acc]):
    comptime width = simd_width_of[acc]()
    var i = 0
    while i + width <= count:
        target.unsafe_offset(i).unsafe_store(SIMD[acc, width](value))
        i += width
    while i < count:
        target[unsafe_offset=i] = value
        i += 1


@always_inline
def pack_row[
    dtype: DType, acc: DType
](
    target: Ptr[acc],
    source: Ptr[dtype],
    columns: Int,
    pitch: Int,
    scale: Scalar[acc],
):
    """Packs one row times a scale, with zeros up to the pitch."""
    comptime width = simd_width_of[acc]()
    var i = 0
    while i + width <= columns:
        target.unsafe_offset(i).unsafe_store(
            source.unsafe_offset(i).unsafe_load[width=width]().cast[acc]()
            * scale
        )
        i += width
    while i < columns:
        target[unsafe_offset=i] = source[unsafe_offset=i].cast[acc]() * scale
        i += 1
    while i < pitch:
        target[unsafe_offset=i] = 0
        i += 1


@no_inline
def pack_rows[
    dtype: DType, acc: DType
](
    target: Matrix[acc],
    source: Ptr[dtype],
    step: Int,
    rows: Int,
    columns: Int,
    scale: Scalar[acc] = 1,
):
    """Packs rows as [rows rounded up to ROWS, columns], zeros up to the pitch; `step` elements lie between rows of the
    source."""
    for row in range(rows):
        pack_row[dtype, acc](
            target.row(row),
            source.unsafe_offset(row * step),
            columns,
            target.pitch,
            scale,
        )
    fill[acc](target.row(rows), (rounded(rows, ROWS) - rows) * target.pitch, 0)


@always_inline
def _turn_four[
    dtype: DType, acc: DType
](target: Ptr[acc], source: Ptr[dtype], step: Int, columns: Int, pitch: Int):
    """Packs four rows as four neighbours of each column."""
    var column = 0
    comptime if acc == DType.float32:
        comptime width = simd_width_of[acc]()

        @always_inline
        def line(row: Int) {imm} -> SIMD[acc, width]:
            return (
                source.unsafe_offset(row * step + column)
                .unsafe_load[width=width]()
                .cast[acc]()
            )

        while column + width <= columns:
            # Two numbers are one of twice the width, so that interleaving twice makes fours.
            var upper = bitcast[DType.uint64, width](
                line(0).interleave(line(1))
            )
            var lower = bitcast[DType.uint64, width](
                line(2).interleave(line(3))
            )
            var fours = bitcast[acc, 4 * width](upper.interleave(lower))
            comptime for i in range(width):
                target.unsafe_offset((column + i) * pitch).unsafe_store(
                    fours.slice[4, offset=4 * i]()
                )
            column += width
    while column < columns:
        comptime for row in range(4):
            target[unsafe_offset=column * pitch + row] = source[
                unsafe_offset=row * step + column
            ].cast[acc]()
        column += 1


@no_inline
def pack_turned[
    dtype: DType, acc: DType
](target: Matrix[acc], source: Ptr[dtype], step: Int, rows: Int, columns: Int):
    """Packs the transpose in panels: [rows / panel][columns][panel], zeros behind the last row.
    """
    comptime width = panel[acc]()
    for first in range(0, rows, width):
        var at = target.start.unsafe_offset(first * columns)
        var count = min(width, rows - first)
        var row = 0
        while row + 4 <= count:
            _turn_four[dtype, acc](
                at.unsafe_offset(row),
                source.unsafe_offset((first + row) * step),
                step,
                columns,
                width,
            )
            row += 4
        while row < count:
            var line = source.unsafe_offset((first + row) * step)
            for column in range(columns):
                at[unsafe_offset=column * width + row] = line[
                    unsafe_offset=column
                ].cast[acc]()
            row += 1
        if count < width:
            for column in range(columns):
                fill[acc](
                    at.unsafe_offset(column * width + count), width - count, 0
                )


@always_inline
def write_row[
    dtype: DType, acc: DType
](target: Ptr[dtype], source: Ptr[acc], columns: Int, scale: Scalar[acc] = 1):
    """Writes one row times a scale, rounded."""
    comptime width = simd_width_of[acc]()
    var i = 0
    while i + width <= columns:
        target.unsafe_offset(i).unsafe_store(
            (source.unsafe_offset(i).unsafe_load[width=width]() * scale).cast[
                dtype
            ]()
        )
        i += width
    while i < columns:
        target[unsafe_offset=i] = (source[unsafe_offset=i] * scale).cast[
            dtype
        ]()
        i += 1
