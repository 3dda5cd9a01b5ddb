"""Pooling on a GPU by gathering, for every window: neighbouring threads hold neighbouring vectors of channels.

A thread's vector is 16 bytes wide where C allows it, one element where it does not; with C = 1 that makes these the
general kernels for contiguous NCHW too. In a gradient a thread owns `rows` consecutive input rows of one column, so
that what neighbouring rows read again comes from the L1 cache. No result is written twice, none needs an atomic, and the
bits are the same on every run.
"""

from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    block_dim,
    block_idx,
    grid_dim,
    thread_idx,
)
from max.gpu.host import DeviceContext
from std.math import ceildiv
from std.sys import size_of
from std.utils.numerics import neg_inf
from std.utils.static_tuple import StaticTuple

from ...arithmetic import Divisor
from ..problem import Data, PoolingAxis, PoolingProblem, accumulator
from .problem import THREADS, GpuProblem, LaunchShape, uniform_scale


@always_inline
def _load[
    dtype: DType, //, V: Int
](data: Data[dtype], at: Int32) -> SIMD[dtype, V]:
    comptime bytes = min(V * size_of[dtype](), 16)
    return data.unsafe_load[width=V, alignment=bytes](Int(at))


@always_inline
def _store[
    dtype: DType, V: Int, //
](data: Data[dtype], at: Int32, value: SIMD[dtype, V]):
    comptime bytes = min(V * size_of[dtype](), 16)
    data.unsafe_store[alignment=bytes](Int(at), value)


@fieldwise_init
struct Place(TrivialRegisterPassable):
    """What a thread works on: `c` its first channel, `w` its column, `strip` its strip of rows.
    """

    var c: Int32
    var w: Int32
    var strip: Int32


@always_inline
def _place[V: Int](by_vectors: Divisor, by_width: Divisor) -> Place:
    var item = Int32(block_idx.x * block_dim.x + thread_idx.x)
    var pixel, vector = by_vectors.divide(item)
    var strip, w = by_width.divide(pixel)
    return Place(vector * Int32(V), w, strip)


@always_inline
def _first_slab() -> Int32:
    return Int32(block_idx.y * block_dim.y + thread_idx.y)


@always_inline
def _slab_step() -> Int32:
    return Int32(grid_dim.y * block_dim.y)


def max_pool_dgrad_gather[
    dtype: DType, index: DType, V: Int, adaptive: Bool, offsets: Bool
](
    dx: Data[dtype],
    dy: Data[dtype],
    indices: Data[index],
    p: GpuProblem,
    rows: Int32,
):
    comptime Acc = accumulator[dtype]
    var at = _place[V](p.by_vectors, p.w.by_input)
    var h_first = at.strip * rows
    if h_first >= p.h.input:
        return
    var h_end = min(h_first + rows, p.h.input)
    var rw = p.w.outputs_over[adaptive](at.w)
    var slab = _first_slab()
    while slab < p.slabs:
        var n, d = p.d.by_input.divide(slab)
        var rd = p.d.outputs_over[adaptive](d)
        var sample = Int(n) * Int(p.output_plane() * p.channels)
        var dy_n = dy.unsafe_offset(sample)
        var indices_n = indices.unsafe_offset(sample)
        var dx_n = dx.unsafe_offset(Int(n) * Int(p.input_plane() * p.channels))
        for h in range(h_first, h_end):
            var rh = p.h.outputs_over[adaptive](h)
            var pixel = (d * p.h.input + h) * p.w.input + at.w
            var total = SIMD[Acc, V](0)
            for od in range(rd[0], rd[1]):
                for oh in range(rh[0], rh[1]):
                    var row = (od * p.h.output + oh) * p.w.output
                    for ow in range(rw[0], rw[1]):
                        var o = (row + ow) * p.channels + at.c
                        var wanted = pixel
                        comptime if offsets:
                            var kd, skipped_d = p.d.by_dilation.divide(
                                d - p.d.origin(od)
                            )
                            var kh, skipped_h = p.h.by_dilation.divide(
                                h - p.h.origin(oh)
                            )
                            var kw, skipped_w = p.w.by_dilation.divide(
                                at.w - p.w.origin(ow)
                            )
                            if (skipped_d | skipped_h | skipped_w) != 0:
                                continue
                            wanted = (kd * p.h.window + kh) * p.w.window + kw
                        var hit = _load[V](indices_n, o).eq(
                            SIMD[index, V](Scalar[index](wanted))
                        )
                        total += hit.select(
                            _load[V](dy_n, o).cast[Acc](), SIMD[Acc, V](0)
                        )
            _store(dx_n, pixel * p.channels + at.c, total.cast[dtype]())
        slab += _slab_step()


