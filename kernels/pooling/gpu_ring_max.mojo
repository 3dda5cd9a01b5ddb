"""Gradient of max pooling on a GPU over channels-last tensors, for every window.

A thread owns V channels of a strip of columns and walks down H, one row of windows at a time. It adds each dy where
its index points: to sums in shared memory that no other thread touches, a ring of as many rows as a window reaches
over. So a window costs the same however many taps it has, nothing is atomic, and additions always come in the same
order. Rows that no later window reaches are rounded, stored and cleared. An index that points outside its window or
outside the strip is ignored.
"""

from max.gpu import block_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.memory import AddressSpace, external_memory
from std.builtin.device_passable import DevicePassable, DeviceTypeEncoder
from std.math import ceildiv
from std.sys import size_of

from .direct import Data
from .gpu_problem import FastDivisor, GpuProblem, LIMIT_32, fits_32_bits
from .problem import PoolingProblem

comptime BLOCK = 128
comptime MOST_SUMS = 96
"""Sums of a thread: 48 KiB of a block. mojo_ops/pooling.py knows how tall a window they hold."""
comptime AHEAD = 4
"""Windows that are loaded before the first is looked at, and pixels before the first is stored."""
comptime LONGEST = 16
"""Most rows of windows in a strip."""
comptime ENOUGH_THREADS = 1 << 16
comptime ENOUGH_APART = 1 << 18
"""The same where windows do not overlap and a shorter strip loads nothing twice."""


