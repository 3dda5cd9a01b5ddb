"""The gradients on a CPU: blocks of keys meet all blocks of queries that see them, five products each.

One task is a head of keys, or, where there are fewer heads than cores, some of its blocks of keys. Then each task has a
gradient of the queries of its own, and a second stage adds them in order.
"""

from std.math import ceildiv
from std.memory.alloc import unsafe_alloc
from std.sys.info import simd_width_of

from ...convolution.common import Ptr, accumulation_type, worker_count
from ...parallel import sync_parallelize
from ..pointers import Backward
from ..problem import AttentionProblem
from .exponential import exponential
from .forward import BLOCK_KEYS, BLOCK_QUERIES, add_bias, key_block
from .packed import (
    ROWS,
    fill,
    pack_rows,
    pack_turned,
    panel,
    product,
    rounded,
    write_row,
)


@always_inline
def _delta[
    dtype: DType, acc: DType
](grad: Ptr[acc], output: Ptr[dtype], count: Int) -> Scalar[acc]:
    comptime width = simd_width_of[acc]()
    var sums = SIMD[acc, width](0)
    var i = 0
    while i + width <= count:
        sums = (
            grad.unsafe_offset(i)
            .unsafe_load[width=width]()
            .fma(
                output.unsafe_offset(i).unsafe_load[width=width]().cast[acc](),
                sums,
            )
        )
        i += width
    var sum = sums.reduce_add()
    while i < count:
        sum += grad[unsafe_offset=i] * output[unsafe_offset=i].cast[acc]()
        i += 1
    return sum


@always_inline
def _gradients[
    acc: DType
](
    powers: Ptr[acc],
    slopes: Ptr[acc],
    seen: Int,
    columns: Int,
    sum: Scalar[acc],
    delta: Scalar[acc],
):
    """From a row of S and of dO V^T to P and dS; zeros from `seen` on."""
    comptime width = simd_width_of[acc]()
    for i in range(0, rounded(seen, width), width):
        var at = powers.unsafe_offset(i)
        var power = exponential[acc, width](at.unsafe_load[width=width]() - sum)
        at.unsafe_store(power)
        var slope = slopes.unsafe_offset(i)
        slope.unsafe_store(power * (slope.unsafe_load[width=width]() - delta))
    fill[acc](powers.unsafe_offset(seen), columns - seen, 0)
    fill[acc](slopes.unsafe_offset(seen), columns - seen, 0)


@always_inline
def _write_slopes[
    acc: DType, bias_type: DType
](target: Ptr[bias_type], slopes: Ptr[acc], seen: Int, count: Int):
    """A row of the bias's gradient: zeros from `seen` on."""
    write_row[bias_type, acc](target, slopes, seen, 1)
    fill[bias_type](target.unsafe_offset(seen), count - seen, 0)


@no_inline
def _add_queries[
    dtype: DType, acc: DType
](
    at: Ptr[dtype],
    parts: Ptr[acc],
    p: AttentionProblem,
    part_size: Int,
    chunks: Int,
    pitch: Int,
    workers: Int,
):
    """Adds the chunks' gradients of the queries in their order: parts [heads of keys, chunks, repeats, M, pitch].
    """
    comptime width = simd_width_of[acc]()
    var heads = p.batch * p.heads

    @always_inline
    def add(share: Int) {imm}:
        for head in range(share, heads, workers):
            var b = head // p.heads
            var h = head % p.heads
            var group = b * p.groups + h // p.repeats()
            var first = parts.unsafe_offset(
                group * chunks * part_size
                + h % p.repeats() * rounded(p.queries, ROWS) * pitch
            )
            for row in range(p.queries):
                var line = first.unsafe_offset(row * pitch)
                for chunk in range(1, chunks):
                    var other = line.unsafe_offset(chunk * part_size)
                    for i in range(0, pitch, width):
                        line.unsafe_offset(i).unsafe_store(
                            line.unsafe_offset(i).unsafe_load[width=width]()
                            + other.unsafe_offset(i).unsafe_load[width=width]()
                        )
                write_row[dtype, acc](
                    at.unsafe_offset(p.query.offset(b, h) + row * p.query.row),
                    line,
                    p.size,
                    p.scale.cast[acc](),
                )

    sync_parallelize(add, workers)


