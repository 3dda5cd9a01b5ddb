"""Gradients on a GPU over contiguous NCHW tensors (C = 1 here) for disjoint windows, by gathering: maxima and averages two or four
pixels wide, global averages.

A thread owns 16 bytes of dx wherever they lie in their plane, so that every warp stores one run of whole sectors
however wide rows are. It gathers: each pixel lies under one window at most, whose gradient it takes where the window's
entry names it. Neighbouring rows under one window belong to neighbouring threads and find it in the first-level cache.
No load hangs on a condition; what lies outside is dropped after. An index that points elsewhere equals no pixel that
it is compared with.
"""

from max.gpu import block_idx, thread_idx
from max.gpu.host import DeviceContext
from std.math import ceildiv
from std.sys import size_of

from ...arithmetic import Divisor
from ..problem import Data, PoolingProblem
from .primitives import fits_word
from .problem import LIMIT_32, THREADS, GpuProblem, uniform_scale

comptime NOTHING = Int32(-1)
comptime MOST_ITEMS = 2


@fieldwise_init
struct DisjointShape(TrivialRegisterPassable):
    """What the compiler knows.

    Rows are whole groups of `group` pixels, and windows of size and stride `stride` on W, a divisor of the group, begin
    without padding."""

    var group: Int
    var stride: Int
    var averaging: Bool
    var offsets: Bool

    def items(self, data: Int, entry: Int) -> Int:
        """Vectors of a thread, as measured on one H200: one alone waits for its windows most of the time, unless they have
        many bytes. `data` and `entry` are those of an element and of an entry.
        """
        return 1 if data < 4 and entry == 8 and not self.averaging else 2


@fieldwise_init
struct _Row(TrivialRegisterPassable):
    """What the pixels of one row share."""

    var base: Int32
    """The number of the first window above the row in the whole output."""
    var wanted: Int32
    """What names the row's first pixel: its number in the plane, or by offset its tap in a window's first column;
    NOTHING where no window lies over the row."""
    var scale: Float32
    """For averages: one over what D and H contribute to the divisor, or over all of it."""


@always_inline
def _row[F: DisjointShape](p: GpuProblem, row: Int32) -> _Row:
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
    comptime if F.offsets:
        wanted = (kd * p.h.window + kh) * p.w.window
    var scale = p.scale
    comptime if F.averaging:
        if p.scale == 0:
            var include = p.include_pad != 0
            scale = p.d.scale[False](od, include) * p.h.scale[False](
                oh, include
            )
    return _Row(
        ((plane * p.d.output + od) * p.h.output + oh) * p.w.output,
        wanted if live else NOTHING,
        scale,
    )


