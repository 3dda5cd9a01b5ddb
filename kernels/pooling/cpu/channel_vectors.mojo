"""Pooling on the CPU over channels-last tensors: vectors of channels, forward and backward.

The elements that a result reads are listed once for its pixel, as offsets, and then walked for every block of channels;
a block is four vectors where C allows it, so that neither the loop nor the latency of a comparison shows.
"""

from max.gpu.host import DeviceContext
from std.sys import size_of
from std.utils.numerics import neg_inf

from ...common.pointer import Ptr, accumulation_type
from ...common.vectors import (
    PREFETCH_DISTANCE,
    CACHE_LINE,
    ClearedAhead,
    ask_for,
    end_past_cache,
    for_each_share,
    is_nan,
    lanes,
    load_part,
    own_lines,
    pointer_inside,
    smallest_share,
    store_part,
    store_past_cache,
)
from .axis_tables import AboveTable, WindowTable
from .separable_max import has_window_everywhere
from ..kernel import INDEX, NO_ARGMAX, OFFSET, PoolingTensors, PoolingKernel
from ..problem import PoolingAxis, PoolingProblem, ClippedTaps

comptime MANY_TAPS = 16
"""Taps of a window above which a pixel's next channels are wanted before the data that lies PREFETCH_DISTANCE bytes
on."""


comptime MIN_CHANNELS = 16
"""Channels from which on listing the elements of a pixel's windows pays off."""
comptime MAX_SUMMED = 16
"""Addends of an average above which summing rows first is cheaper, unless one window covers the whole plane."""


def most_taps(p: PoolingProblem) -> Int:
    """Returns the most taps of a window, clipped to the tensor."""

    @always_inline
    def taps(axis: PoolingAxis) -> Int:
        return Int(min(axis.window, axis.input))

    return taps(p.d) * taps(p.h) * taps(p.w)


struct TapList(Movable):
    """The taps of one row's windows: their offsets from the windows' first column, their argmaxes, and the taps that no
    earlier window has read. All windows inside the tensor share one list."""

    var at: List[Scalar[DType.int]]
    var places: List[Int32]
    var fresh: List[Scalar[DType.int]]
    var count: Int
    var fresh_count: Int
    var columns: Tuple[Int, Int]
    """Number of the first tap on W, and how many there are."""

    def __init__(out self, most: Int):
        self.at = own_lines[DType.int](most)
        self.places = own_lines[DType.int32](most)
        self.fresh = own_lines[DType.int](most)
        self.count = 0
        self.fresh_count = 0
        self.columns = (-1, -1)

    def fill[
        argmax: DType, adaptive: Bool
    ](
        mut self,
        p: PoolingProblem,
        td: ClippedTaps,
        th: ClippedTaps,
        first_column: Int,
        columns: Int,
    ):
        """Lists these taps, with argmaxes as offsets, or as pixels for the window whose first column is 0.
        """
        if (
            self.columns[0] == first_column
            and self.columns[1] == columns
            and self.count > 0
        ):
            return
        self.columns = (first_column, columns)
        self.count = 0
        self.fresh_count = 0
        # What of a window others have not read yet, counted from its end.
        var fresh_h = Int(p.h.window if adaptive else p.h.stride)
        var fresh_w = Int(p.w.window if adaptive else p.w.stride)
        var w_step = 1 if adaptive else Int(p.w.dilation)
        var at = pointer_inside(self.at)
        var places = pointer_inside(self.places)
        var fresh = pointer_inside(self.fresh)
        for a in range(td.count):
            for b in range(th.count):
                var pixel = (
                    (td.start + a * td.step) * Int(p.h.input)
                    + th.start
                    + b * th.step
                ) * Int(p.w.input)
                var tap = (
                    (td.first + a) * Int(p.h.window) + th.first + b
                ) * Int(p.w.window) + first_column
                for k in range(columns):
                    var element = Scalar[DType.int](pixel * Int(p.channels))
                    at[unsafe_offset=self.count] = element
                    places[unsafe_offset=self.count] = Int32(
                        tap + k if argmax == OFFSET else pixel
                    )
                    if b + fresh_h >= th.count and k + fresh_w >= columns:
                        fresh[unsafe_offset=self.fresh_count] = element
                        self.fresh_count += 1
                    pixel += w_step
                    self.count += 1


