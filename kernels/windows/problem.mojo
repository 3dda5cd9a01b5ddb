"""One layout of windows: x [N, H, W, C], and columns, which hold for each window the elements under it.

Letters: R S are the extents of a window, P Q count windows. Columns are [N, R, S, P, Q] with C = 1 (taps first, as aten's
im2col has them: a contiguous NCHW tensor arrives as [N * C, H, W, 1]), or [N, P, Q, R, S, C]. An element outside x is
zero, and what columns have there goes nowhere.
"""

from ..common.argument import KernelArgument
from ..common.arithmetic import Divisor


@fieldwise_init
struct WindowAxis(KernelArgument):
    """One of the two axes."""

    var extent: Int32
    """Of x."""
    var windows: Int32
    var taps: Int32
    """Of a window."""
    var stride: Int32
    var padding: Int32
    var dilation: Int32
    var by_stride: Divisor

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

    @always_inline
    def element(self, window: Int32, tap: Int32) -> Int32:
        """What lies under a tap; outside x too."""
        return window * self.stride + tap * self.dilation - self.padding

    @always_inline
    def is_inside(self, element: Int32) -> Bool:
        return element >= 0 and element < self.extent

    @always_inline
    def window_over(self, element: Int32, tap: Int32) -> Int32:
        """The window whose tap lies over an element; -1 for none."""
        var shifted = element + self.padding - tap * self.dilation
        if shifted < 0:
            return -1
        var window, rest = self.by_stride.divide(shifted)
        return window if rest == 0 and window < self.windows else Int32(-1)

    @always_inline
    def first_inside(self, tap: Int32) -> Int32:
        """The first window whose tap lies at 0 or behind."""
        var missing = self.padding - tap * self.dilation
        if missing <= 0:
            return 0
        return min(
            self.by_stride.quotient(missing + self.stride - 1), self.windows
        )

    @always_inline
    def end_inside(self, tap: Int32) -> Int32:
        """One past the last window whose tap lies before the extent."""
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
        """Where columns [N, R, S, P, Q] have it."""
        var tap = (n * Int(self.h.taps) + Int(r)) * Int(self.w.taps) + Int(s)
        return (tap * Int(self.h.windows) + Int(p)) * Int(self.w.windows) + Int(
            q
        )

    @always_inline
    def at_windows_first(
        self, n: Int, p: Int32, q: Int32, r: Int32, s: Int32
    ) -> Int:
        """Where columns [N, P, Q, R, S, C] have the first channel."""
        var window = (n * Int(self.h.windows) + Int(p)) * Int(
            self.w.windows
        ) + Int(q)
        var tap = (window * Int(self.h.taps) + Int(r)) * Int(self.w.taps) + Int(
            s
        )
        return tap * Int(self.channels)
