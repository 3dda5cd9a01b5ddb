"""Average pooling forward on a GPU over contiguous NCHW tensors, for windows that lie beside each other on W, are a power
of two and whole vectors wide and take several rows.

A warp takes 32 columns of a few rows of windows: each lane adds up 16 bytes of a row, lanes under one window add up their
sums in a few exchanges. Rows begin anywhere, so a lane loads the two aligned vectors that its elements lie in (its
neighbour's first is its second) and picks from both: a window's sum asks for no order of its elements. Nothing goes
through shared memory and no warp waits for another.
"""

import max.gpu.primitives.warp as warp
from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, block_idx, thread_idx
from max.gpu.host import DeviceContext
from std.math import ceildiv
from std.memory import bitcast
from std.sys import size_of
from std.sys._assembly import inlined_assembly
from std.sys.info import is_nvidia_gpu
from std.utils.static_tuple import StaticTuple

from .direct import Data
from .gpu_problem import (
    LIMIT_32,
    THREADS,
    FastDivisor,
    GpuAxis,
    GpuProblem,
    fits_32_bits,
    uniform_scale,
)
from .problem import PoolingProblem

comptime LANES = 32
comptime GROUPS = 4
"""Rows of windows of a warp."""
comptime BLOCKS = 3
"""Blocks that a multiprocessor shall hold: with registers for all of a warp's loads at once."""


@always_inline
def _halves_from(first: Int32) -> UInt32:
    """The halves of a word from number `first` on; all of them for a negative number.
    """
    var bits = max(first, 0) * 16
    comptime if is_nvidia_gpu():
        # One instruction, which shifts out whole words too: LLVM would guard against that.
        return inlined_assembly[
            "shl.b32 $0, $1, $2;",
            UInt32,
            constraints="=r,n,r",
            has_side_effect=False,
        ](Int32(-1), bits)
    else:
        return UInt32(0xFFFFFFFF) << UInt32(bits) if first < 2 else UInt32(0)


@always_inline
def _picked_sum[
    dtype: DType, V: Int, //
](low: SIMD[dtype, V], high: SIMD[dtype, V], skipped: Int32) -> Float32:
    """The sum of high's first `skipped` elements and of those of low that come after as many.
    """
    comptime WORDS = 4
    var lows = bitcast[DType.uint32, WORDS](low)
    var highs = bitcast[DType.uint32, WORDS](high)
    var sum = Float32(0)
    comptime for j in range(WORDS):
        comptime if size_of[dtype]() == 4:
            var word = highs[j] if Int32(j) < skipped else lows[j]
            sum += bitcast[DType.float32](word)
        else:
            var kept = _halves_from(skipped - Int32(2 * j))
            var word = (lows[j] & kept) | (highs[j] & ~kept)
            comptime if dtype == DType.bfloat16:
                # The upper half of its float32.
                sum += bitcast[DType.float32](word << 16)
                sum += bitcast[DType.float32](word & 0xFFFF0000)
            else:
                var pair = bitcast[dtype, 2](word).cast[DType.float32]()
                sum += pair[0] + pair[1]
    return sum


@always_inline
def _under(axis: GpuAxis, o: Int32) -> Tuple[Int32, Int32]:
    """The first position under window `o`, and how many: averages have no dilation.
    """
    var origin = axis.origin(o)
    var start = max(origin, 0)
    return (start, min(origin + axis.window, axis.input) - start)


