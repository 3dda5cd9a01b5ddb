"""Pooling forward on a GPU over contiguous NCHW tensors, for every window: whole planes go through shared memory.

A block copies a few planes as one run of 16-byte vectors, wherever they begin and end; then each of its threads takes
windows of them. What overlapping or long windows read again costs no bandwidth of the device's memory. Averages of windows
that do not overlap on H add up the columns of each row of windows first, neighbours beside each other, whom a window a
thread would set apart.
"""

from max.gpu import barrier, block_dim, block_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.memory import AddressSpace
from std.math import ceildiv
from std.memory import stack_allocation
from std.sys import size_of
from std.utils.numerics import neg_inf

from ...arithmetic import Divisor
from ..problem import Data, PoolingAxis, PoolingProblem
from .problem import LIMIT_32, THREADS, GpuProblem, uniform_scale

comptime PIECE_BYTES = 32 * 1024
comptime MOST_COLUMNS = 2048
"""Sums of columns, at most, that a block holds."""
comptime SHORTEST = 16
"""Columns from which on adding them up first fills warps well."""
comptime AHEAD = 4
"""Vectors that a thread loads before it stores the first."""


@always_inline
def pool_fprop_window[
    dtype: DType,
    index: DType,
    adaptive: Bool,
    averaging: Bool,
    offsets: Bool,
](
    y: Data[dtype],
    indices: Data[index],
    planes: MutPointer[Scalar[dtype], _, address_space=_],
    p: GpuProblem,
    o: Int32,
):
    """Window number `o` of the planes that start at `planes`; y and indices point at the first one's.
    """
    var row, ow = p.w.by_output.divide(o)
    var slab, oh = p.h.by_output.divide(row)
    var n, od = p.d.by_output.divide(slab)
    var td = p.d.taps[adaptive](od)
    var th = p.h.taps[adaptive](oh)
    var tw = p.w.taps[adaptive](ow)
    var base = n * p.input_plane()
    var best = Float32(0) if averaging else neg_inf[DType.float32]()
    var found = (td.start * p.h.input + th.start) * p.w.input + tw.start
    comptime if offsets:
        found = (td.first * p.h.window + th.first) * p.w.window + tw.first
        if td.count <= 0 or th.count <= 0 or tw.count <= 0:
            found = p.d.window * p.h.window * p.w.window
    var d_step = Int32(1) if adaptive else p.d.dilation()
    var h_step = Int32(1) if adaptive else p.h.dilation()
    var w_step = Int32(1) if adaptive else p.w.dilation()
    for a in range(td.count):
        for b in range(th.count):
            var pixel = (
                (td.start + a * d_step) * p.h.input + th.start + b * h_step
            ) * p.w.input + tw.start
            var tap = (
                (td.first + a) * p.h.window + th.first + b
            ) * p.w.window + tw.first
            for k in range(tw.count):
                var value = planes[unsafe_offset=Int(base + pixel)].cast[
                    DType.float32
                ]()
                comptime if averaging:
                    best += value
                else:
                    if value > best or value != value:
                        best = value
                        found = tap + k if offsets else pixel
                pixel += w_step
    comptime if averaging:
        var scale = p.scale
        if scale == 0:
            var include = p.include_pad != 0
            scale = (
                p.d.scale[adaptive](od, include)
                * p.h.scale[adaptive](oh, include)
                * p.w.scale[adaptive](ow, include)
            )
        best *= scale
    y[unsafe_offset=Int(o)] = best.cast[dtype]()
    comptime if not averaging:
        indices[unsafe_offset=Int(o)] = found.cast[index]()


@always_inline
def _average_columns[
    dtype: DType, adaptive: Bool
](
    y: Data[dtype],
    planes: MutPointer[Scalar[dtype], _, address_space=_],
    p: GpuProblem,
    rows: Int32,
    by_columns: Divisor,
):
    """Averages of `rows` rows of windows of the planes that start at `planes`, through sums of their columns.
    """
    var sums = stack_allocation[
        MOST_COLUMNS, Float32, address_space=AddressSpace.SHARED
    ]()
    var columns = by_columns.value
    var item = Int32(thread_idx.x)
    while item < rows * columns:
        var row, w = by_columns.divide(item)
        var slab, oh = p.h.by_output.divide(row)
        var n, od = p.d.by_output.divide(slab)
        var td = p.d.taps[adaptive](od)
        var th = p.h.taps[adaptive](oh)
        var sum = Float32(0)
        for a in range(td.count):
            var pixel = (
                n * p.input_plane()
                + ((td.start + a) * p.h.input + th.start) * p.w.input
                + w
            )
            for _ in range(th.count):
                sum += planes[unsafe_offset=Int(pixel)].cast[DType.float32]()
                pixel += p.w.input
        sums[unsafe_offset=Int(item)] = sum
        item += Int32(block_dim.x)
    barrier()
    var o = Int32(thread_idx.x)
    while o < rows * p.w.output:
        var row, ow = p.w.by_output.divide(o)
        var tw = p.w.taps[adaptive](ow)
        var sum = Float32(0)
        for k in range(tw.count):
            sum += sums[unsafe_offset=Int(row * columns + tw.start + k)]
        var scale = p.scale
        if scale == 0:
            var slab, oh = p.h.by_output.divide(row)
            var od = p.d.by_output.divide(slab)[1]
            var include = p.include_pad != 0
            scale = (
                p.d.scale[adaptive](od, include)
                * p.h.scale[adaptive](oh, include)
                * p.w.scale[adaptive](ow, include)
            )
        y[unsafe_offset=Int(o)] = (sum * scale).cast[dtype]()
        o += Int32(block_dim.x)