@always_inline
def _row_sum[
    dtype: DType, //, V: Int, adaptive: Bool
](
    dy: Data[dtype],
    p: GpuProblem,
    d_range: Tuple[Int32, Int32],
    w_range: Tuple[Int32, Int32],
    oh: Int32,
    c: Int32,
) -> SIMD[accumulator[dtype], V]:
    """What the windows `oh` above a pixel send it: dy over its divisor, over D and W.
    """
    comptime Acc = accumulator[dtype]
    var include = p.include_pad != 0
    var total = SIMD[Acc, V](0)
    for od in range(d_range[0], d_range[1]):
        var row = (od * p.h.output + oh) * p.w.output
        var part = SIMD[Acc, V](0)
        for ow in range(w_range[0], w_range[1]):
            var g = _load[V](dy, (row + ow) * p.channels + c).cast[Acc]()
            if p.scale != 0:
                part += g
            else:
                part += g * Scalar[Acc](p.w.scale[adaptive](ow, include))
        if p.scale == 0:
            part *= Scalar[Acc](p.d.scale[adaptive](od, include))
        total += part
    if p.scale != 0:
        return total * Scalar[Acc](p.scale)
    return total * Scalar[Acc](p.h.scale[adaptive](oh, include))


def avg_pool_dgrad_gather[
    dtype: DType, V: Int, L: Int, adaptive: Bool
](dx: Data[dtype], dy: Data[dtype], p: GpuProblem, rows: Int32):
    """No more than `L` windows lie above one position on the H axis. The sum over D and W of each output row is taken
    once and kept in a ring of L, out of which every input row takes those above it. L = 0: no ring, for any number.
    """
    comptime Acc = accumulator[dtype]
    var at = _place[V](p.by_vectors, p.w.by_input)
    var h_first = at.strip * rows
    if h_first >= p.h.input:
        return
    var h_end = min(h_first + rows, p.h.input)
    var rw = p.w.outputs_over[adaptive](at.w)
    var slab = _first_slab()
    while slab < p.slabs:
        var n, d = p.d.by_input.divide(slab)
        var rd = p.d.outputs_over[adaptive](d)
        var dy_n = dy.unsafe_offset(Int(n) * Int(p.output_plane() * p.channels))
        var dx_n = dx.unsafe_offset(Int(n) * Int(p.input_plane() * p.channels))
        var ring = Array[SIMD[Acc, V], max(L, 1)](fill=SIMD[Acc, V](0))
        var next = p.h.outputs_over[adaptive](h_first)[0]
        for h in range(h_first, h_end):
            var rh = p.h.outputs_over[adaptive](h)
            var sum = SIMD[Acc, V](0)
            comptime if L == 0:
                for oh in range(rh[0], rh[1]):
                    sum += _row_sum[V, adaptive](dy_n, p, rd, rw, oh, at.c)
            else:
                while next < rh[1]:
                    comptime for j in range(L - 1):
                        ring[j] = ring[j + 1]
                    ring[L - 1] = _row_sum[V, adaptive](
                        dy_n, p, rd, rw, next, at.c
                    )
                    next += 1
                comptime for j in range(L):
                    if next - Int32(L - j) >= rh[0]:
                        sum += ring[j]
            var pixel = (d * p.h.input + h) * p.w.input + at.w
            _store(dx_n, pixel * p.channels + at.c, sum.cast[dtype]())
        slab += _slab_step()


comptime AHEAD = 4
"""Taps of a window that are loaded before the first is looked at."""
comptime BLOCKS = 4
"""Blocks that a multiprocessor shall hold: with registers for these loads, which the compiler would not take unasked.
"""