@no_inline
def _pool_fprop_vectors[
    dtype: DType, argmax: DType, //, *, adaptive: Bool
](t: PoolingTensors[dtype, argmax], p: PoolingProblem):
    comptime Acc = accumulation_type[dtype]
    comptime V = lanes[dtype]
    comptime averaging = argmax == NO_ARGMAX
    var d_axis = WindowTable(p.d, adaptive=adaptive)
    var h_axis = WindowTable(p.h, adaptive=adaptive)
    var w_axis = WindowTable(p.w, adaptive=adaptive)
    var most = most_taps(p)

    def share(first: Int, end: Int) {imm}:
        var channels = Int(p.channels)
        var out_width = Int(p.w.output)
        # A line that is stored in part costs more so.
        var past_cache = (
            argmax == INDEX and channels * size_of[argmax]() % CACHE_LINE == 0
        )
        var taps = TapList(most)
        var at = pointer_inside(taps.at)
        var places = pointer_inside(taps.places)
        var fresh = pointer_inside(taps.fresh)
        for unit in range(first, end):
            var row = p.output_row(unit)
            var x = t.source.unsafe_offset(row.n * p.input_plane() * channels)
            var td = d_axis.taps(row.d)
            var th = h_axis.taps(row.h)
            taps.count = 0
            for ow in range(out_width):
                taps.fill[argmax, adaptive](
                    p, td, th, w_axis.first_tap[ow], w_axis.count[ow]
                )
                var count = taps.count
                var fresh_count = taps.fresh_count
                var x_window = x.unsafe_offset(w_axis.start[ow] * channels)
                var first_place = Int32(
                    0 if argmax == OFFSET else w_axis.start[ow]
                )
                var o = (unit * out_width + ow) * channels
                var y = t.result.unsafe_offset(o)
                var argmaxes = t.argmaxes
                # A division for each vector would cost more than the sums.
                var scale = Scalar[Acc](1)
                comptime if averaging:
                    scale /= Scalar[Acc](p.divisor[adaptive](row.d, row.h, ow))
                else:
                    argmaxes = t.argmaxes.unsafe_offset(o)

                @always_inline
                def block[W: Int](c: Int) {imm}:
                    var best = SIMD[Acc, W](0 if averaging else neg_inf[Acc]())
                    var found = SIMD[DType.int32, W](places[unsafe_offset=0])
                    # After many taps the next channels of the same pixels are wanted.
                    var ahead = c + PREFETCH_DISTANCE // size_of[dtype]()
                    if count > MANY_TAPS and c + W < channels:
                        ahead = c + W
                    # Asking all at once leaves the loads that follow waiting in the same queue: not where windows that
                    # share no pixels are read in the order of the memory.
                    var ask_first = fresh_count < count
                    for k in range(fresh_count if ask_first else 0):
                        ask_for[W](
                            x_window.unsafe_offset(Int(fresh[unsafe_offset=k])),
                            ahead,
                        )
                    for k in range(count):
                        var pixel = x_window.unsafe_offset(
                            Int(at[unsafe_offset=k])
                        )
                        if not ask_first:
                            ask_for[W](pixel, ahead)
                        var value = load_part[W](pixel, c, channels).cast[Acc]()
                        comptime if averaging:
                            best += value
                        else:
                            var wins = value.gt(best) | is_nan(value)
                            best = wins.select(value, best)
                            found = wins.select(
                                SIMD[DType.int32, W](places[unsafe_offset=k]),
                                found,
                            )
                    comptime if averaging:
                        best *= scale
                    store_part(y, c, channels, best.cast[dtype]())
                    comptime if not averaging:
                        var named = (found + first_place).cast[argmax]()
                        # Only the backward pass wants indices, and there are more bytes of them than of y.
                        if past_cache:
                            store_past_cache(argmaxes, c, channels, named)
                        else:
                            store_part(argmaxes, c, channels, named)

                var c = 0
                comptime if averaging:
                    while c + 8 * V <= channels:
                        block[8 * V](c)
                        c += 8 * V
                while c + 4 * V <= channels:
                    block[4 * V](c)
                    c += 4 * V
                while c < channels:
                    block[V](c)
                    c += V
        _ = taps^
        if past_cache:
            end_past_cache()

    var units = Int(p.batch) * Int(p.d.output) * Int(p.h.output)
    for_each_share(share, units, smallest_share(p.input_size(), units))


