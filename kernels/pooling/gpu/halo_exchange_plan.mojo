"""Windows that the halo exchange knows, and how it cuts dx into teams of lanes and strips of rows
(halo_exchange.mojo)."""

from std.math import align_up, ceildiv

from ...common.argument import KernelArgument
from ...common.arithmetic import Divisor
from .params import LANES, LIMIT_32
from ..problem import PoolingProblem

comptime THREADS = 128
"""Threads."""


@fieldwise_init
struct HaloShape(TrivialRegisterPassable):
    """The part of a problem that is known at compile time: windows, and a thread's columns, channels and slabs.
    """

    var kd: Int
    var sd: Int
    var pd: Int
    var kh: Int
    var sh: Int
    var kw: Int
    var sw: Int
    var pw: Int
    var columns: Int
    var channels: Int
    var depth: Int
    """Slabs of dx."""
    var ahead: Int
    """Rows of windows that are loaded before they are added."""

    def is_line(self) -> Bool:
        """Returns whether problems have one dimension: rows of windows share no pixel.
        """
        return self.kh == 1

    def taps(self) -> Int:
        return self.kd * self.kh * self.kw

    def run(self) -> Int:
        """Windows that start in a tile."""
        return self.columns // self.sw

    def right(self) -> Int:
        """Columns after a tile that its windows reach; before it they reach the padding's.
        """
        return max(
            (self.run() - 1) * self.sw + self.kw - self.pw - self.columns,
            0,
        )

    def overlap(self) -> Int:
        """Tiles that neighbouring teams of a row both take: one for each side that windows reach beyond.
        """
        return Int(self.right() > 0) + Int(self.pw > 0)

    def width(self) -> Int:
        """Columns of sums."""
        return self.pw + self.columns + self.right()

    def above(self) -> Int:
        """The most rows of windows above a pixel."""
        return (self.kh + self.sh - 1) // self.sh

    def strips_beside(self) -> Bool:
        """Returns whether neighbouring lanes take a plane's strips: short strips, of windows that move by more than
        one."""
        return self.sh > 1

    def kept(self) -> Int:
        """Rows of sums."""
        return max(self.kh, self.sh)

    def turns(self) -> Int:
        """Rows of windows after which the rows of sums stand for the same pixels again, counted from the first.
        """
        var turns = self.ahead
        while turns * self.sh % self.kept() != 0:
            turns += self.ahead
        return turns

    def first_slab(self) -> Int:
        """The first slab of windows above a thread's slabs, counted from the one that starts with them.
        """
        return -((self.kd - 1 - self.pd) // self.sd)

    def slabs(self) -> Int:
        """Slabs of windows above a thread's slabs."""
        return (self.depth - 1 + self.pd) // self.sd - self.first_slab() + 1

    def sum_at(self, slab: Int, r: Int, turn: Int, column: Int) -> Int:
        """The place of the sum of row `r` under a row of windows in its turn.
        """
        var row = (r + turn * self.sh) % self.kept()
        return (slab * self.kept() + row) * self.width() + column

    def tap(self, step: Int, slab: Int) -> Int:
        """The tap on D by which slab `step` of windows reaches a thread's slab.
        """
        return slab + self.pd - (self.first_slab() + step) * self.sd

    def reaches(self, step: Int, slab: Int) -> Bool:
        return 0 <= self.tap(step, slab) and self.tap(step, slab) < self.kd

    def covers(self, i: Int, column: Int) -> Bool:
        """Returns whether window `i` of a row has a tap on a column of sums."""
        var tap = column - i * self.sw
        return tap >= 0 and tap < self.kw

    def reached(self, r: Int, column: Int) -> Bool:
        """Returns whether any window reaches a row and column of sums."""
        if r >= self.kh:
            return False
        for i in range(self.run()):
            if self.covers(i, column):
                return True
        return False

    def sets(self, step: Int, slab: Int, i: Int, r: Int, column: Int) -> Bool:
        """Returns whether window `i` of slab `step` is the first of all that reach a pixel: rows that a row of windows
        is the first to reach, windows from the left, slabs of windows from the front.
        """
        if r < self.kept() - self.sh:
            return False
        for before in range(step):
            if self.reaches(before, slab):
                return False
        for before in range(i):
            if self.covers(before, column):
                return False
        return True


def halo_shapes(data: Int, argmax: Int, deep: Bool) -> List[HaloShape]:
    """Returns the windows that are compiled, for gradients of `data` and argmaxes of `argmax` bytes (0: averages): each
    is one that some network uses and for which the halo exchange is the fastest kernel. Tiles are 16 bytes of dx, but
    for int64 argmaxes, which take all registers."""
    var shapes = _flat_shapes(data, argmax)
    if deep:
        shapes.extend(_deep_shapes(data, argmax))
    return shapes^


def _flat_shapes(data: Int, argmax: Int) -> List[HaloShape]:
    """Windows in one slab of D."""
    var columns = 8 if data < 4 and argmax < 8 else 4
    var shapes = List[HaloShape]()

    @always_inline
    def add(
        k: Int, s: Int, columns: Int, channels: Int, ahead: Int
    ) {mut shapes}:
        shapes.append(
            HaloShape(1, 1, 0, k, s, k, s, 1, columns, channels, 1, ahead)
        )

    # Contiguous NCHW.
    add(3, 2, columns, 1, 6)
    add(3, 1, columns, 1, 6)
    # One dimension: the batch stands for the rows.
    shapes.append(HaloShape(1, 1, 0, 1, 1, 3, 1, 1, columns, 1, 1, 4))
    # Channels-last, four channels of two columns. By int64 index 3/1 windows cost less in rings.
    add(3, 2, 2, 4, 3)
    if argmax < 8:
        add(3, 1, 2, 4, 6)
    return shapes^


def _deep_shapes(data: Int, argmax: Int) -> List[HaloShape]:
    """Windows over several slabs."""
    var shapes = List[HaloShape]()

    @always_inline
    def add(
        k: Int, s: Int, columns: Int, channels: Int, depth: Int, ahead: Int
    ) {mut shapes}:
        shapes.append(
            HaloShape(k, s, 1, k, s, k, s, 1, columns, channels, depth, ahead)
        )

    # Contiguous NCHW.
    if argmax == 0:
        add(3, 2, 8 if data < 4 else 4, 1, 2, 6)
    else:
        add(3, 2, 4, 1, 2, 3)
        if argmax == 1:
            add(3, 1, 8, 1, 1, 1)
        else:
            add(3, 1, 4, 1, 2, 2 if data < 4 else 1)
    # Channels-last. Averages 3/1 cost less by sliding sums.
    add(3, 2, 2, 4, 2, 6 if data < 4 and argmax == 1 else 3)
    if argmax == 1:
        add(3, 1, 2, 4, 1, 2 if data >= 4 else 3)
    return shapes^


def halo_takes(S: HaloShape, p: PoolingProblem) -> Bool:
    """Returns whether a shape's windows are the problem's, and rows are whole tiles or channels whole vectors.
    """
    if S.channels == 1:
        if (
            p.channels != 1
            or Int(p.w.padding) != S.pw
            or Int(p.w.input) % S.columns != 0
            or Int(p.w.output) % S.run() != 0
            or Int(p.w.output) * S.sw > Int(p.w.input)
        ):
            return False
    elif (
        p.channels == 1
        or Int(p.channels) % S.channels != 0
        or Int(p.w.padding) > S.pw
    ):
        return False
    if not p.w.is_window(S.kw, S.sw):
        return False
    if S.is_line():
        return p.is_line()
    if S.kd == 1:
        if not p.d.is_window(1, 1) or p.d.padding != 0:
            return False
    elif not p.d.is_window(S.kd, S.sd) or Int(p.d.padding) != S.pd:
        return False
    return p.h.is_window(S.kh, S.sh)


@fieldwise_init
struct Teams(KernelArgument):
    """The division of dx into teams of `lanes` tiles by `wide` vectors of channels, one strip of rows of windows
    each."""

    var count: Int32
    """Too many to be counted are LIMIT_32 - 1."""
    var lanes: Int32
    var step: Int32
    """Tiles between teams of one row: `lanes`, less the tiles at a team's ends that lack windows."""
    var tiles: Int32
    """Tiles of a row."""
    var vectors: Int32
    """Vectors of channels of a pixel."""
    var slabs: Int32
    """Threads' slabs of a plane."""
    var groups: Int32
    """Rows of windows from one strip to the next. All strips but the first begin with rows of windows that another
    strip takes, too, and store no rows of dx before they have all windows; the first has as many more rows to store."""
    var all_groups: Int32
    """Rows of windows, including rows past the last one that have pixels left."""
    var beside: Int32
    """Strips of a plane that teams beside each other take: all or one."""
    var rows: Int32
    """Rows of windows that a thread takes."""
    var by_lanes: Divisor
    """Divides by a team's lanes."""
    var by_wide: Divisor
    var by_row: Divisor
    """Divides by the teams of a row."""
    var by_chunks: Divisor
    """Divides by the teams that a row's vectors of channels take."""
    var by_slabs: Divisor
    var by_strips: Divisor

    def __init__(
        out self,
        p: PoolingProblem,
        S: HaloShape,
        *,
        columns: Int,
        wide: Int,
        strips: Int,
        beside: Bool = False,
    ):
        """Teams of at most `columns` tiles by `wide` vectors; `strips` of a plane, by teams `beside` each other or else
        by blocks."""
        # Windows may start behind the last whole tile of an odd row.
        var tiles = max(
            ceildiv(Int(p.w.input), S.columns),
            ceildiv(Int(p.w.output), S.run()),
        )
        # Where there is less padding than the shape's, columns before the first tile are one more.
        if Int(p.w.padding) < S.pw:
            tiles += 1
        var lanes = min(columns, tiles)
        var step = lanes if lanes == tiles else lanes - S.overlap()
        var row = 1 if lanes == tiles else ceildiv(tiles - S.overlap(), step)
        var vectors = Int(p.channels) // S.channels
        var chunks = ceildiv(vectors, wide)
        var slabs = ceildiv(Int(p.d.input), S.depth)
        var all_groups = ceildiv(Int(p.h.input) + Int(p.h.padding), S.sh)
        var again = S.above() - 1
        var most = max(all_groups - again, 1)
        var groups = ceildiv(most, strips)
        var taken = ceildiv(most, groups)
        self.beside = Int32(taken if beside else 1)
        var teams = Int(p.batch) * slabs * row * chunks * Int(self.beside)
        self.count = Int32(min(teams, LIMIT_32 - 1))
        self.lanes = Int32(lanes)
        self.step = Int32(step)
        self.tiles = Int32(tiles)
        self.vectors = Int32(vectors)
        self.slabs = Int32(slabs)
        self.groups = Int32(groups)
        self.all_groups = Int32(all_groups)
        self.by_strips = Divisor(taken)
        self.rows = Int32(groups + again)
        self.by_lanes = Divisor(lanes * wide)
        self.by_wide = Divisor(wide)
        self.by_row = Divisor(row)
        self.by_chunks = Divisor(chunks)
        self.by_slabs = Divisor(slabs)

    @always_inline
    def stored[S: HaloShape](self, strip: Int32) -> Tuple[Int32, Int32]:
        """Returns the first group whose rows of dx a strip stores, and one past the last.
        """
        comptime again = Int32(S.above() - 1)
        var first = strip * self.groups
        var end = min(first + self.groups + again, self.all_groups)
        return (first + again if strip > 0 else Int32(0), end)

    def blocks(self) -> Int:
        var per_warp = LANES // Int(self.by_lanes.value)
        return (
            ceildiv(Int(self.count), per_warp * (THREADS // LANES))
            * Int(self.by_strips.value)
            // Int(self.beside)
        )


def halo_blocks(S: HaloShape, data: Int, argmax: Int) -> Int:
    """Blocks that a multiprocessor shall hold. `data` and `argmax` are the bytes of a window's gradient and argmax.
    """
    var row = S.run() * S.channels * (data + argmax) // 4
    var registers = (
        S.depth * S.kept() * S.width() * S.channels
        + S.slabs() * S.ahead * row
        + S.run()
        + 48
    )
    if argmax == 0:
        registers += S.depth * S.run() * S.channels + S.run() + S.slabs()
    return max(65536 // (THREADS * ((registers + 7) // 8 * 8)), 1)


def team_vectors(S: HaloShape, data: Int, argmax: Int, vectors: Int) -> Int:
    """Returns how many of a pixel's vectors of channels a team takes: four, which fill whole sectors of bfloat16, but
    where a sixth of the lanes or more would be idle and five, or three, leave none. Half-precision averages, which
    compute less, gain from longer runs. `data` and `argmax` are the bytes of a window's gradient and argmax (none:
    averages)."""
    if vectors <= 4:
        return vectors
    if argmax == 0 and data < 4 and vectors >= 16 and vectors % 8 == 0:
        return 8
    if 6 * vectors <= 5 * align_up(vectors, 4):
        if vectors % 5 == 0:
            return 5
        if vectors % 3 == 0 and S.sh == 1:
            return 3
    return 4


def strip_rows(
    S: HaloShape, data: Int, argmax: Int, groups: Int, wide: Int
) -> Int:
    """Returns the rows of windows that a thread takes, as measured on one H200: longer strips take fewer of them twice,
    but threads then walk through more of the tensors at a time. A plane has `groups` rows of windows, a team takes
    `wide` vectors of channels; `data` and `argmax` are the bytes of a window's gradient and argmax (none: averages).
    """
    if S.channels > 1:
        if S.sh > 1:
            if argmax == 0:
                return 5 if data >= 4 else (11 if wide > 4 else 7)
            return 6 if data >= 4 else 11
        if S.kd > 1:
            return 40
        return 16 if data >= 4 else 30
    if S.sh > 1:
        if argmax >= 8:
            return 6 if data >= 4 else (8 if S.kd > 1 else 11)
        if S.kd == 1:
            return 6
        if data >= 4 or argmax > 0:
            return 5
        return 4 if groups < 40 else 6
    if S.kd > 1:
        return 27
    if S.is_line():
        return 8
    if data >= 4 and argmax == 0:
        return 8
    # Rows in whole waves of blocks matter more than rows that are taken twice.
    return 18 if data < 4 and argmax == 1 and groups >= 40 else 11


def nearest_strips(groups: Int, again: Int, rows: Int) -> Int:
    """Returns the number of strips whose rows come nearest to `rows`, of which each strip but the first takes `again`
    over from another."""
    var own = max(groups - again, 1)
    var strips = max(own // max(rows - again, 1), 1)
    var longer = ceildiv(own, strips) + again
    var shorter = ceildiv(own, strips + 1) + again
    return strips + 1 if rows * rows < longer * shorter else strips


comptime MIN_WARPS = 8
"""Warps, at least, for each multiprocessor, while strips can be shorter."""


def plan_teams(
    S: HaloShape, p: PoolingProblem, *, data: Int, argmax: Int, processors: Int
) -> Teams:
    """Divides a problem for a GPU of the given number of multiprocessors."""
    var columns = LANES
    var wide = 1
    if S.channels > 1:
        wide = team_vectors(S, data, argmax, Int(p.channels) // S.channels)
        columns = LANES // wide
    var groups = ceildiv(Int(p.h.input) + Int(p.h.padding), S.sh)
    var again = S.above() - 1
    var strips = nearest_strips(
        groups, again, strip_rows(S, data, argmax, groups, wide)
    )
    # Of one strip a plane first, to find out how many warps there are.
    var teams = Teams(p, S, columns=columns, wide=wide, strips=1)
    var warps = teams.blocks() * (THREADS // LANES)
    while (
        strips * warps < MIN_WARPS * processors
        and groups // strips > 2 * again + 1
    ):
        strips *= 2
    return Teams(
        p,
        S,
        columns=columns,
        wide=wide,
        strips=strips,
        beside=S.strips_beside(),
    )
