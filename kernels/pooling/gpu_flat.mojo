"""Gradients on a GPU over contiguous NCHW tensors for windows that do not overlap: maxima by index and by offset, and
averages.

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

from .direct import Data
from .gpu_apart import is_apart
from .gpu_problem import (
    LIMIT_32,
    THREADS,
    GpuProblem,
    fits_32_bits,
    uniform_scale,
)
from .gpu_windows import fits_word
from .problem import PoolingProblem

comptime NOTHING = Int32(-1)
comptime MOST_ITEMS = 2


@fieldwise_init
struct FlatShape(TrivialRegisterPassable):
    """What the compiler knows.

    Rows are whole groups of `group` pixels, and windows of size and stride `stride` on W, a divisor of the group, begin
    without padding. group = 0, for averages: windows beside each other that are no shorter than a thread's pixels.
    """

    var group: Int
    var stride: Int
    var deep: Bool
    """False: planes have one slab, and so have windows."""
    var averaging: Bool
    var offsets: Bool
    var uniform: Bool
    """Of averages: whether one divisor serves all windows."""

    def items(self, data: Int, entry: Int) -> Int:
        """Vectors of a thread, as measured on one H200: one alone waits for its windows most of the time, unless they have
        many bytes. `data` and `entry` are those of an element and of an entry.
        """
        var wide = data < 4 and entry == 8 and self.stride == 2
        return 1 if wide and not self.deep and not self.averaging else 2


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
def _row[F: FlatShape](p: GpuProblem, row: Int32) -> _Row:
    """The row of number `row` of all planes."""
    var slab, h = p.h.by_input.divmod(row)
    var plane = slab
    var od = Int32(0)
    var kd = Int32(0)
    var number = h
    comptime if F.deep:
        var d: Int32
        plane, d = p.d.by_input.divmod(slab)
        od, kd = p.d.by_stride.divmod(d + p.d.padding)
        number += d * p.h.input
    var oh, kh = p.h.by_stride.divmod(h + p.h.padding)
    var live = oh < p.h.output and kh < p.h.window
    comptime if F.deep:
        live = live and od < p.d.output and kd < p.d.window
        od = min(od, p.d.output - 1)
        plane = plane * p.d.output + od
    oh = min(oh, p.h.output - 1)
    var wanted = number * p.w.input
    comptime if F.offsets:
        wanted = (kd * p.h.window + kh) * p.w.window
    var scale = p.scale
    comptime if F.averaging and not F.uniform:
        var include = p.include_pad != 0
        scale = p.d.scale[False](od, include) * p.h.scale[False](oh, include)
    return _Row(
        (plane * p.h.output + oh) * p.w.output,
        wanted if live else NOTHING,
        scale,
    )


@always_inline
def _average[
    dtype: DType, F: FlatShape
](dy: Data[dtype], p: GpuProblem, row: _Row, ow: Int32) -> Scalar[dtype]:
    """What window `ow` above a row gives each of its pixels; zero where there is no such window.
    """
    var there = row.wanted != NOTHING and ow < p.w.output
    var place = min(ow, p.w.output - 1)
    var scale = row.scale
    comptime if not F.uniform:
        scale *= p.w.scale[False](place, p.include_pad != 0)
    var value = (
        dy[unsafe_offset=Int(row.base + place)].cast[DType.float32]() * scale
    )
    # Not a product with zero: a gradient may be infinite.
    return value.cast[dtype]() if there else Scalar[dtype](0)


@always_inline
def flat_long_averages[
    dtype: DType, F: FlatShape
](dy: Data[dtype], p: GpuProblem, flat: Int32, total: Int32) -> SIMD[
    dtype, 16 // size_of[dtype]()
]:
    """The pixels from `flat` on under windows beside each other that are no shorter than a thread's pixels: two of one
    row, and two of the next."""
    comptime V = 16 // size_of[dtype]()
    var number, first = p.w.by_input.divmod(flat)
    var row = _row[F](p, number)
    var next = _row[F](p, min(number + 1, p.w.by_input.div(total - 1)))
    var ow, kw = p.w.by_stride.divmod(first + p.w.padding)
    # Where the row's second window, the next row and its second window begin.
    var second = p.w.stride() - kw
    var below = p.w.input - first
    var last = below + p.w.stride() - p.w.padding
    var left = _average[dtype, F](dy, p, row, ow)
    var right = _average[dtype, F](dy, p, row, ow + 1)
    var left_below = _average[dtype, F](dy, p, next, 0)
    var right_below = _average[dtype, F](dy, p, next, 1)
    var values = SIMD[dtype, V](0)
    comptime for j in range(V):
        var value = left if Int32(j) < second else right
        if Int32(j) >= below:
            value = left_below if Int32(j) < last else right_below
        values[j] = value
    return values


@always_inline
def flat_values[
    dtype: DType, index: DType, F: FlatShape
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
    var number, first = p.w.by_input.divmod(flat)
    var row = _row[F](p, number)
    var next = row
    comptime if G < V:
        # The last row of all has none below it.
        next = _row[F](p, min(number + 1, p.w.by_input.div(total - 1)))
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
                comptime if not F.uniform:
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


def pool_dgrad_flat[
    dtype: DType, index: DType, F: FlatShape
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
        comptime if F.group == 0:
            values[k] = flat_long_averages[dtype, F](dy, p, flat, total)
        else:
            values[k] = flat_values[dtype, index, F](
                dy, indices, p, flat, total
            )
    comptime for k in range(ITEMS):
        var flat = first + Int32(k) * APART
        if flat + Int32(V) <= total:
            dx.unsafe_store[alignment=16](Int(flat), values[k])
        else:
            comptime for j in range(V):
                if flat + Int32(j) < total:
                    dx[unsafe_offset=Int(flat) + j] = values[k][j]


def launch_pool_dgrad_flat[
    dtype: DType, index: DType, *, averaging: Bool, offsets: Bool
](
    ctx: DeviceContext,
    dx: Data[dtype],
    dy: Data[dtype],
    indices: Data[index],
    p: PoolingProblem,
) raises -> Bool:
    """False where windows overlap, channels lie between pixels, no kernel knows the window and the length of rows, or
    numbers do not fit 32 bits. Averages have no indices: any pointer does.
    """
    comptime V = 16 // size_of[dtype]()
    var total = Int(p.batch) * Int(p.input_plane())
    if (
        p.channels != 1
        or not is_apart(p)
        or not fits_32_bits(p)
        or total >= LIMIT_32 - MOST_ITEMS * THREADS * V
        or Int(p.w.input) < V - 1
        or p.output_plane() <= 0
        or Int(dx) % 16 != 0
    ):
        return False
    var scale = Float32(0)
    comptime if averaging:
        scale = uniform_scale[False](p)
    var deep = p.d.input > 1 or p.d.window > 1 or p.d.padding > 0
    var done = False

    @always_inline
    def enqueue[F: FlatShape]() raises {mut done, imm}:
        comptime kernel = pool_dgrad_flat[dtype, index, F]
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
        done = True

    @always_inline
    def launch[G: Int, S: Int]() raises {mut done, imm}:
        if done:
            return
        comptime if G > 0:
            if (
                Int(p.w.input) % G != 0
                or Int(p.w.stride) != S
                or Int(p.w.window) != S
                or p.w.padding != 0
                or Int(dy) % 16 != 0
            ):
                return
            comptime if not averaging:
                if Int(indices) % 16 != 0:
                    return
        else:
            if (
                Int(p.w.stride) < V
                or p.w.window != p.w.stride
                or p.w.padding >= p.w.stride
            ):
                return
        comptime if averaging:
            if scale == 0:
                enqueue[FlatShape(G, S, True, True, offsets, False)]()
                return
        if deep:
            enqueue[FlatShape(G, S, True, averaging, offsets, True)]()
        else:
            enqueue[FlatShape(G, S, False, averaging, offsets, True)]()

    launch[V, 2]()
    launch[V, 4]()
    comptime if V > 4:
        launch[4, 2]()
        launch[4, 4]()
    launch[2, 2]()
    # Wider elements are few enough to be stored one by one.
    comptime if averaging and V > 4:
        launch[0, 0]()
    return done
