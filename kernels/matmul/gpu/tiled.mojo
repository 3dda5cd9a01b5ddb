"""Products on any GPU, of any dtype and any strides, in multiply-adds: sums in float32, or float64 for float64.

A block has a tile of TILE x TILE of C, a thread ROWS x COLUMNS of it. A stage of DEPTH steps of both operands is in
shared memory while the next one is on its way into registers.
"""

from std.memory import stack_allocation
from std.sys import size_of
from std.utils.static_tuple import StaticTuple

from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    barrier,
    block_idx,
    thread_idx,
)
from max.gpu.host import DeviceContext
from max.gpu.memory import AddressSpace

from ...common.pointer import Ptr, accumulation_type
from ..problem import MatmulProblem
from .blocks import Blocks, blocks_refusal

comptime TILE = 64
"""Rows, and columns, of a block's tile of C."""
comptime DEPTH = 16
"""Steps of the reduction in shared memory at once."""
comptime ROWS = 8
"""Rows of a thread's part of the tile."""
comptime COLUMNS = 4
"""Columns of a thread's part of the tile."""
comptime THREADS = TILE // ROWS * (TILE // COLUMNS)
comptime TURNS = TILE * DEPTH // THREADS
"""Elements of one operand's stage that a thread copies."""
comptime PITCH = TILE + 4
"""Elements from one step to the next in shared memory."""
# Four blocks share a multiprocessor: their registers must fit.
comptime FOUR_BLOCKS = StaticTuple[Int32, 1](Int32(4 * THREADS))


