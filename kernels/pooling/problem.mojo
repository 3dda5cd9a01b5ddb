"""The geometry of one pooling operation, shared by every pooling kernel.

Letters: N batch, D/H/W input extents, T/P/Q output extents, C channels. A tensor is always [N, D, H, W, C];
a contiguous NCHW tensor arrives as [N * C, D, H, W, 1]. A "plane" is the D * H * W pixels of one (n, c).
"""

from std.math import ceildiv
from std.utils.index import IndexList

from ..common.argument import KernelArgument
from ..common.check import check_equal
from ..common.library import Arguments


@fieldwise_init
struct ClippedTaps(TrivialRegisterPassable):
    """The input positions under one window on one axis, clipped to the tensor: start, start + step, ...
    """

    var start: Int
    var step: Int
    var count: Int
    var first: Int
    """Number of the first tap within the unclipped window."""


@fieldwise_init
struct PoolingAxis(KernelArgument):
    """One spatial axis. With `adaptive` the windows follow from the two extents alone.
    """

    var input: Int32
    var output: Int32
    var window: Int32
    var stride: Int32
    var padding: Int32
    var dilation: Int32

    @always_inline
    def taps[adaptive: Bool](self, o: Int) -> ClippedTaps:
        """The input positions under window `o`."""
        comptime if adaptive:
            var start = o * Int(self.input) // Int(self.output)
            var end = ceildiv((o + 1) * Int(self.input), Int(self.output))
            return ClippedTaps(start, 1, end - start, 0)
        else:
            var step = Int(self.dilation)
            var start = o * Int(self.stride) - Int(self.padding)
            var first = ceildiv(-start, step) if start < 0 else 0
            start += first * step
            var count = min(
                Int(self.window) - first,
                ceildiv(Int(self.input) - start, step),
            )
            return ClippedTaps(start, step, max(count, 0), first)

    @always_inline
    def divisor[adaptive: Bool](self, o: Int, count_include_pad: Bool) -> Int:
        """Returns this axis's contribution to an average's divisor. Padding counts; the overhang that ceil mode adds
        beyond it does not."""
        comptime if adaptive:
            return self.taps[True](o).count
        else:
            var start = o * Int(self.stride) - Int(self.padding)
            var end = min(
                start + Int(self.window), Int(self.input) + Int(self.padding)
            )
            if not count_include_pad:
                start = max(start, 0)
                end = min(end, Int(self.input))
            return max(end - start, 1)

    def is_window(self, window: Int, stride: Int, dilation: Int = 1) -> Bool:
        """Returns whether windows have this size, stride and dilation."""
        return (
            Int(self.window) == window
            and Int(self.stride) == stride
            and Int(self.dilation) == dilation
        )

    def reach(self) -> Int:
        """Input positions that a window spans."""
        return Int(self.dilation) * (Int(self.window) - 1) + 1

    def most_above(self) -> Int:
        """Returns the most windows above one input position; windows that are this many apart share no position.
        """
        return min(ceildiv(self.reach(), Int(self.stride)), Int(self.output))

    def most_reaching(self, extent: Int) -> Int:
        """The most windows that reach into `extent` neighbouring input positions.
        """
        if extent >= Int(self.input):
            return Int(self.output)
        return min(
            (extent + self.reach() - 2) // Int(self.stride) + 1,
            Int(self.output),
        )

    def may_miss(self) -> Bool:
        """Returns whether all taps of a window may lie in padding, as where a wide dilation takes them past both
        ends."""
        return self.padding > 0 and self.dilation > self.input

    @always_inline
    def outputs_over[adaptive: Bool](self, i: Int) -> Tuple[Int, Int]:
        """Returns the first, and one past the last, window whose hull contains input position `i`.
        """
        comptime if adaptive:
            return (
                i * Int(self.output) // Int(self.input),
                ceildiv((i + 1) * Int(self.output), Int(self.input)),
            )
        else:
            var reach = Int(self.dilation) * (Int(self.window) - 1)
            var shifted = i + Int(self.padding)
            # Never past the last window, even for positions that no window reaches.
            var end = min(shifted // Int(self.stride) + 1, Int(self.output))
            if shifted <= reach:
                return (0, end)
            return (min(ceildiv(shifted - reach, Int(self.stride)), end), end)


@fieldwise_init
struct PoolingProblem(KernelArgument):
    """Sizes and geometry of one pooling operation over [N, D, H, W, C]."""

    var batch: Int64
    var channels: Int64
    var d: PoolingAxis
    var h: PoolingAxis
    var w: PoolingAxis
    var count_include_pad: Int32
    var divisor_override: Int64
    """0: none."""

    @always_inline
    def input_plane(self) -> Int:
        return Int(self.d.input) * Int(self.h.input) * Int(self.w.input)

    @always_inline
    def output_plane(self) -> Int:
        return Int(self.d.output) * Int(self.h.output) * Int(self.w.output)

    @always_inline
    def input_size(self) -> Int:
        return Int(self.batch) * self.input_plane() * Int(self.channels)

    @always_inline
    def output_size(self) -> Int:
        return Int(self.batch) * self.output_plane() * Int(self.channels)

    def most_above(self) -> Int:
        """The most windows above one pixel."""
        return self.d.most_above() * self.h.most_above() * self.w.most_above()

    @always_inline
    def input_row(self, number: Int) -> Position:
        """Returns the position of row `number`, counted over all samples; w and c are 0.
        """
        return position(number, Int(self.d.input), Int(self.h.input), 1, 1)

    @always_inline
    def output_row(self, number: Int) -> Position:
        return position(number, Int(self.d.output), Int(self.h.output), 1, 1)

    def may_miss(self) -> Bool:
        """Returns whether windows may lie wholly in padding."""
        return self.d.may_miss() or self.h.may_miss() or self.w.may_miss()

    def is_line(self) -> Bool:
        """Returns whether the problem has one dimension: there is one row of pixels, and one row of windows.
        """

        @always_inline
        def is_missing(axis: PoolingAxis) -> Bool:
            return axis.input == 1 and axis.window == 1 and axis.padding == 0

        return is_missing(self.d) and is_missing(self.h)

    def rows_together(self) -> PoolingProblem:
        """A 1-D problem as one plane with the batch for its rows."""
        var merged = self
        merged.batch = 1
        merged.h = PoolingAxis(Int32(self.batch), Int32(self.batch), 1, 1, 0, 1)
        return merged

    def is_disjoint(self) -> Bool:
        """Returns whether no pixel lies under two windows."""

        @always_inline
        def alone(axis: PoolingAxis) -> Bool:
            return axis.window <= axis.stride and axis.dilation == 1

        return alone(self.d) and alone(self.h) and alone(self.w)

    def is_global(self) -> Bool:
        """Returns whether one window covers each plane, and channels do not come between its pixels.
        """

        @always_inline
        def covered(axis: PoolingAxis) -> Bool:
            var taps = axis.taps[False](0)
            return taps.start == 0 and taps.count == Int(axis.input)

        return (
            self.channels == 1
            and self.output_plane() == 1
            and covered(self.d)
            and covered(self.h)
            and covered(self.w)
        )

    @always_inline
    def window_size(self) -> Int:
        return Int(self.d.window) * Int(self.h.window) * Int(self.w.window)

    @always_inline
    def divisor[adaptive: Bool](self, od: Int, oh: Int, ow: Int) -> Int:
        """Returns the divisor of an average's window (od, oh, ow)."""
        comptime if not adaptive:
            if self.divisor_override != 0:
                return Int(self.divisor_override)
        var include = self.count_include_pad != 0
        return (
            self.d.divisor[adaptive](od, include)
            * self.h.divisor[adaptive](oh, include)
            * self.w.divisor[adaptive](ow, include)
        )


@fieldwise_init
struct Position(TrivialRegisterPassable):
    """The position of one element of [N, D, H, W, C]."""

    var n: Int
    var d: Int
    var h: Int
    var w: Int
    var c: Int


@always_inline
def position(
    flat: Int, d_extent: Int, h_extent: Int, w_extent: Int, channels: Int
) -> Position:
    """Splits a flat element number of a contiguous [N, d, h, w, c] tensor."""
    var pixel = flat // channels
    var row = pixel // w_extent
    var slab = row // h_extent
    var n = slab // d_extent
    return Position(
        n,
        slab - n * d_extent,
        row - slab * h_extent,
        pixel - row * w_extent,
        flat - pixel * channels,
    )


def _check_axis(name: String, axis: PoolingAxis, overhang: Int) raises -> Int:
    """Refuses impossible geometry and returns how many windows fit."""
    if axis.window < 1:
        raise Error("window[", name, "]=", axis.window, ": must be positive")
    if axis.stride < 1:
        raise Error("stride[", name, "]=", axis.stride, ": must be positive")
    if axis.dilation < 1:
        raise Error(
            "dilation[", name, "]=", axis.dilation, ": must be positive"
        )
    var reach = axis.reach() - 1
    if axis.padding < 0 or axis.padding * 2 > axis.window:
        raise Error(
            "padding[",
            name,
            "]=",
            axis.padding,
            ": must lie between 0 and half the window, ",
            axis.window // 2,
        )
    var room = Int(axis.input) + 2 * Int(axis.padding) - reach - 1
    if overhang == 1:
        room += Int(axis.stride) - 1
    if room < 0:
        raise Error(
            "input[", name, "]=", axis.input, ": smaller than the window"
        )
    var windows = room // Int(axis.stride) + 1
    if overhang == 1 and (windows - 1) * Int(axis.stride) >= Int(
        axis.input
    ) + Int(axis.padding):
        windows -= 1
    return windows


@fieldwise_init
struct PoolingNumbers(ImplicitlyCopyable):
    """The numbers of a call; numbers of axes in the order D, H, W. Adaptive windows follow from extents: their numbers
    are all 0."""

    var window: IndexList[3]
    var stride: IndexList[3]
    var padding: IndexList[3]
    var dilation: IndexList[3]
    var ceil_mode: Int
    var count_include_pad: Int
    var divisor_override: Int
    """0 for none."""

    @staticmethod
    def take(mut arguments: Arguments) -> Self:
        return Self(
            arguments.take_words[3](),
            arguments.take_words[3](),
            arguments.take_words[3](),
            arguments.take_words[3](),
            arguments.take_word(),
            arguments.take_word(),
            arguments.take_word(),
        )


@always_inline
def check_same_shape(
    name: String, shape: IndexList[5], wanted: IndexList[5], rule: String
) raises:
    for a in range(5):
        check_equal(String(name, ".shape[", a, "]"), shape[a], wanted[a], rule)


def pooling_problem(
    numbers: PoolingNumbers, x_shape: IndexList[5], y_shape: IndexList[5]
) raises -> PoolingProblem:
    """The problem that the geometry and the two shapes describe; raises where they disagree.
    """
    check_equal("output.N", y_shape[0], x_shape[0], "the input's N")
    check_equal("output.C", y_shape[4], x_shape[4], "the input's C")

    @always_inline
    def axis(a: Int) {imm} -> PoolingAxis:
        return PoolingAxis(
            Int32(x_shape[1 + a]),
            Int32(y_shape[1 + a]),
            Int32(numbers.window[a]),
            Int32(numbers.stride[a]),
            Int32(numbers.padding[a]),
            Int32(numbers.dilation[a]),
        )

    var p = PoolingProblem(
        Int64(x_shape[0]),
        Int64(x_shape[4]),
        axis(0),
        axis(1),
        axis(2),
        Int32(numbers.count_include_pad),
        Int64(numbers.divisor_override),
    )
    var overhang = numbers.ceil_mode
    var rule = String("the extent that the geometry gives")
    check_equal("output.D", y_shape[1], _check_axis("D", p.d, overhang), rule)
    check_equal("output.H", y_shape[2], _check_axis("H", p.h, overhang), rule)
    check_equal("output.W", y_shape[3], _check_axis("W", p.w, overhang), rule)
    return p


def adaptive_problem(
    x_shape: IndexList[5], y_shape: IndexList[5]
) raises -> PoolingProblem:
    """The problem of adaptive pooling: the shapes say it all."""
    check_equal("output.N", y_shape[0], x_shape[0], "the input's N")
    check_equal("output.C", y_shape[4], x_shape[4], "the input's C")
    for a in range(1, 4):
        if x_shape[a] < 1 or y_shape[a] < 1:
            raise Error(
                "extents of axis ",
                a,
                ": ",
                x_shape[a],
                " to ",
                y_shape[a],
                ": must be positive",
            )

    @always_inline
    def axis(a: Int) {imm} -> PoolingAxis:
        # The longest window: starts round down and ends round up.
        var longest = ceildiv(x_shape[a], y_shape[a])
        if x_shape[a] % y_shape[a] != 0:
            longest += 1
        return PoolingAxis(
            Int32(x_shape[a]), Int32(y_shape[a]), Int32(longest), 1, 0, 1
        )

    return PoolingProblem(
        Int64(x_shape[0]), Int64(x_shape[4]), axis(1), axis(2), axis(3), 0, 0
    )
