"""Average pooling forward on a GPU over contiguous NCHW tensors, for windows that lie beside each other on W, are a power
of two wide and take several rows.

A warp takes 32 columns of a few rows of windows: each lane adds up its column of every window's rows, neighbours loading
neighbours wherever rows begin, and lanes under one window add up their sums in a few exchanges. Nothing goes through
shared memory and no warp waits for another.
"""

import max.gpu.primitives.warp as warp
from max.gpu import block_idx, thread_idx
from max.gpu.host import DeviceContext
from std.math import ceildiv

from .direct import Data
from .gpu_problem import (
    LIMIT_32,
    THREADS,
    FastDivisor,
    GpuProblem,
    fits_32_bits,
    uniform_scale,
)
from .problem import PoolingProblem

comptime LANES = 32
comptime GROUPS = 2
"""Rows of windows of a warp."""
comptime AHEAD = 8
"""Rows of a window that are loaded before the first is added."""
comptime NARROWEST = 4
comptime FEWEST_ROWS = 4


@always_inline
def _column[
    dtype: DType
](x: Data[dtype], at: Int, stride: Int32, rows: Int32) -> Float32:
    """The sum of `rows` elements, `stride` apart, from element `at` on."""
    var sum = Float32(0)
    for first in range(Int32(0), rows, AHEAD):
        var values = Array[Scalar[dtype], AHEAD](fill=0)
        comptime for k in range(AHEAD):
            # Rows past the last repeat it and are dropped after.
            var row = min(first + Int32(k), rows - 1)
            values[k] = x[unsafe_offset=at + Int(row * stride)]
        comptime for k in range(AHEAD):
            if first + Int32(k) < rows:
                sum += values[k].cast[DType.float32]()
    return sum


def avg_pool_fprop_lanes[
    dtype: DType
](
    y: Data[dtype],
    x: Data[dtype],
    p: GpuProblem,
    by_chunks: FastDivisor,
    by_strips: FastDivisor,
    warps: Int32,
):
    """`by_chunks` divides by the chunks of a row's columns, `by_strips` by the groups of rows of windows of a slab.
    """
    var lane = Int32(thread_idx.x) % LANES
    var flat = (
        Int32(block_idx.x) * Int32(THREADS // LANES)
        + Int32(thread_idx.x) // LANES
    )
    # Whole warps end here.
    if flat >= warps:
        return
    var unit, chunk = by_chunks.divmod(flat)
    var slab, strip = by_strips.divmod(unit)
    var n, od = p.d.by_output.divmod(slab)
    var w = chunk * LANES + lane
    var ow = p.w.by_stride.div(w)
    # Columns past the last whole window add nothing: their lanes read the row's first.
    var live = ow < p.w.output
    var td = p.d.taps[False](od)
    var plane = Int(n) * Int(p.input_plane()) + Int(w if live else 0)
    comptime for g in range(GROUPS):
        var oh = strip * GROUPS + Int32(g)
        var th = p.h.taps[False](min(oh, p.h.output - 1))
        var sum = Float32(0)
        for a in range(td.count):
            sum += _column(
                x,
                plane
                + Int(((td.start + a) * p.h.input + th.start) * p.w.input),
                p.w.input,
                th.count,
            )
        if not live:
            sum = 0
        var distance = p.w.window // 2
        while distance > 0:
            sum += warp.shuffle_xor(sum, UInt32(distance))
            distance //= 2
        if live and w % p.w.window == 0 and oh < p.h.output:
            var scale = p.scale
            if scale == 0:
                var include = p.include_pad != 0
                scale = (
                    p.d.scale[False](od, include)
                    * p.h.scale[False](oh, include)
                    * p.w.scale[False](ow, include)
                )
            y[
                unsafe_offset=Int(slab) * Int(p.h.output * p.w.output)
                + Int(oh * p.w.output + ow)
            ] = (sum * scale).cast[dtype]()


def launch_avg_pool_fprop_lanes[
    dtype: DType
](
    ctx: DeviceContext, y: Data[dtype], x: Data[dtype], p: PoolingProblem
) raises -> Bool:
    """False for other windows, where channels lie between pixels or numbers do not fit 32 bits.
    """
    var width = Int(p.w.window)
    if (
        p.channels != 1
        or width != Int(p.w.stride)
        or p.w.padding != 0
        or width < NARROWEST
        or width > LANES
        or width & (width - 1) != 0
        # The last window of a row may hang over its end.
        or Int(p.w.output) * width > Int(p.w.input)
        or p.h.window < FEWEST_ROWS
        or p.output_plane() <= 0
        or not fits_32_bits(p)
    ):
        return False
    var chunks = ceildiv(Int(p.w.output) * width, LANES)
    var strips = ceildiv(Int(p.h.output), GROUPS)
    var warps = Int(p.batch) * Int(p.d.output) * strips * chunks
    if warps >= LIMIT_32 - THREADS:
        return False
    ctx.enqueue_function[avg_pool_fprop_lanes[dtype]](
        y,
        x,
        GpuProblem(
            p, extent_d=p.d.output, vector=1, scale=uniform_scale[False](p)
        ),
        FastDivisor(chunks),
        FastDivisor(strips),
        Int32(warps),
        grid_dim=ceildiv(warps, THREADS // LANES),
        block_dim=THREADS,
    )
    return True