@always_inline
def disjoint_values[
    dtype: DType, index: DType, F: DisjointShape
](
    dy: Data[dtype],
    indices: Data[index],
    p: GpuProblem,
    flat: Int32,
    total: Int32,
) -> SIMD[dtype, 16 // size_of[dtype]()]:
    """The pixels from `flat` on, which lie in two rows at most."""
    comptime V = 16 // size_of[dtype]()
    comptime G = F.group
    comptime N = G // F.stride
    var values = SIMD[dtype, V](0)
    var number, first = p.w.by_input.divide(flat)
    var row = _row[F](p, number)
    var next = row
    comptime if G < V:
        # The last row of all has none below it.
        next = _row[F](p, min(number + 1, p.w.by_input.quotient(total - 1)))
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
        var covered = now.wanted != NOTHING
        var at = Int(now.base + ow)
        var gradient = dy.unsafe_load[
            width=N, alignment=min(N * size_of[dtype](), 16)
        ](at)
        comptime if F.averaging:
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
            var found = indices.unsafe_load[
                width=N, alignment=min(N * size_of[index](), 16)
            ](at)
            comptime for i in range(N):
                var fits = fits_word[index, 1](found[i], covered)[0]
                # How far from what names the group's first pixel.
                var rest = found[i].cast[DType.int32]() - now.wanted
                comptime if not F.offsets:
                    rest -= w
                comptime for j in range(G // N):
                    comptime pixel = i * (G // N) + j
                    comptime name = j if F.offsets else pixel
                    values[g * G + pixel] = gradient[
                        i
                    ] if fits and rest == Int32(name) else Scalar[dtype](0)
    return values


@always_inline
def _store_pixels[
    dtype: DType, V: Int, //
](dx: Data[dtype], first: Int32, total: Int32, values: SIMD[dtype, V]):
    """Pixels first, ... as far as there are any."""
    if first + Int32(V) <= total:
        dx.unsafe_store[alignment=16](Int(first), values)
    else:
        comptime for j in range(V):
            if first + Int32(j) < total:
                dx[unsafe_offset=Int(first) + j] = values[j]


def pool_dgrad_disjoint_planes[
    dtype: DType, index: DType, F: DisjointShape
](
    dx: Data[dtype],
    dy: Data[dtype],
    indices: Data[index],
    p: GpuProblem,
    total: Int32,
):
    comptime V = 16 // size_of[dtype]()
    comptime ITEMS = F.items(size_of[dtype](), size_of[index]())
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
        values[k] = disjoint_values[dtype, index, F](
            dy, indices, p, flat, total
        )
    comptime for k in range(ITEMS):
        _store_pixels(dx, first + Int32(k) * APART, total, values[k])


comptime FEW_PIXELS = 64
"""Of planes up to which prefetched pieces take maxima faster."""


def disjoint_shapes[
    averaging: Bool, offsets: Bool
](data: Int) -> List[DisjointShape]:
    """The shapes that are compiled, for elements of `data` bytes; the first that fits is the fastest.
    """
    var vector = 16 // data
    var shapes = List[DisjointShape]()
    shapes.append(DisjointShape(vector, 2, averaging, offsets))
    if averaging:
        shapes.append(DisjointShape(vector, 4, averaging, offsets))
    shapes.append(DisjointShape(2, 2, averaging, offsets))
    return shapes^


def _fits(F: DisjointShape, p: PoolingProblem) -> Bool:
    return (
        Int(p.w.input) % F.group == 0
        and p.w.is_window(F.stride, F.stride)
        and p.w.padding == 0
    )


def disjoint_planes_can_implement[
    dtype: DType, *, averaging: Bool, offsets: Bool
](p: PoolingProblem) -> Optional[String]:
    """None, or why this kernel does not take the problem."""
    comptime V = 16 // size_of[dtype]()
    comptime SHAPES = disjoint_shapes[averaging, offsets](size_of[dtype]())
    if p.channels != 1:
        return String("channels lie between pixels")
    if not p.is_disjoint():
        return String("windows overlap")
    if p.input_size() >= LIMIT_32 - MOST_ITEMS * THREADS * V:
        return String("pixels are too many for 32 bits")
    if Int(p.w.input) < V - 1:
        return String("16 bytes of dx may lie in more than two rows")
    comptime if not averaging:
        if not p.is_line() and Int(p.h.input) * Int(p.w.input) <= FEW_PIXELS:
            return String("small planes are faster in prefetched pieces")
        comptime if size_of[dtype]() >= 4 and not offsets:
            if Int(p.w.input) % V != 0:
                return String("short rows are faster in prefetched pieces")
    comptime for i in range(len(SHAPES)):
        comptime F = SHAPES[i]
        if _fits(F, p):
            return None
    return String("no shape has this window")


def disjoint_planes_dgrad[
    dtype: DType, index: DType, *, averaging: Bool, offsets: Bool
](
    ctx: DeviceContext,
    dx: Data[dtype],
    dy: Data[dtype],
    indices: Data[index],
    p: PoolingProblem,
) raises:
    """Averages have no indices: any pointer does."""
    comptime V = 16 // size_of[dtype]()
    comptime SHAPES = disjoint_shapes[averaging, offsets](size_of[dtype]())
    var total = p.input_size()
    var scale = Float32(0)
    comptime if averaging:
        scale = uniform_scale[False](p)
    comptime for i in range(len(SHAPES)):
        comptime F = SHAPES[i]
        if _fits(F, p):
            comptime kernel = pool_dgrad_disjoint_planes[dtype, index, F]
            comptime items = F.items(size_of[dtype](), size_of[index]())
            ctx.enqueue_function[kernel](
                dx,
                dy,
                indices,
                GpuProblem(p, extent_d=p.d.input, vector=1, scale=scale),
                Int32(total),
                grid_dim=ceildiv(total, items * THREADS * V),
                block_dim=THREADS,
            )
            return


def avg_pool_dgrad_global[
    dtype: DType
](
    dx: Data[dtype],
    dy: Data[dtype],
    by_plane: Divisor,
    total: Int32,
    scale: Float32,
):
    """A thread's 16 bytes of dx, wherever planes begin and end in them: every pixel of a plane gets the same.
    """
    comptime V = 16 // size_of[dtype]()
    var first = Int32(block_idx.x * THREADS + thread_idx.x) * Int32(V)
    if first >= total:
        return
    var plane, at = by_plane.divide(first)

    @always_inline
    def value_of(plane: Int32) {imm} -> Scalar[dtype]:
        var gradient = dy[unsafe_offset=Int(plane)].cast[DType.float32]()
        return (gradient * scale).cast[dtype]()

    var value = value_of(plane)
    var values = SIMD[dtype, V](0)
    comptime for j in range(V):
        values[j] = value
        at += 1
        if at == by_plane.value and first + Int32(j) + 1 < total:
            at = 0
            plane += 1
            value = value_of(plane)
    _store_pixels(dx, first, total, values)


def global_can_implement[
    dtype: DType, *, adaptive: Bool
](p: PoolingProblem) -> Optional[String]:
    """None, or why the kernel above does not take the problem."""
    comptime V = 16 // size_of[dtype]()
    if not p.is_global[adaptive]():
        return String("no window covers a plane")
    if p.input_size() + THREADS * V >= LIMIT_32:
        return String("pixels are too many for 32 bits")
    return None


def global_avg_dgrad[
    dtype: DType, *, adaptive: Bool
](
    ctx: DeviceContext, dx: Data[dtype], dy: Data[dtype], p: PoolingProblem
) raises:
    comptime V = 16 // size_of[dtype]()
    var total = p.input_size()
    ctx.enqueue_function[avg_pool_dgrad_global[dtype]](
        dx,
        dy,
        Divisor(p.input_plane()),
        Int32(total),
        Float32(1.0 / Float64(p.divisor[adaptive](0, 0, 0))),
        grid_dim=ceildiv(total, THREADS * V),
        block_dim=THREADS,
    )
