"""Adaptive max pooling on a GPU where windows are large and few.

Forward `lanes` threads share a window: each looks at every `lanes`-th tap, then their maxima meet in shared memory.
Backward dx is set to zero, and a thread for each window writes its maximum's sum: of windows that share their maximum
the first adds for all, in order. Neither is atomic, and the bits are the same on every run.
"""

from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    barrier,
    block_dim,
    block_idx,
    grid_dim,
    thread_idx,
)
from max.gpu.host import DeviceBuffer, DeviceContext
from max.gpu.memory import AddressSpace
from std.math import ceildiv
from std.memory import stack_allocation
from std.sys import size_of
from std.utils.numerics import neg_inf
from std.utils.static_tuple import StaticTuple

from ...common.arithmetic import Divisor, divide
from ...common.gpu import vector_alignment
from ...common.pointer import Ptr, accumulation_type
from ..kernel import INDEX, PoolingKernel, PoolingTensors
from ..problem import PoolingProblem
from .gather import Pooled
from .params import (
    THREADS,
    LaunchShape,
    PoolingParams,
    TapRange,
    channel_vector,
)

comptime LOADS_IN_FLIGHT = 4
"""Taps that a thread loads before it looks at the first."""
comptime MIN_TAPS = 8
"""Taps of a thread, at least, where a window has as many."""
comptime MAX_THREADS = 1 << 20
"""Threads of a launch, at most: more of them keep no GPU busier."""


@fieldwise_init
struct SharedTaps(TrivialRegisterPassable):
    """A walk over every `lanes`-th tap of a window, row by row and slab by slab.
    """

    var a: Int32
    """Slab, row and column in the window."""
    var b: Int32
    var k: Int32
    var left: Int32
    """Taps from here on."""
    var step_a: Int32
    var step_b: Int32
    var step_k: Int32

    def __init__(
        out self,
        lane: Int32,
        lanes: Int32,
        td: TapRange,
        th: TapRange,
        tw: TapRange,
    ):
        var row, k = divide(lane, tw.count)
        self.k = k
        self.a, self.b = divide(row, th.count)
        var step_row, step_k = divide(lanes, tw.count)
        self.step_k = step_k
        self.step_a, self.step_b = divide(step_row, th.count)
        var taps = td.count * th.count * tw.count
        self.left = divide(max(taps - lane + lanes - 1, 0), lanes)[0]

    @always_inline
    def next(mut self, th: TapRange, tw: TapRange):
        self.k += self.step_k
        self.b += self.step_b
        self.a += self.step_a
        if self.k >= tw.count:
            self.k -= tw.count
            self.b += 1
        if self.b >= th.count:
            self.b -= th.count
            self.a += 1


