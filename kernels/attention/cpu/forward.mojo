"""The forward pass on a CPU: blocks of queries meet blocks of keys, and a running maximum keeps the sums in range.

One task is a head of keys with a stretch of its queries. Dao, FlashAttention-2, 2023, algorithm 1.
"""

from std.math import ceildiv, log
from std.memory.alloc import unsafe_alloc
from std.sys.info import simd_width_of
from std.utils.numerics import inf

from ...convolution.common import Ptr, accumulation_type, worker_count
from ...parallel import sync_parallelize
from ..pointers import Forward
from ..problem import AttentionProblem
from .exponential import exponential
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

comptime BLOCK_QUERIES = 48
comptime BLOCK_KEYS = 256


@always_inline
def key_block[acc: DType](keys: Int, most: Int) -> Int:
    """Keys of a block: blocks of one size, of whole panels."""
    return rounded(
        max(1, ceildiv(keys, ceildiv(max(1, keys), most))), panel[acc]()
    )


@always_inline
def add_bias[
    acc: DType, bias_type: DType
](scores: Ptr[acc], bias: Ptr[bias_type], step: Int, count: Int):
    """`step` is 1, or 0 where one number serves all keys."""
    comptime width = simd_width_of[acc]()
    if step == 0:
        var same = bias[].cast[acc]()
        for i in range(count):
            scores[unsafe_offset=i] += same
        return
    var i = 0
    while i + width <= count:
        var at = scores.unsafe_offset(i)
        at.unsafe_store(
            at.unsafe_load[width=width]()
            + bias.unsafe_offset(i).unsafe_load[width=width]().cast[acc]()
        )
        i += width
    while i < count:
        scores[unsafe_offset=i] += bias[unsafe_offset=i].cast[acc]()
        i += 1


@always_inline
def _scale_row[acc: DType](row: Ptr[acc], count: Int, by: Scalar[acc]):
    comptime width = simd_width_of[acc]()
    for i in range(0, count, width):
        var at = row.unsafe_offset(i)
        at.unsafe_store(at.unsafe_load[width=width]() * by)


@always_inline
def _powers[
    acc: DType
](
    scores: Ptr[acc],
    seen: Int,
    columns: Int,
    mut largest: Scalar[acc],
    mut total: Scalar[acc],
) -> Scalar[acc]:
    """Turns a row's scores, of which `seen` count, into exp(score - maximum). Returns what earlier sums are multiplied
    with.
    """
    comptime width = simd_width_of[acc]()
    comptime hidden = -inf[acc]()
    fill[acc](scores.unsafe_offset(seen), columns - seen, hidden)
    var tops = SIMD[acc, width](hidden)
    for i in range(0, columns, width):
        tops = max(tops, scores.unsafe_offset(i).unsafe_load[width=width]())
    var top = max(largest, tops.reduce_max())
    # A row in which all is hidden so far has powers of 0.
    var shift = Scalar[acc](0) if top == hidden else top
    var sums = SIMD[acc, width](0)
    for i in range(0, columns, width):
        var at = scores.unsafe_offset(i)
        var power = exponential[acc, width](
            at.unsafe_load[width=width]() - shift
        )
        at.unsafe_store(power)
        sums += power
    var factor = exponential[acc, 1](largest - shift)
    total = total * factor + sums.reduce_add()
    largest = top
    return factor