@fieldwise_init
struct Strips(DevicePassable, TrivialRegisterPassable):
    """How dx is cut: units (a strip of H of one slab) of items (a strip of columns by V channels).
    """

    var total: Int32
    """Items of all units."""
    var columns: Int32
    var ring: Int32
    """Rows of sums: what a window reaches over, or the stride."""
    var groups: Int32
    """Rows of windows in a strip."""
    var all_groups: Int32
    var above: Int32
    """The most rows of windows above one pixel."""
    var taps: Int32
    """Taps of one slab of a window."""
    var by_items: FastDivisor
    var by_strips: FastDivisor
    var by_window_w: FastDivisor

    comptime device_type: AnyType = Self

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        return "Strips"

    def __init__(out self, p: PoolingProblem, vector: Int):
        var reach_h = Int(p.h.dilation) * (Int(p.h.window) - 1) + 1
        var reach_w = Int(p.w.dilation) * (Int(p.w.window) - 1) + 1
        var stride_h = Int(p.h.stride)
        var stride_w = Int(p.w.stride)
        var ring = max(reach_h, stride_h)
        # Windows over the edge of a strip are loaded twice; long strips leave few threads to a multiprocessor.
        var wanted = 4 * reach_w if reach_w > stride_w else max(stride_w, 4)
        var columns = max(
            min(min(MOST_SUMS // (ring * vector), wanted), Int(p.w.input)), 1
        )
        var tiles = ceildiv(Int(p.w.input), columns)
        var above = ceildiv(reach_h, stride_h)
        var slabs = Int(p.batch) * Int(p.d.input)
        var items = tiles * (Int(p.channels) // vector)
        var groups = ceildiv(Int(p.h.input) + Int(p.h.padding), stride_h)
        var enough = ENOUGH_APART if above == 1 else ENOUGH_THREADS
        var strip = LONGEST
        while strip > above and items * slabs * ceildiv(groups, strip) < enough:
            strip //= 2
        strip = max(min(strip, groups), 1)
        var strips = ceildiv(groups, strip)
        self.total = Int32(min(items * slabs * strips, LIMIT_32 - 1))
        self.columns = Int32(ceildiv(Int(p.w.input), tiles))
        self.ring = Int32(ring)
        self.groups = Int32(strip)
        self.all_groups = Int32(groups)
        self.above = Int32(above)
        self.by_items = FastDivisor(items)
        self.by_strips = FastDivisor(strips)
        self.taps = Int32(Int(p.h.window) * Int(p.w.window))
        self.by_window_w = FastDivisor(Int(p.w.window))

    def shared_bytes(self, vector: Int) -> Int:
        return Int(self.ring * self.columns) * vector * BLOCK * 4


@always_inline
def _place[
    index: DType, //, *, offsets: Bool
](
    found: Scalar[index],
    p: GpuProblem,
    t: Strips,
    origin: Int32,
) -> Tuple[
    Int32, Int32
]:
    """Row and column from the window's first that an entry names; the row is -1 where it lies outside the window's
    hull. `origin` is the number of the window's first pixel in the plane, or of the slab's first tap.
    """
    comptime if offsets:
        var tap = Int32(found) - origin
        var kh, kw = t.by_window_w.divmod(tap)
        # As unsigned numbers, what lies before the first is far past the last.
        var bad = UInt32(tap) >= UInt32(t.taps)
        return (
            Int32(-1) if bad else kh * p.h.dilation(),
            kw * p.w.dilation(),
        )
    else:
        var r, j = p.w.by_input.divmod(Int32(found) - origin)
        var bad = (
            UInt64(found) >= UInt64(LIMIT_32)
            or UInt32(r) >= UInt32(p.h.reach)
            or UInt32(j) >= UInt32(p.w.reach)
        )
        return (Int32(-1) if bad else r, j)


@always_inline
def walk_ring[
    dtype: DType, index: DType, V: Int, offsets: Bool
](
    dx: Data[dtype],
    dy: Data[dtype],
    indices: Data[index],
    sums: MutPointer[Float32, _, address_space=_],
    p: GpuProblem,
    t: Strips,
    flat: Int32,
    step: Int,
):
    """The work of thread `flat`; its vectors of sums are `step` apart and begin as zeros at `sums`.
    """
    comptime Sum = SIMD[DType.float32, V]
    comptime data_bytes = V * size_of[dtype]()
    comptime index_bytes = min(V * size_of[index](), 16)
    var unit, item = t.by_items.divmod(flat)
    var tile, vector = p.by_vectors.divmod(item)
    var slab, strip = t.by_strips.divmod(unit)
    var n, d = p.d.by_input.divmod(slab)
    var c = vector * Int32(V)
    var w0 = tile * t.columns
    var columns = min(t.columns, p.w.input - w0)
    if columns <= 0:
        return
    var base = d * p.h.input * p.w.input
    var above_d = p.d.outputs_over[False](d)
    var ow0 = p.w.outputs_over[False](w0)[0]
    var ow1 = p.w.outputs_over[False](w0 + columns - 1)[1]
    var sample = Int(n) * Int(p.output_plane()) * Int(p.channels) + Int(c)
    var dy_n = dy.unsafe_offset(sample)
    var indices_n = indices.unsafe_offset(sample)
    var dx_tile = dx.unsafe_offset(
        Int(slab) * Int(p.h.input * p.w.input * p.channels)
        + Int(w0 * p.channels + c)
    )
    var first_group = strip * t.groups
    var end_group = min(first_group + t.groups, t.all_groups)
    var stride = p.h.stride()
    # The ring's row that stands for the first row under the current windows.
    var head = Int32(0)
    for group in range(max(first_group - t.above + 1, 0), end_group):
        var top = p.h.origin(group)
        if group < p.h.output:
            for od in range(above_d[0], above_d[1]):
                var kd = Int32(0)
                comptime if offsets:
                    var skipped: Int32
                    kd, skipped = p.d.by_dilation.divmod(d - p.d.origin(od))
                    if skipped != 0:
                        continue
                var row = (od * p.h.output + group) * p.w.output
                var corner = base + top * p.w.input
                for first in range(ow0, ow1, AHEAD):
                    var gradient = Array[SIMD[dtype, V], AHEAD](
                        fill=SIMD[dtype, V](0)
                    )
                    var found = Array[SIMD[index, V], AHEAD](
                        fill=SIMD[index, V](0)
                    )
                    comptime for k in range(AHEAD):
                        if first + Int32(k) < ow1:
                            var o = Int((row + first + Int32(k)) * p.channels)
                            gradient[k] = dy_n.unsafe_load[
                                width=V, alignment=data_bytes
                            ](o)
                            found[k] = indices_n.unsafe_load[
                                width=V, alignment=index_bytes
                            ](o)
                    comptime for k in range(AHEAD):
                        if first + Int32(k) < ow1:
                            var left = p.w.origin(first + Int32(k))
                            comptime for v in range(V):
                                var r, j = _place[offsets=offsets](
                                    found[k][v],
                                    p,
                                    t,
                                    kd * t.taps if offsets else corner + left,
                                )
                                j += left - w0
                                if r >= 0 and UInt32(j) < UInt32(columns):
                                    r += head
                                    if r >= t.ring:
                                        r -= t.ring
                                    var at = Int(r * t.columns + j) * step + v
                                    sums[unsafe_offset=at] += gradient[k][
                                        v
                                    ].cast[DType.float32]()
        for r in range(stride):
            var h = top + r
            var live = group >= first_group and h >= 0 and h < p.h.input
            var row = sums.unsafe_offset(Int(head * t.columns) * step)
            var out = dx_tile.unsafe_offset(Int(h * p.w.input * p.channels))
            for first in range(Int32(0), columns, AHEAD):
                var values = Array[Sum, AHEAD](fill=Sum(0))
                comptime for k in range(AHEAD):
                    if first + Int32(k) < columns:
                        var at = Int(first + Int32(k)) * step
                        values[k] = row.unsafe_load[width=V, alignment=4 * V](
                            at
                        )
                        row.unsafe_store[alignment=4 * V](at, Sum(0))
                comptime for k in range(AHEAD):
                    if live and first + Int32(k) < columns:
                        out.unsafe_store[alignment=data_bytes](
                            Int((first + Int32(k)) * p.channels),
                            values[k].cast[dtype](),
                        )
            head += 1
            if head == t.ring:
                head = 0


def max_pool_dgrad_ring[
    dtype: DType, index: DType, V: Int, offsets: Bool
](
    dx: Data[dtype],
    dy: Data[dtype],
    indices: Data[index],
    p: GpuProblem,
    t: Strips,
):
    var shared = external_memory[
        Float32, address_space=AddressSpace.SHARED, alignment=16
    ]()
    var flat = Int32(block_idx.x) * BLOCK + Int32(thread_idx.x)
    if flat >= t.total:
        return
    var sums = shared.unsafe_offset(Int(thread_idx.x) * V)
    for i in range(t.ring * t.columns):
        sums.unsafe_store[alignment=4 * V](
            Int(i) * BLOCK * V, SIMD[DType.float32, V](0)
        )
    walk_ring[dtype, index, V, offsets](
        dx, dy, indices, sums, p, t, flat, BLOCK * V
    )


def launch_max_pool_dgrad_ring[
    dtype: DType, index: DType, *, offsets: Bool
](
    ctx: DeviceContext,
    dx: Data[dtype],
    dy: Data[dtype],
    indices: Data[index],
    p: PoolingProblem,
) raises -> Bool:
    """False where a window reaches over more rows than a thread has sums for, or farther than a row is long, or numbers
    do not fit 32 bits."""
    var reach = Int(p.h.dilation) * (Int(p.h.window) - 1) + 1
    var reach_w = Int(p.w.dilation) * (Int(p.w.window) - 1) + 1
    var ring = max(reach, Int(p.h.stride))
    if ring > MOST_SUMS or reach_w > Int(p.w.input) or not fits_32_bits(p):
        return False
    var done = False

    @always_inline
    def launch[V: Int]() raises {mut done, imm}:
        var strips = Strips(p, V)
        if Int(strips.total) >= LIMIT_32 - BLOCK:
            return
        comptime kernel = max_pool_dgrad_ring[dtype, index, V, offsets]
        ctx.enqueue_function[kernel](
            dx,
            dy,
            indices,
            GpuProblem(p, extent_d=p.d.input, vector=V),
            strips,
            grid_dim=ceildiv(Int(strips.total), BLOCK),
            block_dim=BLOCK,
            shared_mem_bytes=strips.shared_bytes(V),
        )
        done = True

    # Channels of one thread share what a pixel costs; tall rings have room for fewer.
    if (
        Int(p.channels) % 2 == 0
        and 2 * ring <= MOST_SUMS
        and Int(dx) % 16 == 0
        and Int(dy) % 16 == 0
        and Int(indices) % 16 == 0
    ):
        launch[2]()
    else:
        launch[1]()
    return done
