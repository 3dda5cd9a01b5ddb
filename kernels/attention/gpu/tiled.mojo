"""Attention on any GPU, in float32 multiply-adds, correct for every call: code that the forward and backward kernels
share.

A block of 16 x 16 threads has a tile of 64 rows. It forms 64 x 64 scores at a time, each thread four rows by four
columns, puts the results into shared memory and multiplies them with 64 rows of the other operand. A tile of results
has up to 128 columns; wider ones take several turns, each of which forms the scores anew.

Gradients of the queries run over tiles of queries, those of keys and values over tiles of keys: every sum has one
owner and one order.
"""

from std.memory import stack_allocation
from std.utils.numerics import inf
from std.utils.static_tuple import StaticTuple

from max.gpu import barrier, thread_idx
from max.gpu.memory import AddressSpace

from ...common.pointer import Ptr
from ..problem import AttentionProblem

comptime SIDE = 16
"""Threads along a side of a tile."""
comptime THREAD_SIDE = 4
"""Rows, and columns, of a thread's part of a tile."""
comptime TILE = SIDE * THREAD_SIDE
comptime THREADS = SIDE * SIDE
comptime STEP = 16
"""Steps of a reduction in shared memory at once."""
comptime ROUND_COLUMNS = 128
"""Columns of a result that are formed in one turn."""
comptime PARTS = ROUND_COLUMNS // TILE
"""Tiles of a round."""
# Twice the block: registers for two blocks on each multiprocessor, one of which computes while the other waits.
comptime TWO_BLOCKS = StaticTuple[Int32, 1](Int32(2 * THREADS))
comptime MASKED = -inf[DType.float32]()

comptime Shared = MutPointer[
    Float32, MutUntrackedOrigin, address_space=AddressSpace.SHARED
]
comptime PITCH = TILE + THREAD_SIDE
"""Floats from one step of a reduction to the next in shared memory: rows of 16 bytes that fall into different banks."""

comptime Square = Array[SIMD[DType.float32, THREAD_SIDE], THREAD_SIDE]
"""A thread's numbers: rows EACH * (thread / SIDE) + i, columns thread % SIDE + SIDE * j."""
comptime Block = Array[SIMD[DType.float32, THREAD_SIDE], THREAD_SIDE * PARTS]
"""A thread's part of a block of results: one Square after another, each TILE columns further on."""


@fieldwise_init
struct HeadRows[dtype: DType](ImplicitlyCopyable, TrivialRegisterPassable):
    """Rows of one head, from a first row on; rows behind the last read as zero.
    """

    var data: Ptr[Self.dtype]
    var step: Int
    var count: Int
    var columns: Int

    @always_inline
    def at(self, row: Int, column: Int) -> Float32:
        if row < self.count and column < self.columns:
            return self.data[unsafe_offset=row * self.step + column].cast[
                DType.float32
            ]()
        return 0


@fieldwise_init
struct SharedTiles(ImplicitlyCopyable, TrivialRegisterPassable):
    """A block's shared memory."""

    var left: Shared
    var right: Shared
    var scores: Shared

    @staticmethod
    @always_inline
    def make() -> Self:
        return Self(
            stack_allocation[
                STEP * PITCH,
                Float32,
                alignment=16,
                address_space=AddressSpace.SHARED,
            ]().unsafe_origin_cast[MutUntrackedOrigin](),
            stack_allocation[
                STEP * PITCH,
                Float32,
                alignment=16,
                address_space=AddressSpace.SHARED,
            ]().unsafe_origin_cast[MutUntrackedOrigin](),
            stack_allocation[
                TILE * PITCH,
                Float32,
                alignment=16,
                address_space=AddressSpace.SHARED,
            ]().unsafe_origin_cast[MutUntrackedOrigin](),
        )

    @always_inline
    def score(self, row: Int, column: Int) -> Shared:
        return self.scores.unsafe_offset(column * PITCH + row)

    @always_inline
    def put(self, numbers: Square):
        """Shares a thread's numbers; between two barriers."""
        barrier()
        comptime for j in range(THREAD_SIDE):
            var column = SIMD[DType.float32, THREAD_SIDE](0)
            comptime for i in range(THREAD_SIDE):
                column[i] = numbers[i][j]
            self.score(own_row(0), own_column(j)).unsafe_store[alignment=16](
                column
            )
        barrier()


