"""Interpolation on a GPU where a result reads few elements along H and W: a thread owns a strip of results below each
other.

It holds the rows that a result reads, summed along D and W already, in registers: the next result below reads most of
them again. A thread's results are a vector of channels; or, where there is one channel, of neighbours along W or a
single one.
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
from std.sys import size_of
from std.utils.static_tuple import StaticTuple

from ...common.arithmetic import Divisor
from ...common.gpu import GRID_LIMIT
from ...common.pointer import Ptr, accumulation_type
from ..kernel import InterpolationKernel, InterpolationTensors
from ..problem import Axis, InterpolationProblem, Spans
from .params import THREADS, Params, fits_32_bits, load, store, vector

comptime MAX_TAPS = 4
"""Taps along H and along W, at most."""
comptime MAX_STRIP = 16
comptime SATURATING_THREADS = 1 << 18
"""Threads that keep a large GPU busy: longer strips are worth it only while so many remain."""
comptime ALONG_W = 4
"""Neighbours along W that a thread has."""
comptime MAX_HELD = 16
"""Elements that a thread loads before it uses the first."""


struct _Columns[Acc: DType, V: Int, T: Int, along_w: Bool](Movable):
    """The elements that a thread reads of every row: for each of its results the first one, how many, and their
    weights."""

    comptime lanes = Self.V if Self.along_w else 1
    var first: SIMD[DType.int32, Self.lanes]
    """The first elements' offsets in the row."""
    var last: SIMD[DType.int32, Self.lanes]
    """The number of taps, less one; -1 for none."""
    var weights: Array[SIMD[Self.Acc, Self.lanes], Self.T]

    @always_inline
    def __init__(out self, axis: Axis[Self.Acc], w: Int32):
        self.first = SIMD[DType.int32, Self.lanes](0)
        self.last = SIMD[DType.int32, Self.lanes](0)
        self.weights = Array[SIMD[Self.Acc, Self.lanes], Self.T](
            fill=SIMD[Self.Acc, Self.lanes](0)
        )
        comptime for lane in range(Self.lanes):
            var result = min(w + Int32(lane), axis.results - 1)
            self.first[lane] = axis.first(result)
            self.last[lane] = axis.count(result) - 1
            if w + Int32(lane) >= axis.results:
                self.last[lane] = -1
            comptime for k in range(Self.T):
                if Int32(k) <= self.last[lane]:
                    self.weights[k][lane] = axis.weight(result, Int32(k))

    @always_inline
    def load[
        dtype: DType, N: Int, //, start: Int
    ](
        self,
        mut values: Array[SIMD[dtype, Self.V], N],
        row: Ptr[dtype],
        channels: Int32,
    ):
        """Stores the elements that are read of a row at `start`; `row` points to its element at W = 0. There are no
        branches, which would serialize a thread's loads: the last tap is read again in place of taps behind it, which
        `sum` leaves out."""
        comptime for k in range(Self.T):
            comptime if Self.along_w:
                comptime for lane in range(Self.V):
                    var tap = max(min(Int32(k), self.last[lane]), 0)
                    values[start + k][lane] = row[
                        unsafe_offset=Int(self.first[lane] + tap)
                    ]
            else:
                var tap = max(min(Int32(k), self.last[0]), 0)
                values[start + k] = load[Self.V](
                    row, (self.first[0] + tap) * channels
                )

    @always_inline
    def sum[
        dtype: DType, N: Int, //, start: Int
    ](self, values: Array[SIMD[dtype, Self.V], N]) -> SIMD[Self.Acc, Self.V]:
        """Sums the elements that `load` stored there."""
        var total = SIMD[Self.Acc, Self.V](0)
        comptime for k in range(Self.T):
            var read: SIMD[DType.bool, Self.V]
            var weight: SIMD[Self.Acc, Self.V]
            comptime if Self.along_w:
                read = rebind[SIMD[DType.int32, Self.V]](self.last).ge(Int32(k))
                weight = rebind[SIMD[Self.Acc, Self.V]](self.weights[k])
            else:
                read = SIMD[DType.bool, Self.V](fill=Int32(k) <= self.last[0])
                weight = SIMD[Self.Acc, Self.V](self.weights[k][0])
            total += (
                read.select(
                    values[start + k].cast[Self.Acc](),
                    SIMD[Self.Acc, Self.V](0),
                )
                * weight
            )
        return total


