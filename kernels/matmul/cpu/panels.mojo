"""Products on a CPU: B is packed into panels of columns, a tile of C stays in registers.

A task is a block of C's rows of one product, or of a group of small products. B's panels are packed once by each task
for as many steps of the reduction as its cache holds; A is read where it lies if its elements are those that are
multiplied, else it is packed, too. Sums are float32, or float64 for float64.
"""

from std.math import ceildiv
from std.memory.alloc import unsafe_alloc
from std.sys.info import simd_width_of

from ...attention.cpu.packed import ROWS, VECTORS, panel
from ...convolution.common import Ptr, accumulation_type
from ...parallel import sync_parallelize, worker_count
from ..problem import MatmulProblem

comptime BLOCK_BYTES = 192 * 1024
"""Of packed B, at most: a share of the second-level cache."""
comptime MOST_DEPTH = 512
"""Steps of the reduction that are packed at once."""
comptime ROW_BLOCK = 24 * ROWS
"""Rows of one task, at most; a multiple of a tile's."""
comptime ENOUGH_WORK = 1 << 16
"""Multiply-adds that are worth a task."""


@always_inline
def _pack_columns[
    dtype: DType, acc: DType
](
    target: Ptr[acc],
    source: Ptr[dtype],
    step: Int,
    column: Int,
    depth: Int,
    columns: Int,
):
    """[depth][panel] of up to a panel's columns, zeros behind the last."""
    comptime width = panel[acc]()
    comptime vector = simd_width_of[acc]()
    if column == 1:
        if columns == width:
            for k in range(depth):
                comptime for v in range(VECTORS):
                    target.unsafe_offset(k * width + v * vector).unsafe_store(
                        source.unsafe_offset(k * step + v * vector)
                        .unsafe_load[width=vector]()
                        .cast[acc]()
                    )
            return
        for k in range(depth):
            var line = source.unsafe_offset(k * step)
            var at = target.unsafe_offset(k * width)
            for i in range(columns):
                at[unsafe_offset=i] = line[unsafe_offset=i].cast[acc]()
            for i in range(columns, width):
                at[unsafe_offset=i] = 0
        return
    # The reduction is contiguous, or nothing is: column after column, four at a time so that lines are used whole.
    for i in range(columns):
        var line = source.unsafe_offset(i * column)
        var at = target.unsafe_offset(i)
        for k in range(depth):
            at[unsafe_offset=k * width] = line[unsafe_offset=k * step].cast[
                acc
            ]()
    for i in range(columns, width):
        for k in range(depth):
            target[unsafe_offset=k * width + i] = 0


@always_inline
def _tile[
    acc: DType, vectors: Int
](
    c: Ptr[acc],
    c_pitch: Int,
    add: Bool,
    a: Ptr[acc],
    a_row: Int,
    a_step: Int,
    b: Ptr[acc],
    depth: Int,
):
    """ROWS x vectors of C = A B, or C += A B; B is a panel."""
    comptime width = simd_width_of[acc]()
    comptime pitch = panel[acc]()
    var sums = Array[SIMD[acc, width], ROWS * vectors](fill=0)
    if add:
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
            var left = SIMD[acc, width](at[unsafe_offset=row * a_row])
            comptime for v in range(vectors):
                sums[row * vectors + v] = left.fma(
                    right[v], sums[row * vectors + v]
                )
        at = at.unsafe_offset(a_step)
        line = line.unsafe_offset(pitch)
    comptime for row in range(ROWS):
        comptime for v in range(vectors):
            c.unsafe_offset(row * c_pitch + v * width).unsafe_store(
                sums[row * vectors + v]
            )


@no_inline
def _tile_of[
    acc: DType
](
    vectors: Int,
    c: Ptr[acc],
    c_pitch: Int,
    add: Bool,
    a: Ptr[acc],
    a_row: Int,
    a_step: Int,
    b: Ptr[acc],
    depth: Int,
):
    comptime for count in range(1, VECTORS + 1):
        if vectors == count:
            _tile[acc, count](c, c_pitch, add, a, a_row, a_step, b, depth)


@fieldwise_init
struct _Room[acc: DType](ImplicitlyCopyable, TrivialRegisterPassable):
    """A task's memory: packed B, packed rows of A, and a block of C."""

    var b: Ptr[Self.acc]
    var a: Ptr[Self.acc]
    var c: Ptr[Self.acc]

    @staticmethod
    def elements(p: MatmulProblem, block_columns: Int, rows: Int) -> Int:
        return (
            block_columns * min(p.k, MOST_DEPTH)
            + ROWS * min(p.k, MOST_DEPTH)
            + _rounded(rows) * block_columns
        )


