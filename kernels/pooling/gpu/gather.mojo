"""Pooling on a GPU by gathering, for every window: neighbouring threads hold neighbouring vectors of channels.

A thread's vector is 16 bytes wide where C allows it, one element where it does not; with C = 1 that makes these the
general kernels for contiguous NCHW too. In a gradient a thread owns `rows` consecutive input rows of one column, so
that elements that neighbouring rows read again come from the L1 cache. No result is written twice, none needs an
atomic, and the bits are the same on every run.
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

from ...common.arithmetic import Divisor
from ...common.gpu import vector_alignment
from ...common.pointer import Ptr, accumulation_type
from ..kernel import NO_ARGMAX, OFFSET, PoolingTensors, PoolingKernel
from ..problem import PoolingProblem
from .params import (
    THREADS,
    LaunchShape,
    PoolingParams,
    TapRange,
    channel_vector,
    refuse_misses,
    uniform_scale,
)


@always_inline
def _load[
    dtype: DType, //, V: Int
](data: Ptr[dtype], at: Int32) -> SIMD[dtype, V]:
    comptime bytes = vector_alignment[dtype, V]
    return data.unsafe_load[width=V, alignment=bytes](Int(at))


@always_inline
def _store[
    dtype: DType, V: Int, //
](data: Ptr[dtype], at: Int32, value: SIMD[dtype, V]):
    comptime bytes = vector_alignment[dtype, V]
    data.unsafe_store[alignment=bytes](Int(at), value)


@fieldwise_init
struct ThreadItem(TrivialRegisterPassable):
    """The work of a thread: `c` its first channel, `w` its column, `strip` its strip of rows.
    """

    var c: Int32
    var w: Int32
    var strip: Int32


@always_inline
def _thread_item[V: Int](by_vectors: Divisor, by_width: Divisor) -> ThreadItem:
    var item = Int32(block_idx.x * block_dim.x + thread_idx.x)
    var pixel, vector = by_vectors.divide(item)
    var strip, w = by_width.divide(pixel)
    return ThreadItem(vector * Int32(V), w, strip)


@always_inline
def _first_slab() -> Int32:
    return Int32(block_idx.y * block_dim.y + thread_idx.y)


@always_inline
def _slab_step() -> Int32:
    return Int32(grid_dim.y * block_dim.y)


@__name(t"pool_dgrad_gather_{dtype}_{argmax}_v{V}_a{adaptive}")
def pool_dgrad_gather[
    dtype: DType, argmax: DType, V: Int, adaptive: Bool
](
    dx: Ptr[dtype],
    dy: Ptr[dtype],
    argmaxes: Ptr[argmax],
    p: PoolingParams,
    rows: Int32,
):
    """`rows` pixels below each other."""
    comptime Acc = accumulation_type[dtype]
    comptime averaging = argmax == NO_ARGMAX
    var at = _thread_item[V](p.by_vectors, p.w.by_input)
    var h_first = at.strip * rows
    if h_first >= p.h.input:
        return
    var h_end = min(h_first + rows, p.h.input)
    var include = p.include_pad != 0
    var rw = p.w.outputs_over[adaptive](at.w)
    var slab = _first_slab()
    while slab < p.slabs:
        var n, d = p.d.by_input.divide(slab)
        var rd = p.d.outputs_over[adaptive](d)
        var sample = Int(n) * Int(p.output_plane() * p.channels)
        var dy_n = dy.unsafe_offset(sample)
        var argmaxes_n = argmaxes
        comptime if not averaging:
            argmaxes_n = argmaxes.unsafe_offset(sample)
        var dx_n = dx.unsafe_offset(Int(n) * Int(p.input_plane() * p.channels))
        for h in range(h_first, h_end):
            var rh = p.h.outputs_over[adaptive](h)
            var pixel = (d * p.h.input + h) * p.w.input + at.w
            var total = SIMD[Acc, V](0)
            for od in range(rd[0], rd[1]):
                for oh in range(rh[0], rh[1]):
                    var row = (od * p.h.output + oh) * p.w.output
                    # By index the pixel; by offset its tap in a window's first column.
                    var wanted = pixel
                    comptime if argmax == OFFSET:
                        var kd, skipped_d = p.d.by_dilation.divide(
                            d - p.d.origin(od)
                        )
                        var kh, skipped_h = p.h.by_dilation.divide(
                            h - p.h.origin(oh)
                        )
                        if (skipped_d | skipped_h) != 0:
                            continue
                        wanted = (kd * p.h.window + kh) * p.w.window
                    var part = SIMD[Acc, V](0)
                    for ow in range(rw[0], rw[1]):
                        var o = (row + ow) * p.channels + at.c
                        var g = _load[V](dy_n, o).cast[Acc]()
                        comptime if averaging:
                            if p.scale == 0:
                                g *= Scalar[Acc](
                                    p.w.scale[adaptive](ow, include)
                                )
                            part += g
                        else:
                            var name = wanted
                            comptime if argmax == OFFSET:
                                var kw, skipped_w = p.w.by_dilation.divide(
                                    at.w - p.w.origin(ow)
                                )
                                name += kw
                                if skipped_w != 0:
                                    continue
                            var hit = _load[V](argmaxes_n, o).eq(
                                SIMD[argmax, V](Scalar[argmax](name))
                            )
                            part += hit.select(g, SIMD[Acc, V](0))
                    comptime if averaging:
                        if p.scale == 0:
                            part *= Scalar[Acc](
                                p.d.scale[adaptive](od, include)
                                * p.h.scale[adaptive](oh, include)
                            )
                    total += part
            comptime if averaging:
                if p.scale != 0:
                    total *= Scalar[Acc](p.scale)
            _store(dx_n, pixel * p.channels + at.c, total.cast[dtype]())
        slab += _slab_step()


comptime LOADS_IN_FLIGHT = 4
"""Taps of a window that are loaded before the first is looked at."""
comptime MIN_RESIDENT_BLOCKS = 4
"""Blocks that a multiprocessor shall hold: with registers for these loads, which the compiler would not take unasked.
"""


@fieldwise_init
struct WindowWalk(TrivialRegisterPassable):
    """A walk over the taps of a window in one slab, row by row."""

    var pixel: Int32
    var tap: Int32
    """Number of the tap in its window."""
    var left: Int32
    """Taps of this row from here on."""

    @always_inline
    def next[count_taps: Bool](mut self, count: Int32, p: PoolingParams):
        """Moves to the next tap; `count` taps make a row."""
        self.left -= 1
        var wraps = self.left == 0
        var row = p.h.dilation() * p.w.input - (count - 1) * p.w.dilation()
        self.pixel += row if wraps else p.w.dilation()
        comptime if count_taps:
            self.tap += p.w.window - count + 1 if wraps else Int32(1)
        if wraps:
            self.left = count


@fieldwise_init
struct Pooled[Acc: DType, V: Int](TrivialRegisterPassable):
    """The result of a window: the sum of its taps, or the maximum and its argmax.
    """

    var value: SIMD[Self.Acc, Self.V]
    var argmax: SIMD[DType.int32, Self.V]


@always_inline
def pool_window[
    dtype: DType, //, argmax: DType, V: Int
](
    x: MutPointer[Scalar[dtype], _, address_space=_],
    p: PoolingParams,
    td: TapRange,
    th: TapRange,
    tw: TapRange,
    c: Int32,
) -> Pooled[accumulation_type[dtype], V]:
    """Pools a window for the V channels from `c` on of the sample that begins at `x`: the first of equal maxima, the
    last NaN."""
    comptime Acc = accumulation_type[dtype]
    comptime averaging = argmax == NO_ARGMAX
    comptime counts_taps = argmax == OFFSET
    comptime bytes = vector_alignment[dtype, V]
    var best = SIMD[Acc, V](0 if averaging else neg_inf[Acc]())
    var start = (td.start * p.h.input + th.start) * p.w.input + tw.start
    comptime if counts_taps:
        start = (td.first * p.h.window + th.first) * p.w.window + tw.first
        if td.count <= 0 or th.count <= 0 or tw.count <= 0:
            start = p.d.window * p.h.window * p.w.window
    var found = SIMD[DType.int32, V](start)
    # Windows may lie in padding altogether.
    var count = max(tw.count, 0) * max(th.count, 0)
    for a in range(td.count):
        var taps = WindowWalk(
            ((td.start + a * p.d.dilation()) * p.h.input + th.start) * p.w.input
            + tw.start,
            ((td.first + a) * p.h.window + th.first) * p.w.window + tw.first,
            tw.count,
        )

        @always_inline
        def take[together: Int]() {mut taps, mut best, mut found, imm}:
            var values = Array[SIMD[dtype, V], together](fill=SIMD[dtype, V](0))
            var places = Array[Int32, together](fill=0)
            comptime for k in range(together):
                values[k] = x.unsafe_load[width=V, alignment=bytes](
                    Int(taps.pixel * p.channels + c)
                )
                places[k] = taps.tap if counts_taps else taps.pixel
                taps.next[counts_taps](tw.count, p)
            comptime for k in range(together):
                var value = values[k].cast[Acc]()
                comptime if averaging:
                    best += value
                else:
                    var wins = value.gt(best) | ~value.eq(value)
                    best = wins.select(value, best)
                    found = wins.select(SIMD[DType.int32, V](places[k]), found)

        for _ in range(count // LOADS_IN_FLIGHT):
            take[LOADS_IN_FLIGHT]()
        for _ in range(count % LOADS_IN_FLIGHT):
            take[1]()
    return {best, found}


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)),
    `nvvm.minctasm`=SIMDLength(MIN_RESIDENT_BLOCKS),
)
@__name(t"pool_fprop_gather_{dtype}_{argmax}_v{V}_a{adaptive}")
def pool_fprop_gather[
    dtype: DType, argmax: DType, V: Int, adaptive: Bool
](y: Ptr[dtype], x: Ptr[dtype], argmaxes: Ptr[argmax], p: PoolingParams):
    var at = _thread_item[V](p.by_vectors, p.w.by_output)
    var oh = at.strip
    if oh >= p.h.output:
        return
    var tw = p.w.taps[adaptive](at.w)
    var th = p.h.taps[adaptive](oh)
    var slab = _first_slab()
    while slab < p.slabs:
        var n, od = p.d.by_output.divide(slab)
        var pooled = pool_window[argmax, V](
            x.unsafe_offset(Int(n) * Int(p.input_plane() * p.channels)),
            p,
            p.d.taps[adaptive](od),
            th,
            tw,
            at.c,
        )
        var o = ((od * p.h.output + oh) * p.w.output + at.w) * p.channels + at.c
        var sample = Int(n) * Int(p.output_plane() * p.channels)
        comptime if argmax == NO_ARGMAX:
            pooled.value *= Scalar[accumulation_type[dtype]](
                p.scale_of[adaptive](od, oh, at.w)
            )
        else:
            _store(
                argmaxes.unsafe_offset(sample), o, pooled.argmax.cast[argmax]()
            )
        _store(y.unsafe_offset(sample), o, pooled.value.cast[dtype]())
        slab += _slab_step()


comptime SATURATING_THREADS = 1 << 19
"""Threads that keep a large GPU busy: fewer make better use of the cache only while at least so many remain."""
comptime MAX_STRIP_ROWS = 8
"""Rows of a thread's strip, at most."""


