"""Products on a CPU: a tile of C stays in registers while panels of B's columns pass by.

A task is a block of C's rows and columns of one product, or several small products. Operands are read where they lie as
far as vectors allow: a full panel of a row-major B, and A either way. Operands that have another dtype, lie the other
way, or end within a panel are packed once for a block. Sums are float32, or float64 for float64.
"""

from std.math import ceildiv
from std.memory.alloc import unsafe_alloc
from std.sys.info import simd_width_of, size_of

from ...common.amx import TILE, TILE_STEPS, has_tiles
from ...common.packed import (
    ROWS,
    VECTORS,
    Matrix,
    fill,
    pack_row,
    pack_turned,
    panel,
    rounded,
)
from ...common.parallel import sync_parallelize, worker_count
from ...common.pointer import Ptr, accumulation_type
from ..problem import MatmulProblem
from .tiles import multiply_tiles, pack_tiles

comptime BLOCK_BYTES = 192 * 1024
"""Bytes of packed B, at most: a share of the second-level cache."""
comptime MAX_DEPTH = 512
"""Steps of the reduction that are multiplied at once."""
comptime ROW_BLOCK = 24 * ROWS
"""Rows of one task that still pay for its packed panels."""
comptime MIN_TASK_WORK = 1 << 16
"""Multiply-adds that are worth a task."""
comptime FEW_ROWS = 2
"""Up to this many rows are multiplied element by element with columns that lie along the reduction."""


@fieldwise_init
struct _Strided[acc: DType](ImplicitlyCopyable, TrivialRegisterPassable):
    """An operand as a tile reads it."""

    var start: Ptr[Self.acc]
    var row: Int
    """Elements from one row to the next."""
    var column: Int
    """Elements from one column to the next."""

    @always_inline
    def at(self, row: Int, column: Int) -> Ptr[Self.acc]:
        return self.start.unsafe_offset(row * self.row + column * self.column)


@always_inline
def _tile[
    dtype: DType, acc: DType, rows: Int, vectors: Int
](
    c: Ptr[dtype],
    c_row: Int,
    sums_at: Ptr[acc],
    first: Bool,
    last: Bool,
    columns: Int,
    a: _Strided[acc],
    b: Ptr[acc],
    b_row: Int,
    depth: Int,
):
    """Computes `rows` x `columns` of C = A B over some steps of the reduction: the `first` ones begin the sums, and
    after the `last` ones C is stored; in between sums are kept at `sums_at`."""
    comptime width = simd_width_of[acc]()
    comptime pitch = panel[acc]()
    var sums = Array[SIMD[acc, width], rows * vectors](fill=0)
    if not first:
        comptime for i in range(rows * vectors):
            sums[i] = sums_at.unsafe_offset(
                i // vectors * pitch + i % vectors * width
            ).unsafe_load[width=width]()
    var at = a.start
    var line = b
    for _ in range(depth):
        var right = Array[SIMD[acc, width], vectors](fill=0)
        comptime for v in range(vectors):
            right[v] = line.unsafe_offset(v * width).unsafe_load[width=width]()
        comptime for row in range(rows):
            var left = SIMD[acc, width](at[unsafe_offset=row * a.row])
            comptime for v in range(vectors):
                sums[row * vectors + v] = left.fma(
                    right[v], sums[row * vectors + v]
                )
        at = at.unsafe_offset(a.column)
        line = line.unsafe_offset(b_row)
    if not last:
        comptime for i in range(rows * vectors):
            sums_at.unsafe_offset(
                i // vectors * pitch + i % vectors * width
            ).unsafe_store(sums[i])
        return
    comptime for row in range(rows):
        var target = c.unsafe_offset(row * c_row)
        comptime for v in range(vectors):
            var sum = sums[row * vectors + v].cast[dtype]()
            comptime if v + 1 < vectors:
                target.unsafe_offset(v * width).unsafe_store(sum)
            else:
                if columns == vectors * width:
                    target.unsafe_offset(v * width).unsafe_store(sum)
                else:
                    for i in range(columns - v * width):
                        target[unsafe_offset=v * width + i] = sum[i]