def _columns[adaptive: Bool](p: PoolingProblem, planes: Int) -> Int:
    """The columns that windows cover where adding them up first pays, else 1.
    """

    @always_inline
    def again(axis: PoolingAxis) -> Bool:
        comptime if adaptive:
            return axis.input % axis.output != 0
        else:
            return axis.window > axis.stride or axis.dilation != 1

    var last = p.w.taps[adaptive](Int(p.w.output) - 1)
    var columns = last.start + last.count
    var held = planes * Int(p.d.output) * Int(p.h.output) * columns
    if (
        again(p.d)
        or again(p.h)
        or p.w.dilation != 1
        or columns < SHORTEST
        or held > MOST_COLUMNS
    ):
        return 1
    return columns


def pool_fprop_planes[
    dtype: DType,
    index: DType,
    adaptive: Bool,
    averaging: Bool,
    offsets: Bool,
](
    y: Data[dtype],
    indices: Data[index],
    x: Data[dtype],
    p: GpuProblem,
    batch: Int32,
    group: Int32,
    by_columns: Divisor,
):
    """A block takes `group` of the `batch` planes. `by_columns` divides by the columns that windows cover; by 1 where
    windows are taken one by one."""
    comptime V = 16 // size_of[dtype]()
    var piece = stack_allocation[
        PIECE_BYTES // size_of[dtype]() + V,
        Scalar[dtype],
        alignment=16,
        address_space=AddressSpace.SHARED,
    ]()
    var n = Int32(block_idx.x) * group
    var count = min(group, batch - n)
    var source = x.unsafe_offset(Int(n) * Int(p.input_plane()))
    # Vectors are aligned in both places when the run starts equally far from one.
    var shift = Int32((Int(source) // size_of[dtype]()) % V)
    var start = source.unsafe_offset(-Int(shift))
    var end = shift + count * p.input_plane()
    var thread = Int32(thread_idx.x)
    var threads = Int32(block_dim.x)
    var v = thread
    while v * Int32(V) < end:
        var values = Array[SIMD[dtype, V], AHEAD](fill=SIMD[dtype, V](0))
        comptime for k in range(AHEAD):
            var at = (v + Int32(k) * threads) * Int32(V)
            if at >= shift and at + Int32(V) <= end:
                values[k] = start.unsafe_load[width=V, alignment=16](Int(at))
        comptime for k in range(AHEAD):
            var at = (v + Int32(k) * threads) * Int32(V)
            if at >= shift and at + Int32(V) <= end:
                piece.unsafe_store[alignment=16](Int(at), values[k])
            else:
                for i in range(max(at, shift), min(at + Int32(V), end)):
                    piece[unsafe_offset=Int(i)] = start[unsafe_offset=Int(i)]
        v += Int32(AHEAD) * threads
    barrier()
    comptime if averaging:
        if by_columns.value > 1:
            _average_columns[dtype, adaptive](
                y.unsafe_offset(Int(n) * Int(p.output_plane())),
                piece.unsafe_offset(Int(shift)),
                p,
                count * p.d.output * p.h.output,
                by_columns,
            )
            return
    var first = Int(n) * Int(p.output_plane())
    var indices_n = indices
    comptime if not averaging:
        indices_n = indices.unsafe_offset(first)
    var o = thread
    while o < count * p.output_plane():
        pool_fprop_window[dtype, index, adaptive, averaging, offsets](
            y.unsafe_offset(first),
            indices_n,
            piece.unsafe_offset(Int(shift)),
            p,
            o,
        )
        o += threads


def planes_can_implement[dtype: DType](p: PoolingProblem) -> Optional[String]:
    """None, or why this kernel does not take the problem."""
    if p.channels != 1:
        return String("channels lie between pixels")
    if p.input_plane() * size_of[dtype]() > PIECE_BYTES:
        return String("a plane does not fit shared memory")
    if Int(p.batch) >= LIMIT_32:
        return String("planes are too many for 32 bits")
    return None


def planes_fprop[
    dtype: DType,
    index: DType,
    *,
    adaptive: Bool,
    averaging: Bool,
    offsets: Bool,
](
    ctx: DeviceContext,
    y: Data[dtype],
    indices: Data[index],
    x: Data[dtype],
    p: PoolingProblem,
) raises:
    """Averages have no indices: any pointer does."""
    # As many planes as keep the threads busy, not so many that few blocks remain.
    var group = max(
        min(
            PIECE_BYTES // (p.input_plane() * size_of[dtype]()),
            max(Int(p.batch) // 1024, ceildiv(THREADS, p.output_plane())),
        ),
        1,
    )
    var scale = Float32(0)
    comptime if averaging:
        scale = uniform_scale[adaptive](p)
    comptime kernel = pool_fprop_planes[
        dtype, index, adaptive, averaging, offsets
    ]
    ctx.enqueue_function[kernel](
        y,
        indices,
        x,
        GpuProblem(p, extent_d=p.d.output, vector=1, scale=scale),
        Int32(p.batch),
        Int32(group),
        Divisor(_columns[adaptive](p, group) if averaging else 1),
        grid_dim=ceildiv(Int(p.batch), group),
        block_dim=THREADS,
    )
