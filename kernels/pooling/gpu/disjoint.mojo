"""Gradients on a GPU for disjoint windows, by gathering: each pixel lies under one window at most, whose gradient it
takes where the window's argmax names it. An argmax that points elsewhere equals no pixel that it is compared with.

Contiguous NCHW tensors (C = 1 here), windows two or four pixels wide: a thread owns 16 bytes of dx wherever they lie in
their plane, so that every warp stores one run of whole sectors however wide rows are. Neighbouring rows under one
window belong to neighbouring threads and find it in the first-level cache. No load hangs on a condition; what lies
outside is dropped after.

Channels between pixels, windows of any size, and averages over single channels: a thread owns one column of pixels, by
a vector of channels, and walks down the rows of a few rows of windows. It loads the one window above, and for maxima
compares its argmaxes with each row's pixel. Threads beside each other store to addresses beside each other, however few
channels there are and wherever rows begin; columns under the same window find it in the first-level cache.
"""

from max.gpu import block_idx, thread_idx
from max.gpu.host import DeviceContext
from std.math import ceildiv
from std.sys import size_of

from ...common.argument import KernelArgument
from ...common.arithmetic import Divisor
from ...common.gpu import vector_alignment
from ...common.pointer import Ptr
from ..kernel import INDEX, NO_ARGMAX, OFFSET, PoolingTensors, PoolingKernel
from ..problem import PoolingProblem
from .primitives import fits_word, narrow
from .params import LIMIT_32, THREADS, PoolingParams, uniform_scale

comptime NO_WINDOW = Int32(-1)
comptime MAX_ITEMS = 2
"""Vectors of a thread."""


@fieldwise_init
struct DisjointShape(TrivialRegisterPassable):
    """The part of a problem that is known at compile time.

    Rows are whole groups of `group` pixels, and windows of size and stride `stride` on W, a divisor of the group, begin
    without padding."""

    var group: Int
    var stride: Int


def items[dtype: DType, argmax: DType]() -> Int:
    """Vectors of a thread, as measured on one H200: one alone waits for its windows most of the time, unless they have
    many bytes."""
    return 1 if size_of[dtype]() < 4 and argmax == INDEX else 2


@fieldwise_init
struct _Row(TrivialRegisterPassable):
    """The values that the pixels of one row share."""

    var base: Int32
    """The number of the first window above the row in the whole output."""
    var wanted: Int32
    """The argmax that names the row's first pixel: its number in the plane, or by offset its tap in a window's first
    column; NO_WINDOW where no window lies over the row."""
    var scale: Float32
    """For averages: one over the contribution of D and H to the divisor, or one over the whole divisor."""


@always_inline
def _row[argmax: DType](p: PoolingParams, row: Int32) -> _Row:
    """The row of number `row` of all planes."""
    var slab, h = p.h.by_input.divide(row)
    var plane = slab
    var od = Int32(0)
    var kd = Int32(0)
    var number = h
    # Planes of one slab need no divisions on D; all threads take the same way.
    if p.d.input > 1 or p.d.window > 1 or p.d.padding > 0:
        var d: Int32
        plane, d = p.d.by_input.divide(slab)
        od, kd = p.d.by_stride.divide(d + p.d.padding)
        number += d * p.h.input
    var oh, kh = p.h.by_stride.divide(h + p.h.padding)
    var live = (
        oh < p.h.output
        and kh < p.h.window
        and od < p.d.output
        and kd < p.d.window
    )
    oh = min(oh, p.h.output - 1)
    od = min(od, p.d.output - 1)
    var wanted = number * p.w.input
    comptime if argmax == OFFSET:
        wanted = (kd * p.h.window + kh) * p.w.window
    var scale = p.scale
    comptime if argmax == NO_ARGMAX:
        if p.scale == 0:
            var include = p.include_pad != 0
            scale = p.d.scale[False](od, include) * p.h.scale[False](
                oh, include
            )
    return _Row(
        ((plane * p.d.output + od) * p.h.output + oh) * p.w.output,
        wanted if live else NO_WINDOW,
        scale,
    )


