"""Interpolation on a GPU where a result reads few elements along H and W: a thread owns a strip of results below each
other.

It holds the rows that a result reads, summed along D and W already, in registers: the next result below reads most of them
again. A thread's results are a vector of channels; or, where there is one channel, of neighbours along W or a single one.
"""

from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    block_dim,
    block_idx,
    grid_dim,
    thread_idx,
)
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_cpu
from std.math import ceildiv
from std.utils.static_tuple import StaticTuple

from ...common.arithmetic import Divisor
from ...common.pointer import Ptr, accumulation_type
from ..kernel import InterpolationKernel, InterpolationTensors
from ..problem import Axis, InterpolationProblem, Spans
from .params import THREADS, Params, fits_32_bits, load, store, vector

comptime MOST_TAPS = 4
"""Along H and along W."""
comptime LONGEST_STRIP = 16
comptime BUSY = 1 << 18
"""Threads that keep a large GPU busy: longer strips are worth it only while so many remain."""
comptime ALONG_W = 4
"""Neighbours along W that a thread has."""
comptime GRID_LIMIT = 65535


struct _Columns[Acc: DType, V: Int, T: Int, along_w: Bool](Movable):
    """What a thread reads of every row: for each of its results the first element, how many, and their weights.
    """

    comptime lanes = Self.V if Self.along_w else 1
    var first: SIMD[DType.int32, Self.lanes]
    """Of the elements, in the row."""
    var last: SIMD[DType.int32, Self.lanes]
    """Taps, less one; -1 for none."""
    var weights: Array[SIMD[Self.Acc, Self.lanes], Self.T]

    @always_inline
    def __init__(out self, axis: Axis[Self.Acc], w: Int32):
        self.first = SIMD[DType.int32, Self.lanes](0)
        self.last = SIMD[DType.int32, Self.lanes](0)
        self.weights = Array[SIMD[Self.Acc, Self.lanes], Self.T](
            fill=SIMD[Self.Acc, Self.lanes](0)
        )
        comptime for lane in range(Self.lanes):
            var result = w + Int32(lane)
            self.first[lane] = axis.first(result)
            self.last[lane] = axis.count(result) - 1
            comptime for k in range(Self.T):
                if Int32(k) <= self.last[lane]:
                    self.weights[k][lane] = axis.weight(result, Int32(k))

    @always_inline
    def of[
        dtype: DType
    ](self, row: Ptr[dtype], channels: Int32) -> SIMD[Self.Acc, Self.V]:
        """The sums of a row, whose first element at W = 0 `row` points to."""
        var total = SIMD[Self.Acc, Self.V](0)
        comptime for k in range(Self.T):
            comptime if Self.along_w:
                var value = SIMD[dtype, Self.V](0)
                comptime for lane in range(Self.V):
                    if Int32(k) <= self.last[lane]:
                        value[lane] = row[
                            unsafe_offset=Int(self.first[lane] + Int32(k))
                        ]
                total += value.cast[Self.Acc]() * rebind[
                    SIMD[Self.Acc, Self.V]
                ](self.weights[k])
            else:
                if Int32(k) <= self.last[0]:
                    var value = load[Self.V](
                        row, (self.first[0] + Int32(k)) * channels
                    )
                    total += value.cast[Self.Acc]() * self.weights[k][0]
        return total


