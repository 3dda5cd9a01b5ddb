"""The work of a lane of the halo exchange, and a row of its windows as they lie in memory."""

from max.gpu import block_idx, thread_idx

from ...common.gpu import vector_alignment
from ..kernel import NO_ARGMAX
from .halo_exchange_plan import THREADS, HaloShape, Teams
from .params import LANES, PoolingParams
from .primitives import widen


struct LoadedRow[dtype: DType, argmax: DType, S: HaloShape](Copyable):
    """A thread's windows of one row as they lie in memory: of one channel, one vector of windows.
    """

    comptime vector = Self.S.channels == 1
    comptime wide = Self.S.run() if Self.vector else Self.S.channels
    comptime count = 1 if Self.vector else Self.S.run()
    var dy: Array[SIMD[Self.dtype, Self.wide], Self.count]
    var found: Array[SIMD[Self.argmax, Self.wide], Self.count]

    @always_inline
    def __init__(out self):
        self.dy = Array[SIMD[Self.dtype, Self.wide], Self.count](
            fill=SIMD[Self.dtype, Self.wide](0)
        )
        self.found = Array[SIMD[Self.argmax, Self.wide], Self.count](
            fill=SIMD[Self.argmax, Self.wide](0)
        )

    @always_inline
    def load(
        mut self,
        dy: MutPointer[Scalar[Self.dtype], _, address_space=_],
        found: MutPointer[Scalar[Self.argmax], _, address_space=_],
        row: Int32,
        places: Array[Int32, Self.count],
    ):
        comptime bytes = vector_alignment[Self.dtype, Self.wide]
        comptime index_bytes = vector_alignment[Self.argmax, Self.wide]
        comptime for i in range(Self.count):
            var at = Int(row + places[i])
            self.dy[i] = dy.unsafe_load[width=Self.wide, alignment=bytes](at)
            comptime if Self.argmax != NO_ARGMAX:
                self.found[i] = found.unsafe_load[
                    width=Self.wide, alignment=index_bytes
                ](at)

    @always_inline
    def gradient[i: Int](self) -> SIMD[DType.float32, Self.S.channels]:
        comptime if Self.vector:
            return widen[i, Self.S.channels](self.dy[0])
        else:
            return widen[0, Self.S.channels](self.dy[i])

    @always_inline
    def argmaxes[i: Int](self) -> SIMD[Self.argmax, Self.S.channels]:
        comptime if Self.vector:
            return self.found[0].slice[Self.S.channels, offset=i]()
        else:
            return rebind[SIMD[Self.argmax, Self.S.channels]](self.found[i])


@fieldwise_init
struct Lane(TrivialRegisterPassable):
    """The work of a lane, and whether it stores anything."""

    var strip: Int32
    var n: Int32
    var slab: Int32
    """Number of its few slabs in the sample."""
    var tile: Int32
    var c: Int32
    var moved: Int32
    """Columns by which tiles are moved: where there is less padding than the shape's, by one, and one begins before the
    first.
    """
    var live: Bool
    var has_left: Int32
    """1 where a lane of the team has the tile on that side, else 0."""
    var has_right: Int32

    @staticmethod
    @always_inline
    def of[S: HaloShape](p: PoolingParams, t: Teams) -> Self:
        """Returns this thread's lane."""
        var block = Int32(block_idx.x)
        var strip = Int32(0)
        # Long strips are a block's: what hangs on the strip alone then costs no lanes. Short ones are taken by lanes
        # beside each other, which share rows of windows and lines of dx.
        comptime if not S.strips_beside():
            block, strip = t.by_strips.divide(block)
        # Lanes that no team needs do as others do and store nothing.
        var half = (
            block * Int32(THREADS // LANES) + Int32(thread_idx.x) // LANES
        )
        var own, lane = t.by_lanes.divide(Int32(thread_idx.x) % LANES)
        var per_warp = t.by_lanes.quotient(LANES)
        var team = half * per_warp + own
        var live = own < per_warp and team < t.count
        team = min(team, t.count - 1)
        # One channel is one vector.
        var tile_in_team = lane
        var across = Int32(0)
        var rest = team
        var chunk = Int32(0)
        comptime if S.channels > 1:
            tile_in_team, across = t.by_wide.divide(lane)
            rest, chunk = t.by_chunks.divide(team)
        var place: Int32
        rest, place = t.by_row.divide(rest)
        comptime if S.strips_beside():
            rest, strip = t.by_strips.divide(rest)
        var n, slab = t.by_slabs.divide(rest)
        var tile = place * t.step + tile_in_team
        var channel = chunk * t.by_wide.value + across
        live = live and tile < t.tiles and channel < t.vectors
        var last = place == t.by_row.value - 1
        # A team's first or last tile lacks the windows of the tile beside it.
        comptime if S.right() > 0:
            live = live and (tile_in_team > 0 or place == 0)
        comptime if S.pw > 0:
            live = live and (tile_in_team < t.lanes - 1 or last)
        var has_left = Int32(1) if tile_in_team > 0 else Int32(0)
        var has_right = Int32(
            1
        ) if tile_in_team < t.lanes - 1 and tile + 1 < t.tiles else Int32(0)
        tile = min(tile, t.tiles - 1)
        var c = min(channel, t.vectors - 1) * Int32(S.channels)
        var moved = Int32(0)
        comptime if S.channels > 1:
            moved = Int32(S.pw) - p.w.padding
            tile -= moved
        return Self(strip, n, slab, tile, c, moved, live, has_left, has_right)