@no_inline
def _rows_of[
    dtype: DType, acc: DType, vectors: Int
](
    c: Ptr[dtype],
    c_row: Int,
    sums_at: Ptr[acc],
    first: Bool,
    last: Bool,
    rows: Int,
    columns: Int,
    a: _Strided[acc],
    b: Ptr[acc],
    b_row: Int,
    depth: Int,
):
    """Multiplies all rows of a block by one panel."""
    comptime pitch = panel[acc]()
    var row = 0
    # Sums of two tiles of rows fit where vectors are half as many.
    comptime most = 2 * ROWS if 2 * vectors <= VECTORS else ROWS
    comptime for size in [most, 4, 2, 1]:
        while row + size <= rows:
            _tile[dtype, acc, size, vectors](
                c.unsafe_offset(row * c_row),
                c_row,
                sums_at.unsafe_offset(row * pitch),
                first,
                last,
                columns,
                _Strided[acc](a.at(row, 0), a.row, a.column),
                b,
                b_row,
                depth,
            )
            row += size


@no_inline
def _packed_panel[
    dtype: DType, acc: DType
](
    target: Ptr[acc],
    source: Ptr[dtype],
    row: Int,
    column: Int,
    depth: Int,
    columns: Int,
):
    """[depth][panel] of up to a panel's columns, zeros behind the last."""
    comptime width = panel[acc]()
    if row == 1 and column != 1:
        pack_turned[dtype, acc](
            Matrix[acc](target, width, depth * width),
            source,
            column,
            columns,
            depth,
        )
    elif column == 1:
        for k in range(depth):
            pack_row[dtype, acc](
                target.unsafe_offset(k * width),
                source.unsafe_offset(k * row),
                columns,
                width,
                1,
            )
    else:
        fill[acc](target, depth * width, 0)
        for k in range(depth):
            for i in range(columns):
                target[unsafe_offset=k * width + i] = source[
                    unsafe_offset=k * row + i * column
                ].cast[acc]()


@no_inline
def _packed_rows[
    dtype: DType, acc: DType
](
    target: Ptr[acc],
    source: Ptr[dtype],
    row: Int,
    column: Int,
    rows: Int,
    depth: Int,
) -> _Strided[acc]:
    """A block of A in the dtype of the sums, as it lies."""
    if row == 1 and column != 1:
        for k in range(depth):
            pack_row[dtype, acc](
                target.unsafe_offset(k * rows),
                source.unsafe_offset(k * column),
                rows,
                rows,
                1,
            )
        return _Strided[acc](target, 1, rows)
    for i in range(rows):
        if column == 1:
            pack_row[dtype, acc](
                target.unsafe_offset(i * depth),
                source.unsafe_offset(i * row),
                depth,
                depth,
                1,
            )
        else:
            for k in range(depth):
                target[unsafe_offset=i * depth + k] = source[
                    unsafe_offset=i * row + k * column
                ].cast[acc]()
    return _Strided[acc](target, depth, 1)


@fieldwise_init
struct _TaskBuffers[acc: DType](ImplicitlyCopyable, TrivialRegisterPassable):
    """A task's memory: packed panels of B, packed rows of A, and sums of a reduction in several parts.
    """

    var b: Ptr[Self.acc]
    var a: Ptr[Self.acc]
    var sums: Ptr[Self.acc]