@always_inline
def shared_window[
    dtype: DType, //, V: Int
](
    x: Ptr[dtype],
    p: PoolingParams,
    td: TapRange,
    th: TapRange,
    tw: TapRange,
    c: Int32,
    lane: Int32,
    lanes: Int32,
) -> Pooled[accumulation_type[dtype], V]:
    """Returns the maximum of one lane's taps: the first of equal maxima, the last NaN; the window's first pixel where
    the lane has none."""
    comptime Acc = accumulation_type[dtype]
    comptime bytes = vector_alignment[dtype, V]
    var start = (td.start * p.h.input + th.start) * p.w.input + tw.start
    var best = SIMD[Acc, V](neg_inf[Acc]())
    var found = SIMD[DType.int32, V](start)
    var taps = SharedTaps(lane, lanes, td, th, tw)

    @always_inline
    def take[together: Int]() {mut taps, mut best, mut found, imm}:
        var values = Array[SIMD[dtype, V], together](fill=SIMD[dtype, V](0))
        var places = Array[Int32, together](fill=0)
        comptime for i in range(together):
            places[i] = (
                start + (taps.a * p.h.input + taps.b) * p.w.input + taps.k
            )
            values[i] = x.unsafe_load[width=V, alignment=bytes](
                Int(places[i] * p.channels + c)
            )
            taps.next(th, tw)
        comptime for i in range(together):
            var value = values[i].cast[Acc]()
            var wins = value.gt(best) | ~value.eq(value)
            best = wins.select(value, best)
            found = wins.select(SIMD[DType.int32, V](places[i]), found)

    var left = taps.left
    for _ in range(left // LOADS_IN_FLIGHT):
        take[LOADS_IN_FLIGHT]()
    for _ in range(left % LOADS_IN_FLIGHT):
        take[1]()
    return {best, found}


@always_inline
def merged[
    Acc: DType, V: Int, //
](first: Pooled[Acc, V], second: Pooled[Acc, V]) -> Pooled[Acc, V]:
    """Merges the maxima of two lanes, whose taps alternate: a NaN wins over a number, the last NaN over others, the
    first of equal maxima."""
    var a = first.value
    var b = second.value
    var is_nan = ~a.eq(a)
    var wins = ~b.eq(b) & (~is_nan | second.argmax.gt(first.argmax))
    var above = b.gt(a) | (b.eq(a) & second.argmax.lt(first.argmax))
    wins = wins | (above & ~is_nan)
    return {
        wins.select(b, a),
        wins.select(second.argmax, first.argmax),
    }


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS))
)
@__name(t"pool_fprop_shared_windows_{dtype}_v{V}")
def pool_fprop_shared_windows[
    dtype: DType, V: Int
](
    y: Ptr[dtype],
    argmaxes: Ptr[INDEX],
    x: Ptr[dtype],
    p: PoolingParams,
    by_items: Divisor,
    windows: Int32,
    lanes: Int32,
):
    """Computes maxima of windows that threads share. `by_items` divides by the vectors of windows in a slab, `windows`
    counts the windows of all slabs. The threads of a plane's window are neighbours; with channels innermost the threads
    of neighbouring channels are."""
    comptime Acc = accumulation_type[dtype]
    comptime bytes = vector_alignment[dtype, V]
    var values = stack_allocation[
        THREADS * V,
        Scalar[Acc],
        alignment=16,
        address_space=AddressSpace.SHARED,
    ]()
    var places = stack_allocation[
        THREADS * V,
        Int32,
        alignment=16,
        address_space=AddressSpace.SHARED,
    ]()
    var thread = Int32(thread_idx.x)
    var teams = Int32(THREADS) // lanes
    var lane_step = teams
    var lane: Int32
    var team: Int32
    if p.by_vectors.value == 1:
        lane_step = 1
        team = thread // lanes
        lane = thread % lanes
    else:
        lane = thread // teams
        team = thread % teams
    var number = Int32(block_idx.x) * teams + team
    var is_there = number < windows
    var slab, item = by_items.divide(min(number, windows - 1))
    var pixel, vector = p.by_vectors.divide(item)
    var oh, ow = p.w.by_output.divide(pixel)
    var n, od = p.d.by_output.divide(slab)
    var c = vector * Int32(V)
    var mine = shared_window[V](
        x.unsafe_offset(Int(n) * Int(p.input_plane() * p.channels)),
        p,
        p.d.taps[True](od),
        p.h.taps[True](oh),
        p.w.taps[True](ow),
        c,
        lane,
        lanes,
    )
    var half = lanes // 2
    while half > 0:
        if lane >= half and lane < 2 * half:
            values.unsafe_store[alignment=bytes](Int(thread) * V, mine.value)
            places.unsafe_store(Int(thread) * V, mine.argmax)
        barrier()
        if lane < half:
            var other = Int(thread + half * lane_step) * V
            mine = merged(
                mine,
                {
                    values.unsafe_load[width=V, alignment=bytes](other),
                    places.unsafe_load[width=V](other),
                },
            )
        half //= 2
    if lane == 0 and is_there:
        var o = ((od * p.h.output + oh) * p.w.output + ow) * p.channels + c
        var at = Int(n) * Int(p.output_plane() * p.channels) + Int(o)
        argmaxes.unsafe_store(at, mine.argmax.cast[INDEX]())
        y.unsafe_store[alignment=bytes](at, mine.value.cast[dtype]())


def lanes_of_window[dtype: DType](p: PoolingProblem) -> Int:
    """Returns how many threads share a window: a power of two."""
    var windows = p.output_size() // channel_vector[dtype](p)
    var lanes = 1
    while (
        lanes < THREADS
        and 2 * lanes * MIN_TAPS <= p.window_size()
        and 2 * lanes * windows <= MAX_THREADS
    ):
        lanes *= 2
    return lanes


