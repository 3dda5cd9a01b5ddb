"""The division of dx into the strips of threads in the channels-last gradient of max pooling (ring_scatter.mojo)."""

from std.math import ceildiv

from ...common.argument import KernelArgument
from ...common.arithmetic import Divisor
from ..problem import PoolingProblem
from .params import LIMIT_32

comptime THREADS = 128
comptime LOADS_IN_FLIGHT = 8
"""Windows whose loads are in flight together, and pixels that are read before the first is stored."""
comptime MAX_SUMS = 104
"""Sums of a thread: 52 KiB of a block. mojo_ops/pooling.py knows how tall a window they hold."""
comptime MAX_TILES = 16
"""Ways to cut a row into strips that are compared, from the fewest strips on."""
comptime MAX_CUTS = 10
"""Ways to cut H into strips that are compared."""
comptime SHARED = 227 * 1024
"""Bytes of shared memory of a multiprocessor."""
comptime WAVE_COST = 128
"""The number of threads whose time a multiprocessor loses while it takes blocks once, as measured on one H200."""
comptime START_COST = 8.0
"""Windows that a thread could add while it finds out where it is, as measured on one H200."""
comptime PIXEL_COST = 0.5
"""The cost of storing a pixel relative to adding a window, as measured on one H200."""
comptime TABLE = 256
"""Elements of the table for one place of a slab of windows: the values of a byte."""