@no_inline
def _block[
    dtype: DType
](
    c: Ptr[dtype],
    a: Ptr[dtype],
    b: Ptr[dtype],
    p: MatmulProblem,
    rows: Int,
    columns: Int,
    room: _TaskBuffers[accumulation_type[dtype]],
    same_b: Bool,
):
    """Computes C [rows, columns] of one product whose matrices begin at the pointers; rows of C are contiguous. With
    `same_b` the panels of B are unchanged since the block before."""
    comptime acc = accumulation_type[dtype]
    comptime width = simd_width_of[acc]()
    comptime pitch = panel[acc]()
    var panels = ceildiv(columns, pitch)
    for begin in range(0, max(p.k, 1), MAX_DEPTH):
        var depth = min(p.k - begin, MAX_DEPTH)
        comptime if has_tiles[dtype]:
            var left = room.a.unsafe_bitcast[Scalar[dtype]]()
            var right = room.b.unsafe_bitcast[Scalar[dtype]]()
            pack_tiles[dtype, in_pairs=False](
                left,
                a.unsafe_offset(begin * p.a.column),
                p.a.row,
                p.a.column,
                rows,
                depth,
            )
            if not same_b:
                pack_tiles[dtype, in_pairs=True](
                    right,
                    b.unsafe_offset(begin * p.b.row),
                    p.b.column,
                    p.b.row,
                    columns,
                    depth,
                )
            multiply_tiles[dtype](
                c,
                p.c.row,
                rebind[Ptr[DType.float32]](room.sums),
                begin == 0,
                begin + depth >= p.k,
                rows,
                columns,
                left,
                right,
                depth,
            )
            continue
        var left = _Strided[acc](room.a, 1, 1)
        var a_at = a.unsafe_offset(begin * p.a.column)
        comptime if dtype == acc:
            left = _Strided[acc](rebind[Ptr[acc]](a_at), p.a.row, p.a.column)
        else:
            left = _packed_rows[dtype, acc](
                room.a, a_at, p.a.row, p.a.column, rows, depth
            )
        for number in range(panels):
            var now = min(pitch, columns - number * pitch)
            var right = room.b.unsafe_offset(number * depth * pitch)
            var b_row = pitch
            var b_at = b.unsafe_offset(
                begin * p.b.row + number * pitch * p.b.column
            )
            var lies = False
            comptime if dtype == acc:
                lies = p.b.column == 1 and now % width == 0
                if lies:
                    right = rebind[Ptr[acc]](b_at)
                    b_row = p.b.row
            if not lies and not same_b:
                _packed_panel[dtype, acc](
                    right, b_at, p.b.row, p.b.column, depth, now
                )
            comptime for vectors in range(1, VECTORS + 1):
                if ceildiv(now, width) == vectors:
                    _rows_of[dtype, acc, vectors](
                        c.unsafe_offset(number * pitch),
                        p.c.row,
                        room.sums.unsafe_offset(number * rows * pitch),
                        begin == 0,
                        begin + depth >= p.k,
                        rows,
                        now,
                        left,
                        right,
                        b_row,
                        depth,
                    )


@no_inline
def panels_cpu[
    dtype: DType
](c: Ptr[dtype], a: Ptr[dtype], b: Ptr[dtype], p: MatmulProblem):
    """Runs any problem with elements in C."""
    if p.c.column != 1 and p.n > 1:
        _each_column[dtype](c, a, b, p)
    elif p.m <= FEW_ROWS < p.n and p.b.row == 1 and p.b.column != 1:
        _each_column[dtype](c, a, b, p)
    else:
        _blocks[dtype](c, a, b, p)


