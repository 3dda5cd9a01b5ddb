"""Gradient of max pooling on a GPU over contiguous NCHW tensors (C = 1 here), for every window.

A block owns a contiguous piece of dx that fits in shared memory: several planes, several D slabs of one plane, or
several rows of one slab. Its threads load the windows that reach into the piece, runs of one row of windows, and find
out which pixel each names. Then they add in phases: windows of one phase are too far apart to share a pixel, so no
atomic is needed and the order of additions is always the same; whole warps take the windows of one phase. The piece
leaves as one aligned run. An index that points outside its window or outside the piece is ignored.
"""

from max.gpu import barrier, block_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.memory import AddressSpace, external_memory
from std.memory import stack_allocation
from std.builtin.device_passable import DevicePassable, DeviceTypeEncoder
from std.math import ceildiv
from std.sys import size_of

from .direct import Data
from .gpu_problem import (
    FastDivisor,
    GpuProblem,
    LIMIT_32,
    fits_32_bits,
)
from .problem import PoolingAxis, PoolingProblem

comptime SLACK = 8
"""Pixels by which a piece is moved to be aligned as its tensor is."""
comptime PIECE = 46 * 1024 // 4 - SLACK
"""Most pixels of a piece, as float32 in shared memory."""
comptime RUN = 4
"""Consecutive windows of one row that a thread takes at a time."""
comptime THREADS = 256
comptime HELD = 2
"""Runs that a thread holds at once: what it waits for together. Four would leave room for half as many threads."""
comptime MOST_TAPS = 256
"""Taps, at most, whose places a block lists for windows given by offset."""
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
    var by_runs: FastDivisor
    """Divides by the runs of one row of windows."""
    var by_rows: FastDivisor
    """Divides by the most rows of windows of one class that reach into a piece of one slab."""
    var by_slabs: FastDivisor
    """The same for slabs of windows."""
    var by_class: FastDivisor
    """Divides by the runs of a class."""
    var by_class_d: FastDivisor
    """Windows of one class are this far apart on the axis."""
    var by_class_h: FastDivisor
    var by_class_w: FastDivisor
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
            # Enough planes to keep a block busy once, not so many that few blocks remain.
            var runs = (
                Int(p.d.output)
                * Int(p.h.output)
                * ceildiv(Int(p.w.output), RUN)
            )
            var most = min(PIECE // (slab * depth), HELD * THREADS // runs)
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
        self.by_runs = FastDivisor(ceildiv(Int(p.w.output), RUN))
        self.by_class_d = FastDivisor(Int(_class_distance(p.d)))
        self.by_class_h = FastDivisor(Int(_class_distance(p.h)))
        self.by_class_w = FastDivisor(Int(_class_distance(p.w)))
        self.by_rows = FastDivisor(
            ceildiv(
                _most_reaching(p.h, Int(self.rows)),
                Int(self.by_class_h.divisor),
            )
        )
        self.by_slabs = FastDivisor(
            ceildiv(
                _most_reaching(p.d, Int(self.slabs)),
                Int(self.by_class_d.divisor),
            )
        )
        self.by_class = FastDivisor(
            Int(
                self.planes
                * self.by_slabs.divisor
                * self.by_rows.divisor
                * self.by_runs.divisor
            )
        )
        self.aligned = Int32(Int(p.w.output) % RUN == 0)

    def size(self, p: PoolingProblem) -> Int:
        """Pixels of a whole piece."""
        var rows = Int(self.planes) * Int(self.slabs) * Int(self.rows)
        return rows * Int(p.w.input)

    def blocks(self) -> Int:
        return (
            ceildiv(Int(self.plane_count), Int(self.planes))
            * Int(self.by_slab_pieces.divisor)
            * Int(self.by_row_pieces.divisor)
        )


def _most_reaching(axis: PoolingAxis, extent: Int) -> Int:
    """The most windows that reach into `extent` neighbouring positions."""
    if extent == Int(axis.input):
        return Int(axis.output)
    var reach = Int(axis.dilation) * (Int(axis.window) - 1) + 1
    return min((extent + reach - 2) // Int(axis.stride) + 1, Int(axis.output))


def _class_distance(axis: PoolingAxis) -> Int32:
    var reach = axis.dilation * (axis.window - 1) + 1
    return min((reach + axis.stride - 1) // axis.stride, axis.output)


def can_scatter_planes[*, offsets: Bool](p: PoolingProblem) -> Bool:
    """Whether the kernel below takes the problem, and takes it well."""
    var classes = (
        Int(_class_distance(p.d))
        * Int(_class_distance(p.h))
        * Int(_class_distance(p.w))
    )
    return (
        p.channels == 1
        and Int(p.w.input) <= PIECE
        and (not offsets or p.window_size() <= MOST_TAPS)
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
    var sums = external_memory[
        Float32, address_space=AddressSpace.SHARED, alignment=16
    ]()
    var thread = Int32(thread_idx.x)

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
    var dx_piece = dx.unsafe_offset(
        Int(plane) * Int(p.input_plane()) + Int(start)
    )
    # Vectors are aligned in both places when the piece starts equally far from one.
    comptime V = 16 // size_of[dtype]()
    var shift = Int32((Int(dx_piece) // size_of[dtype]()) % V)

    var at = thread * 4
    while at < size + Int32(V):
        sums.unsafe_store[alignment=16](Int(at), SIMD[DType.float32, 4](0))
        at += THREADS * 4

    # By offset: how far each tap lies from its window's first pixel, in the plane and in its row.
    var taps = stack_allocation[
        2 * MOST_TAPS if offsets else 2,
        Int32,
        alignment=8,
        address_space=AddressSpace.SHARED,
    ]()
    comptime if offsets:
        for tap in range(thread, p.d.window * p.h.window * p.w.window, THREADS):
            var pair, kw = pieces.by_window_w.divmod(tap)
            var kd, kh = pieces.by_window_h.divmod(pair)
            kw *= p.w.dilation()
            taps[unsafe_offset=2 * Int(tap)] = (
                kd * p.d.dilation() * p.h.input + kh * p.h.dilation()
            ) * p.w.input + kw
            taps[unsafe_offset=2 * Int(tap) + 1] = kw
        barrier()

    # The windows that reach into the piece; there may be fewer than the divisors say.
    var od0 = p.d.outputs_over[False](d0)[0]
    var od1 = p.d.outputs_over[False](d1 - 1)[1]
    var oh0 = p.h.outputs_over[False](h0)[0]
    var oh1 = p.h.outputs_over[False](h1 - 1)[1]
    var dy_piece = dy.unsafe_offset(Int(plane) * Int(p.output_plane()))
    var indices_piece = indices.unsafe_offset(
        Int(plane) * Int(p.output_plane())
    )
    var class_w = pieces.by_class_w.divisor
    var across = min(class_w, 2) if class_w < RUN else class_w
    var phases = pieces.by_class_d.divisor * pieces.by_class_h.divisor
    var items = phases * pieces.by_class.divisor
    var first = Int32(0)
    while first < items:
        var gradient = Array[SIMD[DType.float32, RUN], HELD](
            fill=SIMD[DType.float32, RUN](0)
        )
        var found = Array[SIMD[index, RUN], HELD](fill=SIMD[index, RUN](0))
        # Where each dy goes within the piece; -1: nowhere.
        var target = Array[SIMD[DType.int32, RUN], HELD](
            fill=SIMD[DType.int32, RUN](-1)
        )
        # In which phase a run of windows adds.
        var turn = Array[Int32, HELD](fill=-1)
        var column = Array[Int32, HELD](fill=0)
        var row_of = Array[Int32, HELD](fill=0)
        var slab_of = Array[Int32, HELD](fill=0)
        var plane_of = Array[Int32, HELD](fill=0)
        comptime for k in range(HELD):
            var own, rest = pieces.by_class.divmod(
                first + Int32(k * THREADS) + thread
            )
            var row, run = pieces.by_runs.divmod(rest)
            var g, oh = pieces.by_rows.divmod(row)
            var od = Int32(0)
            if pieces.by_slabs.divisor > 1:
                g, od = pieces.by_slabs.divmod(g)
            var class_d, class_h = pieces.by_class_h.divmod(own)
            oh = oh0 + oh * pieces.by_class_h.divisor + class_h
            od = od0 + od * pieces.by_class_d.divisor + class_d
            var ow = run * RUN
            column[k] = ow
            row_of[k] = oh
            slab_of[k] = od
            plane_of[k] = g
            if own < phases and g < planes and oh < oh1 and od < od1:
                turn[k] = own
                var o = Int(
                    ((g * p.d.output + od) * p.h.output + oh) * p.w.output + ow
                )
                if pieces.aligned != 0:
                    comptime wide = min(RUN * size_of[index](), 16)
                    comptime narrow = RUN * size_of[dtype]()
                    found[k] = indices_piece.unsafe_load[
                        width=RUN, alignment=wide
                    ](o)
                    gradient[k] = dy_piece.unsafe_load[
                        width=RUN, alignment=narrow
                    ](o).cast[DType.float32]()
                else:
                    comptime for j in range(RUN):
                        if ow + Int32(j) < p.w.output:
                            found[k][j] = indices_piece[unsafe_offset=o + j]
                            gradient[k][j] = dy_piece[unsafe_offset=o + j].cast[
                                DType.float32
                            ]()
        comptime for k in range(HELD):
            if turn[k] >= 0:
                var top = p.h.origin(row_of[k])
                var front = p.d.origin(slab_of[k])
                var base = plane_of[k] * p.input_plane() + shift
                comptime for j in range(RUN):
                    var left = p.w.origin(column[k] + Int32(j))
                    var place: Int32
                    comptime if offsets:
                        var tap = Int(UInt32(found[k][j]))
                        place = -1
                        if tap < Int(p.d.window * p.h.window * p.w.window):
                            var w = left + taps[unsafe_offset=2 * tap + 1]
                            if UInt32(w) < UInt32(p.w.input):
                                place = (
                                    (front * p.h.input + top) * p.w.input
                                    + left
                                    + taps[unsafe_offset=2 * tap]
                                    - start
                                )
                    else:
                        place = _under(found[k][j], p, pieces, front, top, left)
                        place -= start
                    # As unsigned numbers, places before the piece are far past its end.
                    if (
                        UInt32(place) < UInt32(single)
                        and column[k] + Int32(j) < p.w.output
                    ):
                        target[k][j] = place + base
        barrier()
        for phase in range(phases):
            for part in range(across):
                comptime for k in range(HELD):
                    if turn[k] == phase:
                        _add_run(
                            sums,
                            gradient[k],
                            target[k],
                            column[k],
                            part,
                            pieces.by_class_w,
                        )
                barrier()
        first += HELD * THREADS
    # Where no window reaches, nothing has waited for the zeros.
    if items == 0:
        barrier()
    _write_piece(
        dx_piece.unsafe_offset(-Int(shift)),
        sums,
        shift,
        shift + size,
        thread,
    )


@always_inline
def _under[
    index: DType, //
](
    found: Scalar[index],
    p: GpuProblem,
    pieces: Pieces,
    front: Int32,
    top: Int32,
    left: Int32,
) -> Int32:
    """The pixel, flat in its plane, that an index names; far from every piece where it lies outside the hull of the
    window whose first pixel is (front, top, left)."""
    comptime nowhere = Int32(-1)
    if UInt64(found) >= UInt64(p.input_plane()):
        return nowhere
    var h, w = pieces.by_width.divmod(Int32(found))
    # As unsigned numbers, positions before the window are far past its end.
    if p.d.input > 1:
        var d: Int32
        d, h = pieces.by_height.divmod(h)
        if UInt32(d - front) >= UInt32(p.d.reach):
            return nowhere
    if UInt32(h - top) >= UInt32(p.h.reach):
        return nowhere
    if UInt32(w - left) >= UInt32(p.w.reach):
        return nowhere
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
    part: Int32,
    by_class_w: FastDivisor,
):
    """Adds those of a run's gradients that belong to a part, so that no two threads of a row touch one pixel.

    Up to three windows over a pixel: first those windows of every run that the next run's first cannot reach, then
    the rest. Beyond, windows go by their number modulo the distance.
    """
    var class_w = by_class_w.divisor
    if class_w == 1:
        comptime for j in range(RUN):
            _add_one(sums, gradient[j], target[j])
    elif class_w <= RUN - 1:
        comptime for j in range(RUN):
            if (Int32(j) > RUN - class_w) == (part == 1):
                _add_one(sums, gradient[j], target[j])
    else:
        var residue = by_class_w.divmod(ow)[1]
        comptime for j in range(RUN):
            var own = residue + Int32(j)
            if own == part or own == part + class_w:
                _add_one(sums, gradient[j], target[j])


@always_inline
def _write_piece[
    dtype: DType
](
    dx: Data[dtype],
    sums: MutPointer[Float32, _, address_space=AddressSpace.SHARED],
    first: Int32,
    end: Int32,
    thread: Int32,
):
    """Rounds sums first, ... and stores them 16 bytes at a time, those before and after whole vectors one by one. dx
    is aligned.
    """
    comptime V = 16 // size_of[dtype]()
    var at = thread * Int32(V)
    while at < end:
        if at >= first and at + Int32(V) <= end:
            dx.unsafe_store[alignment=16](
                Int(at),
                sums.unsafe_load[width=V, alignment=16](Int(at)).cast[dtype](),
            )
        else:
            for i in range(max(at, first), min(at + Int32(V), end)):
                dx[unsafe_offset=Int(i)] = sums[unsafe_offset=Int(i)].cast[
                    dtype
                ]()
        at += Int32(THREADS * V)


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
    comptime kernel = max_pool_dgrad_planes[dtype, index, offsets]
    ctx.enqueue_function[kernel](
        dx,
        dy,
        indices,
        GpuProblem(p, extent_d=p.d.input, vector=1),
        pieces,
        grid_dim=pieces.blocks(),
        block_dim=THREADS,
        # Whole vectors of zeros are written.
        shared_mem_bytes=ceildiv(pieces.size(p) + SLACK, 4)
        * size_of[SIMD[DType.float32, 4]](),
    )
