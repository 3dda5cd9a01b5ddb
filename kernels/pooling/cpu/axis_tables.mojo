"""One axis of a pooling problem spelt out for the CPU kernels: rows can be short, and nothing is divided twice for
them.

Axes can be long, too (16384 samples of sound), and one core fills a table, so its elements take no division but for
adaptive windows and those that padding clips.
"""

from ...common.int_table import IntTable
from ..problem import PoolingAxis, ClippedTaps


struct WindowTable(Movable):
    """For each window its taps, clipped to the tensor, and its contribution to an average's divisor.
    """

    var start: IntTable
    var count: IntTable
    var first_tap: IntTable
    var divisor: IntTable
    var step: Int

    def __init__(
        out self,
        axis: PoolingAxis,
        *,
        adaptive: Bool = False,
        include_pad: Bool = False,
    ):
        self.step = 1 if adaptive else Int(axis.dilation)
        var windows = Int(axis.output)
        var extent = Int(axis.input)
        var window = Int(axis.window)
        var reach = axis.reach()
        self.start = IntTable(length=windows, fill=0)
        self.count = IntTable(length=windows, fill=window)
        self.first_tap = IntTable(length=windows, fill=0)
        self.divisor = IntTable(length=windows, fill=window)
        for o in range(windows):
            var start = o * Int(axis.stride) - Int(axis.padding)
            if not adaptive and start >= 0 and start + reach <= extent:
                self.start[o] = start
                continue
            var taps = axis.taps[True](o) if adaptive else axis.taps[False](o)
            self.start[o] = taps.start
            self.count[o] = taps.count
            self.first_tap[o] = taps.first
            self.divisor[o] = taps.count if adaptive else axis.divisor[False](
                o, include_pad
            )

    @always_inline
    def taps(self, o: Int) -> ClippedTaps:
        return ClippedTaps(
            self.start[o], self.step, self.count[o], self.first_tap[o]
        )


struct AboveTable(Movable):
    """For each input position the windows whose hulls contain it."""

    var first: IntTable
    var end: IntTable
    var most: Int
    """The most windows above one position."""

    def __init__(out self, axis: PoolingAxis):
        var extent = Int(axis.input)
        var windows = Int(axis.output)
        self.first = IntTable(length=extent, fill=0)
        self.end = IntTable(length=extent, fill=0)
        self.most = 0

        @always_inline
        def start_of(o: Int) {imm} -> Int:
            return o * Int(axis.stride) - Int(axis.padding)

        @always_inline
        def end_of(o: Int) {imm} -> Int:
            return start_of(o) + axis.reach()

        # Both bounds only grow.
        var first = 0
        var end = 0
        var next_end = end_of(0)
        var next_start = start_of(0)
        for i in range(extent):
            while first < windows and next_end <= i:
                first += 1
                next_end = end_of(first)
            while end < windows and next_start <= i:
                end += 1
                next_start = start_of(end)
            self.first[i] = min(first, end)
            self.end[i] = end
            self.most = max(self.most, end - first)
