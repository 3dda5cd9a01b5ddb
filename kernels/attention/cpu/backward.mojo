"""The gradients on a CPU: blocks of keys meet all blocks of queries that see them, five products each.

One task is a head of keys, or, where there are fewer heads than cores, some of its blocks of keys. Then each task has a
gradient of the queries of its own, and a second stage adds them in order.
"""

from std.math import ceildiv
from std.memory.alloc import unsafe_alloc
from std.sys.info import simd_width_of

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
from ..pointers import BackwardPointers
from ..problem import AttentionProblem
from .exponential import exponential
from .forward import BLOCK_KEYS, BLOCK_QUERIES, add_bias, key_block


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
    """Turns a row of S into one of P, and a row of dO V^T into one of dS; elements from `seen` on become zero.
    """
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
    acc: DType, dtype: DType
](target: Ptr[dtype], slopes: Ptr[acc], seen: Int, count: Int):
    """A row of the bias's gradient: zeros from `seen` on."""
    write_row[dtype, acc](target, slopes, seen, 1)
    fill[dtype](target.unsafe_offset(seen), count - seen, 0)


@always_inline
def _store_queries[
    dtype: DType, acc: DType
](at: Ptr[dtype], grads: Matrix[acc], p: AttentionProblem, b: Int, g: Int):
    """Writes the gradients of the queries whose heads share one head of keys: grads [repeats, M rounded up to ROWS,
    D]."""
    for repeat in range(p.repeats()):
        var of_head = grads.behind(rows=repeat * rounded(p.queries, ROWS))
        for row in range(p.queries):
            var h = g * p.repeats() + repeat
            write_row(
                at.unsafe_offset(p.query_grad.row_offset(b, h, row)),
                of_head.row(row),
                p.size,
                p.scale.cast[acc](),
            )


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
                    at.unsafe_offset(p.query_grad.row_offset(b, h, row)),
                    line,
                    p.size,
                    p.scale.cast[acc](),
                )

    sync_parallelize(add, workers)