def _outputs(p: PoolingProblem, vector: Int) -> LaunchShape:
    """Returns a launch with one thread for each vector of results."""
    return LaunchShape(
        Int(p.h.output) * Int(p.w.output) * (Int(p.channels) // vector),
        Int(p.batch) * Int(p.d.output),
    )


def _strip(p: PoolingProblem, vector: Int) -> Int:
    """Returns how many input rows a thread of a gradient takes."""
    var threads = p.input_size() // vector
    return max(
        min(min(threads // SATURATING_THREADS, MAX_STRIP_ROWS), Int(p.h.input)),
        1,
    )


def _inputs(p: PoolingProblem, vector: Int, rows: Int) -> LaunchShape:
    """Returns a launch with one thread for each vector of `rows` pixels below each other.
    """
    return LaunchShape(
        ceildiv(Int(p.h.input), rows)
        * Int(p.w.input)
        * (Int(p.channels) // vector),
        Int(p.batch) * Int(p.d.input),
    )


struct GatherFprop(PoolingKernel):
    comptime NAME: StaticString = "gather"

    @staticmethod
    def launch[
        dtype: DType, argmax: DType, adaptive: Bool
    ](
        ctx: DeviceContext, t: PoolingTensors[dtype, argmax], p: PoolingProblem
    ) raises:
        comptime for V in [16 // size_of[dtype](), 1]:
            if channel_vector[dtype](p) == V:
                var shape = _outputs(p, V)
                var params = PoolingParams(
                    p,
                    extent_d=p.d.output,
                    vector=V,
                    scale=uniform_scale[argmax, adaptive](p),
                )
                comptime kernel = pool_fprop_gather[dtype, argmax, V, adaptive]
                ctx.enqueue_function[kernel](
                    t.result,
                    t.source,
                    t.argmaxes,
                    params,
                    grid_dim=(shape.grid_x, shape.grid_y),
                    block_dim=(shape.x, shape.y),
                )
                return


struct GatherDgrad(PoolingKernel):
    comptime NAME: StaticString = "gather"

    @staticmethod
    def refusal[
        dtype: DType, argmax: DType, adaptive: Bool
    ](p: PoolingProblem) -> Optional[String]:
        return refuse_misses[argmax, adaptive](p)

    @staticmethod
    def launch[
        dtype: DType, argmax: DType, adaptive: Bool
    ](
        ctx: DeviceContext, t: PoolingTensors[dtype, argmax], p: PoolingProblem
    ) raises:
        comptime for V in [16 // size_of[dtype](), 1]:
            if channel_vector[dtype](p) == V:
                var rows = _strip(p, V)
                var shape = _inputs(p, V, rows)
                var params = PoolingParams(
                    p,
                    extent_d=p.d.input,
                    vector=V,
                    scale=uniform_scale[argmax, adaptive](p),
                )
                comptime kernel = pool_dgrad_gather[dtype, argmax, V, adaptive]
                ctx.enqueue_function[kernel](
                    t.result,
                    t.source,
                    t.argmaxes,
                    params,
                    Int32(rows),
                    grid_dim=(shape.grid_x, shape.grid_y),
                    block_dim=(shape.x, shape.y),
                )
                return