@fieldwise_init
struct StripPlan(KernelArgument):
    """The division of dx into units (a strip of H of a few slabs) of items (a strip of columns by V channels).
    """

    var vector: Int32
    """Channels of a thread."""
    var depth: Int32
    """Slabs of a thread."""
    var total: Int32
    """Items of all units."""
    var columns: Int32
    var ring: Int32
    """Rows of sums: the rows that a window reaches over, or the stride."""
    var groups: Int32
    """Rows of windows in a strip."""
    var all_groups: Int32
    var above: Int32
    """The most rows of windows above one pixel."""
    var tables: Int32
    """Places of a slab of windows that the table serves."""
    var by_items: Divisor
    var by_strips: Divisor
    var by_slabs: Divisor
    """Divides by the units that one sample's slabs make."""
    var by_window_w: Divisor
    var by_window_h: Divisor

    def __init__(
        out self,
        p: PoolingProblem,
        *,
        vector: Int,
        depth: Int,
        columns: Int,
        groups: Int,
    ):
        """Divides dx into strips of at most `columns` columns and `groups` rows of windows.
        """
        var reach_h = p.h.reach()
        var reach_d = p.d.reach()
        var stride = Int(p.h.stride)
        var tiles = ceildiv(Int(p.w.input), columns)
        var items = tiles * (Int(p.channels) // vector)
        var all_groups = ceildiv(Int(p.h.input) + Int(p.h.padding), stride)
        var strips = ceildiv(all_groups, groups)
        var slabs = ceildiv(Int(p.d.input), depth)
        self.vector = Int32(vector)
        self.depth = Int32(depth)
        self.total = Int32(
            min(items * slabs * Int(p.batch) * strips, LIMIT_32 - 1)
        )
        self.columns = Int32(ceildiv(Int(p.w.input), tiles))
        self.ring = Int32(Self.ring_of(p))
        self.groups = Int32(ceildiv(all_groups, strips))
        self.all_groups = Int32(all_groups)
        self.above = Int32(ceildiv(reach_h, stride))
        self.tables = Int32(reach_d + depth - 1)
        self.by_items = Divisor(items)
        self.by_strips = Divisor(strips)
        self.by_slabs = Divisor(slabs)
        self.by_window_w = Divisor(Int(p.w.window))
        self.by_window_h = Divisor(Int(p.h.window))

    @staticmethod
    def ring_of(p: PoolingProblem) -> Int:
        var reach = p.h.reach()
        return max(reach, Int(p.h.stride))

    @always_inline
    def sums(self) -> Int:
        """Returns the number of sums of one thread."""
        return Int(self.ring * self.columns * self.vector * self.depth)

    def shared_bytes(self, *, table: Bool) -> Int:
        var bytes = self.sums() * THREADS * 4
        if table:
            bytes += Int(self.tables) * TABLE * 4
        return bytes


def plan_strips(
    p: PoolingProblem,
    *,
    vector: Int,
    depth: Int,
    table: Bool,
    processors: Int,
) -> Optional[StripPlan]:
    """The strips that a large GPU is done with first; None if none fit.

    The model: a thread's work is its windows and its pixels, both in whole batches; a multiprocessor's threads share
    its time, and a few of them do not fill it. Over 12 problems on one H200 it picked strips that took 1.027 times as
    long as the best of some sixty, in the geometric mean, and 1.20 at worst.
    """
    var reach_w = p.w.reach()
    var groups = ceildiv(Int(p.h.input) + Int(p.h.padding), Int(p.h.stride))
    var best = Optional[StripPlan](None)
    var least = Float64(0)
    var ring = StripPlan.ring_of(p)
    var widest = MAX_SUMS // (ring * vector * depth)
    if widest == 0:
        return None
    var fewest = ceildiv(Int(p.w.input), widest)
    for tiles in range(fewest, fewest + MAX_TILES):
        var columns = ceildiv(Int(p.w.input), tiles)
        # Beyond the fewest that fit, strips narrower than a window take most windows twice.
        if best and columns < min(reach_w, LOADS_IN_FLIGHT - 2):
            break
        for cut in range(MAX_CUTS):
            # 1, 2, 3, 4, 6, 8, 12, ...
            var strips = (2 + (cut + 1) % 2) << ((cut - 1) // 2)
            if cut == 0:
                strips = 1
            var rows = ceildiv(groups, strips)
            var t = StripPlan(
                p, vector=vector, depth=depth, columns=columns, groups=rows
            )
            if strips > 1 and rows < Int(t.above):
                break
            if Int(t.total) >= LIMIT_32 - THREADS:
                continue
            var cost = strip_cost(p, t, t.shared_bytes(table=table), processors)
            if not best or cost < least:
                least = cost
                best = t
    return best


def strip_cost(
    p: PoolingProblem, t: StripPlan, shared_bytes: Int, processors: Int
) -> Float64:
    """Returns how long a multiprocessor takes, in windows that one thread adds.
    """
    var reach_w = p.w.reach()
    var reach_d = p.d.reach()
    var columns = Int(t.columns)
    var depth = Int(t.depth)
    var windows = min(
        ceildiv(columns + reach_w - 1, Int(p.w.stride)), Int(p.w.output)
    )
    var rows = min(Int(t.groups) + Int(t.above) - 1, Int(t.all_groups))
    var deep = Float64(depth + reach_d - 1) / Float64(Int(p.d.stride))
    var work = (
        START_COST
        + Float64(rows * _whole(windows)) * deep
        + PIXEL_COST
        * Float64(Int(t.groups) * _whole(columns) * Int(p.h.stride) * depth)
    ) * Float64(Int(t.vector))
    var blocks = Float64(Int(t.total)) / Float64(THREADS * processors)
    var slots = max(min(SHARED // (shared_bytes + 1024), 16), 1)
    var full = Int(blocks) // slots
    var rest = blocks - Float64(full * slots)
    var time = Float64(full) * Float64(slots * THREADS + WAVE_COST)
    # A multiprocessor takes whole blocks, which evens out over some rounds.
    if full < 2:
        rest = Float64(
            ceildiv(Int(t.total) // THREADS + 1, processors) - full * slots
        )
    if rest > 0:
        time += rest * Float64(THREADS) + Float64(WAVE_COST)
    return work * time


def _whole(count: Int) -> Int:
    return ceildiv(count, LOADS_IN_FLIGHT) * LOADS_IN_FLIGHT
