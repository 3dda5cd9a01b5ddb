"""Attention on any GPU, in float32 multiply-adds: the kernels that are always right.

A block of 16 x 16 threads has a tile of 64 rows. It forms 64 x 64 scores at a time, each thread four rows by four
columns, puts what becomes of them into shared memory and multiplies that with 64 rows of the other operand. A tile of
results has up to 128 columns; wider ones take several turns, each of which forms the scores anew.

Gradients of the queries run over tiles of queries, those of keys and values over tiles of keys: every sum has one
owner and one order.
"""

from std.math import ceildiv, exp, log
from std.memory import stack_allocation
from std.utils.numerics import inf
from std.utils.static_tuple import StaticTuple

from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    barrier,
    block_idx,
    global_idx,
    thread_idx,
)
from max.gpu.host import DeviceContext
from max.gpu.memory import AddressSpace

from ...convolution.common import Ptr, accumulation_type
from ..pointers import Backward, Forward
from ..problem import AttentionProblem

comptime SIDE = 16
comptime EACH = 4
comptime TILE = SIDE * EACH
comptime THREADS = SIDE * SIDE
comptime STEP = 16
"""Of a reduction, in shared memory at once."""
comptime TURN = 128
"""Columns of a result that are formed in one turn."""
comptime PARTS = TURN // TILE
# Twice the block: registers for two blocks on each multiprocessor, one of which computes while the other waits.
comptime TWO_BLOCKS = StaticTuple[Int32, 1](Int32(2 * THREADS))
comptime HIDDEN = -inf[DType.float32]()

comptime Shared = MutPointer[
    Float32, MutUntrackedOrigin, address_space=AddressSpace.SHARED
]
comptime PITCH = TILE + EACH
"""Floats from one step of a reduction to the next in shared memory: rows of 16 bytes that fall into different banks."""

comptime Square = Array[SIMD[DType.float32, EACH], EACH]
"""A thread's numbers: rows EACH * (thread / SIDE) + i, columns thread % SIDE + SIDE * j."""
comptime Block = Array[SIMD[DType.float32, EACH], EACH * PARTS]
"""The same of a result: TILE columns behind each other TILE columns."""


@fieldwise_init
struct Rows[dtype: DType](ImplicitlyCopyable, TrivialRegisterPassable):
    """Rows of one head from one on; what is behind the last reads as zero."""

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
struct Room(ImplicitlyCopyable, TrivialRegisterPassable):
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
        comptime for j in range(EACH):
            var column = SIMD[DType.float32, EACH](0)
            comptime for i in range(EACH):
                column[i] = numbers[i][j]
            self.score(own_row(0), own_column(j)).unsafe_store[alignment=16](
                column
            )
        barrier()


@always_inline
def own_row(i: Int) -> Int:
    return Int(thread_idx.x) // SIDE * EACH + i


@always_inline
def own_column(j: Int) -> Int:
    return Int(thread_idx.x) % SIDE + SIDE * j


@always_inline
def _place(column: Int) -> Int:
    """Where a column lies, so that a thread's four are neighbours."""
    return column % SIDE * EACH + column // SIDE


@always_inline
def _four(at: Shared) -> SIMD[DType.float32, EACH]:
    return at.unsafe_load[width=EACH, alignment=16]()


@always_inline
def _add_outer[
    count: Int
](
    mut sums: Array[SIMD[DType.float32, EACH], count],
    first: Int,
    left: SIMD[DType.float32, EACH],
    right: SIMD[DType.float32, EACH],
):
    comptime for i in range(EACH):
        sums[first + i] = SIMD[DType.float32, EACH](left[i]).fma(
            right, sums[first + i]
        )


