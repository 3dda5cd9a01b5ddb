"""Shapes and launches of the gradients that exchange sums between lanes (gpu_across.mojo)."""

from std.builtin.device_passable import DevicePassable, DeviceTypeEncoder
from std.math import ceildiv

from .gpu_problem import LANES, LIMIT_32, FastDivisor
from .problem import PoolingProblem

comptime BLOCK = 128
"""Threads."""


@fieldwise_init
struct AcrossShape(TrivialRegisterPassable):
    """What the compiler knows: windows, and a thread's columns, channels and slabs.
    """

    var kd: Int
    var sd: Int
    var pd: Int
    var kh: Int
    var sh: Int
    var kw: Int
    var sw: Int
    var pw: Int
    var dilation: Int
    var columns: Int
    var channels: Int
    var depth: Int
    """Slabs of dx."""
    var ahead: Int
    """Rows of windows that are loaded before they are added."""

    def taps(self) -> Int:
        return self.kd * self.kh * self.kw

    def reach_h(self) -> Int:
        return self.dilation * (self.kh - 1) + 1

    def reach_w(self) -> Int:
        return self.dilation * (self.kw - 1) + 1

    def run(self) -> Int:
        """Windows that start in a tile."""
        return self.columns // self.sw

    def right(self) -> Int:
        """Columns after a tile that its windows reach; before it they reach the padding's.
        """
        return max(
            (self.run() - 1) * self.sw
            + self.reach_w()
            - self.pw
            - self.columns,
            0,
        )

    def width(self) -> Int:
        """Columns of sums."""
        return self.pw + self.columns + self.right()

    def above(self) -> Int:
        """The most rows of windows above a pixel."""
        return (self.reach_h() + self.sh - 1) // self.sh

    def strips_beside(self) -> Bool:
        """Whether lanes beside each other take a plane's strips: short ones, of windows that move by more than one.
        """
        return self.sh > 1

    def kept(self) -> Int:
        """Rows of sums."""
        return max(self.reach_h(), self.sh)

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
        """Whether window `i` of a row has a tap on a column of sums."""
        var tap = column - i * self.sw
        return tap >= 0 and tap < self.reach_w() and tap % self.dilation == 0

    def reached(self, r: Int, column: Int) -> Bool:
        """Whether any window reaches a row and column of sums."""
        if r >= self.reach_h() or r % self.dilation != 0:
            return False
        for i in range(self.run()):
            if self.covers(i, column):
                return True
        return False

    def sets(self, step: Int, slab: Int, i: Int, r: Int, column: Int) -> Bool:
        """Whether window `i` of slab `step` is the first of all that reach a pixel: rows that a row of windows is the
        first to reach, windows from the left, slabs of windows from the front.
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


def flat_shape(
    k: Int,
    s: Int,
    p: Int,
    *,
    columns: Int,
    channels: Int = 1,
    ahead: Int = 1,
    dilation: Int = 1,
) -> AcrossShape:
    """Square windows of one slab: size, stride and padding."""
    return AcrossShape(
        1, 1, 0, k, s, k, s, p, dilation, columns, channels, 1, ahead
    )


def deep_shape(
    k: Int,
    s: Int,
    p: Int,
    *,
    columns: Int,
    depth: Int,
    ahead: Int,
    channels: Int = 1,
) -> AcrossShape:
    """Cubes over `depth` slabs of dx."""
    return AcrossShape(
        k, s, p, k, s, k, s, p, 1, columns, channels, depth, ahead
    )


@fieldwise_init
struct Teams(DevicePassable, TrivialRegisterPassable):
    """How dx is cut: teams of `lanes` tiles by `wide` vectors of channels, one strip of rows of windows each.
    """

    var count: Int32
    """Too many to be counted are LIMIT_32 - 1."""
    var lanes: Int32
    var step: Int32
    """Tiles between teams of one row: `lanes`, or two less, since a team's first and last tile lack windows."""
    var tiles: Int32
    """Tiles of a row."""
    var vectors: Int32
    """Vectors of channels of a pixel."""
    var slabs: Int32
    """Threads' slabs of a plane."""
    var groups: Int32
    """From strip to strip. All but the first begin with rows of windows that another takes too, and store no rows of dx
    before they have all windows; the first has as many more to store."""
    var all_groups: Int32
    """Rows of windows, those included that pixels are left for."""
    var beside: Int32
    """Strips of a plane that teams beside each other take: all or one."""
    var rows: Int32
    """Rows of windows that a thread takes."""
    var by_lanes: FastDivisor
    """Divides by a team's lanes."""
    var by_wide: FastDivisor
    var by_row: FastDivisor
    """Divides by the teams of a row."""
    var by_chunks: FastDivisor
    """Divides by the teams that a row's vectors of channels take."""
    var by_slabs: FastDivisor
    var by_strips: FastDivisor

    comptime device_type: AnyType = Self

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        return "Teams"

    def __init__(
        out self,
        p: PoolingProblem,
        S: AcrossShape,
        *,
        columns: Int,
        wide: Int,
        strips: Int,
        beside: Bool = False,
    ):
        """Teams of at most `columns` tiles by `wide` vectors; `strips` of a plane, by teams `beside` each other or else by
        blocks."""
        # Windows may start behind the last whole tile of an odd row.
        var tiles = max(
            ceildiv(Int(p.w.input), S.columns),
            ceildiv(Int(p.w.output), S.run()),
        )
        var lanes = min(columns, tiles)
        var step = lanes if lanes == tiles else lanes - 2
        var row = 1 if lanes == tiles else ceildiv(tiles - 2, step)
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
        self.by_strips = FastDivisor(taken)
        self.rows = Int32(groups + again)
        self.by_lanes = FastDivisor(lanes * wide)
        self.by_wide = FastDivisor(wide)
        self.by_row = FastDivisor(row)
        self.by_chunks = FastDivisor(chunks)
        self.by_slabs = FastDivisor(slabs)

    @always_inline
    def stored[S: AcrossShape](self, strip: Int32) -> Tuple[Int32, Int32]:
        """The first group whose rows of dx a strip stores, and one past the last.
        """
        comptime again = Int32(S.above() - 1)
        var first = strip * self.groups
        var end = min(first + self.groups + again, self.all_groups)
        return (first + again if strip > 0 else Int32(0), end)

    def blocks(self) -> Int:
        var per_warp = LANES // Int(self.by_lanes.divisor)
        return (
            ceildiv(Int(self.count), per_warp * (BLOCK // LANES))
            * Int(self.by_strips.divisor)
            // Int(self.beside)
        )


def across_blocks(
    S: AcrossShape, data: Int, entry: Int, *, vector: Bool
) -> Int:
    """Blocks that a multiprocessor shall hold. `data` and `entry` are the bytes of a window's gradient and entry.
    """
    var row = S.run() * S.channels * (data + entry) // 4
    if S.channels == 1 and not vector:
        # Elements that are loaded one by one lie in registers of their own.
        row = S.run() * (ceildiv(data, 4) + ceildiv(entry, 4))
    var registers = (
        S.depth * S.kept() * S.width() * S.channels
        + S.slabs() * S.ahead * row
        + S.run()
        + 48
    )
    if entry == 0:
        registers += S.depth * S.run() * S.channels + S.run() + S.slabs()
    return max(65536 // (BLOCK * ((registers + 7) // 8 * 8)), 1)