@no_inline
def _avg_pool_dgrad_vectors[
    dtype: DType, //
](dx_all: Ptr[dtype], dy: Ptr[dtype], p: PoolingProblem):
    comptime Acc = accumulation_type[dtype]
    comptime V = lanes[dtype]
    var include = p.count_include_pad != 0
    var d_axis = WindowTable(p.d, include_pad=include)
    var h_axis = WindowTable(p.h, include_pad=include)
    var w_axis = WindowTable(p.w, include_pad=include)
    var d_above = AboveTable(p.d)
    var h_above = AboveTable(p.h)
    var w_above = AboveTable(p.w)
    var most_rows = d_above.most * h_above.most
    var override = p.divisor_override != 0

    def share(first: Int, end: Int) {imm}:
        var channels = Int(p.channels)
        var width = Int(p.w.input)
        var at_list = own_lines[DType.int](most_rows)
        var scale_list = own_lines[Acc](most_rows, fill=1)
        var at = pointer_inside(at_list)
        var scale = pointer_inside(scale_list)
        var w_scale_list = own_lines[Acc](
            Int(p.w.output), fill=1 / Scalar[Acc](Int(p.divisor_override))
        )
        var w_scale = pointer_inside(w_scale_list)
        if not override:
            for ow in range(Int(p.w.output)):
                w_scale[unsafe_offset=ow] = 1 / Scalar[Acc](w_axis.divisor[ow])
        for unit in range(first, end):
            var row = p.input_row(unit)
            # What all pixels of the row share is found once.
            var row_count = 0
            for od in range(d_above.first[row.d], d_above.end[row.d]):
                for oh in range(h_above.first[row.h], h_above.end[row.h]):
                    at[unsafe_offset=row_count] = Scalar[DType.int](
                        ((row.n * Int(p.d.output) + od) * Int(p.h.output) + oh)
                        * Int(p.w.output)
                        * channels
                    )
                    if not override:
                        scale[unsafe_offset=row_count] = 1 / Scalar[Acc](
                            d_axis.divisor[od] * h_axis.divisor[oh]
                        )
                    row_count += 1
            var dx_row = dx_all.unsafe_offset(unit * width * channels)
            var cleared = ClearedAhead(width * channels, 0)
            for w in range(width):
                var above_first = w_above.first[w]
                var above_end = w_above.end[w]
                cleared.reach(dx_row, (w + 1) * channels)
                var dx = dx_row.unsafe_offset(w * channels)

                @always_inline
                def block[W: Int](c: Int) {imm}:
                    var total = SIMD[Acc, W](0)
                    for r in range(row_count):
                        var windows = dy.unsafe_offset(
                            Int(at[unsafe_offset=r]) + c
                        )
                        # What no pixel before has read.
                        if r == row_count - 1 and above_end > above_first:
                            ask_for[W](
                                windows,
                                (above_end - 1) * channels
                                + PREFETCH_DISTANCE // size_of[dtype](),
                            )
                        for ow in range(above_first, above_end):
                            total += load_part[W](
                                windows,
                                ow * channels,
                                ow * channels + channels - c,
                            ).cast[Acc]() * (
                                scale[unsafe_offset=r]
                                * w_scale[unsafe_offset=ow]
                            )
                    store_part(dx, c, channels, total.cast[dtype]())

                var c = 0
                while c + 4 * V <= channels:
                    block[4 * V](c)
                    c += 4 * V
                while c < channels:
                    block[V](c)
                    c += V
        _ = at_list^
        _ = scale_list^
        _ = w_scale_list^

    var units = Int(p.batch) * Int(p.d.input) * Int(p.h.input)
    for_each_share(share, units, smallest_share(p.input_size(), units))


struct ChannelVectorsFprop(PoolingKernel):
    comptime NAME: StaticString = "channel_vectors"

    @staticmethod
    def refusal[
        dtype: DType, argmax: DType, adaptive: Bool
    ](p: PoolingProblem) -> Optional[String]:
        comptime if argmax != NO_ARGMAX:
            if not has_window_everywhere[adaptive](p):
                return String("a window may lie wholly in padding")
        return None

    @staticmethod
    def launch[
        dtype: DType, argmax: DType, adaptive: Bool
    ](
        ctx: DeviceContext, t: PoolingTensors[dtype, argmax], p: PoolingProblem
    ) raises:
        _pool_fprop_vectors[adaptive=adaptive](t, p)


struct ChannelVectorsDgrad(PoolingKernel):
    comptime NAME: StaticString = "channel_vectors"

    @staticmethod
    def compiles[argmax: DType, adaptive: Bool]() -> Bool:
        return argmax == NO_ARGMAX and not adaptive

    @staticmethod
    def launch[
        dtype: DType, argmax: DType, adaptive: Bool
    ](
        ctx: DeviceContext, t: PoolingTensors[dtype, argmax], p: PoolingProblem
    ) raises:
        _avg_pool_dgrad_vectors(t.result, t.source, p)