@always_inline
def disjoint_values[
    dtype: DType, argmax: DType, F: DisjointShape
](
    dy: Ptr[dtype],
    argmaxes: Ptr[argmax],
    p: PoolingParams,
    flat: Int32,
    total: Int32,
) -> SIMD[dtype, 16 // size_of[dtype]()]:
    """The pixels from `flat` on, which lie in two rows at most."""
    comptime V = 16 // size_of[dtype]()
    comptime G = F.group
    comptime N = G // F.stride
    var values = SIMD[dtype, V](0)
    var number, first = p.w.by_input.divide(flat)
    var row = _row[argmax](p, number)
    var next = row
    comptime if G < V:
        # The last row of all has none below it.
        next = _row[argmax](
            p, min(number + 1, p.w.by_input.quotient(total - 1))
        )
    comptime for g in range(V // G):
        var w = first + Int32(g * G)
        var now = row
        comptime if g > 0:
            if w >= p.w.input:
                now = next
                w -= p.w.input
            # Past the end of the tensor any window does.
            w = min(w, p.w.input - Int32(G))
        var ow = Int32(UInt32(w) // UInt32(F.stride))
        var covered = now.wanted != NO_WINDOW
        var at = Int(now.base + ow)
        var gradient = dy.unsafe_load[
            width=N, alignment=vector_alignment[dtype, N]
        ](at)
        comptime if argmax == NO_ARGMAX:
            var scaled = gradient.cast[DType.float32]()
            comptime for i in range(N):
                var scale = now.scale
                if p.scale == 0:
                    scale *= p.w.scale[False](ow + Int32(i), p.include_pad != 0)
                scaled[i] *= scale
            gradient = scaled.cast[dtype]()
            comptime for j in range(G):
                values[g * G + j] = gradient[j * N // G] if covered else Scalar[
                    dtype
                ](0)
        else:
            var found = argmaxes.unsafe_load[
                width=N, alignment=vector_alignment[argmax, N]
            ](at)
            comptime for i in range(N):
                var fits = fits_word[argmax, 1](found[i], covered)[0]
                # How far from what names the group's first pixel.
                var rest = found[i].cast[DType.int32]() - now.wanted
                comptime if argmax == INDEX:
                    rest -= w
                comptime for j in range(G // N):
                    comptime pixel = i * (G // N) + j
                    comptime name = j if argmax == OFFSET else pixel
                    values[g * G + pixel] = gradient[
                        i
                    ] if fits and rest == Int32(name) else Scalar[dtype](0)
    return values


@always_inline
def _store_pixels[
    dtype: DType, V: Int, //
](dx: Ptr[dtype], first: Int32, total: Int32, values: SIMD[dtype, V]):
    """Pixels first, ... as far as there are any."""
    if first + Int32(V) <= total:
        dx.unsafe_store[alignment=16](Int(first), values)
    else:
        comptime for j in range(V):
            if first + Int32(j) < total:
                dx[unsafe_offset=Int(first) + j] = values[j]


@__name(t"pool_dgrad_disjoint_planes_{dtype}_{argmax}_g{F.group}_s{F.stride}")
def pool_dgrad_disjoint_planes[
    dtype: DType, argmax: DType, F: DisjointShape
](
    dx: Ptr[dtype],
    dy: Ptr[dtype],
    argmaxes: Ptr[argmax],
    p: PoolingParams,
    total: Int32,
):
    comptime V = 16 // size_of[dtype]()
    comptime ITEMS = items[dtype, argmax]()
    comptime APART = Int32(THREADS * V)
    var first = (
        Int32(block_idx.x) * Int32(ITEMS * THREADS) + Int32(thread_idx.x)
    ) * Int32(V)
    # All loads before any store.
    var values = Array[SIMD[dtype, V], ITEMS](fill=SIMD[dtype, V](0))
    comptime for k in range(ITEMS):
        # Past the end any vector does.
        var flat = min(
            first + Int32(k) * APART, (total - 1) // Int32(V) * Int32(V)
        )
        values[k] = disjoint_values[dtype, argmax, F](
            dy, argmaxes, p, flat, total
        )
    comptime for k in range(ITEMS):
        _store_pixels(dx, first + Int32(k) * APART, total, values[k])


def _shapes[argmax: DType](vector: Int) -> List[DisjointShape]:
    """Returns the shapes that are compiled for vectors of `vector` elements; the first that fits is the fastest.
    """
    var shapes = List[DisjointShape]()
    shapes.append(DisjointShape(vector, 2))
    comptime if argmax == NO_ARGMAX:
        shapes.append(DisjointShape(vector, 4))
    shapes.append(DisjointShape(2, 2))
    return shapes^


def _fits(F: DisjointShape, p: PoolingProblem) -> Bool:
    return (
        Int(p.w.input) % F.group == 0
        and p.w.is_window(F.stride, F.stride)
        and p.w.padding == 0
    )


struct DisjointPlanes(PoolingKernel):
    comptime NAME: StaticString = "disjoint_planes"

    @staticmethod
    def compiles[argmax: DType, adaptive: Bool]() -> Bool:
        return not adaptive

    @staticmethod
    def refusal[
        dtype: DType, argmax: DType, adaptive: Bool
    ](p: PoolingProblem) -> Optional[String]:
        comptime V = 16 // size_of[dtype]()
        comptime SHAPES = _shapes[argmax](V)
        if p.channels != 1:
            return String("channels lie between pixels")
        if not p.is_disjoint():
            return String("windows overlap")
        if p.input_size() >= LIMIT_32 - MAX_ITEMS * THREADS * V:
            return String("pixels are too many for 32 bits")
        if Int(p.w.input) < V - 1:
            return String("16 bytes of dx may lie in more than two rows")
        comptime for i in range(len(SHAPES)):
            comptime F = SHAPES[i]
            if _fits(F, p):
                return None
        return String("no shape has this window")

    @staticmethod
    def launch[
        dtype: DType, argmax: DType, adaptive: Bool
    ](
        ctx: DeviceContext, t: PoolingTensors[dtype, argmax], p: PoolingProblem
    ) raises:
        comptime V = 16 // size_of[dtype]()
        comptime SHAPES = _shapes[argmax](V)
        var total = p.input_size()
        var scale = uniform_scale[argmax, False](p)
        comptime for i in range(len(SHAPES)):
            comptime F = SHAPES[i]
            if _fits(F, p):
                comptime kernel = pool_dgrad_disjoint_planes[dtype, argmax, F]
                ctx.enqueue_function[kernel](
                    t.result,
                    t.source,
                    t.argmaxes,
                    PoolingParams(p, extent_d=p.d.input, vector=1, scale=scale),
                    Int32(total),
                    grid_dim=ceildiv(
                        total, items[dtype, argmax]() * THREADS * V
                    ),
                    block_dim=THREADS,
                )
                return


comptime ROWS = 8
"""Rows of pixels, about, that a thread walks down where it owns single elements."""


@fieldwise_init
struct ColumnUnits(KernelArgument):
    """The division of dx into units (the rows under a few rows of windows, of one slab) of items (a column by a vector
    of channels)."""

    var total: Int32
    """Items of all units."""
    var groups: Int32
    """Rows of windows of a unit, including rows past the last one that have pixels left."""
    var by_items: Divisor
    var by_strips: Divisor
    """Divides units by the units of a slab."""

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


@__name(t"pool_dgrad_disjoint_channels_{dtype}_{argmax}_v{V}")
def pool_dgrad_disjoint_channels[
    dtype: DType, argmax: DType, V: Int
](
    dx: Ptr[dtype],
    dy: Ptr[dtype],
    argmaxes: Ptr[argmax],
    p: PoolingParams,
    t: ColumnUnits,
):
    comptime data_bytes = V * size_of[dtype]()
    comptime index_bytes = vector_alignment[argmax, V]
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
    comptime if argmax == OFFSET:
        step = p.w.window
    var include = p.include_pad != 0
    var scale = p.scale
    comptime if argmax == NO_ARGMAX:
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
                comptime if argmax != NO_ARGMAX:
                    found[k] = narrow(
                        argmaxes.unsafe_load[width=V, alignment=index_bytes](at)
                    )
        comptime for k in range(BATCH):
            if first + Int32(k) < t.groups:
                comptime if argmax == NO_ARGMAX:
                    var by = scale
                    if p.scale == 0:
                        by *= p.h.scale[False](oh + Int32(k), include)
                    # Not where there is no window: the scale may be anything there.
                    if covered and oh + Int32(k) < p.h.output:
                        gradients[k] = (
                            gradients[k].cast[DType.float32]() * by
                        ).cast[dtype]()
                comptime if argmax == OFFSET:
                    wanted = kd * p.h.window * p.w.window + kw
                for r in range(p.h.stride()):
                    var value = gradients[k]
                    comptime if argmax != NO_ARGMAX:
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


def _vector[dtype: DType, argmax: DType](p: PoolingProblem) -> Int:
    """Elements that a thread holds: 16 bytes of channels, or two of maxima, one of averages; 0 where channels are odd.
    """
    comptime V = 16 // size_of[dtype]()
    if Int(p.channels) % V == 0:
        return V
    if argmax == NO_ARGMAX:
        return 1
    return 2 if p.channels % 2 == 0 else 0


struct DisjointChannels(PoolingKernel):
    comptime NAME: StaticString = "disjoint_channels"

    @staticmethod
    def compiles[argmax: DType, adaptive: Bool]() -> Bool:
        return not adaptive

    @staticmethod
    def refusal[
        dtype: DType, argmax: DType, adaptive: Bool
    ](p: PoolingProblem) -> Optional[String]:
        if not p.is_disjoint():
            return String("windows overlap")
        var vector = _vector[dtype, argmax](p)
        if vector == 0:
            return String("channels are odd")
        if Int(ColumnUnits(p, vector).total) >= LIMIT_32 - THREADS:
            return String("columns are too many for 32 bits")
        return None

    @staticmethod
    def launch[
        dtype: DType, argmax: DType, adaptive: Bool
    ](
        ctx: DeviceContext, t: PoolingTensors[dtype, argmax], p: PoolingProblem
    ) raises:
        var scale = uniform_scale[argmax, False](p)
        comptime for V in [
            16 // size_of[dtype](),
            1 if argmax == NO_ARGMAX else 2,
        ]:
            if _vector[dtype, argmax](p) == V:
                var columns = ColumnUnits(p, V)
                comptime kernel = pool_dgrad_disjoint_channels[dtype, argmax, V]
                ctx.enqueue_function[kernel](
                    t.result,
                    t.source,
                    t.argmaxes,
                    PoolingParams(p, extent_d=p.d.input, vector=V, scale=scale),
                    columns,
                    grid_dim=ceildiv(Int(columns.total), THREADS),
                    block_dim=THREADS,
                )
                return
