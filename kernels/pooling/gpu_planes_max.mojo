"""Gradient of max pooling on a GPU over contiguous NCHW tensors (C = 1 here).

A block owns a contiguous piece of dx that fits in shared memory: several planes, several D slabs of one plane, or
several rows of one slab. It walks over the windows that reach into the piece and adds each dy where its index points.
Windows are taken in classes whose members are too far apart to share a pixel, with a barrier between classes: no
atomic is needed and the order of additions is always the same. An index that points outside its window or outside
the piece is ignored.
"""

from max.gpu import barrier, block_dim, block_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.memory import AddressSpace
from std.builtin.device_passable import DevicePassable, DeviceTypeEncoder
from std.math import ceildiv
from std.memory import stack_allocation
from std.sys import size_of

from .direct import Data
from .gpu_problem import (
    THREADS,
    FastDivisor,
    GpuProblem,
    LIMIT_32,
    fits_32_bits,
)
from .problem import PoolingAxis, PoolingProblem

comptime PIECE = 8192
"""Most pixels of a piece; as float32 they take 32 KiB of shared memory."""
comptime RUN = 4
"""Consecutive windows of one row that a thread takes at a time."""
comptime MOST_CLASSES = 512


@fieldwise_init
struct Pieces(DevicePassable, TrivialRegisterPassable):
    """How dx is cut: `planes` whole planes, or `slabs` of one plane, or `rows` of one slab; the other two are full
    or one."""

    var planes: Int32
    var slabs: Int32
    var rows: Int32
    var plane_count: Int32
    var by_row_pieces: FastDivisor
    var by_slab_pieces: FastDivisor
    var by_width: FastDivisor
    var by_height: FastDivisor
    var by_window_h: FastDivisor
    var by_window_w: FastDivisor
    var class_d: Int32
    """Windows of one class are this far apart on the axis."""
    var class_h: Int32
    var class_w: Int32
    var aligned: Int32
    """Whether runs of windows can be loaded 16 bytes at a time."""

    comptime device_type: AnyType = Self

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        return "Pieces"

    def __init__(out self, p: PoolingProblem):
        var depth = Int(p.d.input)
        var height = Int(p.h.input)
        var width = Int(p.w.input)
        var slab = height * width
        self.planes = 1
        self.slabs = 1
        self.rows = Int32(height)
        if slab * depth <= PIECE:
            self.slabs = Int32(depth)
            # Enough planes to keep a block busy, not so many that few blocks remain.
            var most = PIECE // (slab * depth)
            var spread = Int(p.batch) // 1024
            self.planes = Int32(max(min(most, spread), 1))
        elif slab <= PIECE:
            var pieces = ceildiv(depth, PIECE // slab)
            self.slabs = Int32(ceildiv(depth, pieces))
        else:
            var pieces = ceildiv(height, max(PIECE // width, 1))
            self.rows = Int32(ceildiv(height, pieces))
        self.plane_count = Int32(p.batch)
        self.by_row_pieces = FastDivisor(ceildiv(height, Int(self.rows)))
        self.by_slab_pieces = FastDivisor(ceildiv(depth, Int(self.slabs)))
        self.by_width = FastDivisor(width)
        self.by_height = FastDivisor(height)
        self.by_window_h = FastDivisor(Int(p.h.window))
        self.by_window_w = FastDivisor(Int(p.w.window))
        self.class_d = _class_distance(p.d)
        self.class_h = _class_distance(p.h)
        self.class_w = _class_distance(p.w)
        self.aligned = Int32(Int(p.w.output) % RUN == 0)

    def blocks(self) -> Int:
        return (
            ceildiv(Int(self.plane_count), Int(self.planes))
            * Int(self.by_slab_pieces.divisor)
            * Int(self.by_row_pieces.divisor)
        )


def _class_distance(axis: PoolingAxis) -> Int32:
    var reach = axis.dilation * (axis.window - 1) + 1
    return min((reach + axis.stride - 1) // axis.stride, axis.output)


def can_scatter_planes(p: PoolingProblem) -> Bool:
    """Whether the kernel below takes the problem, and takes it well."""
    var classes = (
        Int(_class_distance(p.d))
        * Int(_class_distance(p.h))
        * Int(_class_distance(p.w))
    )
    return (
        p.channels == 1
        and Int(p.w.input) <= PIECE
        and classes <= MOST_CLASSES
        and Int(p.batch) < LIMIT_32
        and fits_32_bits(p)
    )


def max_pool_dgrad_planes[
    dtype: DType, index: DType, offsets: Bool
](
    dx: Data[dtype],
    dy: Data[dtype],
    indices: Data[index],
    p: GpuProblem,
    pieces: Pieces,
):
    var sums = stack_allocation[
        PIECE, Float32, address_space=AddressSpace.SHARED
    ]()
    var thread = Int32(thread_idx.y * block_dim.x + thread_idx.x)
    var threads = Int32(block_dim.x * block_dim.y)

    # The piece: planes [plane, plane + planes), slabs [d0, d1), rows [h0, h1), whole rows.
    var rest, row_piece = pieces.by_row_pieces.divmod(Int32(block_idx.x))
    var group, slab_piece = pieces.by_slab_pieces.divmod(rest)
    var plane = group * pieces.planes
    var planes = min(pieces.planes, pieces.plane_count - plane)
    var d0 = slab_piece * pieces.slabs
    var d1 = min(d0 + pieces.slabs, p.d.input)
    var h0 = row_piece * pieces.rows
    var h1 = min(h0 + pieces.rows, p.h.input)
    var start = (d0 * p.h.input + h0) * p.w.input
    var single = ((d1 - d0 - 1) * p.h.input + (h1 - h0)) * p.w.input
    var size = (planes - 1) * p.input_plane() + single

    var i = thread
    while i < size:
        sums[unsafe_offset=Int(i)] = 0
        i += threads
    barrier()

    # The windows that reach into the piece.
    var od0 = p.d.outputs_over[False](d0)[0]
    var od1 = p.d.outputs_over[False](d1 - 1)[1]
    var oh0 = p.h.outputs_over[False](h0)[0]
    var oh1 = p.h.outputs_over[False](h1 - 1)[1]
    var dy_piece = dy.unsafe_offset(Int(plane) * Int(p.output_plane()))
    var indices_piece = indices.unsafe_offset(
        Int(plane) * Int(p.output_plane())
    )
    var runs = (p.w.output + RUN - 1) // RUN

    for class_d in range(pieces.class_d):
        var first_d = od0 + class_d
        var count_d = (od1 - first_d + pieces.class_d - 1) // pieces.class_d
        for class_h in range(pieces.class_h):
            var first_h = oh0 + class_h
            var count_h = (oh1 - first_h + pieces.class_h - 1) // pieces.class_h
            if count_d <= 0 or count_h <= 0:
                continue
            var rows = planes * count_d * count_h
            # All threads make the same number of rounds: there are barriers inside.
            var tiles_x = (runs + Int32(block_dim.x) - 1) // Int32(block_dim.x)
            var tiles_y = (rows + Int32(block_dim.y) - 1) // Int32(block_dim.y)
            for tile_y in range(tiles_y):
                var row = tile_y * Int32(block_dim.y) + Int32(thread_idx.y)
                var slab_row = Int32(UInt32(row) // UInt32(count_h))
                var oh = first_h + (row - slab_row * count_h) * pieces.class_h
                var g = Int32(UInt32(slab_row) // UInt32(count_d))
                var od = first_d + (slab_row - g * count_d) * pieces.class_d
                var od_origin = p.d.origin(od)
                var oh_origin = p.h.origin(oh)
                for tile_x in range(tiles_x):
                    var ow = (
                        tile_x * Int32(block_dim.x) + Int32(thread_idx.x)
                    ) * RUN
                    var live = row < rows and ow < p.w.output
                    var gradient = SIMD[DType.float32, RUN](0)
                    # Where each dy goes within the piece; -1: nowhere.
                    var target = SIMD[DType.int32, RUN](-1)
                    if live:
                        var o = (
                            (g * p.d.output + od) * p.h.output + oh
                        ) * p.w.output + ow
                        var found = SIMD[index, RUN](0)
                        var count = min(p.w.output - ow, RUN)
                        if pieces.aligned != 0:
                            comptime wide = min(RUN * size_of[index](), 16)
                            comptime narrow = RUN * size_of[dtype]()
                            found = indices_piece.unsafe_load[
                                width=RUN, alignment=wide
                            ](Int(o))
                            gradient = dy_piece.unsafe_load[
                                width=RUN, alignment=narrow
                            ](Int(o)).cast[DType.float32]()
                        else:
                            comptime for j in range(RUN):
                                if Int32(j) < count:
                                    found[j] = indices_piece[
                                        unsafe_offset=Int(o) + j
                                    ]
                                    gradient[j] = dy_piece[
                                        unsafe_offset=Int(o) + j
                                    ].cast[DType.float32]()
                        comptime for j in range(RUN):
                            if Int32(j) < count:
                                target[j] = _target[offsets=offsets](
                                    found[j],
                                    p,
                                    pieces,
                                    od_origin,
                                    oh_origin,
                                    p.w.origin(ow + Int32(j)),
                                    d0,
                                    d1,
                                    h0,
                                    h1,
                                )
                                if target[j] >= 0:
                                    target[j] += g * p.input_plane() - start
                    _add_run(sums, gradient, target, ow, pieces.class_w)
                    if tiles_x > 1:
                        barrier()
            barrier()
    _write_piece(
        dx.unsafe_offset(Int(plane) * Int(p.input_plane()) + Int(start)),
        sums,
        size,
        thread,
        threads,
    )


@always_inline
def _target[
    index: DType, //, *, offsets: Bool
](
    found: Scalar[index],
    p: GpuProblem,
    pieces: Pieces,
    od_origin: Int32,
    oh_origin: Int32,
    ow_origin: Int32,
    d0: Int32,
    d1: Int32,
    h0: Int32,
    h1: Int32,
) -> Int32:
    """The pixel, flat in its plane, that a window's entry names; -1 where it lies outside the window's hull or
    outside the piece."""
    comptime if offsets:
        if Int32(found) < 0 or Int32(found) >= (
            p.d.window * p.h.window * p.w.window
        ):
            return -1
        var pair, kw = pieces.by_window_w.divmod(Int32(found))
        var kd, kh = pieces.by_window_h.divmod(pair)
        var d = od_origin + kd * p.d.dilation()
        var h = oh_origin + kh * p.h.dilation()
        var w = ow_origin + kw * p.w.dilation()
        if d < d0 or d >= d1 or h < h0 or h >= h1:
            return -1
        if w < 0 or w >= p.w.input:
            return -1
        return (d * p.h.input + h) * p.w.input + w
    else:
        if UInt64(found) >= UInt64(p.input_plane()):
            return -1
        var row, w = pieces.by_width.divmod(Int32(found))
        var d, h = pieces.by_height.divmod(row)
        if d < d0 or d >= d1 or h < h0 or h >= h1:
            return -1
        # As unsigned numbers, positions before the window are far past its end.
        if UInt32(w - ow_origin) >= UInt32(p.w.reach):
            return -1
        if UInt32(h - oh_origin) >= UInt32(p.h.reach):
            return -1
        if UInt32(d - od_origin) >= UInt32(p.d.reach):
            return -1
        return Int32(found)


@always_inline
def _add_one(
    sums: MutPointer[Float32, _, address_space=AddressSpace.SHARED],
    gradient: Float32,
    target: Int32,
):
    if target >= 0:
        sums[unsafe_offset=Int(target)] += gradient


@always_inline
def _add_run(
    sums: MutPointer[Float32, _, address_space=AddressSpace.SHARED],
    gradient: SIMD[DType.float32, RUN],
    target: SIMD[DType.int32, RUN],
    ow: Int32,
    class_w: Int32,
):
    """Adds a run's gradients so that no two threads of a row touch one pixel between two barriers.

    Up to three windows over a pixel: every thread first takes those windows of its run that the next run's first
    cannot reach, then the rest. Beyond, windows go by their number modulo the distance.
    """
    if class_w == 1:
        comptime for j in range(RUN):
            _add_one(sums, gradient[j], target[j])
    elif class_w <= RUN - 1:
        comptime for j in range(RUN):
            if Int32(j) <= RUN - class_w:
                _add_one(sums, gradient[j], target[j])
        barrier()
        comptime for j in range(RUN):
            if Int32(j) > RUN - class_w:
                _add_one(sums, gradient[j], target[j])
    else:
        var residue = ow % class_w
        for turn in range(class_w):
            comptime for j in range(RUN):
                if (residue + Int32(j)) % class_w == turn:
                    _add_one(sums, gradient[j], target[j])
            barrier()


@always_inline
def _write_piece[
    dtype: DType
](
    dx: Data[dtype],
    sums: MutPointer[Float32, _, address_space=AddressSpace.SHARED],
    size: Int32,
    thread: Int32,
    threads: Int32,
):
    """Rounds the sums and stores them 16 bytes at a time; what lies before and after whole vectors, one by one.
    """
    comptime V = 16 // size_of[dtype]()
    var past = Int32((Int(dx) // size_of[dtype]()) % V)
    var head = min((Int32(V) - past) % Int32(V), size)
    var vectors = (size - head) // Int32(V)
    if thread < head:
        dx[unsafe_offset=Int(thread)] = sums[unsafe_offset=Int(thread)].cast[
            dtype
        ]()
    var v = thread
    while v < vectors:
        var at = Int(head) + Int(v) * V
        var value = SIMD[DType.float32, V](0)
        comptime for j in range(V):
            value[j] = sums[unsafe_offset=at + j]
        dx.unsafe_store[alignment=16](at, value.cast[dtype]())
        v += threads
    var tail = head + vectors * Int32(V) + thread
    if tail < size:
        dx[unsafe_offset=Int(tail)] = sums[unsafe_offset=Int(tail)].cast[
            dtype
        ]()


def launch_max_pool_dgrad_planes[
    dtype: DType, index: DType, *, offsets: Bool
](
    ctx: DeviceContext,
    dx: Data[dtype],
    dy: Data[dtype],
    indices: Data[index],
    p: PoolingProblem,
) raises:
    var pieces = Pieces(p)
    if Int(dy) % 16 != 0 or Int(indices) % 16 != 0:
        pieces.aligned = 0
    var x = min(ceildiv(Int(p.w.output), RUN), THREADS)
    comptime kernel = max_pool_dgrad_planes[dtype, index, offsets]
    ctx.enqueue_function[kernel](
        dx,
        dy,
        indices,
        GpuProblem(p, extent_d=p.d.input, vector=1),
        pieces,
        grid_dim=pieces.blocks(),
        block_dim=(x, THREADS // x),
    )