@no_inline
def forward_cpu[
    dtype: DType, bias_type: DType, biased: Bool
](at: Forward[dtype, bias_type], p: AttentionProblem):
    """Writes output and logsumexp."""
    comptime acc = accumulation_type[dtype]
    comptime assert acc.is_floating_point(), "attention of floats"
    comptime width = simd_width_of[acc]()
    var workers = worker_count()
    var heads = p.batch * p.groups
    if heads * p.heads * p.queries == 0:
        return
    var block = key_block[acc](p.keys, BLOCK_KEYS)
    var blocks = ceildiv(p.keys, block)
    var query_blocks = ceildiv(p.queries, BLOCK_QUERIES)
    # Every stretch packs its keys anew, so that there are only as many as occupy the cores.
    var stretches = min(query_blocks, ceildiv(2 * workers, heads))
    var tasks = heads * stretches
    var shares = min(workers, tasks)
    var out_pitch = rounded(p.value_size, width)
    # Rows that one packed product reads one behind the other must not fall into one set of the cache.
    var pitch = block + width
    var turned_size = blocks * block * p.size
    var values_size = rounded(p.keys, ROWS) * out_pitch
    var room = (
        turned_size
        + values_size
        + BLOCK_QUERIES * (rounded(p.size, width) + pitch + out_pitch + 2)
    )
    var scratch = unsafe_alloc[Scalar[acc]](
        shares * room, alignment=64
    ).unsafe_origin_cast[MutUntrackedOrigin]()

    @always_inline
    def run(share: Int) {imm}:
        var turned = scratch.unsafe_offset(share * room)
        var values = turned.unsafe_offset(turned_size)
        var queries = values.unsafe_offset(values_size)
        var scores = queries.unsafe_offset(
            BLOCK_QUERIES * rounded(p.size, width)
        )
        var outputs = scores.unsafe_offset(BLOCK_QUERIES * pitch)
        var largest = outputs.unsafe_offset(BLOCK_QUERIES * out_pitch)
        var totals = largest.unsafe_offset(BLOCK_QUERIES)
        for task in range(share, tasks, shares):
            # Under a causal mask the last queries take longest: they come first.
            var head = task % heads
            var stretch = stretches - 1 - task // heads
            var b = head // p.groups
            var g = head % p.groups
            for i in range(blocks):
                pack_turned[dtype, acc](
                    turned.unsafe_offset(i * block * p.size),
                    at.key.unsafe_offset(
                        p.key.offset(b, g) + i * block * p.key.row
                    ),
                    p.key.row,
                    min(block, p.keys - i * block),
                    p.size,
                )
            pack_rows[dtype, acc](
                values,
                at.value.unsafe_offset(p.value.offset(b, g)),
                p.value.row,
                p.keys,
                p.value_size,
                out_pitch,
                1,
            )
            for repeat in range(p.repeats()):
                var h = g * p.repeats() + repeat
                for query_block in range(
                    query_blocks * stretch // stretches,
                    query_blocks * (stretch + 1) // stretches,
                ):
                    var first = query_block * BLOCK_QUERIES
                    var rows = min(BLOCK_QUERIES, p.queries - first)
                    pack_rows[dtype, acc](
                        queries,
                        at.query.unsafe_offset(
                            p.query.offset(b, h) + first * p.query.row
                        ),
                        p.query.row,
                        rows,
                        p.size,
                        p.size,
                        p.scale.cast[acc](),
                    )
                    fill[acc](outputs, BLOCK_QUERIES * out_pitch, 0)
                    fill[acc](largest, rows, -inf[acc]())
                    fill[acc](totals, rows, 0)
                    for i in range(blocks):
                        var key = i * block
                        var seen = min(block, p.visible(first + rows - 1) - key)
                        if seen <= 0:
                            break
                        var columns = rounded(seen, width)
                        product[acc, False, False](
                            scores,
                            pitch,
                            queries,
                            p.size,
                            turned.unsafe_offset(i * block * p.size),
                            panel[acc](),
                            panel[acc]() * p.size,
                            rows,
                            columns,
                            p.size,
                        )
                        for row in range(rows):
                            var q = first + row
                            var mine = max(0, min(block, p.visible(q) - key))
                            var line = scores.unsafe_offset(row * pitch)
                            comptime if biased:
                                add_bias[acc, bias_type](
                                    line,
                                    at.bias.unsafe_offset(
                                        p.bias_offset(b, h, q)
                                        + key * p.bias.key
                                    ),
                                    p.bias.key,
                                    mine,
                                )
                            var factor = _powers[acc](
                                line,
                                mine,
                                columns,
                                largest[unsafe_offset=row],
                                totals[unsafe_offset=row],
                            )
                            if i > 0 and factor != 1:
                                _scale_row[acc](
                                    outputs.unsafe_offset(row * out_pitch),
                                    out_pitch,
                                    factor,
                                )
                        product[acc, False, True](
                            outputs,
                            out_pitch,
                            scores,
                            pitch,
                            values.unsafe_offset(key * out_pitch),
                            out_pitch,
                            panel[acc](),
                            rows,
                            out_pitch,
                            seen,
                        )
                    var sums = at.sums.unsafe_offset(
                        p.sums_offset(b, h) + first
                    )
                    for row in range(rows):
                        var total = totals[unsafe_offset=row]
                        var line = outputs.unsafe_offset(row * out_pitch)
                        var inverse = Scalar[acc](0)
                        var sum = Scalar[acc](0)
                        if total == 0:
                            fill[acc](line, out_pitch, 0)
                        else:
                            inverse = 1 / total
                            sum = largest[unsafe_offset=row] + log(total)
                        sums[unsafe_offset=row] = sum
                        write_row[dtype, acc](
                            at.output.unsafe_offset(
                                p.output.offset(b, h)
                                + (first + row) * p.output.row
                            ),
                            line,
                            p.value_size,
                            inverse,
                        )

    sync_parallelize(run, shares)
    scratch.unsafe_free()