@always_inline
def _dots[
    a_type: DType, b_type: DType
](room: Room, a: Rows[a_type], b: Rows[b_type]) -> Square:
    """The products of 64 rows with 64 rows."""
    var sums = Square(fill=0)
    var line = Int(thread_idx.x) // STEP
    var place = Int(thread_idx.x) % STEP
    for first in range(0, a.columns, STEP):
        barrier()
        comptime for i in range(EACH):
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
def _add_rows[
    dtype: DType
](room: Room, mut sums: Block, b: Rows[dtype], turn: Int):
    """Adds the shared 64 x 64 numbers times 64 rows of which the columns from `turn` on count.
    """
    comptime for part in range(PARTS):
        var first = turn + part * TILE
        if first < b.columns:
            for step in range(0, TILE, STEP):
                barrier()
                comptime for i in range(EACH):
                    var place = Int(thread_idx.x) + i * THREADS
                    room.right[
                        unsafe_offset=place // TILE * PITCH
                        + _place(place % TILE)
                    ] = b.at(step + place // TILE, first + place % TILE)
                barrier()
                for k in range(STEP):
                    _add_outer(
                        sums,
                        part * EACH,
                        _four(room.score(own_row(0), step + k)),
                        _four(
                            room.right.unsafe_offset(
                                k * PITCH + _place(own_column(0))
                            )
                        ),
                    )


@always_inline
def _write_rows[
    dtype: DType
](target: Rows[dtype], sums: Block, turn: Int, scale: Float32):
    comptime for part in range(PARTS):
        comptime for i in range(EACH):
            comptime for j in range(EACH):
                var row = own_row(i)
                var column = turn + part * TILE + own_column(j)
                if row < target.count and column < target.columns:
                    target.data[unsafe_offset=row * target.step + column] = (
                        sums[part * EACH + i][j] * scale
                    ).cast[dtype]()


@always_inline
def _score[
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
        return HIDDEN
    var score = dot * p.scale.cast[DType.float32]()
    comptime if biased:
        score += bias[unsafe_offset=q * p.bias.row + key * p.bias.key].cast[
            DType.float32
        ]()
    return score


@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=TWO_BLOCKS)
@__name(t"attention_tiled_fprop_{dtype}_b{biased}")
def tiled_forward_kernel[
    dtype: DType, bias_type: DType, biased: Bool
](at: Forward[dtype, bias_type], p: AttentionProblem):
    """One tile of queries of one head."""
    var first = Int(block_idx.x) * TILE
    var h = Int(block_idx.y)
    var b = Int(block_idx.z)
    var g = h // p.repeats()
    var room = Room.make()
    # Two numbers of each quarter of a row, and a row's factor.
    var quarters = stack_allocation[
        TILE * EACH, Float32, address_space=AddressSpace.SHARED
    ]()
    var factors = stack_allocation[
        TILE, Float32, address_space=AddressSpace.SHARED
    ]()
    var rows = Rows[dtype](
        at.query.unsafe_offset(p.query.offset(b, h) + first * p.query.row),
        p.query.row,
        p.queries - first,
        p.size,
    )
    var bias = at.bias.unsafe_offset(p.bias_offset(b, h, 0))
    var row = Int(thread_idx.x) // EACH
    var quarter = Int(thread_idx.x) % EACH
    var end = p.visible(min(p.queries, first + TILE) - 1)
    for turn in range(0, p.value_size, TURN):
        var sums = Block(fill=0)
        # Of the row whose quarter this thread has.
        var largest = HIDDEN
        var total = Float32(0)
        for key in range(0, end, TILE):
            var keys = Rows[dtype](
                at.key.unsafe_offset(p.key.offset(b, g) + key * p.key.row),
                p.key.row,
                p.keys - key,
                p.size,
            )
            var scores = _dots(room, rows, keys)
            comptime for i in range(EACH):
                comptime for j in range(EACH):
                    scores[i][j] = _score[bias_type, biased](
                        scores[i][j],
                        bias,
                        p,
                        first + own_row(i),
                        key + own_column(j),
                    )
            room.put(scores)
            var top = HIDDEN
            comptime for e in range(TILE // EACH):
                top = max(top, room.score(row, quarter + EACH * e)[])
            quarters[unsafe_offset=Int(thread_idx.x)] = top
            barrier()
            comptime for e in range(EACH):
                top = max(top, quarters[unsafe_offset=row * EACH + e])
            top = max(top, largest)
            var shift = Float32(0) if top == HIDDEN else top
            var sum = Float32(0)
            comptime for e in range(TILE // EACH):
                var place = room.score(row, quarter + EACH * e)
                var power = exp(place[] - shift)
                place[] = power
                sum += power
            barrier()
            quarters[unsafe_offset=Int(thread_idx.x)] = sum
            var factor = exp(largest - shift)
            factors[unsafe_offset=row] = factor
            largest = top
            barrier()
            total *= factor
            comptime for e in range(EACH):
                total += quarters[unsafe_offset=row * EACH + e]
            comptime for i in range(EACH):
                var by = factors[unsafe_offset=own_row(i)]
                comptime for part in range(PARTS):
                    sums[part * EACH + i] *= by
            _add_rows(
                room,
                sums,
                Rows[dtype](
                    at.value.unsafe_offset(
                        p.value.offset(b, g) + key * p.value.row
                    ),
                    p.value.row,
                    p.keys - key,
                    p.value_size,
                ),
                turn,
            )
        barrier()
        factors[unsafe_offset=row] = Float32(0) if total == 0 else 1 / total
        if turn == 0 and quarter == 0 and first + row < p.queries:
            var sum = Float32(0)
            if total != 0:
                sum = largest + log(total)
            at.sums[unsafe_offset=p.sums_offset(b, h) + first + row] = sum.cast[
                accumulation_type[dtype]
            ]()
        barrier()
        comptime for i in range(EACH):
            var by = factors[unsafe_offset=own_row(i)]
            comptime for part in range(PARTS):
                sums[part * EACH + i] *= by
        _write_rows(
            Rows[dtype](
                at.output.unsafe_offset(
                    p.output.offset(b, h) + first * p.output.row
                ),
                p.output.row,
                p.queries - first,
                p.value_size,
            ),
            sums,
            turn,
            1,
        )


@__name(t"attention_delta_{dtype}")
def delta_kernel[
    dtype: DType
](
    delta: Ptr[DType.float32],
    grad: Ptr[dtype],
    output: Ptr[dtype],
    p: AttentionProblem,
):
    """rowsum(dO * O) as [B, H, M]: a thread has a row."""
    var i = Int(global_idx.x)
    if i >= p.batch * p.heads * p.queries:
        return
    var head = i // p.queries
    var at = (
        p.output.offset(head // p.heads, head % p.heads)
        + i % p.queries * p.output.row
    )
    var sum = Float32(0)
    for e in range(p.value_size):
        sum += (
            grad[unsafe_offset=at + e].cast[DType.float32]()
            * output[unsafe_offset=at + e].cast[DType.float32]()
        )
    delta[unsafe_offset=i] = sum


@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=TWO_BLOCKS)
@__name(t"attention_tiled_dq_{dtype}_b{biased}_w{bias_wanted}")
def tiled_queries_kernel[
    dtype: DType, bias_type: DType, biased: Bool, bias_wanted: Bool
](
    at: Backward[dtype, bias_type],
    delta: Ptr[DType.float32],
    p: AttentionProblem,
):
    """The gradients of one tile of queries, and the bias's."""
    var first = Int(block_idx.x) * TILE
    var h = Int(block_idx.y)
    var b = Int(block_idx.z)
    var g = h // p.repeats()
    var room = Room.make()
    var output = p.output.offset(b, h) + first * p.output.row
    var rows = Rows[dtype](
        at.query.unsafe_offset(p.query.offset(b, h) + first * p.query.row),
        p.query.row,
        p.queries - first,
        p.size,
    )
    var grads = Rows[dtype](
        at.grad.unsafe_offset(output),
        p.output.row,
        p.queries - first,
        p.value_size,
    )
    var bias = at.bias.unsafe_offset(p.bias_offset(b, h, 0))
    var head_sums = p.sums_offset(b, h)
    var sum = SIMD[DType.float32, EACH](0)
    var own_delta = SIMD[DType.float32, EACH](0)
    comptime for i in range(EACH):
        if first + own_row(i) < p.queries:
            var place = head_sums + first + own_row(i)
            sum[i] = at.sums[unsafe_offset=place].cast[DType.float32]()
            own_delta[i] = delta[unsafe_offset=place]
    var end = p.visible(min(p.queries, first + TILE) - 1)
    comptime if bias_wanted:
        end = p.keys
    for turn in range(0, p.size, TURN):
        var sums = Block(fill=0)
        for key in range(0, end, TILE):
            var keys = Rows[dtype](
                at.key.unsafe_offset(p.key.offset(b, g) + key * p.key.row),
                p.key.row,
                p.keys - key,
                p.size,
            )
            var values = Rows[dtype](
                at.value.unsafe_offset(
                    p.value.offset(b, g) + key * p.value.row
                ),
                p.value.row,
                p.keys - key,
                p.value_size,
            )
            var slopes = _dots(room, rows, keys)
            var dots = _dots(room, grads, values)
            comptime for i in range(EACH):
                comptime for j in range(EACH):
                    var q = first + own_row(i)
                    var k = key + own_column(j)
                    var score = _score[bias_type, biased](
                        slopes[i][j], bias, p, q, k
                    )
                    slopes[i][j] = exp(score - sum[i]) * (
                        dots[i][j] - own_delta[i]
                    )
                    comptime if bias_wanted:
                        if turn == 0 and q < p.queries and k < p.keys:
                            at.bias_grad[
                                unsafe_offset=(head_sums + q) * p.keys + k
                            ] = slopes[i][j].cast[bias_type]()
            room.put(slopes)
            _add_rows(room, sums, keys, turn)
        _write_rows(
            Rows[dtype](
                at.query_grad.unsafe_offset(
                    p.query.offset(b, h) + first * p.query.row
                ),
                p.query.row,
                p.queries - first,
                p.size,
            ),
            sums,
            turn,
            p.scale.cast[DType.float32](),
        )


@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=TWO_BLOCKS)
@__name(t"attention_tiled_dkdv_{dtype}_b{biased}")
def tiled_keys_kernel[
    dtype: DType, bias_type: DType, biased: Bool
](
    at: Backward[dtype, bias_type],
    delta: Ptr[DType.float32],
    p: AttentionProblem,
):
    """The gradients of one tile of keys and values: all queries' heads that share them, in order.
    """
    var first = Int(block_idx.x) * TILE
    var g = Int(block_idx.y)
    var b = Int(block_idx.z)
    var room = Room.make()
    var keys = Rows[dtype](
        at.key.unsafe_offset(p.key.offset(b, g) + first * p.key.row),
        p.key.row,
        p.keys - first,
        p.size,
    )
    var values = Rows[dtype](
        at.value.unsafe_offset(p.value.offset(b, g) + first * p.value.row),
        p.value.row,
        p.keys - first,
        p.value_size,
    )
    var begin = p.first_query(first) // TILE * TILE
    for turn in range(0, max(p.size, p.value_size), TURN):
        var key_sums = Block(fill=0)
        var value_sums = Block(fill=0)
        for repeat in range(p.repeats()):
            var h = g * p.repeats() + repeat
            var bias = at.bias.unsafe_offset(p.bias_offset(b, h, 0))
            for query in range(begin, p.queries, TILE):
                var queries = Rows[dtype](
                    at.query.unsafe_offset(
                        p.query.offset(b, h) + query * p.query.row
                    ),
                    p.query.row,
                    p.queries - query,
                    p.size,
                )
                var grads = Rows[dtype](
                    at.grad.unsafe_offset(
                        p.output.offset(b, h) + query * p.output.row
                    ),
                    p.output.row,
                    p.queries - query,
                    p.value_size,
                )
                var powers = _dots(room, keys, queries)
                var slopes = _dots(room, values, grads)
                comptime for j in range(EACH):
                    var q = query + own_column(j)
                    var sum = Float32(0)
                    var own_delta = Float32(0)
                    if q < p.queries:
                        var place = p.sums_offset(b, h) + q
                        sum = at.sums[unsafe_offset=place].cast[DType.float32]()
                        own_delta = delta[unsafe_offset=place]
                    comptime for i in range(EACH):
                        var score = _score[bias_type, biased](
                            powers[i][j], bias, p, q, first + own_row(i)
                        )
                        powers[i][j] = exp(score - sum)
                        slopes[i][j] = powers[i][j] * (slopes[i][j] - own_delta)
                room.put(powers)
                _add_rows(room, value_sums, grads, turn)
                room.put(slopes)
                _add_rows(room, key_sums, queries, turn)
        _write_rows(
            Rows[dtype](
                at.key_grad.unsafe_offset(
                    p.key.offset(b, g) + first * p.key.row
                ),
                p.key.row,
                p.keys - first,
                p.size,
            ),
            key_sums,
            turn,
            p.scale.cast[DType.float32](),
        )
        _write_rows(
            Rows[dtype](
                at.value_grad.unsafe_offset(
                    p.value.offset(b, g) + first * p.value.row
                ),
                p.value.row,
                p.keys - first,
                p.value_size,
            ),
            value_sums,
            turn,
            1,
        )


@no_inline
def tiled_forward_gpu[
    dtype: DType, bias_type: DType, biased: Bool
](
    at: Forward[dtype, bias_type], p: AttentionProblem, ctx: DeviceContext
) raises:
    """Writes output and logsumexp."""
    if p.batch * p.heads * p.queries == 0:
        return
    ctx.enqueue_function[tiled_forward_kernel[dtype, bias_type, biased]](
        at,
        p,
        grid_dim=(ceildiv(p.queries, TILE), p.heads, p.batch),
        block_dim=THREADS,
    )


@no_inline
def tiled_backward_gpu[
    dtype: DType, bias_type: DType, biased: Bool, bias_wanted: Bool
](
    at: Backward[dtype, bias_type], p: AttentionProblem, ctx: DeviceContext
) raises:
    """Writes the gradients."""
    var rows = p.batch * p.heads * p.queries
    var delta = ctx.enqueue_create_buffer[DType.float32](max(1, rows))
    var delta_at = Ptr[DType.float32](
        unsafe_from_address=Int(delta.unsafe_ptr())
    )
    if rows > 0:
        ctx.enqueue_function[delta_kernel[dtype]](
            delta_at,
            at.grad,
            at.output,
            p,
            grid_dim=ceildiv(rows, THREADS),
            block_dim=THREADS,
        )
        ctx.enqueue_function[
            tiled_queries_kernel[dtype, bias_type, biased, bias_wanted]
        ](
            at,
            delta_at,
            p,
            grid_dim=(ceildiv(p.queries, TILE), p.heads, p.batch),
            block_dim=THREADS,
        )
    if p.batch * p.groups * p.keys > 0:
        ctx.enqueue_function[tiled_keys_kernel[dtype, bias_type, biased]](
            at,
            delta_at,
            p,
            grid_dim=(ceildiv(p.keys, TILE), p.groups, p.batch),
            block_dim=THREADS,
        )
    _ = delta^