struct _KeyBlock[
    dtype: DType, bias_type: DType, biased: Bool, bias_wanted: Bool
](ImplicitlyCopyable, TrivialRegisterPassable):
    """A block of keys and values, which meets one block of queries after the other.
    """

    comptime acc = accumulation_type[Self.dtype]
    comptime width = simd_width_of[Self.acc]()

    var t: BackwardPointers[Self.dtype, Self.bias_type]
    var p: AttentionProblem
    var turned_keys: Matrix[Self.acc]
    var turned_values: Matrix[Self.acc]
    var keys: Matrix[Self.acc]
    var key_grads: Matrix[Self.acc]
    var value_grads: Matrix[Self.acc]
    var queries: Matrix[Self.acc]
    var grads: Matrix[Self.acc]
    """Rows of the output's gradient."""
    var powers: Matrix[Self.acc]
    """S, then P."""
    var slopes: Matrix[Self.acc]
    """dO V^T, then dS."""
    var tall: Int
    """Rows of keys, to whole tiles of a product."""
    var room: Int
    """Elements of memory that it takes."""

    @always_inline
    def __init__(
        out self,
        t: BackwardPointers[Self.dtype, Self.bias_type],
        p: AttentionProblem,
        block: Int,
        memory: Ptr[Self.acc],
    ):
        """Assigns every matrix its place in memory; nothing is read or written.
        """
        var room = 0
        comptime M = Matrix[Self.acc]
        var size = rounded(p.size, Self.width)
        var value_size = rounded(p.value_size, Self.width)
        self.t = t
        self.p = p
        self.tall = rounded(block, ROWS)
        # Whole tiles of keys, when P and dS are read turned.
        var pitch = max(block + Self.width, rounded(self.tall, Self.width))
        self.turned_keys = M.of_panels(memory, room, p.size, block)
        self.turned_values = M.of_panels(memory, room, p.value_size, block)
        self.keys = M.of_rows(memory, room, self.tall, size)
        self.key_grads = M.of_rows(memory, room, self.tall, size)
        self.value_grads = M.of_rows(memory, room, self.tall, value_size)
        self.queries = M.of_rows(memory, room, BLOCK_QUERIES, size)
        self.grads = M.of_rows(memory, room, BLOCK_QUERIES, value_size)
        self.powers = M.of_rows(memory, room, BLOCK_QUERIES, pitch)
        self.slopes = M.of_rows(memory, room, BLOCK_QUERIES, pitch)
        self.room = room

    @always_inline
    def load_keys(self, b: Int, g: Int, key: Int, count: Int):
        """Packs a block of keys and values; their gradients begin with zeros.
        """
        var p = self.p
        var keys = self.t.key.unsafe_offset(p.key.row_offset(b, g, key))
        var values = self.t.value.unsafe_offset(p.value.row_offset(b, g, key))
        pack_turned(self.turned_keys, keys, p.key.row, count, p.size)
        pack_turned(
            self.turned_values, values, p.value.row, count, p.value_size
        )
        pack_rows(self.keys, keys, p.key.row, count, p.size)
        fill(self.key_grads.start, self.tall * self.key_grads.pitch, 0)
        fill(self.value_grads.start, self.tall * self.value_grads.pitch, 0)

    @always_inline
    def store_keys(self, b: Int, g: Int, key: Int, count: Int):
        """Writes the gradients of a block of keys and values."""
        var p = self.p
        for row in range(count):
            write_row(
                self.t.key_grad.unsafe_offset(
                    p.key_grad.row_offset(b, g, key + row)
                ),
                self.key_grads.row(row),
                p.size,
            )
            write_row(
                self.t.value_grad.unsafe_offset(
                    p.value_grad.row_offset(b, g, key + row)
                ),
                self.value_grads.row(row),
                p.value_size,
            )

    @always_inline
    def meet(
        self,
        query_grads: Matrix[Self.acc],
        b: Int,
        h: Int,
        first: Int,
        key: Int,
        count: Int,
    ):
        """Adds the contributions of the block of queries at `first` to the gradients of the keys and values at `key`,
        and the keys' contributions to the gradients of those queries."""
        comptime acc = Self.acc
        var p = self.p
        var rows = min(BLOCK_QUERIES, p.queries - first)
        var most = min(count, p.visible(first + rows - 1) - key)
        var columns = rounded(max(0, most), Self.width)
        pack_rows(
            self.queries,
            self.t.query.unsafe_offset(p.query.row_offset(b, h, first)),
            p.query.row,
            rows,
            p.size,
            p.scale.cast[acc](),
        )
        pack_rows(
            self.grads,
            self.t.grad.unsafe_offset(p.output.row_offset(b, h, first)),
            p.output.row,
            rows,
            p.value_size,
        )
        product[acc, False, False](
            self.powers, self.queries, self.turned_keys, rows, columns, p.size
        )
        product[acc, False, False](
            self.slopes,
            self.grads,
            self.turned_values,
            rows,
            columns,
            p.value_size,
        )
        var output = self.t.output.unsafe_offset(
            p.output.row_offset(b, h, first)
        )
        var bias = self.t.bias.unsafe_offset(
            p.bias_offset(b, h, first) + key * p.bias.key
        )
        # Products with P and dS turned read whole tiles of keys.
        var filled = max(columns, rounded(max(0, most), ROWS))
        for row in range(rows):
            self._differentiate_row(
                row,
                p.sums_offset(b, h) + first + row,
                bias.unsafe_offset(row * p.bias.row),
                output.unsafe_offset(row * p.output.row),
                max(0, min(count, p.visible(first + row) - key)),
                key,
                count,
                filled,
            )
        if most <= 0:
            return
        product[acc, False, True](
            query_grads, self.slopes, self.keys, rows, self.keys.pitch, most
        )
        product[acc, True, True](
            self.value_grads,
            self.powers,
            self.grads,
            most,
            self.grads.pitch,
            rows,
        )
        product[acc, True, True](
            self.key_grads,
            self.slopes,
            self.queries,
            most,
            self.queries.pitch,
            rows,
        )

    @always_inline
    def _differentiate_row(
        self,
        row: Int,
        sums: Int,
        bias: Ptr[Self.bias_type],
        output: Ptr[Self.dtype],
        seen: Int,
        key: Int,
        count: Int,
        filled: Int,
    ):
        """Turns a row of S, of whose `count` keys `seen` are visible, into one of P, and a row of dO V^T into one of
        dS. `sums` is the row's place in logsumexp; its bias and output are given.
        """
        comptime acc = Self.acc
        var p = self.p
        comptime if Self.biased:
            add_bias[acc, Self.bias_type](
                self.powers.row(row),
                bias,
                p.bias.key,
                seen,
            )
        _gradients[acc](
            self.powers.row(row),
            self.slopes.row(row),
            seen,
            filled,
            self.t.sums[unsafe_offset=sums],
            _delta[Self.dtype, acc](
                self.grads.row(row),
                output,
                p.value_size,
            ),
        )
        comptime if Self.bias_wanted:
            _write_slopes[acc, Self.dtype](
                self.t.bias_grad.unsafe_offset(sums * p.keys + key),
                self.slopes.row(row),
                seen,
                count,
            )


