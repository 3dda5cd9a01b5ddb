"""Products on any GPU, of any dtype and any strides, in multiply-adds: sums in float32, or float64 for float64.

A block has a tile of TILE x TILE of C, a thread ROWS x COLUMNS of it. A stage of DEPTH steps of both operands is in
shared memory while the next one is on its way into registers.
"""

from std.math import ceildiv
from std.memory import stack_allocation
from std.sys import size_of

from max.gpu import barrier, block_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.memory import AddressSpace

from ...convolution.common import Ptr, accumulation_type
from ..problem import MatmulProblem

comptime TILE = 64
comptime DEPTH = 16
comptime ROWS = 8
comptime COLUMNS = 4
comptime THREADS = TILE // ROWS * (TILE // COLUMNS)
comptime TURNS = TILE * DEPTH // THREADS
comptime PITCH = TILE + 4
"""From one step to the next in shared memory."""


@fieldwise_init
struct _Source[dtype: DType](ImplicitlyCopyable, TrivialRegisterPassable):
    """One operand's part of a tile."""

    var data: Ptr[Self.dtype]
    var index: Int
    """Elements from one index to the next."""
    var step: Int
    """Elements from one step of the reduction to the next."""
    var count: Int
    """Indices that are left."""
    var depth: Int

    @always_inline
    def place(self, i: Int) -> Tuple[Int, Int]:
        """Index and step of a thread's number i: neighbours in memory for neighbouring threads.
        """
        var thread = Int(thread_idx.x)
        if self.index == 1 and self.step != 1:
            return thread % TILE, thread // TILE + i * (THREADS // TILE)
        return thread // DEPTH + i * (THREADS // DEPTH), thread % DEPTH

    @always_inline
    def load(
        self, begin: Int
    ) -> Array[Scalar[accumulation_type[Self.dtype]], TURNS]:
        comptime acc = accumulation_type[Self.dtype]
        var values = Array[Scalar[acc], TURNS](fill=0)
        comptime for i in range(TURNS):
            var index, step = self.place(i)
            if index < self.count and begin + step < self.depth:
                values[i] = self.data[
                    unsafe_offset=index * self.index
                    + (begin + step) * self.step
                ].cast[acc]()
        return values^


@__name(t"matmul_tiled_{dtype}")
def tiled_kernel[
    dtype: DType
](
    c: Ptr[dtype],
    a: Ptr[dtype],
    b: Ptr[dtype],
    p: MatmulProblem,
    row_tiles: Int32,
    column_tiles: Int32,
    neighbours: Int32,
):
    """One tile of one product; `neighbours` says that COLUMNS of them may be stored at once.
    """
    comptime acc = accumulation_type[dtype]
    var left = stack_allocation[
        DEPTH * PITCH,
        Scalar[acc],
        alignment=16,
        address_space=AddressSpace.SHARED,
    ]()
    var right = stack_allocation[
        DEPTH * PITCH,
        Scalar[acc],
        alignment=16,
        address_space=AddressSpace.SHARED,
    ]()
    var tile = Int(block_idx.x)
    var column_tile = tile % Int(column_tiles)
    var rest = tile // Int(column_tiles)
    var first_row = rest % Int(row_tiles) * TILE
    var number = rest // Int(row_tiles)
    var first_column = column_tile * TILE
    var rows = min(p.m - first_row, TILE)
    var columns = min(p.n - first_column, TILE)
    var a_source = _Source[dtype](
        a.unsafe_offset(p.place(p.a, number) + first_row * p.a.row),
        p.a.row,
        p.a.column,
        rows,
        p.k,
    )
    var b_source = _Source[dtype](
        b.unsafe_offset(p.place(p.b, number) + first_column * p.b.column),
        p.b.column,
        p.b.row,
        columns,
        p.k,
    )
    var row = Int(thread_idx.x) // (TILE // COLUMNS) * ROWS
    var column = Int(thread_idx.x) % (TILE // COLUMNS) * COLUMNS
    var sums = Array[SIMD[acc, COLUMNS], ROWS](fill=0)
    var a_next = a_source.load(0)
    var b_next = b_source.load(0)
    for begin in range(0, p.k, DEPTH):
        barrier()
        comptime for i in range(TURNS):
            var a_index, a_step = a_source.place(i)
            left[unsafe_offset=a_step * PITCH + a_index] = a_next[i]
            var b_index, b_step = b_source.place(i)
            right[unsafe_offset=b_step * PITCH + b_index] = b_next[i]
        barrier()
        if begin + DEPTH < p.k:
            a_next = a_source.load(begin + DEPTH)
            b_next = b_source.load(begin + DEPTH)
        comptime for k in range(DEPTH):
            var factor = right.unsafe_offset(k * PITCH + column).unsafe_load[
                width=COLUMNS, alignment=16
            ]()
            comptime for part in range(ROWS // 4):
                var four = left.unsafe_offset(
                    k * PITCH + row + 4 * part
                ).unsafe_load[width=4, alignment=16]()
                comptime for i in range(4):
                    comptime at = 4 * part + i
                    sums[at] = SIMD[acc, COLUMNS](four[i]).fma(factor, sums[at])
    var target = c.unsafe_offset(
        p.place(p.c, number) + first_row * p.c.row + first_column * p.c.column
    )
    comptime for i in range(ROWS):
        if row + i < rows:
            var line = target.unsafe_offset((row + i) * p.c.row)
            if neighbours != 0 and column + COLUMNS <= columns:
                line.unsafe_offset(column).unsafe_store[
                    alignment=COLUMNS * size_of[dtype]()
                ](sums[i].cast[dtype]())
            else:
                comptime for j in range(COLUMNS):
                    if column + j < columns:
                        line[unsafe_offset=(column + j) * p.c.column] = sums[i][
                            j
                        ].cast[dtype]()


@no_inline
def tiled_gpu[
    dtype: DType
](
    c: Ptr[dtype],
    a: Ptr[dtype],
    b: Ptr[dtype],
    p: MatmulProblem,
    ctx: DeviceContext,
) raises:
    """Any problem."""
    var row_tiles = ceildiv(p.m, TILE)
    var column_tiles = ceildiv(p.n, TILE)
    comptime bytes = COLUMNS * size_of[dtype]()
    comptime kernel = tiled_kernel[dtype]
    ctx.enqueue_function[kernel](
        c,
        a,
        b,
        p,
        Int32(row_tiles),
        Int32(column_tiles),
        Int32(
            Int(c) % bytes == 0 and p.c.column == 1 and p.c.is_whole(COLUMNS)
        ),
        grid_dim=row_tiles * column_tiles * p.batch(),
        block_dim=THREADS,
    )
