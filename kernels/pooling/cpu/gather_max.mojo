"""Gradient of max pooling on the CPU over channels-last tensors: every pixel of dx gathers the gradients of the windows
above it.

Vectors of channels compare the windows' argmaxes with the pixel and add in registers: for some tens of windows given by
offset, and some by index, which is eight bytes wide, that costs less than to add one argmax after the other in memory.
dx is written once, in the order of the memory, and the additions always come in the same order.
"""

from max.gpu.host import DeviceContext

from ...common.pointer import Ptr, accumulation_type
from ...common.vectors import (
    ask_ahead,
    for_each_share,
    lanes,
    load_part,
    own_lines,
    pointer_inside,
    smallest_share,
    store_part,
)
from .axis_tables import AboveTable
from ..kernel import NO_ARGMAX, OFFSET, PoolingTensors, PoolingKernel
from ..problem import PoolingAxis, PoolingProblem

comptime CHANNEL_VECTORS = 4
"""Vectors of channels that share the cost of finding a window."""


struct ColumnsAbove(Movable):
    """For each pixel of a row the windows above it: where they begin in a row of windows, and which of a row of taps
    lies over the pixel."""

    var first: List[Int]
    """The number of a pixel's first window below; one more than pixels."""
    var start: List[Int]
    var wanted: List[Int]

    def __init__(out self, axis: PoolingAxis, table: AboveTable, channels: Int):
        self.first = List[Int](capacity=Int(axis.input) + 1)
        self.start = List[Int]()
        self.wanted = List[Int]()
        for i in range(Int(axis.input)):
            self.first.append(len(self.start))
            for o in range(table.first[i], table.end[i]):
                var distance = i + Int(axis.padding) - o * Int(axis.stride)
                if distance % Int(axis.dilation) == 0:
                    self.start.append(o * channels)
                    self.wanted.append(distance // Int(axis.dilation))
        self.first.append(len(self.start))


struct RowsAbove(Movable):
    """The rows of windows above one row of dx: where they begin, and the first of the taps that lie over the row.
    """

    var start: List[Scalar[DType.int]]
    var wanted: List[Scalar[DType.int]]
    var count: Int

    def __init__(out self, most: Int):
        self.start = own_lines[DType.int](most)
        self.wanted = own_lines[DType.int](most)
        self.count = 0

    @always_inline
    def append(mut self, start: Int, wanted: Int):
        pointer_inside(self.start)[unsafe_offset=self.count] = Scalar[
            DType.int
        ](start)
        pointer_inside(self.wanted)[unsafe_offset=self.count] = Scalar[
            DType.int
        ](wanted)
        self.count += 1


@always_inline
def _gather_row[
    dtype: DType, argmax: DType, //
](
    dx: Ptr[dtype],
    dy_all: Ptr[dtype],
    argmaxes_all: Ptr[argmax],
    mut above: RowsAbove,
    columns: ColumnsAbove,
    width: Int,
    channels: Int,
    pixel: Int,
):
    """Gathers the gradient of one row. `pixel` is the number of the row's first pixel in its plane.
    """
    comptime Acc = accumulation_type[dtype]
    comptime V = lanes[dtype]
    var rows = above.count
    var row_starts = pointer_inside(above.start)
    var row_wanted = pointer_inside(above.wanted)
    var firsts = columns.first.unsafe_ptr()
    var starts = columns.start.unsafe_ptr()
    var wanteds = columns.wanted.unsafe_ptr()
    for w in range(width):
        var k0 = firsts[unsafe_offset=w]
        var k1 = firsts[unsafe_offset=w + 1]
        var out = dx.unsafe_offset(w * channels)

        @always_inline
        def block[count: Int, whole: Bool](c: Int) {imm}:
            var sums = Array[SIMD[Acc, V], count](fill=SIMD[Acc, V](0))
            for a in range(rows):
                var start = Int(row_starts[unsafe_offset=a]) + c
                var dy = dy_all.unsafe_offset(start)
                var found = argmaxes_all.unsafe_offset(start)
                # What no pixel before has read.
                if a == rows - 1 and k1 > k0:
                    var last = starts[unsafe_offset=k1 - 1]
                    ask_ahead[count * V](dy, last)
                    ask_ahead[count * V](found, last)
                for k in range(k0, k1):
                    var o = starts[unsafe_offset=k]
                    var number = pixel + w
                    comptime if argmax == OFFSET:
                        number = (
                            Int(row_wanted[unsafe_offset=a])
                            + wanteds[unsafe_offset=k]
                        )
                    var wanted = SIMD[argmax, V](Scalar[argmax](number))
                    comptime for v in range(count):
                        var argmaxes: SIMD[argmax, V]
                        var gradient: SIMD[dtype, V]
                        comptime if whole:
                            argmaxes = found.unsafe_load[width=V, alignment=1](
                                o + v * V
                            )
                            gradient = dy.unsafe_load[width=V, alignment=1](
                                o + v * V
                            )
                        else:
                            argmaxes = load_part[V](found, o, o + channels - c)
                            gradient = load_part[V](dy, o, o + channels - c)
                        sums[v] = argmaxes.eq(wanted).select(
                            sums[v] + gradient.cast[Acc](), sums[v]
                        )
            comptime for v in range(count):
                comptime if whole:
                    out.unsafe_store[alignment=1](
                        c + v * V, sums[v].cast[dtype]()
                    )
                else:
                    store_part(out, c, channels, sums[v].cast[dtype]())

        var c = 0
        while c + CHANNEL_VECTORS * V <= channels:
            block[CHANNEL_VECTORS, True](c)
            c += CHANNEL_VECTORS * V
        while c + V <= channels:
            block[1, True](c)
            c += V
        if c < channels:
            if channels >= V:
                # Once more some of the vector before.
                block[1, True](channels - V)
            else:
                block[1, False](c)


@no_inline
def _max_pool_dgrad_gather[
    dtype: DType, argmax: DType, //
](t: PoolingTensors[dtype, argmax], p: PoolingProblem):
    var d_axis = AboveTable(p.d)
    var h_axis = AboveTable(p.h)
    var w_axis = AboveTable(p.w)
    var columns = ColumnsAbove(p.w, w_axis, Int(p.channels))

    def share(first: Int, end: Int) {imm}:
        var channels = Int(p.channels)
        var width = Int(p.w.input)
        var height = Int(p.h.input)
        var row_length = Int(p.w.output) * channels
        var above = RowsAbove(p.d.most_above() * p.h.most_above())
        for unit in range(first, end):
            var row = p.input_row(unit)
            var h = row.h
            var d = row.d
            above.count = 0
            for od in range(d_axis.first[d], d_axis.end[d]):
                var kd = d + Int(p.d.padding) - od * Int(p.d.stride)
                if kd % Int(p.d.dilation) != 0:
                    continue
                for oh in range(h_axis.first[h], h_axis.end[h]):
                    var kh = h + Int(p.h.padding) - oh * Int(p.h.stride)
                    if kh % Int(p.h.dilation) != 0:
                        continue
                    above.append(
                        ((row.n * Int(p.d.output) + od) * Int(p.h.output) + oh)
                        * row_length,
                        (
                            kd // Int(p.d.dilation) * Int(p.h.window)
                            + kh // Int(p.h.dilation)
                        )
                        * Int(p.w.window),
                    )
            _gather_row(
                t.result.unsafe_offset(unit * width * channels),
                t.source,
                t.argmaxes,
                above,
                columns,
                width,
                channels,
                (d * height + h) * width,
            )

    var units = Int(p.batch) * Int(p.d.input) * Int(p.h.input)
    for_each_share(share, units, smallest_share(p.input_size(), units))
    _ = columns^


struct GatherMaxDgrad(PoolingKernel):
    comptime NAME: StaticString = "gather_max"

    @staticmethod
    def compiles[argmax: DType, adaptive: Bool]() -> Bool:
        return argmax != NO_ARGMAX and not adaptive

    @staticmethod
    def refusal[
        dtype: DType, argmax: DType, adaptive: Bool
    ](p: PoolingProblem) -> Optional[String]:
        comptime if argmax != OFFSET:
            if max(p.d.dilation, max(p.h.dilation, p.w.dilation)) > 1:
                return String("indices may name pixels between dilated taps")
        if p.input_plane() >= 1 << 31:
            return String("places do not fit 32 bits")
        return None

    @staticmethod
    def launch[
        dtype: DType, argmax: DType, adaptive: Bool
    ](
        ctx: DeviceContext, t: PoolingTensors[dtype, argmax], p: PoolingProblem
    ) raises:
        _max_pool_dgrad_gather(t, p)