struct _Source[dtype: DType](ImplicitlyCopyable, TrivialRegisterPassable):
    """One operand's part of a tile: neighbours in memory for neighbouring threads.
    """

    comptime Values = Array[Scalar[accumulation_type[Self.dtype]], TURNS]

    var data: Ptr[Self.dtype]
    """This thread's first element of the next stage."""
    var turn: Int
    """Elements from one of its elements to the next."""
    var stage_step: Int
    var across: Bool
    """Whether the tile is contiguous along its indices, not along the reduction's steps."""
    var count: Int32
    """How many of this thread's elements have an index that exists; all or none if `across`."""
    var left: Int32
    """Steps from this thread's first one of the next stage on."""
    var place: Int32
    """The offset of this thread's first element in shared memory."""

    @always_inline
    def __init__(
        out self,
        data: Ptr[Self.dtype],
        index: Int,
        step: Int,
        count: Int32,
        depth: Int32,
    ):
        var thread = Int32(thread_idx.x)
        self.across = index == 1 and step != 1
        self.stage_step = DEPTH * step
        if self.across:
            var own = thread % TILE
            var k = thread // TILE
            self.data = data.unsafe_offset(Int(own) + Int(k) * step)
            self.turn = THREADS // TILE * step
            self.count = Int32(TURNS if own < count else 0)
            self.left = depth - k
            self.place = k * PITCH + own
        else:
            var own = thread // DEPTH
            var k = thread % DEPTH
            self.data = data.unsafe_offset(Int(own) * index + Int(k) * step)
            self.turn = THREADS // DEPTH * index
            self.count = (count - own + Int32(THREADS // DEPTH - 1)) // Int32(
                THREADS // DEPTH
            )
            self.left = depth - k
            self.place = k * PITCH + own

    @always_inline
    def load(mut self) -> Self.Values:
        """The next stage."""
        comptime acc = accumulation_type[Self.dtype]
        var values = Self.Values(fill=0)
        var existing = self.count
        if self.across:
            comptime steps = Int32(THREADS // TILE)
            existing = min(existing, (self.left + steps - 1) // steps)
        elif self.left <= 0:
            existing = 0
        comptime for i in range(TURNS):
            if Int32(i) < existing:
                values[i] = self.data[unsafe_offset=i * self.turn].cast[acc]()
        self.data = self.data.unsafe_offset(self.stage_step)
        self.left -= DEPTH
        return values^

    @always_inline
    def place_turn(self) -> Int32:
        """Returns the distance in shared memory from one of this thread's elements to the next.
        """
        return Int32(THREADS // TILE * PITCH) if self.across else Int32(
            THREADS // DEPTH
        )


@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=FOUR_BLOCKS)
@__name(t"matmul_tiled_{dtype}")
def tiled_kernel[
    dtype: DType
](
    c: Ptr[dtype],
    a: Ptr[dtype],
    b: Ptr[dtype],
    p: MatmulProblem,
    blocks: Blocks,
    neighbours: Int32,
):
    """Computes one tile of one product; `neighbours` says that COLUMNS neighbouring elements may be stored at once.
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
    var number, row_tile, column_tile = blocks.tile(Int32(block_idx.x))
    var first_row = Int(row_tile) * TILE
    var first_column = Int(column_tile) * TILE
    var rows = Int32(min(p.m - first_row, TILE))
    var columns = Int32(min(p.n - first_column, TILE))
    var depth = Int32(p.k)
    var a_source = _Source[dtype](
        a.unsafe_offset(blocks.place(p.a, number) + first_row * p.a.row),
        p.a.row,
        p.a.column,
        rows,
        depth,
    )
    var b_source = _Source[dtype](
        b.unsafe_offset(blocks.place(p.b, number) + first_column * p.b.column),
        p.b.column,
        p.b.row,
        columns,
        depth,
    )
    var row = Int32(thread_idx.x) // (TILE // COLUMNS) * ROWS
    var column = Int32(thread_idx.x) % (TILE // COLUMNS) * COLUMNS
    var sums = Array[SIMD[acc, COLUMNS], ROWS](fill=0)
    var a_next = a_source.load()
    var b_next = b_source.load()
    for begin in range(Int32(0), depth, Int32(DEPTH)):
        barrier()
        comptime for i in range(TURNS):
            left[
                unsafe_offset=Int(
                    a_source.place + Int32(i) * a_source.place_turn()
                )
            ] = a_next[i]
            right[
                unsafe_offset=Int(
                    b_source.place + Int32(i) * b_source.place_turn()
                )
            ] = b_next[i]
        barrier()
        if begin + DEPTH < depth:
            a_next = a_source.load()
            b_next = b_source.load()
        comptime for k in range(DEPTH):
            var factor = right.unsafe_offset(
                k * PITCH + Int(column)
            ).unsafe_load[width=COLUMNS, alignment=16]()
            comptime for part in range(ROWS // 4):
                var four = left.unsafe_offset(
                    k * PITCH + Int(row) + 4 * part
                ).unsafe_load[width=4, alignment=16]()
                comptime for i in range(4):
                    comptime at = 4 * part + i
                    sums[at] = SIMD[acc, COLUMNS](four[i]).fma(factor, sums[at])
    var target = c.unsafe_offset(
        blocks.place(p.c, number)
        + first_row * p.c.row
        + first_column * p.c.column
    )
    comptime for i in range(ROWS):
        if row + Int32(i) < rows:
            var line = target.unsafe_offset(Int(row + Int32(i)) * p.c.row)
            if neighbours != 0 and column + COLUMNS <= columns:
                line.unsafe_offset(Int(column)).unsafe_store[
                    alignment=COLUMNS * size_of[dtype]()
                ](sums[i].cast[dtype]())
            else:
                comptime for j in range(COLUMNS):
                    if column + Int32(j) < columns:
                        line[
                            unsafe_offset=Int(column + Int32(j)) * p.c.column
                        ] = sums[i][j].cast[dtype]()


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
    """Runs any problem whose blocks 32 bits can count.

    Raises: Error: the problem has more blocks.
    """
    var reason = blocks_refusal(p, TILE, TILE)
    if reason:
        raise Error(t"matmul: {reason.value()}")
    comptime bytes = COLUMNS * size_of[dtype]()
    comptime kernel = tiled_kernel[dtype]
    var blocks = Blocks.of(p, TILE, TILE)
    ctx.enqueue_function[kernel](
        c,
        a,
        b,
        p,
        blocks,
        Int32(
            Int(c) % bytes == 0 and p.c.column == 1 and p.c.is_whole(COLUMNS)
        ),
        grid_dim=Int(blocks.tiles.value) * p.batch(),
        block_dim=THREADS,
    )