@always_inline
def _rounded(rows: Int) -> Int:
    return ceildiv(rows, ROWS) * ROWS


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
    room: _Room[accumulation_type[dtype]],
    same_b: Bool,
):
    """C [rows, columns] of one product whose matrices begin at the pointers. With `same_b` B is packed already, which
    one step of packing held."""
    comptime acc = accumulation_type[dtype]
    comptime width = simd_width_of[acc]()
    comptime pitch = panel[acc]()
    var panels = ceildiv(columns, pitch)
    var c_pitch = panels * pitch
    # Nothing lies behind A's last row, so that a whole tile of rows is not read where it is.
    for begin in range(0, max(p.k, 1), MOST_DEPTH):
        var depth = min(p.k - begin, MOST_DEPTH)
        if not same_b:
            for number in range(panels):
                _pack_columns[dtype, acc](
                    room.b.unsafe_offset(number * depth * pitch),
                    b.unsafe_offset(
                        begin * p.b.row + number * pitch * p.b.column
                    ),
                    p.b.row,
                    p.b.column,
                    depth,
                    min(pitch, columns - number * pitch),
                )
        for row in range(0, rows, ROWS):
            var now = min(ROWS, rows - row)
            var at = a.unsafe_offset(row * p.a.row + begin * p.a.column)
            var left = room.a
            var a_row = 1
            var a_step = ROWS
            var packed = True
            comptime if dtype == acc:
                if now == ROWS:
                    left = rebind[Ptr[acc]](at)
                    a_row = p.a.row
                    a_step = p.a.column
                    packed = False
            if packed:
                for i in range(ROWS):
                    if i < now:
                        for k in range(depth):
                            room.a[unsafe_offset=k * ROWS + i] = at[
                                unsafe_offset=i * p.a.row + k * p.a.column
                            ].cast[acc]()
                    else:
                        for k in range(depth):
                            room.a[unsafe_offset=k * ROWS + i] = 0
            for number in range(panels):
                var vectors = min(
                    VECTORS, ceildiv(columns - number * pitch, width)
                )
                _tile_of[acc](
                    vectors,
                    room.c.unsafe_offset(row * c_pitch + number * pitch),
                    c_pitch,
                    begin > 0,
                    left,
                    a_row,
                    a_step,
                    room.b.unsafe_offset(number * depth * pitch),
                    depth,
                )
    # Out of the cache, rounded.
    if p.c.column == 1:
        for row in range(rows):
            var line = room.c.unsafe_offset(row * c_pitch)
            var target = c.unsafe_offset(row * p.c.row)
            var column = 0
            while column + width <= columns:
                target.unsafe_offset(column).unsafe_store(
                    line.unsafe_offset(column)
                    .unsafe_load[width=width]()
                    .cast[dtype]()
                )
                column += width
            while column < columns:
                target[unsafe_offset=column] = line[unsafe_offset=column].cast[
                    dtype
                ]()
                column += 1
        return
    for column in range(columns):
        var target = c.unsafe_offset(column * p.c.column)
        for row in range(rows):
            target[unsafe_offset=row * p.c.row] = room.c[
                unsafe_offset=row * c_pitch + column
            ].cast[dtype]()


@no_inline
def panels_cpu[
    dtype: DType
](c: Ptr[dtype], a: Ptr[dtype], b: Ptr[dtype], p: MatmulProblem):
    """Any problem with elements in C."""
    comptime acc = accumulation_type[dtype]
    comptime pitch = panel[acc]()
    # Columns of a block whose packed part of B the cache holds.
    var depth = max(1, min(p.k, MOST_DEPTH))
    var most = max(1, BLOCK_BYTES // (depth * pitch * 4)) * pitch
    var block_columns = min(ceildiv(p.n, pitch) * pitch, most)
    var column_blocks = ceildiv(p.n, block_columns)
    # Rows: packing B pays the more of them use it, but each worker wants some tasks.
    var workers = worker_count()
    var batch = p.batch()
    var row_block = _rounded(p.m)
    while row_block > ROW_BLOCK and (
        batch * column_blocks * ceildiv(p.m, row_block) < 4 * workers
    ):
        row_block = _rounded(ceildiv(row_block, 2))
    var row_blocks = ceildiv(p.m, row_block)
    # Small products in groups.
    var items = batch * column_blocks * row_blocks
    var work = max(1, row_block * block_columns * p.k)
    var together = max(1, min(ENOUGH_WORK // work, ceildiv(items, 4 * workers)))
    var tasks = ceildiv(items, together)
    var room_elements = _Room[acc].elements(p, block_columns, row_block)

    @always_inline
    def task(number: Int) {imm}:
        var memory = unsafe_alloc[Scalar[acc]](room_elements, alignment=64)
        var b_elements = block_columns * depth
        var room = _Room[acc](
            memory,
            memory.unsafe_offset(b_elements),
            memory.unsafe_offset(b_elements + ROWS * depth),
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
                c.unsafe_offset(
                    p.place(p.c, product) + row * p.c.row + column * p.c.column
                ),
                a.unsafe_offset(p.place(p.a, product) + row * p.a.row),
                b.unsafe_offset(b_at),
                p,
                min(row_block, p.m - row),
                min(block_columns, p.n - column),
                room,
                b_at == last_b and p.k <= MOST_DEPTH,
            )
            last_b = b_at
        memory.unsafe_free()

    sync_parallelize(task, tasks)