struct SharedWindowsFprop(PoolingKernel):
    comptime NAME: StaticString = "shared_windows"

    @staticmethod
    def compiles[argmax: DType, adaptive: Bool]() -> Bool:
        return adaptive and argmax == INDEX

    @staticmethod
    def launch[
        dtype: DType, argmax: DType, adaptive: Bool
    ](
        ctx: DeviceContext, t: PoolingTensors[dtype, argmax], p: PoolingProblem
    ) raises:
        comptime for V in [16 // size_of[dtype](), 1]:
            if channel_vector[dtype](p) == V:
                var lanes = lanes_of_window[dtype](p)
                var windows = p.output_size() // V
                var items = (
                    Int(p.h.output) * Int(p.w.output) * (Int(p.channels) // V)
                )
                ctx.enqueue_function[pool_fprop_shared_windows[dtype, V]](
                    t.result,
                    rebind[Ptr[INDEX]](t.argmaxes),
                    t.source,
                    PoolingParams(p, extent_d=p.d.output, vector=V),
                    Divisor(items),
                    Int32(windows),
                    Int32(lanes),
                    grid_dim=ceildiv(windows, THREADS // lanes),
                    block_dim=THREADS,
                )
                return


@always_inline
def add_for_maximum[
    dtype: DType
](
    dx: Ptr[dtype],
    dy: Ptr[dtype],
    indices: Ptr[INDEX],
    p: PoolingParams,
    od: Int32,
    oh: Int32,
    ow: Int32,
    c: Int32,
):
    """Runs a window's thread in the sample at which all pointers begin; an index that names no pixel under its window
    is ignored."""
    comptime Acc = accumulation_type[dtype]
    var own = (od * p.h.output + oh) * p.w.output + ow
    var index = indices[unsafe_offset=Int(own * p.channels + c)]
    if index < 0 or index >= Int64(p.input_plane()):
        return
    var pixel = Int32(index)
    var row, w = p.w.by_input.divide(pixel)
    var d, h = p.h.by_input.divide(row)
    var rd = p.d.outputs_over[True](d)
    var rh = p.h.outputs_over[True](h)
    var rw = p.w.outputs_over[True](w)
    if od < rd[0] or od >= rd[1] or oh < rh[0] or oh >= rh[1]:
        return
    if ow < rw[0] or ow >= rw[1]:
        return
    var total = Scalar[Acc](0)
    for a in range(rd[0], rd[1]):
        for b in range(rh[0], rh[1]):
            for k in range(rw[0], rw[1]):
                var window = (a * p.h.output + b) * p.w.output + k
                var at = Int(window * p.channels + c)
                if indices[unsafe_offset=at] == index:
                    if window < own:
                        return
                    total += dy[unsafe_offset=at].cast[Acc]()
    dx[unsafe_offset=Int(pixel * p.channels + c)] = total.cast[dtype]()


@__name(t"pool_dgrad_by_windows_{dtype}")
def pool_dgrad_by_windows[
    dtype: DType
](dx: Ptr[dtype], dy: Ptr[dtype], indices: Ptr[INDEX], p: PoolingParams):
    """dx is zero before. x counts the windows and channels of a slab, y slabs.
    """
    var item = Int32(block_idx.x * block_dim.x + thread_idx.x)
    var pixel, c = p.by_vectors.divide(item)
    var oh, ow = p.w.by_output.divide(pixel)
    if oh >= p.h.output:
        return
    var slab = Int32(block_idx.y * block_dim.y + thread_idx.y)
    while slab < p.slabs:
        var n, od = p.d.by_output.divide(slab)
        var sample = Int(n) * Int(p.output_plane() * p.channels)
        add_for_maximum(
            dx.unsafe_offset(Int(n) * Int(p.input_plane() * p.channels)),
            dy.unsafe_offset(sample),
            indices.unsafe_offset(sample),
            p,
            od,
            oh,
            ow,
            c,
        )
        slab += Int32(grid_dim.y * block_dim.y)


struct ByWindowsDgrad(PoolingKernel):
    comptime NAME: StaticString = "by_windows"

    @staticmethod
    def compiles[argmax: DType, adaptive: Bool]() -> Bool:
        return adaptive and argmax == INDEX

    @staticmethod
    def launch[
        dtype: DType, argmax: DType, adaptive: Bool
    ](
        ctx: DeviceContext, t: PoolingTensors[dtype, argmax], p: PoolingProblem
    ) raises:
        ctx.enqueue_memset(
            DeviceBuffer[dtype](ctx, t.result, p.input_size(), owning=False), 0
        )
        var shape = LaunchShape(
            Int(p.h.output) * Int(p.w.output) * Int(p.channels),
            Int(p.batch) * Int(p.d.output),
        )
        ctx.enqueue_function[pool_dgrad_by_windows[dtype]](
            t.result,
            t.source,
            rebind[Ptr[INDEX]](t.argmaxes),
            PoolingParams(p, extent_d=p.d.output, vector=1),
            grid_dim=(shape.grid_x, shape.grid_y),
            block_dim=(shape.x, shape.y),
        )
