"""Attention's gradients on any GPU: the gradients of queries by tiles of queries, the gradients of keys and values by
tiles of keys."""

from std.math import ceildiv, exp

from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, block_idx, global_idx
from max.gpu.host import DeviceContext

from ...common.pointer import Ptr
from ..pointers import BackwardPointers
from ..problem import AttentionProblem
from .tiled import (
    Block,
    THREAD_SIDE,
    SharedTiles,
    HeadRows,
    THREADS,
    TILE,
    ROUND_COLUMNS,
    TWO_BLOCKS,
    add_rows,
    multiply_rows,
    own_column,
    own_row,
    score_of,
    write_rows,
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
    at: BackwardPointers[dtype, bias_type],
    delta: Ptr[DType.float32],
    p: AttentionProblem,
):
    """The gradients of one tile of queries, and the bias's."""
    var first = Int(block_idx.x) * TILE
    var h = Int(block_idx.y)
    var b = Int(block_idx.z)
    var g = h // p.repeats()
    var room = SharedTiles.make()
    var output = p.output.offset(b, h) + first * p.output.row
    var rows = HeadRows[dtype](
        at.query.unsafe_offset(p.query.offset(b, h) + first * p.query.row),
        p.query.row,
        p.queries - first,
        p.size,
    )
    var grads = HeadRows[dtype](
        at.grad.unsafe_offset(output),
        p.output.row,
        p.queries - first,
        p.value_size,
    )
    var bias = at.bias.unsafe_offset(p.bias_offset(b, h, 0))
    var head_sums = p.sums_offset(b, h)
    var sum = SIMD[DType.float32, THREAD_SIDE](0)
    var own_delta = SIMD[DType.float32, THREAD_SIDE](0)
    comptime for i in range(THREAD_SIDE):
        if first + own_row(i) < p.queries:
            var place = head_sums + first + own_row(i)
            sum[i] = at.sums[unsafe_offset=place].cast[DType.float32]()
            own_delta[i] = delta[unsafe_offset=place]
    var end = p.visible(min(p.queries, first + TILE) - 1)
    comptime if bias_wanted:
        end = p.keys
    for turn in range(0, p.size, ROUND_COLUMNS):
        var sums = Block(fill=0)
        for key in range(0, end, TILE):
            var keys = HeadRows[dtype](
                at.key.unsafe_offset(p.key.offset(b, g) + key * p.key.row),
                p.key.row,
                p.keys - key,
                p.size,
            )
            var values = HeadRows[dtype](
                at.value.unsafe_offset(
                    p.value.offset(b, g) + key * p.value.row
                ),
                p.value.row,
                p.keys - key,
                p.value_size,
            )
            var slopes = multiply_rows(room, rows, keys)
            var dots = multiply_rows(room, grads, values)
            comptime for i in range(THREAD_SIDE):
                comptime for j in range(THREAD_SIDE):
                    var q = first + own_row(i)
                    var k = key + own_column(j)
                    var score = score_of[bias_type, biased](
                        slopes[i][j], bias, p, q, k
                    )
                    slopes[i][j] = exp(score - sum[i]) * (
                        dots[i][j] - own_delta[i]
                    )
                    comptime if bias_wanted:
                        if turn == 0 and q < p.queries and k < p.keys:
                            at.bias_grad[
                                unsafe_offset=(head_sums + q) * p.keys + k
                            ] = slopes[i][j].cast[dtype]()
            room.put(slopes)
            add_rows(room, sums, keys, turn)
        write_rows(
            HeadRows[dtype](
                at.query_grad.unsafe_offset(
                    p.query_grad.offset(b, h) + first * p.query_grad.row
                ),
                p.query_grad.row,
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
    at: BackwardPointers[dtype, bias_type],
    delta: Ptr[DType.float32],
    p: AttentionProblem,
):
    """The gradients of one tile of keys and values: all queries' heads that share them, in order.
    """
    var first = Int(block_idx.x) * TILE
    var g = Int(block_idx.y)
    var b = Int(block_idx.z)
    var room = SharedTiles.make()
    var keys = HeadRows[dtype](
        at.key.unsafe_offset(p.key.offset(b, g) + first * p.key.row),
        p.key.row,
        p.keys - first,
        p.size,
    )
    var values = HeadRows[dtype](
        at.value.unsafe_offset(p.value.offset(b, g) + first * p.value.row),
        p.value.row,
        p.keys - first,
        p.value_size,
    )
    var begin = p.first_query(first) // TILE * TILE
    for turn in range(0, max(p.size, p.value_size), ROUND_COLUMNS):
        var key_sums = Block(fill=0)
        var value_sums = Block(fill=0)
        for repeat in range(p.repeats()):
            var h = g * p.repeats() + repeat
            var bias = at.bias.unsafe_offset(p.bias_offset(b, h, 0))
            for query in range(begin, p.queries, TILE):
                var queries = HeadRows[dtype](
                    at.query.unsafe_offset(
                        p.query.offset(b, h) + query * p.query.row
                    ),
                    p.query.row,
                    p.queries - query,
                    p.size,
                )
                var grads = HeadRows[dtype](
                    at.grad.unsafe_offset(
                        p.output.offset(b, h) + query * p.output.row
                    ),
                    p.output.row,
                    p.queries - query,
                    p.value_size,
                )
                var powers = multiply_rows(room, keys, queries)
                var slopes = multiply_rows(room, values, grads)
                comptime for j in range(THREAD_SIDE):
                    var q = query + own_column(j)
                    var sum = Float32(0)
                    var own_delta = Float32(0)
                    if q < p.queries:
                        var place = p.sums_offset(b, h) + q
                        sum = at.sums[unsafe_offset=place].cast[DType.float32]()
                        own_delta = delta[unsafe_offset=place]
                    comptime for i in range(THREAD_SIDE):
                        var score = score_of[bias_type, biased](
                            powers[i][j], bias, p, q, first + own_row(i)
                        )
                        powers[i][j] = exp(score - sum)
                        slopes[i][j] = powers[i][j] * (slopes[i][j] - own_delta)
                room.put(powers)
                add_rows(room, value_sums, grads, turn)
                room.put(slopes)
                add_rows(room, key_sums, queries, turn)
        write_rows(
            HeadRows[dtype](
                at.key_grad.unsafe_offset(
                    p.key_grad.offset(b, g) + first * p.key_grad.row
                ),
                p.key_grad.row,
                p.keys - first,
                p.size,
            ),
            key_sums,
            turn,
            p.scale.cast[DType.float32](),
        )
        write_rows(
            HeadRows[dtype](
                at.value_grad.unsafe_offset(
                    p.value_grad.offset(b, g) + first * p.value_grad.row
                ),
                p.value_grad.row,
                p.keys - first,
                p.value_size,
            ),
            value_sums,
            turn,
            1,
        )


@no_inline
def tiled_backward_gpu[
    dtype: DType, bias_type: DType, biased: Bool, bias_wanted: Bool
](
    at: BackwardPointers[dtype, bias_type],
    p: AttentionProblem,
    ctx: DeviceContext,
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