@no_inline
def backward_cpu[
    dtype: DType, bias_type: DType, biased: Bool, bias_wanted: Bool
](at: BackwardPointers[dtype, bias_type], p: AttentionProblem):
    """Writes the gradients."""
    comptime acc = accumulation_type[dtype]
    comptime Share = _KeyBlock[dtype, bias_type, biased, bias_wanted]
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
    var pitch = rounded(p.size, simd_width_of[acc]())
    # A product of the last block of queries ends at a multiple of ROWS.
    var head_size = rounded(p.queries, ROWS) * pitch
    var part_size = p.repeats() * head_size
    var room = Share(at, p, block, at.sums).room
    # One behind the other: a share's scratch, then the gradients of the queries.
    var scratch = unsafe_alloc[Scalar[acc]](
        shares * room + (shares if chunks == 1 else tasks) * part_size,
        alignment=64,
    ).unsafe_origin_cast[MutUntrackedOrigin]()
    var parts = scratch.unsafe_offset(shares * room)

    @always_inline
    def run(number: Int) {imm}:
        var share = Share(at, p, block, scratch.unsafe_offset(number * room))
        # What a product reads behind the last column must be a number.
        fill(share.powers.start, BLOCK_QUERIES * share.powers.pitch, 0)
        fill(share.slopes.start, BLOCK_QUERIES * share.slopes.pitch, 0)
        for task in range(number, tasks, shares):
            var chunk = task % chunks
            var b = task // chunks // p.groups
            var g = task // chunks % p.groups
            var part = parts.unsafe_offset(
                (number if chunks == 1 else task) * part_size
            )
            fill(part, part_size, 0)
            var grads = Matrix[acc](part, pitch, panel[acc]())
            for i in range(
                blocks * chunk // chunks, blocks * (chunk + 1) // chunks
            ):
                var key = i * block
                var count = min(block, p.keys - key)
                share.load_keys(b, g, key, count)
                var begin = 0 if bias_wanted else p.first_query(key)
                begin -= begin % BLOCK_QUERIES
                for repeat in range(p.repeats()):
                    var of_head = grads.behind(
                        rows=repeat * rounded(p.queries, ROWS)
                    )
                    for first in range(begin, p.queries, BLOCK_QUERIES):
                        share.meet(
                            of_head.behind(rows=first),
                            b,
                            g * p.repeats() + repeat,
                            first,
                            key,
                            count,
                        )
                share.store_keys(b, g, key, count)
            if chunks == 1:
                _store_queries(at.query_grad, grads, p, b, g)

    sync_parallelize(run, shares)
    if chunks > 1:
        _add_queries[dtype, acc](
            at.query_grad, parts, p, part_size, chunks, pitch, workers
        )
    scratch.unsafe_free()