@always_inline
def _lane_sum[
    dtype: DType, //, V: Int
](
    x: Data[dtype],
    p: GpuProblem,
    column: Int,
    slabs: Tuple[Int32, Int32],
    rows: Tuple[Int32, Int32],
    row: Int32,
) -> Float32:
    """One lane's part of a window, element by element: rows number `row`, row + V, ... of each slab.
    """
    var sum = Float32(0)
    for a in range(slabs[1]):
        for b in range(row, rows[1], Int32(V)):
            var begin = column + Int(
                ((slabs[0] + a) * p.h.input + rows[0] + b) * p.w.input
            )
            for i in range(V):
                sum += x[unsafe_offset=begin + i].cast[DType.float32]()
    return sum


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)),
    `nvvm.minctasm`=SIMDLength(BLOCKS),
)
def avg_pool_fprop_lanes[
    dtype: DType
](
    y: Data[dtype],
    x: Data[dtype],
    p: GpuProblem,
    by_chunks: FastDivisor,
    by_strips: FastDivisor,
    warps: Int32,
    size: Int64,
):
    """`by_chunks` divides by the chunks of a row's columns, `by_strips` by the groups of rows of windows of a slab; x has
    `size` elements and begins at a whole vector."""
    comptime V = 16 // size_of[dtype]()
    comptime ACROSS = LANES // V
    """Vectors of a row that a warp takes beside each other, of V rows at a time."""
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
    var row = lane // Int32(ACROSS)
    var w = chunk * LANES + lane % Int32(ACROSS) * Int32(V)
    var ow = p.w.by_stride.div(w)
    # Columns past the last whole window add nothing: their lanes read the row's first.
    var live = ow < p.w.output
    var slabs = _under(p.d, od)
    var plane = Int(n) * Int(p.input_plane())
    var column = w if live else Int32(0)
    var rows = Array[Tuple[Int32, Int32], GROUPS](fill=(Int32(0), Int32(0)))
    var sums = Array[Float32, GROUPS](fill=0)
    comptime for g in range(GROUPS):
        rows[g] = _under(p.h, min(strip * GROUPS + Int32(g), p.h.output - 1))
    # A vector that hangs over the end of x comes after elements of its last row: the same for all lanes of a warp.
    var last = (
        (slabs[0] + slabs[1] - 1) * p.h.input
        + rows[GROUPS - 1][0]
        + rows[GROUPS - 1][1]
    ) * p.w.input
    if Int64(plane + Int(last) + V) > size:
        comptime for g in range(GROUPS):
            sums[g] = _lane_sum[V](
                x, p, plane + Int(column), slabs, rows[g], row
            )
    else:
        # Numbers in the plane count from the whole vector that it begins in.
        var shift = plane % V
        var source = x.unsafe_offset(plane - shift)
        for a in range(slabs[1]):
            var first = row
            # The same turns for all lanes: rows past a window's last repeat it and are dropped after.
            for _ in range(Int32(0), p.h.window, Int32(V)):
                var lows = Array[SIMD[dtype, V], GROUPS](fill=SIMD[dtype, V](0))
                var highs = Array[SIMD[dtype, V], GROUPS](
                    fill=SIMD[dtype, V](0)
                )
                var skips = Array[Int32, GROUPS](fill=0)
                comptime for g in range(GROUPS):
                    var h = rows[g][0] + min(first, rows[g][1] - 1)
                    var begin = (
                        ((slabs[0] + a) * p.h.input + h) * p.w.input
                        + column
                        + Int32(shift)
                    )
                    skips[g] = begin & Int32(V - 1)
                    var aligned = source.unsafe_offset(Int(begin - skips[g]))
                    lows[g] = aligned.unsafe_load[width=V, alignment=16](0)
                    highs[g] = aligned.unsafe_load[width=V, alignment=16](V)
                comptime for g in range(GROUPS):
                    var sum = _picked_sum(lows[g], highs[g], skips[g])
                    if first < rows[g][1]:
                        sums[g] += sum
                first += Int32(V)
    comptime for g in range(GROUPS):
        if not live:
            sums[g] = 0
        # Over the rows, then over the vectors of a window.
        comptime for k in range(5):
            comptime if ACROSS << k < LANES:
                sums[g] += warp.shuffle_xor(sums[g], UInt32(ACROSS << k))
    var distance = p.w.window // Int32(2 * V)
    while distance > 0:
        comptime for g in range(GROUPS):
            sums[g] += warp.shuffle_xor(sums[g], UInt32(distance))
        distance //= 2
    # Lanes of one row store one row of windows.
    var mine = sums[0]
    comptime for g in range(1, GROUPS):
        if row == Int32(g):
            mine = sums[g]
    var oh = strip * GROUPS + row
    if live and row < GROUPS and oh < p.h.output and w == ow * p.w.window:
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
        ] = (mine * scale).cast[dtype]()


def launch_avg_pool_fprop_lanes[
    dtype: DType
](
    ctx: DeviceContext, y: Data[dtype], x: Data[dtype], p: PoolingProblem
) raises -> Bool:
    """False for other windows, where channels lie between pixels or numbers do not fit 32 bits.
    """
    comptime V = 16 // size_of[dtype]()
    var width = Int(p.w.window)
    if (
        p.channels != 1
        or width != Int(p.w.stride)
        or p.w.padding != 0
        or width < V
        or width > LANES
        or width & (width - 1) != 0
        # The last window of a row may hang over its end.
        or Int(p.w.output) * width > Int(p.w.input)
        or Int(p.h.window) < V
        or p.output_plane() <= 0
        or Int(x) % 16 != 0
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
        Int64(p.input_size()),
        grid_dim=ceildiv(warps, THREADS // LANES),
        block_dim=THREADS,
    )
    return True
