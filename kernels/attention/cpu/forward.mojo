"""The forward pass on a CPU: blocks of queries meet blocks of keys, and a running maximum keeps the sums in range.

One task is a head of keys with a stretch of its queries. Dao, FlashAttention-2, 2023, algorithm 1.
"""

from std.math import ceildiv, log
from std.memory.alloc import unsafe_alloc
from std.sys.info import simd_width_of
from std.utils.numerics import inf, nan

from ...common.packed import (
    ROWS,
    Matrix,
    fill,
    pack_rows,
    pack_turned,
    panel,
    product,
    rounded,
    write_row,
)
from ...common.parallel import sync_parallelize, worker_count
from ...common.pointer import Ptr, accumulation_type
from ..pointers import ForwardPointers
from ..problem import AttentionProblem
from .exponential import exponential

comptime BLOCK_QUERIES = 48
"""Rows of scores that are formed at once."""
comptime BLOCK_KEYS = 256
"""Columns of scores that are formed at once."""


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
    """Adds a bias to `count` scores. `step` is 1, or 0 where one number serves all keys.
    """
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
    """Turns a row's scores, of which `seen` count, into exp(score - maximum). Returns the factor that rescales earlier
    sums."""
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


struct _HeadKeys[dtype: DType, bias_type: DType, biased: Bool](
    ImplicitlyCopyable, TrivialRegisterPassable
):
    """Keys and values of a head, which one block of queries after the other meets.
    """

    comptime acc = accumulation_type[Self.dtype]
    comptime width = simd_width_of[Self.acc]()

    var t: ForwardPointers[Self.dtype, Self.bias_type]
    var p: AttentionProblem
    var block: Int
    """Keys of a block."""
    var turned_keys: Matrix[Self.acc]
    var values: Matrix[Self.acc]
    var queries: Matrix[Self.acc]
    var scores: Matrix[Self.acc]
    """The scores of a block of keys; then their exponentials."""
    var outputs: Matrix[Self.acc]
    var largest: Ptr[Self.acc]
    var totals: Ptr[Self.acc]
    var room: Int
    """Elements of memory that it takes."""

    @always_inline
    def __init__(
        out self,
        t: ForwardPointers[Self.dtype, Self.bias_type],
        p: AttentionProblem,
        block: Int,
        memory: Ptr[Self.acc],
    ):
        """Assigns every matrix its place in memory; nothing is read or written.
        """
        comptime M = Matrix[Self.acc]
        var room = 0
        var out_pitch = rounded(p.value_size, Self.width)
        self.t = t
        self.p = p
        self.block = block
        self.turned_keys = M.of_panels(
            memory, room, p.size, rounded(p.keys, block)
        )
        self.values = M.of_rows(memory, room, rounded(p.keys, ROWS), out_pitch)
        self.queries = M.of_rows(memory, room, BLOCK_QUERIES, p.size)
        # Rows that one packed product reads one behind the other must not fall into one set of the cache.
        self.scores = M.of_rows(memory, room, BLOCK_QUERIES, block + Self.width)
        self.outputs = M.of_rows(memory, room, BLOCK_QUERIES, out_pitch)
        self.largest = memory.unsafe_offset(room)
        self.totals = self.largest.unsafe_offset(BLOCK_QUERIES)
        self.room = room + 2 * BLOCK_QUERIES

    @always_inline
    def load_keys(self, b: Int, g: Int):
        """Packs the keys and values of a head."""
        var p = self.p
        pack_turned(
            self.turned_keys,
            self.t.key.unsafe_offset(p.key.offset(b, g)),
            p.key.row,
            p.keys,
            p.size,
        )
        pack_rows(
            self.values,
            self.t.value.unsafe_offset(p.value.offset(b, g)),
            p.value.row,
            p.keys,
            p.value_size,
        )

    @always_inline
    def attend(self, b: Int, h: Int, first: Int):
        """Writes output and logsumexp of the block of queries at `first`."""
        var p = self.p
        var rows = min(BLOCK_QUERIES, p.queries - first)
        pack_rows(
            self.queries,
            self.t.query.unsafe_offset(p.query.row_offset(b, h, first)),
            p.query.row,
            rows,
            p.size,
            p.scale.cast[Self.acc](),
        )
        fill(self.outputs.start, BLOCK_QUERIES * self.outputs.pitch, 0)
        fill(self.largest, rows, -inf[Self.acc]())
        fill(self.totals, rows, 0)
        for key in range(0, p.keys, self.block):
            var seen = min(self.block, p.visible(first + rows - 1) - key)
            if seen <= 0:
                break
            self._meet(b, h, first, rows, key, seen)
        for row in range(rows):
            self._store_row(row, b, h, first + row)

    @always_inline
    def _meet(self, b: Int, h: Int, first: Int, rows: Int, key: Int, most: Int):
        """Adds the contributions of the block of keys at `key` to the outputs; a query sees `most` of its keys or
        fewer."""
        comptime acc = Self.acc
        var p = self.p
        var columns = rounded(most, Self.width)
        var bias = self.t.bias.unsafe_offset(
            p.bias_offset(b, h, first) + key * p.bias.key
        )
        product[acc, False, False](
            self.scores,
            self.queries,
            self.turned_keys.behind(panels=key // panel[acc]()),
            rows,
            columns,
            p.size,
        )
        for row in range(rows):
            var query = first + row
            var seen = max(0, min(self.block, p.visible(query) - key))
            comptime if Self.biased:
                add_bias[acc, Self.bias_type](
                    self.scores.row(row),
                    bias.unsafe_offset(row * p.bias.row),
                    p.bias.key,
                    seen,
                )
            var factor = _powers[acc](
                self.scores.row(row),
                seen,
                columns,
                self.largest[unsafe_offset=row],
                self.totals[unsafe_offset=row],
            )
            if key > 0 and factor != 1:
                _scale_row[acc](
                    self.outputs.row(row), self.outputs.pitch, factor
                )
        product[acc, False, True](
            self.outputs,
            self.scores,
            self.values.behind(rows=key),
            rows,
            self.outputs.pitch,
            most,
        )

    @always_inline
    def _store_row(self, row: Int, b: Int, h: Int, query: Int):
        comptime assert Self.acc.is_floating_point(), "attention of floats"
        var p = self.p
        var total = self.totals[unsafe_offset=row]
        var line = self.outputs.row(row)
        var inverse = Scalar[Self.acc](0)
        var sum = Scalar[Self.acc](0)
        if total == 0:
            if p.hidden_is_nan:
                sum = nan[Self.acc]()
            fill(line, self.outputs.pitch, sum)
            inverse = 1
        else:
            inverse = 1 / total
            sum = self.largest[unsafe_offset=row] + log(total)
        self.t.sums[unsafe_offset=p.sums_offset(b, h) + query] = sum
        write_row(
            self.t.output.unsafe_offset(p.output.row_offset(b, h, query)),
            line,
            p.value_size,
            inverse,
        )


@no_inline
def forward_cpu[
    dtype: DType, bias_type: DType, biased: Bool
](at: ForwardPointers[dtype, bias_type], p: AttentionProblem):
    """Writes output and logsumexp."""
    comptime acc = accumulation_type[dtype]
    comptime Share = _HeadKeys[dtype, bias_type, biased]
    var workers = worker_count()
    var heads = p.batch * p.groups
    if heads * p.heads * p.queries == 0:
        return
    var block = key_block[acc](p.keys, BLOCK_KEYS)
    var query_blocks = ceildiv(p.queries, BLOCK_QUERIES)
    # Every stretch packs its keys anew, so that there are only as many as occupy the cores.
    var stretches = min(query_blocks, ceildiv(2 * workers, heads))
    var tasks = heads * stretches
    var shares = min(workers, tasks)
    var room = Share(at, p, block, at.sums).room
    var scratch = unsafe_alloc[Scalar[acc]](
        shares * room, alignment=64
    ).unsafe_origin_cast[MutUntrackedOrigin]()

    @always_inline
    def run(number: Int) {imm}:
        var share = Share(at, p, block, scratch.unsafe_offset(number * room))
        for task in range(number, tasks, shares):
            # Under a causal mask the last queries take longest: they come first.
            var head = task % heads
            var stretch = stretches - 1 - task // heads
            var b = head // p.groups
            var g = head % p.groups
            share.load_keys(b, g)
            for repeat in range(p.repeats()):
                for query_block in range(
                    query_blocks * stretch // stretches,
                    query_blocks * (stretch + 1) // stretches,
                ):
                    share.attend(
                        b, g * p.repeats() + repeat, query_block * BLOCK_QUERIES
                    )

    sync_parallelize(run, shares)
    scratch.unsafe_free()
