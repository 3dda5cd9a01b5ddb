"""Pooling gradients on a GPU over contiguous NCHW tensors whose windows do not overlap, of any size.

A thread computes 16 bytes of dx, wherever rows and planes begin and end in them: every store is a whole vector. The
one window above an element follows from its place; neighbours load the same one, out of the first-level cache.
"""

from max.gpu import block_dim, block_idx, thread_idx
from max.gpu.host import DeviceContext
from std.math import ceildiv
from std.sys import size_of

from .direct import Data
from .gpu_problem import LIMIT_32, THREADS, GpuProblem, uniform_scale
from .problem import PoolingAxis, PoolingProblem


@fieldwise_init
struct _RowPlace(TrivialRegisterPassable):
    """What a row of dx lies under."""

    var live: Bool
    var windows: Int32
    """Number of the first window of its row of windows, in the whole tensor."""
    var origin: Int32
    """What an index or offset of the row's first column or tap holds."""
    var scale: Float32


@always_inline
def _row_place[offsets: Bool](p: GpuProblem, row: Int32) -> _RowPlace:
    var slab, h = p.h.by_input.divmod(row)
    var n, d = p.d.by_input.divmod(slab)
    var od, kd = p.d.by_stride.divmod(d + p.d.padding)
    var oh, kh = p.h.by_stride.divmod(h + p.h.padding)
    var live = (
        kd < p.d.window
        and od < p.d.output
        and kh < p.h.window
        and oh < p.h.output
    )
    var origin = (d * p.h.input + h) * p.w.input
    comptime if offsets:
        origin = (kd * p.h.window + kh) * p.w.window
    var scale = p.scale
    if scale == 0:
        var include = p.include_pad != 0
        scale = p.d.scale[False](od, include) * p.h.scale[False](oh, include)
    return _RowPlace(
        live,
        ((n * p.d.output + od) * p.h.output + oh) * p.w.output,
        origin,
        scale,
    )


@always_inline
def gradient_run[
    dtype: DType, index: DType, averaging: Bool, offsets: Bool
](
    dx: Data[dtype],
    dy: Data[dtype],
    indices: Data[index],
    p: GpuProblem,
    total: Int32,
    first: Int32,
):
    """Elements first, ... of dx, as many as make 16 bytes. Averages have no indices.
    """
    comptime V = 16 // size_of[dtype]()
    var row, w = p.w.by_input.divmod(first)
    var place = _row_place[offsets](p, row)
    var ow, kw = p.w.by_stride.divmod(w + p.w.padding)
    var g = Array[Scalar[dtype], V](fill=0)
    var found = Array[Scalar[index], V](fill=Scalar[index](-1))
    var wanted = Array[Int32, V](fill=0)
    var scale = Array[Float32, V](fill=0)
    # All loads before the first use.
    comptime for j in range(V):
        if place.live and kw < p.w.window and ow < p.w.output:
            var at = Int(place.windows + ow)
            g[j] = dy[unsafe_offset=at]
            comptime if averaging:
                scale[j] = place.scale
                if p.scale == 0:
                    scale[j] *= p.w.scale[False](ow, p.include_pad != 0)
            else:
                found[j] = indices[unsafe_offset=at]
        comptime if not averaging:
            wanted[j] = place.origin + (kw if offsets else w)
        w += 1
        kw += 1
        if kw == p.w.stride():
            kw = 0
            ow += 1
        if w == p.w.input:
            row += 1
            w = 0
            # The element after the last one is in no row.
            place = _row_place[offsets](p, row)
            ow, kw = p.w.by_stride.divmod(p.w.padding)
    var result = SIMD[dtype, V](0)
    comptime for j in range(V):
        var value = g[j].cast[DType.float32]()
        comptime if averaging:
            result[j] = (value * scale[j]).cast[dtype]()
        else:
            # Unsigned bytes that stand for nothing are 255, more than any tap's number.
            var hit = found[j].cast[DType.int64]() == Int64(wanted[j])
            result[j] = (value if hit else Float32(0)).cast[dtype]()
    if first + Int32(V) <= total:
        dx.unsafe_store[alignment=16](Int(first), result)
    else:
        comptime for j in range(V):
            if first + Int32(j) < total:
                dx[unsafe_offset=Int(first) + j] = result[j]


def pool_dgrad_flat[
    dtype: DType, index: DType, averaging: Bool, offsets: Bool
](
    dx: Data[dtype],
    dy: Data[dtype],
    indices: Data[index],
    p: GpuProblem,
    total: Int32,
):
    comptime V = 16 // size_of[dtype]()
    var first = Int32(block_idx.x * block_dim.x + thread_idx.x) * Int32(V)
    if first < total:
        gradient_run[dtype, index, averaging, offsets](
            dx, dy, indices, p, total, first
        )


def _apart(axis: PoolingAxis) -> PoolingAxis:
    """The axis with a stride that numbers windows by division: a single window has the whole axis.
    """
    var result = axis
    if axis.output == 1:
        result.stride = max(axis.stride, axis.input + axis.padding)
    return result


def windows_apart(p: PoolingProblem) -> PoolingProblem:
    """The problem as gradient_run takes it."""
    var result = p
    result.d = _apart(p.d)
    result.h = _apart(p.h)
    result.w = _apart(p.w)
    return result


def launch_pool_dgrad_flat[
    dtype: DType, index: DType, *, averaging: Bool, offsets: Bool
](
    ctx: DeviceContext,
    dx: Data[dtype],
    dy: Data[dtype],
    indices: Data[index],
    given: PoolingProblem,
) raises -> Bool:
    """False where windows overlap, or channels lie between pixels. Averages have no indices: any pointer does.
    """
    comptime V = 16 // size_of[dtype]()
    var p = windows_apart(given)
    var total = p.input_size()

    @always_inline
    def overlaps(axis: PoolingAxis) -> Bool:
        return axis.window > axis.stride or axis.dilation != 1

    if (
        p.channels != 1
        or overlaps(p.d)
        or overlaps(p.h)
        or overlaps(p.w)
        or max(total, p.output_size()) + THREADS * V >= LIMIT_32
        or Int(dx) % 16 != 0
    ):
        return False
    var scale = Float32(0)
    comptime if averaging:
        scale = uniform_scale[False](given)
    comptime kernel = pool_dgrad_flat[dtype, index, averaging, offsets]
    ctx.enqueue_function[kernel](
        dx,
        dy,
        indices,
        GpuProblem(p, extent_d=p.d.input, vector=1, scale=scale),
        Int32(total),
        grid_dim=ceildiv(total, THREADS * V),
        block_dim=THREADS,
    )
    return True