@always_inline
def _thread[
    dtype: DType, V: Int, T: Int, along_w: Bool
](
    y: Ptr[dtype],
    x: Ptr[dtype],
    p: Params[accumulation_type[dtype]],
    by_vectors: Divisor,
    by_columns: Divisor,
    rows: Int32,
    item: Int32,
    first_slab: Int32,
    slab_step: Int32,
):
    """What a thread does: strip `item` of every slab that it comes to."""
    comptime Acc = accumulation_type[dtype]
    var column, vector_of_pixel = by_vectors.divide(item)
    var strip, place = by_columns.divide(column)
    var h_first = strip * rows
    if h_first >= p.h.results:
        return
    var h_end = min(h_first + rows, p.h.results)
    var c = vector_of_pixel * Int32(V)
    var w = place
    comptime if along_w:
        c = 0
        w = place * Int32(V)
    var columns = _Columns[Acc, V, T, along_w](p.w, w)
    var slab = first_slab
    while slab < p.slabs:
        var n, d = p.by_depth.divide(slab)
        var d_first = p.d.first(d)
        var d_count = p.d.count(d)
        var x_n = x.unsafe_offset(Int(n) * p.sources() + Int(c))
        var y_n = y.unsafe_offset(Int(n) * p.results())
        var held = Array[SIMD[Acc, V], T](fill=SIMD[Acc, V](0))
        # The row that held[0] is the sum of, and how many are held.
        var base = Int32(0)
        var there = Int32(0)
        for h in range(h_first, h_end):
            var first = p.h.first(h)
            var count = p.h.count(h)
            var move = first - base
            base = first
            if move >= Int32(T):
                there = 0
            else:
                for _ in range(move):
                    comptime for k in range(T - 1):
                        held[k] = held[k + 1]
                there = max(there - move, 0)
            comptime for k in range(T):
                if Int32(k) >= there and Int32(k) < count:
                    var sum = SIMD[Acc, V](0)
                    for a in range(d_count):
                        var row = (
                            ((d_first + a) * p.h.extent + first + Int32(k))
                            * p.w.extent
                            * p.channels
                        )
                        sum += columns.of(
                            x_n.unsafe_offset(Int(row)), p.channels
                        ) * p.d.weight(d, a)
                    held[k] = sum
            there = max(there, count)
            var total = SIMD[Acc, V](0)
            comptime for k in range(T):
                if Int32(k) < count:
                    total += held[k] * p.h.weight(h, Int32(k))
            store(
                y_n,
                ((d * p.h.results + h) * p.w.results + w) * p.channels + c,
                total.cast[dtype](),
            )
        slab += slab_step


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS))
)
def interpolate_strips[
    dtype: DType, V: Int, T: Int, along_w: Bool
](
    y: Ptr[dtype],
    x: Ptr[dtype],
    p: Params[accumulation_type[dtype]],
    by_vectors: Divisor,
    by_columns: Divisor,
    rows: Int32,
):
    """By channels `by_vectors` divides by the vectors of a pixel and `by_columns` by W; along W by 1 and by the vectors of
    a row."""
    _thread[dtype, V, T, along_w](
        y,
        x,
        p,
        by_vectors,
        by_columns,
        rows,
        Int32(block_idx.x * block_dim.x + thread_idx.x),
        Int32(block_idx.y * block_dim.y + thread_idx.y),
        Int32(grid_dim.y * block_dim.y),
    )


@always_inline
def _launch[
    target: StaticString, dtype: DType, V: Int, T: Int, along_w: Bool
](
    ctx: DeviceContext,
    t: InterpolationTensors[dtype],
    p: InterpolationProblem[accumulation_type[dtype]],
) raises:
    var vectors = 1 if along_w else Int(p.channels) // V
    var columns = Int(p.w.results) // V if along_w else Int(p.w.results)
    var slabs = Int(p.batch) * Int(p.d.results)
    var threads = vectors * columns * slabs * Int(p.h.results)
    var rows = max(
        min(min(threads // BUSY, LONGEST_STRIP), Int(p.h.results)), 1
    )
    var items = vectors * columns * ceildiv(Int(p.h.results), rows)
    comptime if is_cpu[target]():
        for item in range(items):
            _thread[dtype, V, T, along_w](
                t.y,
                t.x,
                Params(p),
                Divisor(vectors),
                Divisor(columns),
                Int32(rows),
                Int32(item),
                0,
                1,
            )
        return
    var block_x = min(THREADS, items)
    var block_y = THREADS // block_x
    ctx.enqueue_function[interpolate_strips[dtype, V, T, along_w]](
        t.y,
        t.x,
        Params(p),
        Divisor(vectors),
        Divisor(columns),
        Int32(rows),
        grid_dim=(
            ceildiv(items, block_x),
            min(ceildiv(slabs, block_y), GRID_LIMIT),
        ),
        block_dim=(block_x, block_y),
    )


struct Strips[target: StaticString](InterpolationKernel):
    """For tests a CPU runs it, too, lane by lane."""

    comptime NAME: StaticString = "strips"

    @staticmethod
    def can_implement[
        dtype: DType
    ](
        t: InterpolationTensors[dtype],
        p: InterpolationProblem[accumulation_type[dtype]],
        spans: Spans,
    ) -> Optional[String]:
        if Int(max(p.h.most, p.w.most)) > MOST_TAPS:
            return String("a result reads more than four rows or columns")
        if not fits_32_bits(p):
            return String("a sample is too large for 32-bit numbers")
        return None

    @staticmethod
    def launch[
        dtype: DType
    ](
        ctx: DeviceContext,
        t: InterpolationTensors[dtype],
        p: InterpolationProblem[accumulation_type[dtype]],
        spans: Spans,
    ) raises:
        comptime V = vector[dtype]()
        var taps = Int(max(p.h.most, p.w.most))
        var aligned = t.are_aligned()
        comptime for T in [1, 2, MOST_TAPS]:
            if taps <= T:
                if aligned and Int(p.channels) % V == 0:
                    _launch[Self.target, dtype, V, T, False](ctx, t, p)
                elif (
                    aligned
                    and p.channels == 1
                    and Int(p.w.results) % ALONG_W == 0
                    and p.w.results >= p.w.extent
                ):
                    _launch[Self.target, dtype, ALONG_W, T, True](ctx, t, p)
                else:
                    _launch[Self.target, dtype, 1, T, False](ctx, t, p)
                return
