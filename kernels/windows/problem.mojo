"""One layout of windows: x [N, H, W, C], and columns, which hold for each window the elements under it.

Letters: R S are the extents of a window, P Q count windows. Columns are [N, R, S, P, Q] with C = 1 (taps first, as
aten's im2col has them: a contiguous NCHW tensor arrives as [N * C, H, W, 1]), or [N, P, Q, R, S, C]. An element outside
x is zero, and elements of columns there are dropped.
"""

from ..common.argument import KernelArgument
from ..common.arithmetic import Divisor, gcd


@fieldwise_init
struct Hits(TrivialRegisterPassable):
    """The taps that lie over an element: `count` of them from `tap` on, each `every` taps behind the last and in a
    window `drop` before the last one's."""

    var tap: Int32
    var window: Int32
    var count: Int32


@fieldwise_init
struct WindowAxis(KernelArgument):
    """One of the two axes."""

    var extent: Int32
    """The extent of x."""
    var windows: Int32
    var taps: Int32
    """Taps of a window."""
    var stride: Int32
    var padding: Int32
    var dilation: Int32
    var by_stride: Divisor
    var by_common: Divisor
    """Divides by the greatest common divisor of stride and dilation."""
    var by_every: Divisor
    """Divides by `every` of Hits."""
    var by_drop: Divisor
    """Divides by `drop` of Hits."""
    var inverse: Int64
    """The inverse of `drop`, modulo `every`."""

    def __init__(
        out self,
        extent: Int,
        windows: Int,
        taps: Int,
        stride: Int,
        padding: Int,
        dilation: Int,
    ):
        self.extent = Int32(extent)
        self.windows = Int32(windows)
        self.taps = Int32(taps)
        self.stride = Int32(stride)
        self.padding = Int32(padding)
        self.dilation = Int32(dilation)
        self.by_stride = Divisor(stride)
        var common = gcd(stride, dilation)
        var every = stride // common
        var drop = dilation // common
        self.by_common = Divisor(common)
        self.by_every = Divisor(every)
        self.by_drop = Divisor(drop)
        # Euclid's algorithm, with the factor of `drop` alone.
        var a = every
        var b = drop % every
        var last = 0
        var factor = 1
        while b != 0:
            var quotient = a // b
            a, b = b, a - quotient * b
            last, factor = factor, last - quotient * factor
        self.inverse = Int64(last % every)

    @always_inline
    def element(self, window: Int32, tap: Int32) -> Int32:
        """Returns the element of x under a tap; it may lie outside x."""
        return window * self.stride + tap * self.dilation - self.padding

    @always_inline
    def is_inside(self, element: Int32) -> Bool:
        return element >= 0 and element < self.extent

    @always_inline
    def every(self) -> Int32:
        """Taps from one over an element to the next."""
        return self.by_every.value

    @always_inline
    def drop(self) -> Int32:
        """Windows from that of such a tap back to that of the next."""
        return self.by_drop.value

    @always_inline
    def hits(self, element: Int32) -> Hits:
        """The taps over an element of x."""
        var shifted = element + self.padding
        var part, odd = self.by_common.divide(shifted)
        if odd != 0:
            return Hits(0, 0, 0)
        # tap * drop = part (modulo every).
        var tap = self.by_every.divide(part)[1]
        if self.inverse > 1:
            var product = Int64(tap) * self.inverse
            comptime most = Int64(Int32.MAX)
            if product <= most:
                tap = self.by_every.divide(Int32(product))[1]
            else:
                tap = Int32(product % Int64(self.every()))
        var reached = Int64(shifted) - Int64(tap) * Int64(self.dilation)
        if tap >= self.taps or reached < 0:
            return Hits(0, 0, 0)
        var window = self.by_stride.quotient(Int32(reached))
        var last = min(
            self.by_every.quotient(self.taps - 1 - tap),
            self.by_drop.quotient(window),
        )
        # Windows behind the last one do not exist.
        var behind = max(window - self.windows + 1, 0)
        var skipped = self.by_drop.quotient(behind + self.drop() - 1)
        return Hits(
            tap + skipped * self.every(),
            window - skipped * self.drop(),
            max(last - skipped + 1, 0),
        )

    @always_inline
    def first_inside(self, tap: Int32) -> Int32:
        """Returns the first window whose tap lies at 0 or behind."""
        var missing = self.padding - tap * self.dilation
        if missing <= 0:
            return 0
        return min(
            self.by_stride.quotient(missing + self.stride - 1), self.windows
        )

    @always_inline
    def end_inside(self, tap: Int32) -> Int32:
        """Returns one past the last window whose tap lies before the extent."""
        var room = self.extent - 1 + self.padding - tap * self.dilation
        if room < 0:
            return 0
        return min(self.by_stride.quotient(room) + 1, self.windows)


@fieldwise_init
struct WindowsProblem(KernelArgument):
    var batch: Int32
    var channels: Int32
    var h: WindowAxis
    var w: WindowAxis

    @always_inline
    def row_length(self) -> Int:
        """Elements of a row of x."""
        return Int(self.w.extent) * Int(self.channels)

    @always_inline
    def size(self) -> Int:
        """Elements of x."""
        return Int(self.batch) * Int(self.h.extent) * self.row_length()

    @always_inline
    def columns_size(self) -> Int:
        """Elements of the columns."""
        return (
            Int(self.batch)
            * Int(self.h.taps)
            * Int(self.w.taps)
            * Int(self.h.windows)
            * Int(self.w.windows)
            * Int(self.channels)
        )

    @always_inline
    def at_taps_first(
        self, n: Int, r: Int32, s: Int32, p: Int32, q: Int32
    ) -> Int:
        """Returns the offset of the element in columns [N, R, S, P, Q]."""
        var tap = (n * Int(self.h.taps) + Int(r)) * Int(self.w.taps) + Int(s)
        return (tap * Int(self.h.windows) + Int(p)) * Int(self.w.windows) + Int(
            q
        )

    @always_inline
    def at_windows_first(
        self, n: Int, p: Int32, q: Int32, r: Int32, s: Int32
    ) -> Int:
        """Returns the offset of the first channel in columns [N, P, Q, R, S, C].
        """
        var window = (n * Int(self.h.windows) + Int(p)) * Int(
            self.w.windows
        ) + Int(q)
        var tap = (window * Int(self.h.taps) + Int(r)) * Int(self.w.taps) + Int(
            s
        )
        return tap * Int(self.channels)
