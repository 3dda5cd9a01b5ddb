"""Attention's output on any GPU: a tile of queries runs over all keys."""

from std.math import ceildiv, exp, log
from std.memory import stack_allocation
from std.utils.numerics import nan

from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    barrier,
    block_idx,
    thread_idx,
)
from max.gpu.host import DeviceContext
from max.gpu.memory import AddressSpace

from ...common.pointer import accumulation_type
from ..pointers import ForwardPointers
from ..problem import AttentionProblem
from .tiled import (
    Block,
    THREAD_SIDE,
    MASKED,
    PARTS,
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


@__llvm_metadata(MAX_THREADS_PER_BLOCK_METADATA=TWO_BLOCKS)
@__name(t"attention_tiled_fprop_{dtype}_b{biased}")
def tiled_forward_kernel[
    dtype: DType, bias_type: DType, biased: Bool
](at: ForwardPointers[dtype, bias_type], p: AttentionProblem):
    """Computes one tile of queries of one head."""
    var first = Int(block_idx.x) * TILE
    var h = Int(block_idx.y)
    var b = Int(block_idx.z)
    var g = h // p.repeats()
    var room = SharedTiles.make()
    # Two numbers of each quarter of a row, and a row's factor.
    var quarters = stack_allocation[
        TILE * THREAD_SIDE, Float32, address_space=AddressSpace.SHARED
    ]()
    var factors = stack_allocation[
        TILE, Float32, address_space=AddressSpace.SHARED
    ]()
    var rows = HeadRows[dtype](
        at.query.unsafe_offset(p.query.offset(b, h) + first * p.query.row),
        p.query.row,
        p.queries - first,
        p.size,
    )
    var bias = at.bias.unsafe_offset(p.bias_offset(b, h, 0))
    var row = Int(thread_idx.x) // THREAD_SIDE
    var quarter = Int(thread_idx.x) % THREAD_SIDE
    var end = p.visible(min(p.queries, first + TILE) - 1)
    for turn in range(0, p.value_size, ROUND_COLUMNS):
        var sums = Block(fill=0)
        # Of the row whose quarter this thread has.
        var largest = MASKED
        var total = Float32(0)
        for key in range(0, end, TILE):
            var keys = HeadRows[dtype](
                at.key.unsafe_offset(p.key.offset(b, g) + key * p.key.row),
                p.key.row,
                p.keys - key,
                p.size,
            )
            var scores = multiply_rows(room, rows, keys)
            comptime for i in range(THREAD_SIDE):
                comptime for j in range(THREAD_SIDE):
                    scores[i][j] = score_of[bias_type, biased](
                        scores[i][j],
                        bias,
                        p,
                        first + own_row(i),
                        key + own_column(j),
                    )
            room.put(scores)
            var top = MASKED
            comptime for e in range(TILE // THREAD_SIDE):
                top = max(top, room.score(row, quarter + THREAD_SIDE * e)[])
            quarters[unsafe_offset=Int(thread_idx.x)] = top
            barrier()
            comptime for e in range(THREAD_SIDE):
                top = max(top, quarters[unsafe_offset=row * THREAD_SIDE + e])
            top = max(top, largest)
            var shift = Float32(0) if top == MASKED else top
            var sum = Float32(0)
            comptime for e in range(TILE // THREAD_SIDE):
                var place = room.score(row, quarter + THREAD_SIDE * e)
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
            comptime for e in range(THREAD_SIDE):
                total += quarters[unsafe_offset=row * THREAD_SIDE + e]
            comptime for i in range(THREAD_SIDE):
                var by = factors[unsafe_offset=own_row(i)]
                comptime for part in range(PARTS):
                    sums[part * THREAD_SIDE + i] *= by
            add_rows(
                room,
                sums,
                HeadRows[dtype](
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
        var sum = Float32(0)
        var inverse = Float32(0)
        if total != 0:
            sum = largest + log(total)
            inverse = 1 / total
        elif p.hidden_is_nan:
            sum = nan[DType.float32]()
            inverse = sum
        factors[unsafe_offset=row] = inverse
        if turn == 0 and quarter == 0 and first + row < p.queries:
            at.sums[unsafe_offset=p.sums_offset(b, h) + first + row] = sum.cast[
                accumulation_type[dtype]
            ]()
        barrier()
        comptime for i in range(THREAD_SIDE):
            var by = factors[unsafe_offset=own_row(i)]
            comptime for part in range(PARTS):
                sums[part * THREAD_SIDE + i] *= by
        write_rows(
            HeadRows[dtype](
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


@no_inline
def tiled_forward_gpu[
    dtype: DType, bias_type: DType, biased: Bool
](
    at: ForwardPointers[dtype, bias_type],
    p: AttentionProblem,
    ctx: DeviceContext,
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
