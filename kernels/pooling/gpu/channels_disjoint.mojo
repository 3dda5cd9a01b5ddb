"""Pooling gradients on a GPU for disjoint windows, whatever their size, where channels lie between pixels; averages over single
channels too.

A thread owns one column of pixels, by a vector of channels, and walks down the rows of a few rows of windows: it loads the
one window above, and for maxima compares its entries with each row's pixel, and stores. Threads beside each other store
to addresses beside each other, however few channels there are and wherever rows begin; columns under the same window find
it in the first-level cache. An index that points elsewhere equals no pixel that it is compared with.
"""

from max.gpu import block_idx, thread_idx
from max.gpu.host import DeviceContext
from std.math import ceildiv
from std.sys import size_of

from ...argument import KernelArgument
from ...arithmetic import Divisor
from ..problem import Data, PoolingProblem
from .primitives import narrow
from .problem import LIMIT_32, THREADS, GpuProblem, uniform_scale

comptime ROWS = 8
"""Rows of pixels, about, that a thread walks down where it owns single elements."""
comptime LONGEST = 4
"""Rows, at most, of channels-last averages' windows: longer ones leave few threads."""


@fieldwise_init
struct Columns(KernelArgument):
    """How dx is cut: units (the rows under a few rows of windows, of one slab) of items (a column by a vector of
    channels)."""

    var total: Int32
    """Items of all units."""
    var groups: Int32
    """Rows of windows of a unit, those past the last that pixels are left for included."""
    var by_items: Divisor
    var by_strips: Divisor
    """Divides units by those of a slab."""

    def __init__(out self, p: PoolingProblem, vector: Int):
        var items = Int(p.w.input) * (Int(p.channels) // vector)
        var groups = ceildiv(Int(p.h.input) + Int(p.h.padding), Int(p.h.stride))
        # One or two elements are cheap beside finding out where a thread is.
        var together = 1
        if vector <= 2:
            together = max(ROWS // Int(p.h.stride), 1)
        var strips = ceildiv(groups, together)
        var units = Int(p.batch) * Int(p.d.input) * strips
        self.total = Int32(min(items * units, LIMIT_32 - 1))
        self.groups = Int32(together)
        self.by_items = Divisor(items)
        self.by_strips = Divisor(strips)


def pool_dgrad_disjoint_channels[
    dtype: DType, index: DType, V: Int, averaging: Bool, offsets: Bool
](
    dx: Data[dtype],
    dy: Data[dtype],
    indices: Data[index],
    p: GpuProblem,
    t: Columns,
):
    """Averages have no indices."""
    comptime data_bytes = V * size_of[dtype]()
    comptime index_bytes = min(V * size_of[index](), 16)
    var flat = Int32(block_idx.x * THREADS + thread_idx.x)
    if flat >= t.total:
        return
    var unit, item = t.by_items.divide(flat)
    var w, vector = p.by_vectors.divide(item)
    var slab, strip = t.by_strips.divide(unit)
    var n, d = p.d.by_input.divide(slab)
    var c = vector * Int32(V)
    var od, kd = p.d.by_stride.divide(d + p.d.padding)
    var ow, kw = p.w.by_stride.divide(w + p.w.padding)
    var covered = (
        od < p.d.output
        and ow < p.w.output
        and kd < p.d.window
        and kw < p.w.window
    )
    var oh = strip * t.groups
    var top = p.h.origin(oh)
    var row = Int(n) * Int(p.output_plane()) * Int(p.channels) + Int(
        (od * p.h.output * p.w.output + ow) * p.channels + c
    )
    # What the first row's pixel would be called, and the step to the next row's.
    var wanted = (d * p.h.input + top) * p.w.input + w
    var step = p.w.input
    comptime if offsets:
        step = p.w.window
    var include = p.include_pad != 0
    var scale = p.scale
    comptime if averaging:
        if p.scale == 0:
            scale = p.d.scale[False](od, include) * p.w.scale[False](
                ow, include
            )
    var out = dx.unsafe_offset(
        (Int(slab) * Int(p.h.input) + Int(top)) * Int(p.w.input * p.channels)
        + Int(w * p.channels + c)
    )
    # Few channels: the windows of a batch are on the way together.
    comptime BATCH = 4 if V <= 2 else 1
    for first in range(Int32(0), t.groups, Int32(BATCH)):
        var gradients = Array[SIMD[dtype, V], BATCH](fill=SIMD[dtype, V](0))
        var found = Array[SIMD[DType.int32, V], BATCH](
            fill=SIMD[DType.int32, V](-1)
        )
        comptime for k in range(BATCH):
            if (
                covered
                and oh + Int32(k) < p.h.output
                and first + Int32(k) < t.groups
            ):
                var at = row + Int((oh + Int32(k)) * p.w.output * p.channels)
                gradients[k] = dy.unsafe_load[width=V, alignment=data_bytes](at)
                comptime if not averaging:
                    found[k] = narrow(
                        indices.unsafe_load[width=V, alignment=index_bytes](at)
                    )
        comptime for k in range(BATCH):
            if first + Int32(k) < t.groups:
                comptime if averaging:
                    var by = scale
                    if p.scale == 0:
                        by *= p.h.scale[False](oh + Int32(k), include)
                    # Not where there is no window: the scale may be anything there.
                    if covered and oh + Int32(k) < p.h.output:
                        gradients[k] = (
                            gradients[k].cast[DType.float32]() * by
                        ).cast[dtype]()
                comptime if offsets:
                    wanted = kd * p.h.window * p.w.window + kw
                for r in range(p.h.stride()):
                    var value = gradients[k]
                    comptime if not averaging:
                        value = (
                            found[k]
                            .eq(SIMD[DType.int32, V](wanted))
                            .select(value, SIMD[dtype, V](0))
                        )
                    if r >= p.h.window:
                        value = SIMD[dtype, V](0)
                    if UInt32(top) < UInt32(p.h.input):
                        out.unsafe_store[alignment=data_bytes](0, value)
                    out = out.unsafe_offset(Int(p.w.input * p.channels))
                    top += 1
                    wanted += step
        oh += Int32(BATCH)


def _vector[dtype: DType](p: PoolingProblem, *, averaging: Bool) -> Int:
    """Elements that a thread holds: 16 bytes of channels, or two of maxima, one of averages; 0 where channels are odd.
    """
    comptime V = 16 // size_of[dtype]()
    if Int(p.channels) % V == 0:
        return V
    if averaging:
        return 1
    return 2 if p.channels % 2 == 0 else 0


def disjoint_channels_can_implement[
    dtype: DType, *, averaging: Bool
](p: PoolingProblem) -> Optional[String]:
    """None, or why this kernel does not take the problem."""
    if not p.is_disjoint():
        return String("windows overlap")
    if averaging:
        if p.channels > 1 and Int(p.h.stride) > LONGEST:
            return String("long windows leave too few threads")
    elif p.channels == 1:
        return String("no channels lie between pixels")
    var vector = _vector[dtype](p, averaging=averaging)
    if vector == 0:
        return String("channels are odd")
    if Int(Columns(p, vector).total) >= LIMIT_32 - THREADS:
        return String("columns are too many for 32 bits")
    return None


def disjoint_channels_dgrad[
    dtype: DType, index: DType, *, averaging: Bool, offsets: Bool
](
    ctx: DeviceContext,
    dx: Data[dtype],
    dy: Data[dtype],
    indices: Data[index],
    p: PoolingProblem,
) raises:
    """Averages have no indices: any pointer does."""
    var scale = Float32(0)
    comptime if averaging:
        scale = uniform_scale[False](p)

    comptime for V in [16 // size_of[dtype](), 1 if averaging else 2]:
        if _vector[dtype](p, averaging=averaging) == V:
            var columns = Columns(p, V)
            comptime kernel = pool_dgrad_disjoint_channels[
                dtype, index, V, averaging, offsets
            ]
            ctx.enqueue_function[kernel](
                dx,
                dy,
                indices,
                GpuProblem(p, extent_d=p.d.input, vector=V, scale=scale),
                columns,
                grid_dim=ceildiv(Int(columns.total), THREADS),
                block_dim=THREADS,
            )
            return
