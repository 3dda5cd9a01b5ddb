"""Gradient of max pooling on a GPU over contiguous NCHW tensors (C = 1 here), for every window.

A block owns a contiguous piece of dx that fits in shared memory: several planes, several D slabs of one plane, or
several rows of one slab. Its threads load the windows that reach into the piece, runs of one row of windows, and find
out which pixel each names. Then they add in phases: runs of one phase are too far apart to share a pixel, so no
atomic is needed and the order of additions is always the same; whole warps take the runs of one phase. The piece
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
from .gpu_windows import NOWHERE, where_below
from .problem import PoolingProblem

comptime SLACK = 8
"""Pixels by which a piece is moved to be aligned as its tensor is."""
comptime PIECE = 46 * 1024 // 4 - SLACK
"""Most pixels of a piece, as float32 in shared memory."""
comptime RUN = 4
"""Consecutive windows of one row that a thread takes at a time."""
comptime THREADS = 256
comptime HELD = 2
"""Runs that a thread holds at once: what it waits for together. Four would leave room for half as many threads."""
comptime MANY_PHASES = 4
"""Beyond so many windows above a pixel of a plane blocks take as many planes as fill their threads twice: what a block
costs weighs more than threads that wait for one another's loads."""
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
    """Divides by the runs of one class in one row of windows."""
    var by_rows: FastDivisor
    """Divides by the most rows of windows of one class that reach into a piece of one slab."""
    var by_slabs: FastDivisor
    """The same for slabs of windows."""
    var by_class: FastDivisor
    """Divides by the runs of a class."""
    var by_class_d: FastDivisor
    """Windows of one class are this far apart on the axis; on W runs of them."""
    var by_class_h: FastDivisor
    var by_class_w: FastDivisor
    var aligned: Int32
    """Whether runs of windows can be loaded 16 bytes at a time."""
    var cut: Int32
    """Windows of a run that are added before the others."""
    var zero: Int32
    """Nothing, which the compiler does not know."""

    comptime device_type: AnyType = Self

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        return "Pieces"

    def __init__(out self, p: PoolingProblem, *, split: Bool):
        """`split`: narrow windows need no classes of runs."""
        var depth = Int(p.d.input)
        var height = Int(p.h.input)
        var width = Int(p.w.input)
        var slab = height * width
        self.planes = 1
        self.slabs = 1
        self.rows = Int32(height)
        if slab * depth <= PIECE:
            self.slabs = Int32(depth)
            var rounds = 1
            if p.h.most_above() * p.w.most_above() > MANY_PHASES:
                rounds = 2
            # Enough planes to keep a block busy, not so many that few blocks remain.
            var runs = (
                Int(p.d.output)
                * Int(p.h.output)
                * ceildiv(Int(p.w.output), RUN)
            )
            var most = min(
                PIECE // (slab * depth), rounds * HELD * THREADS // runs
            )
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
        self.by_class_d = FastDivisor(p.d.most_above())
        self.by_class_h = FastDivisor(p.h.most_above())
        # The last window of a run and the first of the next run of its class are a window's reach apart. With
        # `split` all runs first add the windows that the next run's first cannot reach, then the others.
        var runs = ceildiv(Int(p.w.output), RUN)
        var distance = p.w.most_above()
        var apart = 1
        self.cut = RUN
        if split and distance < RUN:
            self.cut = Int32(RUN - distance + 1)
        elif distance > 1:
            apart = min(ceildiv(distance - 1, RUN) + 1, runs)
        self.by_class_w = FastDivisor(apart)
        self.by_runs = FastDivisor(ceildiv(runs, apart))
        self.by_rows = FastDivisor(
            ceildiv(
                p.h.most_reaching(Int(self.rows)),
                Int(self.by_class_h.divisor),
            )
        )
        self.by_slabs = FastDivisor(
            ceildiv(
                p.d.most_reaching(Int(self.slabs)),
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
        self.zero = 0

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


comptime splits[dtype: DType, offsets: Bool] = (
    size_of[dtype]() >= 4 and not offsets
)
"""Whether runs are cut in two rather than sorted into classes: fewer additions wait for one another, but twice as many
instructions are spent on them, which operands of few bytes do not hide."""


def can_scatter_planes[*, offsets: Bool](p: PoolingProblem) -> Bool:
    """Whether the kernel below takes the problem, and takes it well."""
    var classes = p.d.most_above() * p.h.most_above() * p.w.most_above()
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
    comptime split = splits[dtype, offsets]
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
    var phases = (
        pieces.by_class_d.divisor
        * pieces.by_class_h.divisor
        * pieces.by_class_w.divisor
    )
    # Lanes hold what windows need; the compiler would fetch it anew for each of them.
    var zero = thread * pieces.zero
    var under = Under[offsets](p, pieces, zero, start, single)
    var items = phases * pieces.by_class.divisor
    var first = Int32(0)
    while first < items:
        var gradient = Array[SIMD[DType.float32, RUN], HELD](
            fill=SIMD[DType.float32, RUN](0)
        )
        var found = Array[SIMD[index, RUN], HELD](fill=SIMD[index, RUN](0))
        # Where each dy goes within the piece.
        var target = Array[SIMD[DType.uint32, RUN], HELD](
            fill=SIMD[DType.uint32, RUN](NOWHERE)
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
            var class_dh, class_w = pieces.by_class_w.divmod(own)
            var class_d, class_h = pieces.by_class_h.divmod(class_dh)
            oh = oh0 + oh * pieces.by_class_h.divisor + class_h
            od = od0 + od * pieces.by_class_d.divisor + class_d
            var ow = (run * pieces.by_class_w.divisor + class_w) * RUN
            column[k] = ow
            row_of[k] = oh
            slab_of[k] = od
            plane_of[k] = g
            if (
                (own < phases)
                & (g < planes)
                & (oh < oh1)
                & (od < od1)
                & (ow < p.w.output)
            ):
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
                var base = UInt32(plane_of[k] * under.plane + shift)
                var left = p.w.origin(column[k])
                var corner = under.corner(
                    p.d.origin(slab_of[k]), p.h.origin(row_of[k]), left
                )
                comptime for j in range(RUN):
                    var place = under.place(
                        found[k][j],
                        taps,
                        corner,
                        left,
                        column[k] + Int32(j) < p.w.output,
                    )
                    target[k][j] = place + base
                    if place == NOWHERE:
                        target[k][j] = NOWHERE
                    left += under.stride_w
                    corner.pixel += under.stride_w
        barrier()
        for phase in range(phases):
            comptime for k in range(HELD):
                if turn[k] == phase:
                    _add_run[split](sums, gradient[k], target[k], pieces.cut, 0)
            barrier()
            comptime if split:
                if pieces.cut < RUN:
                    comptime for k in range(HELD):
                        if turn[k] == phase:
                            _add_run[split](
                                sums, gradient[k], target[k], pieces.cut, 1
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


@fieldwise_init
struct Corner(TrivialRegisterPassable):
    """A window's first pixel, flat in its plane less the piece's first; slab and row.
    """

    var pixel: Int32
    var front: Int32
    var top: Int32


struct Under[offsets: Bool](TrivialRegisterPassable):
    """What finding the pixels under windows takes, in registers."""

    var width: Int32
    var height: Int32
    var plane: Int32
    var stride_w: Int32
    var start: Int32
    var single: UInt32
    var taps: UInt32
    var reach_d: UInt32
    var reach_h: UInt32
    var reach_w: UInt32
    var deep: Bool
    var by_width: FastDivisor
    var by_height: FastDivisor

    @always_inline
    def __init__(
        out self,
        p: GpuProblem,
        pieces: Pieces,
        zero: Int32,
        start: Int32,
        single: Int32,
    ):
        """`zero` makes the compiler keep them there. The piece's part of a plane are `single` pixels from `start` on.
        """
        self.width = p.w.input + zero
        self.height = p.h.input + zero
        self.plane = p.input_plane() + zero
        self.stride_w = p.w.stride() + zero
        self.start = start
        self.single = UInt32(single)
        self.taps = UInt32(p.d.window * p.h.window * p.w.window + zero)
        self.reach_d = UInt32(p.d.reach + zero)
        self.reach_h = UInt32(p.h.reach + zero)
        self.reach_w = UInt32(p.w.reach + zero)
        self.deep = p.d.input > 1
        self.by_width = pieces.by_width
        self.by_width.magic += UInt32(zero)
        self.by_width.shift += UInt32(zero)
        self.by_width.divisor += zero
        self.by_height = pieces.by_height

    @always_inline
    def corner(self, front: Int32, top: Int32, left: Int32) -> Corner:
        return Corner(
            (front * self.height + top) * self.width + left - self.start,
            front,
            top,
        )

    @always_inline
    def place[
        index: DType, //
    ](
        self,
        found: Scalar[index],
        taps: MutPointer[Int32, _, address_space=AddressSpace.SHARED],
        corner: Corner,
        left: Int32,
        there: Bool,
    ) -> UInt32:
        """The pixel that an entry names, counted from the piece's first; NOWHERE if it lies outside the piece or the hull of
        the window, or the window is not `there`."""
        var last = UInt32(0) if there else UInt32(1)
        comptime if Self.offsets:
            var tap = UInt32(found)
            var at = 2 * Int(min(tap, UInt32(MOST_TAPS - 1)))
            var place = UInt32(corner.pixel + taps[unsafe_offset=at])
            place = where_below(
                place,
                tap,
                self.taps,
                UInt32(left + taps[unsafe_offset=at + 1]),
                UInt32(self.width),
                place,
                self.single,
            )
            return where_below(place, last, 1, 0, 1, 0, 1)
        else:
            var h, w = self.by_width.divmod(Int32(found))
            var d = corner.front
            if self.deep:
                d, h = self.by_height.divmod(h)
            var place = UInt32(Int32(found) - self.start)
            # As unsigned numbers, what lies before a bound is far past the end.
            place = where_below(
                place,
                UInt32(w - left),
                self.reach_w,
                UInt32(h - corner.top),
                self.reach_h,
                place,
                self.single,
            )
            var high = UInt32(0)
            comptime if size_of[index]() == 8:
                high = UInt32(found >> 32)
            return where_below(
                place,
                UInt32(d - corner.front),
                self.reach_d,
                high | last,
                1,
                UInt32(found),
                UInt32(self.plane),
            )


@always_inline
def _add_run[
    split: Bool
](
    sums: MutPointer[Float32, _, address_space=AddressSpace.SHARED],
    gradient: SIMD[DType.float32, RUN],
    target: SIMD[DType.uint32, RUN],
    cut: Int32,
    part: Int,
):
    """Adds a run's gradients, one after the other: those before the cut, or after it.
    """
    comptime for j in range(RUN):
        var there = target[j] != NOWHERE
        comptime if split:
            there = there & ((Int32(j) >= cut) == (part == 1))
        if there:
            sums[unsafe_offset=Int(target[j])] += gradient[j]


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
    var pieces = Pieces(p, split=splits[dtype, offsets])
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