@fieldwise_init
struct Taps(TrivialRegisterPassable):
    """A walk over the taps of a window in one slab, row by row."""

    var pixel: Int32
    var tap: Int32
    """Number of the tap in its window."""
    var left: Int32
    """Taps of this row from here on."""

    @always_inline
    def next[count_taps: Bool](mut self, count: Int32, p: GpuProblem):
        """`count` taps make a row."""
        self.left -= 1
        var wraps = self.left == 0
        var row = p.h.dilation() * p.w.input - (count - 1) * p.w.dilation()
        self.pixel += row if wraps else p.w.dilation()
        comptime if count_taps:
            self.tap += p.w.window - count + 1 if wraps else Int32(1)
        if wraps:
            self.left = count


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)),
    `nvvm.minctasm`=SIMDLength(BLOCKS),
)
def max_pool_fprop_gather[
    dtype: DType,
    index: DType,
    V: Int,
    adaptive: Bool,
    offsets: Bool,
](y: Data[dtype], indices: Data[index], x: Data[dtype], p: GpuProblem,):
    comptime Acc = accumulator[dtype]
    var at = _place[V](p.by_vectors, p.w.by_output)
    var oh = at.strip
    if oh >= p.h.output:
        return
    var tw = p.w.taps[adaptive](at.w)
    var th = p.h.taps[adaptive](oh)
    var slab = _first_slab()
    while slab < p.slabs:
        var n, od = p.d.by_output.divide(slab)
        var td = p.d.taps[adaptive](od)
        var x_n = x.unsafe_offset(Int(n) * Int(p.input_plane() * p.channels))
        var best = SIMD[Acc, V](neg_inf[Acc]())
        var start = (td.start * p.h.input + th.start) * p.w.input + tw.start
        comptime if offsets:
            start = (td.first * p.h.window + th.first) * p.w.window + tw.first
            if td.count <= 0 or th.count <= 0 or tw.count <= 0:
                start = p.d.window * p.h.window * p.w.window
        var found = SIMD[DType.int32, V](start)
        # Windows may lie in padding altogether.
        var count = max(tw.count, 0) * max(th.count, 0)
        for a in range(td.count):
            var taps = Taps(
                ((td.start + a * p.d.dilation()) * p.h.input + th.start)
                * p.w.input
                + tw.start,
                ((td.first + a) * p.h.window + th.first) * p.w.window
                + tw.first,
                tw.count,
            )

            @always_inline
            def take[together: Int]() {mut taps, mut best, mut found, imm}:
                var values = Array[SIMD[dtype, V], together](
                    fill=SIMD[dtype, V](0)
                )
                var places = Array[Int32, together](fill=0)
                comptime for k in range(together):
                    values[k] = _load[V](x_n, taps.pixel * p.channels + at.c)
                    places[k] = taps.tap if offsets else taps.pixel
                    taps.next[offsets](tw.count, p)
                comptime for k in range(together):
                    var value = values[k].cast[Acc]()
                    var wins = value.gt(best) | ~value.eq(value)
                    best = wins.select(value, best)
                    found = wins.select(SIMD[DType.int32, V](places[k]), found)

            for _ in range(count // AHEAD):
                take[AHEAD]()
            for _ in range(count % AHEAD):
                take[1]()
        var o = ((od * p.h.output + oh) * p.w.output + at.w) * p.channels + at.c
        var sample = Int(n) * Int(p.output_plane() * p.channels)
        _store(y.unsafe_offset(sample), o, best.cast[dtype]())
        _store(indices.unsafe_offset(sample), o, found.cast[index]())
        slab += _slab_step()


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)),
    `nvvm.minctasm`=SIMDLength(BLOCKS),
)
def avg_pool_fprop_gather[
    dtype: DType, V: Int, adaptive: Bool
](y: Data[dtype], x: Data[dtype], p: GpuProblem):
    comptime Acc = accumulator[dtype]
    var at = _place[V](p.by_vectors, p.w.by_output)
    var oh = at.strip
    if oh >= p.h.output:
        return
    var tw = p.w.taps[adaptive](at.w)
    var th = p.h.taps[adaptive](oh)
    var include = p.include_pad != 0
    var slab = _first_slab()
    while slab < p.slabs:
        var n, od = p.d.by_output.divide(slab)
        var td = p.d.taps[adaptive](od)
        var x_n = x.unsafe_offset(Int(n) * Int(p.input_plane() * p.channels))
        var total = SIMD[Acc, V](0)
        var count = max(tw.count, 0) * max(th.count, 0)
        for a in range(td.count):
            var taps = Taps(
                ((td.start + a) * p.h.input + th.start) * p.w.input + tw.start,
                0,
                tw.count,
            )

            @always_inline
            def take[together: Int]() {mut taps, mut total, imm}:
                var values = Array[SIMD[dtype, V], together](
                    fill=SIMD[dtype, V](0)
                )
                comptime for k in range(together):
                    values[k] = _load[V](x_n, taps.pixel * p.channels + at.c)
                    taps.next[False](tw.count, p)
                comptime for k in range(together):
                    total += values[k].cast[Acc]()

            for _ in range(count // AHEAD):
                take[AHEAD]()
            for _ in range(count % AHEAD):
                take[1]()
        var scale = p.scale
        if scale == 0:
            scale = (
                p.d.scale[adaptive](od, include)
                * p.h.scale[adaptive](oh, include)
                * p.w.scale[adaptive](at.w, include)
            )
        total *= Scalar[Acc](scale)
        var o = ((od * p.h.output + oh) * p.w.output + at.w) * p.channels + at.c
        _store(
            y.unsafe_offset(Int(n) * Int(p.output_plane() * p.channels)),
            o,
            total.cast[dtype](),
        )
        slab += _slab_step()


comptime BUSY = 1 << 19
"""Threads that keep a large GPU busy: fewer make better use of the cache only while at least so many remain."""
comptime LONGEST_STRIP = 8
comptime RING = 3
"""Rows of windows that averages keep, where no more lie above a position."""


def _vector[dtype: DType](p: PoolingProblem) -> Int:
    comptime V = 16 // size_of[dtype]()
    return V if Int(p.channels) % V == 0 else 1


def _outputs(p: PoolingProblem, vector: Int) -> LaunchShape:
    """One thread for each vector of results."""
    return LaunchShape(
        Int(p.h.output) * Int(p.w.output) * (Int(p.channels) // vector),
        Int(p.batch) * Int(p.d.output),
    )


def _strip(p: PoolingProblem, vector: Int) -> Int:
    """How many input rows a thread of a gradient takes."""
    var threads = p.input_size() // vector
    return max(min(min(threads // BUSY, LONGEST_STRIP), Int(p.h.input)), 1)


def _inputs(p: PoolingProblem, vector: Int, rows: Int) -> LaunchShape:
    """One thread for each vector of `rows` pixels below each other."""
    return LaunchShape(
        ceildiv(Int(p.h.input), rows)
        * Int(p.w.input)
        * (Int(p.channels) // vector),
        Int(p.batch) * Int(p.d.input),
    )


def _windows_above[adaptive: Bool](axis: PoolingAxis) -> Int:
    """The most windows above one input position."""
    comptime if adaptive:
        # Windows start every input / output positions and overlap by at most one on either side.
        if axis.input % axis.output == 0:
            return 1
        return Int(axis.output) // Int(axis.input) + 2
    else:
        return axis.most_above()


def gather_max_fprop[
    dtype: DType,
    index: DType,
    *,
    adaptive: Bool,
    offsets: Bool,
](
    ctx: DeviceContext,
    y: Data[dtype],
    indices: Data[index],
    x: Data[dtype],
    p: PoolingProblem,
) raises:
    comptime for V in [16 // size_of[dtype](), 1]:
        if _vector[dtype](p) == V:
            var shape = _outputs(p, V)
            comptime kernel = max_pool_fprop_gather[
                dtype, index, V, adaptive, offsets
            ]
            ctx.enqueue_function[kernel](
                y,
                indices,
                x,
                GpuProblem(p, extent_d=p.d.output, vector=V),
                grid_dim=(shape.grid_x, shape.grid_y),
                block_dim=(shape.x, shape.y),
            )
            return


def gather_max_dgrad[
    dtype: DType, index: DType, *, adaptive: Bool, offsets: Bool
](
    ctx: DeviceContext,
    dx: Data[dtype],
    dy: Data[dtype],
    indices: Data[index],
    p: PoolingProblem,
) raises:
    comptime for V in [16 // size_of[dtype](), 1]:
        if _vector[dtype](p) == V:
            var rows = _strip(p, V)
            var shape = _inputs(p, V, rows)
            comptime kernel = max_pool_dgrad_gather[
                dtype, index, V, adaptive, offsets
            ]
            ctx.enqueue_function[kernel](
                dx,
                dy,
                indices,
                GpuProblem(p, extent_d=p.d.input, vector=V),
                Int32(rows),
                grid_dim=(shape.grid_x, shape.grid_y),
                block_dim=(shape.x, shape.y),
            )
            return


def gather_avg_fprop[
    dtype: DType, *, adaptive: Bool
](ctx: DeviceContext, y: Data[dtype], x: Data[dtype], p: PoolingProblem) raises:
    comptime for V in [16 // size_of[dtype](), 1]:
        if _vector[dtype](p) == V:
            var shape = _outputs(p, V)
            ctx.enqueue_function[avg_pool_fprop_gather[dtype, V, adaptive]](
                y,
                x,
                GpuProblem(
                    p,
                    extent_d=p.d.output,
                    vector=V,
                    scale=uniform_scale[adaptive](p),
                ),
                grid_dim=(shape.grid_x, shape.grid_y),
                block_dim=(shape.x, shape.y),
            )
            return


def gather_avg_dgrad[
    dtype: DType, *, adaptive: Bool
](
    ctx: DeviceContext, dx: Data[dtype], dy: Data[dtype], p: PoolingProblem
) raises:
    var ring = RING if _windows_above[adaptive](p.h) <= RING else 0
    comptime for V in [16 // size_of[dtype](), 1]:
        comptime for L in [RING, 0]:
            if _vector[dtype](p) == V and ring == L:
                var rows = _strip(p, V)
                var shape = _inputs(p, V, rows)
                comptime kernel = avg_pool_dgrad_gather[dtype, V, L, adaptive]
                ctx.enqueue_function[kernel](
                    dx,
                    dy,
                    GpuProblem(
                        p,
                        extent_d=p.d.input,
                        vector=V,
                        scale=uniform_scale[adaptive](p),
                    ),
                    Int32(rows),
                    grid_dim=(shape.grid_x, shape.grid_y),
                    block_dim=(shape.x, shape.y),
                )
                return