@no_inline
def backward_cpu[
    dtype: DType, bias_type: DType, biased: Bool, bias_wanted: Bool
](at: Backward[dtype, bias_type], p: AttentionProblem):
    """Writes the gradients."""
    comptime acc = accumulation_type[dtype]
    comptime width = simd_width_of[acc]()
    var workers = worker_count()
    var heads = p.batch * p.groups
    if heads == 0:
        return
    var wanted = min(workers, ceildiv(workers, heads))
    var block = key_block[acc](
        p.keys, min(BLOCK_KEYS, max(panel[acc](), ceildiv(p.keys, wanted)))
    )
    var blocks = ceildiv(p.keys, block)
    var chunks = max(1, min(wanted, blocks))
    var tasks = heads * chunks
    var shares = min(workers, tasks)
    var query_blocks = ceildiv(p.queries, BLOCK_QUERIES)
    var size_pitch = rounded(p.size, width)
    var value_pitch = rounded(p.value_size, width)
    var pitch = block + width
    var tall = rounded(block, ROWS)
    # A product of the last block of queries ends at a multiple of ROWS.
    var head_size = rounded(p.queries, ROWS) * size_pitch
    var part_size = p.repeats() * head_size
    var room = (
        block * (p.size + p.value_size)
        + tall * (2 * size_pitch + value_pitch)
        + BLOCK_QUERIES * (size_pitch + value_pitch + 2 * pitch + ROWS)
    )
    # One behind the other: a share's scratch, then the gradients of the queries.
    var scratch = unsafe_alloc[Scalar[acc]](
        shares * room + (shares if chunks == 1 else tasks) * part_size,
        alignment=64,
    ).unsafe_origin_cast[MutUntrackedOrigin]()
    var parts = scratch.unsafe_offset(shares * room)

    @always_inline
    def run(share: Int) {imm}:
        var turned_keys = scratch.unsafe_offset(share * room)
        var turned_values = turned_keys.unsafe_offset(block * p.size)
        var keys = turned_values.unsafe_offset(block * p.value_size)
        var key_grads = keys.unsafe_offset(tall * size_pitch)
        var value_grads = key_grads.unsafe_offset(tall * size_pitch)
        var queries = value_grads.unsafe_offset(tall * value_pitch)
        var grads = queries.unsafe_offset(BLOCK_QUERIES * size_pitch)
        var powers = grads.unsafe_offset(BLOCK_QUERIES * value_pitch)
        var slopes = powers.unsafe_offset(BLOCK_QUERIES * pitch)
        # What a product reads behind the last column must be a number.
        fill[acc](powers, 2 * BLOCK_QUERIES * pitch, 0)
        for task in range(share, tasks, shares):
            var head = task // chunks
            var chunk = task % chunks
            var b = head // p.groups
            var g = head % p.groups
            var query_grads = parts.unsafe_offset(
                (share if chunks == 1 else task) * part_size
            )
            fill[acc](query_grads, part_size, 0)
            for i in range(
                blocks * chunk // chunks, blocks * (chunk + 1) // chunks
            ):
                var key = i * block
                var count = min(block, p.keys - key)
                var key_row = at.key.unsafe_offset(
                    p.key.offset(b, g) + key * p.key.row
                )
                pack_turned[dtype, acc](
                    turned_keys, key_row, p.key.row, count, p.size
                )
                pack_turned[dtype, acc](
                    turned_values,
                    at.value.unsafe_offset(
                        p.value.offset(b, g) + key * p.value.row
                    ),
                    p.value.row,
                    count,
                    p.value_size,
                )
                pack_rows[dtype, acc](
                    keys, key_row, p.key.row, count, p.size, size_pitch, 1
                )
                fill[acc](key_grads, tall * size_pitch, 0)
                fill[acc](value_grads, tall * value_pitch, 0)
                var first_block = (
                    0 if bias_wanted else p.first_query(key) // BLOCK_QUERIES
                )
                for repeat in range(p.repeats()):
                    var h = g * p.repeats() + repeat
                    for query_block in range(first_block, query_blocks):
                        var first = query_block * BLOCK_QUERIES
                        var rows = min(BLOCK_QUERIES, p.queries - first)
                        var most = min(count, p.visible(first + rows - 1) - key)
                        var columns = rounded(max(0, most), width)
                        # Products with P and dS turned take whole tiles of keys.
                        var filled = max(columns, rounded(max(0, most), ROWS))
                        pack_rows[dtype, acc](
                            queries,
                            at.query.unsafe_offset(
                                p.query.offset(b, h) + first * p.query.row
                            ),
                            p.query.row,
                            rows,
                            p.size,
                            size_pitch,
                            p.scale.cast[acc](),
                        )
                        var output = p.output.offset(b, h)
                        pack_rows[dtype, acc](
                            grads,
                            at.grad.unsafe_offset(
                                output + first * p.output.row
                            ),
                            p.output.row,
                            rows,
                            p.value_size,
                            value_pitch,
                            1,
                        )
                        product[acc, False, False](
                            powers,
                            pitch,
                            queries,
                            size_pitch,
                            turned_keys,
                            panel[acc](),
                            panel[acc]() * p.size,
                            rows,
                            columns,
                            p.size,
                        )
                        product[acc, False, False](
                            slopes,
                            pitch,
                            grads,
                            value_pitch,
                            turned_values,
                            panel[acc](),
                            panel[acc]() * p.value_size,
                            rows,
                            columns,
                            p.value_size,
                        )
                        for row in range(rows):
                            var q = first + row
                            var seen = max(0, min(count, p.visible(q) - key))
                            var line = powers.unsafe_offset(row * pitch)
                            comptime if biased:
                                add_bias[acc, bias_type](
                                    line,
                                    at.bias.unsafe_offset(
                                        p.bias_offset(b, h, q)
                                        + key * p.bias.key
                                    ),
                                    p.bias.key,
                                    seen,
                                )
                            _gradients[acc](
                                line,
                                slopes.unsafe_offset(row * pitch),
                                seen,
                                filled,
                                at.sums[unsafe_offset=p.sums_offset(b, h) + q],
                                _delta[dtype, acc](
                                    grads.unsafe_offset(row * value_pitch),
                                    at.output.unsafe_offset(
                                        output + q * p.output.row
                                    ),
                                    p.value_size,
                                ),
                            )
                            comptime if bias_wanted:
                                _write_slopes[acc, bias_type](
                                    at.bias_grad.unsafe_offset(
                                        (p.sums_offset(b, h) + q) * p.keys + key
                                    ),
                                    slopes.unsafe_offset(row * pitch),
                                    seen,
                                    count,
                                )
                        if most <= 0:
                            continue
                        product[acc, False, True](
                            query_grads.unsafe_offset(
                                repeat * head_size + first * size_pitch
                            ),
                            size_pitch,
                            slopes,
                            pitch,
                            keys,
                            size_pitch,
                            panel[acc](),
                            rows,
                            size_pitch,
                            most,
                        )
                        product[acc, True, True](
                            value_grads,
                            value_pitch,
                            powers,
                            pitch,
                            grads,
                            value_pitch,
                            panel[acc](),
                            most,
                            value_pitch,
                            rows,
                        )
                        product[acc, True, True](
                            key_grads,
                            size_pitch,
                            slopes,
                            pitch,
                            queries,
                            size_pitch,
                            panel[acc](),
                            most,
                            size_pitch,
                            rows,
                        )
                for row in range(count):
                    write_row[dtype, acc](
                        at.key_grad.unsafe_offset(
                            p.key.offset(b, g) + (key + row) * p.key.row
                        ),
                        key_grads.unsafe_offset(row * size_pitch),
                        p.size,
                        1,
                    )
                    write_row[dtype, acc](
                        at.value_grad.unsafe_offset(
                            p.value.offset(b, g) + (key + row) * p.value.row
                        ),
                        value_grads.unsafe_offset(row * value_pitch),
                        p.value_size,
                        1,
                    )
            if chunks == 1:
                for repeat in range(p.repeats()):
                    for row in range(p.queries):
                        write_row[dtype, acc](
                            at.query_grad.unsafe_offset(
                                p.query.offset(b, g * p.repeats() + repeat)
                                + row * p.query.row
                            ),
                            query_grads.unsafe_offset(
                                repeat * head_size + row * size_pitch
                            ),
                            p.size,
                            p.scale.cast[acc](),
                        )

    sync_parallelize(run, shares)
    if chunks > 1:
        _add_queries[dtype, acc](
            at.query_grad, parts, p, part_size, chunks, size_pitch, workers
        )
    scratch.unsafe_free()