@always_inline
def _add_rows[
    dtype: DType, Acc: DType, V: Int, T: Int, along_w: Bool, //
](
    mut held: Array[SIMD[Acc, V], T],
    wanted: Array[Bool, T],
    x: Ptr[dtype],
    p: Params[Acc],
    columns: _Columns[Acc, V, T, along_w],
    d_first: Int32,
    d_count: Int32,
    d_weight: Scalar[Acc],
    d: Int32,
    first: Int32,
):
    """Adds the sums along W of the rows that are wanted, from row `first` of each slab that result `d` reads on;
    `d_weight` is the first slab's.
    """
    # Rows that are loaded before the first is added up, as far as registers hold them.
    comptime group = max(min(T, MAX_HELD // (V * T)), 1)
    for a in range(d_count):
        var slab_weight = d_weight
        if a > 0:
            slab_weight = p.d.weight(d, a)
        var slab_row = (d_first + a) * p.h.extent + first
        comptime for begin in range(0, T, group):
            var values = Array[SIMD[dtype, V], group * T](
                fill=SIMD[dtype, V](0)
            )
            comptime for k in range(begin, min(begin + group, T)):
                if wanted[k]:
                    var row = (slab_row + Int32(k)) * p.w.extent * p.channels
                    columns.load[(k - begin) * T](
                        values,
                        x.unsafe_offset(Int(row)),
                        p.channels,
                    )
            comptime for k in range(begin, min(begin + group, T)):
                if wanted[k]:
                    held[k] += (
                        columns.sum[(k - begin) * T](values) * slab_weight
                    )


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
    """Runs one thread: strip `item` of every slab that it comes to."""
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
    var has_whole_rows = (
        p.w.results % Int32(V) == 0 and Int(y) % (V * size_of[dtype]()) == 0
    )
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
        var d_weight = p.d.weight(d, 0)
        var next_first = p.h.first(h_first)
        var next_count = p.h.count(h_first)
        for h in range(h_first, h_end):
            # What the next result needs of the tables is on its way meanwhile.
            var first = next_first
            var count = next_count
            var behind = min(h + 1, p.h.results - 1)
            next_first = p.h.first(behind)
            next_count = p.h.count(behind)
            var weights = Array[Scalar[Acc], T](fill=0)
            comptime for k in range(T):
                weights[k] = p.h.weight(h, min(Int32(k), p.h.most - 1))
            var move = first - base
            base = first
            if move >= Int32(T):
                there = 0
            else:
                for _ in range(move):
                    comptime for k in range(T - 1):
                        held[k] = held[k + 1]
                there = max(there - move, 0)
            var wanted = Array[Bool, T](fill=False)
            comptime for k in range(T):
                wanted[k] = Int32(k) >= there and Int32(k) < count
                if wanted[k]:
                    held[k] = SIMD[Acc, V](0)
            _add_rows(
                held,
                wanted,
                x_n,
                p,
                columns,
                d_first,
                d_count,
                d_weight,
                d,
                first,
            )
            there = max(there, count)
            var total = SIMD[Acc, V](0)
            comptime for k in range(T):
                if Int32(k) < count:
                    total += held[k] * weights[k]
            var at = ((d * p.h.results + h) * p.w.results + w) * p.channels + c
            comptime if along_w:
                if not has_whole_rows:
                    comptime for lane in range(V):
                        if w + Int32(lane) < p.w.results:
                            y_n[unsafe_offset=Int(at) + lane] = total[
                                lane
                            ].cast[dtype]()
                    continue
            store(y_n, at, total.cast[dtype]())
        slab += slab_step


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS))
)
@__name(t"interpolate_strips_{dtype}_v{V}_t{T}_w{along_w}")
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
    """Runs the strips of all threads. Where vectors hold channels, `by_vectors` divides by the vectors of a pixel and
    `by_columns` by W; along W, by 1 and by the vectors of a row."""
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
    var columns = ceildiv(Int(p.w.results), V) if along_w else Int(p.w.results)
    var slabs = Int(p.batch) * Int(p.d.results)
    var threads = vectors * columns * slabs * Int(p.h.results)
    var rows = max(
        min(min(threads // SATURATING_THREADS, MAX_STRIP), Int(p.h.results)), 1
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
    var block_x = items
    if items > THREADS:
        # Blocks of equal shares, in whole warps.
        block_x = ceildiv(ceildiv(items, ceildiv(items, THREADS)), 32) * 32
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


def _is_along_w[Acc: DType](p: InterpolationProblem[Acc], T: Int) -> Bool:
    """Returns whether a thread of planes takes neighbours along W; with many taps these take many registers.
    """
    if p.channels != 1:
        return False
    if T == MAX_TAPS:
        return Int(p.w.results) % ALONG_W == 0 and p.w.results >= p.w.extent
    return p.w.results >= 3 and 2 * p.w.results >= p.w.extent


struct Strips[target: StaticString](InterpolationKernel):
    """Interpolation in strips of rows. Tests run it on a CPU, too, lane by lane.
    """

    comptime NAME: StaticString = "strips"

    @staticmethod
    def refusal[
        dtype: DType
    ](
        t: InterpolationTensors[dtype],
        p: InterpolationProblem[accumulation_type[dtype]],
        spans: Spans,
    ) -> Optional[String]:
        if Int(max(p.h.most, p.w.most)) > MAX_TAPS:
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
        comptime for T in [1, 2, MAX_TAPS]:
            if taps <= T:
                if aligned and Int(p.channels) % V == 0:
                    _launch[Self.target, dtype, V, T, False](ctx, t, p)
                elif _is_along_w(p, T):
                    _launch[Self.target, dtype, ALONG_W, T, True](ctx, t, p)
                else:
                    _launch[Self.target, dtype, 1, T, False](ctx, t, p)
                return