@no_inline
def _each_column[
    dtype: DType
](c: Ptr[dtype], a: Ptr[dtype], b: Ptr[dtype], p: MatmulProblem):
    """Element by element, as sums along the reduction: results without contiguous rows, and few rows.
    """
    comptime acc = accumulation_type[dtype]
    comptime width = simd_width_of[acc]()
    var along = p.a.column == 1 and p.b.row == 1
    var items = p.batch() * p.m

    @always_inline
    def task(item: Int) {imm}:
        var product = item // p.m
        var row = item % p.m
        var left = a.unsafe_offset(p.place(p.a, product) + row * p.a.row)
        var matrix = b.unsafe_offset(p.place(p.b, product))
        var target = c.unsafe_offset(p.place(p.c, product) + row * p.c.row)
        for column in range(p.n):
            var right = matrix.unsafe_offset(column * p.b.column)
            var sums = SIMD[acc, width](0)
            var k = 0
            if along:
                while k + width <= p.k:
                    sums = (
                        left.unsafe_offset(k)
                        .unsafe_load[width=width]()
                        .cast[acc]()
                        .fma(
                            right.unsafe_offset(k)
                            .unsafe_load[width=width]()
                            .cast[acc](),
                            sums,
                        )
                    )
                    k += width
            var sum = sums.reduce_add()
            while k < p.k:
                sum += (
                    left[unsafe_offset=k * p.a.column].cast[acc]()
                    * right[unsafe_offset=k * p.b.row].cast[acc]()
                )
                k += 1
            target[unsafe_offset=column * p.c.column] = sum.cast[dtype]()

    var together = max(1, MIN_TASK_WORK // max(1, p.n * p.k))

    @always_inline
    def tasks(number: Int) {imm}:
        for item in range(
            number * together, min(items, (number + 1) * together)
        ):
            task(item)

    sync_parallelize(tasks, ceildiv(items, together))


@no_inline
def _blocks[
    dtype: DType
](c: Ptr[dtype], a: Ptr[dtype], b: Ptr[dtype], p: MatmulProblem):
    """Runs a problem whose C has contiguous rows, in blocks."""
    comptime acc = accumulation_type[dtype]
    comptime pitch = panel[acc]()
    # Columns of a block whose packed part of B the cache holds.
    var depth = max(1, min(p.k, MAX_DEPTH))
    comptime if has_tiles[dtype]:
        depth = rounded(depth, TILE_STEPS)
    comptime packed = dtype if has_tiles[dtype] else acc
    var most = (
        max(1, BLOCK_BYTES // (depth * pitch * size_of[packed]())) * pitch
    )
    var block_columns = min(ceildiv(p.n, pitch) * pitch, most)
    var column_blocks = ceildiv(p.n, block_columns)
    # Rows: packing B pays the more of them use it, but each worker wants some tasks.
    var workers = worker_count()
    var batch = p.batch()
    var row_block = min(p.m, 4 * ROW_BLOCK)
    while row_block > ROW_BLOCK and (
        batch * column_blocks * ceildiv(p.m, row_block) < 4 * workers
    ):
        row_block = ceildiv(ceildiv(row_block, 2), ROWS) * ROWS
    var row_blocks = ceildiv(p.m, row_block)
    # Small products in groups.
    var items = batch * column_blocks * row_blocks
    var work = max(1, row_block * block_columns * p.k)
    var together = max(
        1, min(MIN_TASK_WORK // work, ceildiv(items, 4 * workers))
    )
    var b_elements = block_columns * depth
    var a_elements = row_block * depth if dtype != acc else 0
    var sums_elements = row_block * block_columns if p.k > MAX_DEPTH else 0
    comptime if has_tiles[dtype]:
        # Pairs of elements, in whole tiles.
        a_elements = rounded(row_block, TILE) * depth // 2
        b_elements //= 2
        sums_elements = rounded(row_block, 2 * TILE) * rounded(
            block_columns, 2 * TILE
        )

    @always_inline
    def task(number: Int) {imm}:
        var memory = unsafe_alloc[Scalar[acc]](
            b_elements + a_elements + sums_elements, alignment=64
        )
        var room = _TaskBuffers[acc](
            memory,
            memory.unsafe_offset(b_elements),
            memory.unsafe_offset(b_elements + a_elements),
        )
        var last_b = -1
        for item in range(
            number * together, min(items, (number + 1) * together)
        ):
            var row = item % row_blocks * row_block
            var rest = item // row_blocks
            var column = rest % column_blocks * block_columns
            var product = rest // column_blocks
            var b_at = p.place(p.b, product) + column * p.b.column
            _block[dtype](
                c.unsafe_offset(p.place(p.c, product) + row * p.c.row + column),
                a.unsafe_offset(p.place(p.a, product) + row * p.a.row),
                b.unsafe_offset(b_at),
                p,
                min(row_block, p.m - row),
                min(block_columns, p.n - column),
                room,
                b_at == last_b and p.k <= MAX_DEPTH,
            )
            last_b = b_at
        memory.unsafe_free()

    sync_parallelize(task, ceildiv(items, together))
