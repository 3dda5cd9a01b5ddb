"""One padding: y [N, D, H, W, C] has longer axes than x, by `low` in front and `high` behind; dy is like y, dx like x.

A contiguous NCHW tensor arrives as [N * C, D, H, W, 1]. Negative counts crop.
"""

from ..common.argument import KernelArgument


@fieldwise_init
struct Shown(TrivialRegisterPassable):
    """The places along one axis of dy that show an element of dx: neighbouring places, and up to two more.
    """

    var first: Int32
    var count: Int32
    """The number of neighbouring places."""
    var second: Int32
    """Another place, or -1 for none; likewise `third`."""
    var third: Int32

    @always_inline
    def all(self) -> Int32:
        """Returns how many places there may be."""
        return self.count + 2

    @always_inline
    def is_single(self) -> Bool:
        """Returns whether `first` is the only place, as for all elements but those near the borders.
        """
        return self.count == 1 and self.second < 0 and self.third < 0

    @always_inline
    def place(self, k: Int32) -> Int32:
        """Returns place `k` of `all`, or -1 for none."""
        if k < self.count:
            return self.first + k
        return self.second if k == self.count else self.third


@fieldwise_init
struct PaddedAxis(KernelArgument):
    var extent: Int32
    """The extent of dx."""
    var padded: Int32
    """The extent of dy."""
    var low: Int32
    var mirrored: Bool
    """Whether borders mirror the tensor; otherwise they repeat its outermost elements."""

    @always_inline
    def shown(self, i: Int32) -> Shown:
        """Returns the places along dy that show element `i`."""
        var last = self.extent - 1
        if self.mirrored:
            var own = i + self.low
            var inside = own >= 0 and own < self.padded
            return Shown(
                own,
                Int32(1) if inside else Int32(0),
                self._inside(self.low - i) if i > 0 else Int32(-1),
                self._inside(2 * last + self.low - i) if i
                < last else Int32(-1),
            )
        var first = Int32(0) if i == 0 else i + self.low
        var end = self.padded if i == last else i + self.low + 1
        first = max(first, 0)
        return Shown(first, max(min(end, self.padded) - first, 0), -1, -1)

    @always_inline
    def element(self, place: Int32) -> Int32:
        """The element that dy shows at a place."""
        var i = place - self.low
        var last = self.extent - 1
        if self.mirrored:
            i = abs(i)
            return i if i <= last else 2 * last - i
        return min(max(i, 0), last)

    @always_inline
    def _inside(self, place: Int32) -> Int32:
        return place if place >= 0 and place < self.padded else Int32(-1)


@fieldwise_init
struct PaddingProblem(KernelArgument):
    var batch: Int32
    var channels: Int32
    var d: PaddedAxis
    var h: PaddedAxis
    var w: PaddedAxis

    @always_inline
    def rows(self) -> Int:
        """Rows of dx."""
        return Int(self.batch) * Int(self.d.extent) * Int(self.h.extent)

    @always_inline
    def length(self) -> Int:
        """Elements of a row of dx."""
        return Int(self.w.extent) * Int(self.channels)

    @always_inline
    def padded_length(self) -> Int:
        """Elements of a row of dy."""
        return Int(self.w.padded) * Int(self.channels)

    @always_inline
    def padded_row(self, n: Int, d: Int32, h: Int32) -> Int:
        """Returns the offset of a row of dy."""
        var row = (n * Int(self.d.padded) + Int(d)) * Int(self.h.padded)
        return (row + Int(h)) * self.padded_length()