@always_inline
def own_row(i: Int) -> Int:
    return Int(thread_idx.x) // SIDE * THREAD_SIDE + i


@always_inline
def own_column(j: Int) -> Int:
    return Int(thread_idx.x) % SIDE + SIDE * j


@always_inline
def _place(column: Int) -> Int:
    """Returns the place of a column in shared memory, such that a thread's four columns are neighbours.
    """
    return column % SIDE * THREAD_SIDE + column // SIDE


@always_inline
def _four(at: Shared) -> SIMD[DType.float32, THREAD_SIDE]:
    return at.unsafe_load[width=THREAD_SIDE, alignment=16]()


@always_inline
def _add_outer[
    count: Int
](
    mut sums: Array[SIMD[DType.float32, THREAD_SIDE], count],
    first: Int,
    left: SIMD[DType.float32, THREAD_SIDE],
    right: SIMD[DType.float32, THREAD_SIDE],
):
    comptime for i in range(THREAD_SIDE):
        sums[first + i] = SIMD[DType.float32, THREAD_SIDE](left[i]).fma(
            right, sums[first + i]
        )


@always_inline
def multiply_rows[
    a_type: DType, b_type: DType
](room: SharedTiles, a: HeadRows[a_type], b: HeadRows[b_type]) -> Square:
    """The products of 64 rows with 64 rows."""
    var sums = Square(fill=0)
    var line = Int(thread_idx.x) // STEP
    var place = Int(thread_idx.x) % STEP
    for first in range(0, a.columns, STEP):
        barrier()
        comptime for i in range(THREAD_SIDE):
            var row = line + i * (THREADS // STEP)
            room.left[unsafe_offset=place * PITCH + row] = a.at(
                row, first + place
            )
            room.right[unsafe_offset=place * PITCH + _place(row)] = b.at(
                row, first + place
            )
        barrier()
        for k in range(STEP):
            _add_outer(
                sums,
                0,
                _four(room.left.unsafe_offset(k * PITCH + own_row(0))),
                _four(
                    room.right.unsafe_offset(k * PITCH + _place(own_column(0)))
                ),
            )
    return sums^


@always_inline
def add_rows[
    dtype: DType
](room: SharedTiles, mut sums: Block, b: HeadRows[dtype], turn: Int):
    """Adds the shared 64 x 64 numbers times 64 rows of which the columns from `turn` on count.
    """
    comptime for part in range(PARTS):
        var first = turn + part * TILE
        if first < b.columns:
            for step in range(0, TILE, STEP):
                barrier()
                comptime for i in range(THREAD_SIDE):
                    var place = Int(thread_idx.x) + i * THREADS
                    room.right[
                        unsafe_offset=place // TILE * PITCH
                        + _place(place % TILE)
                    ] = b.at(step + place // TILE, first + place % TILE)
                barrier()
                for k in range(STEP):
                    _add_outer(
                        sums,
                        part * THREAD_SIDE,
                        _four(room.score(own_row(0), step + k)),
                        _four(
                            room.right.unsafe_offset(
                                k * PITCH + _place(own_column(0))
                            )
                        ),
                    )


@always_inline
def write_rows[
    dtype: DType
](target: HeadRows[dtype], sums: Block, turn: Int, scale: Float32):
    comptime for part in range(PARTS):
        comptime for i in range(THREAD_SIDE):
            comptime for j in range(THREAD_SIDE):
                var row = own_row(i)
                var column = turn + part * TILE + own_column(j)
                if row < target.count and column < target.columns:
                    target.data[unsafe_offset=row * target.step + column] = (
                        sums[part * THREAD_SIDE + i][j] * scale
                    ).cast[dtype]()


@always_inline
def score_of[
    bias_type: DType, biased: Bool
](
    dot: Float32,
    bias: Ptr[bias_type],
    p: AttentionProblem,
    q: Int,
    key: Int,
) -> Float32:
    """A scaled score with its bias, -inf where the query does not see the key. `bias` is the head's.
    """
    if q >= p.queries or key >= p.visible(q):
        return MASKED
    var score = dot * p.scale.cast[DType.float32]()
    comptime if biased:
        score += bias[unsafe_offset=q * p.bias.row + key * p.bias.key].cast[
            DType.float32
        ]()
    return score
