"""How the channels-last gradient of max pooling by blocks cuts dx (gpu_blocks_max.mojo)."""

from std.builtin.device_passable import DevicePassable, DeviceTypeEncoder
from std.math import ceildiv

from .gpu_problem import FastDivisor
from .problem import PoolingProblem

comptime LANES_OF_TEAM = 16
comptime V = 2
"""Channels of a lane."""
comptime CHANNELS = LANES_OF_TEAM * V
comptime RUN = 4
"""Windows beside each other that a team adds between barriers."""
comptime FEWEST_THREADS = 128
comptime MOST_THREADS = 512
comptime MOST_BYTES = 64 * 1024
"""Of a block's shared memory: what every GPU has."""
comptime SLOW_THREADS = 1024
"""So many threads that wait for each other at barriers double the time, as measured on one H200."""
comptime MOST_CUTS = 16


@fieldwise_init
struct Blocks(DevicePassable, TrivialRegisterPassable):
    """How dx is cut, and how a block's teams share its windows."""

    var rows: Int32
    var columns: Int32
    var phases: Int32
    """Rows of windows from one to the next that shares no row of pixels with it."""
    var teams_h: Int32
    var teams_w: Int32
    var threads: Int32
    var total: Int32
    """Blocks."""
    var by_chunks: FastDivisor
    var by_pieces_w: FastDivisor
    var by_pieces_h: FastDivisor
    var by_teams_w: FastDivisor
    var by_columns: FastDivisor
    var per_row: UInt32
    """2^32 over the pixels of a row of dx, rounded up."""
    var per_window_w: UInt32
    """2^16 over a window's columns, rounded up."""

    comptime device_type: AnyType = Self

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        return "Blocks"

    def __init__(out self, p: PoolingProblem, *, pieces_h: Int, pieces_w: Int):
        var rows = ceildiv(Int(p.h.input), pieces_h)
        var columns = ceildiv(Int(p.w.input), pieces_w)
        self.rows = Int32(rows)
        self.columns = Int32(columns)
        self.phases = Int32(ceildiv(p.h.reach(), Int(p.h.stride)))
        var teams_h = ceildiv(p.h.most_reaching(rows), Int(self.phases))
        var teams_w = ceildiv(p.w.most_reaching(columns), 2 * RUN)
        self.teams_h = Int32(teams_h)
        self.teams_w = Int32(teams_w)
        var needed = ceildiv(teams_h * teams_w * LANES_OF_TEAM, 32) * 32
        self.threads = Int32(max(needed, FEWEST_THREADS))
        var chunks = ceildiv(Int(p.channels), CHANNELS)
        self.total = Int32(chunks * pieces_w * pieces_h * Int(p.batch))
        self.by_chunks = FastDivisor(chunks)
        self.by_pieces_w = FastDivisor(pieces_w)
        self.by_pieces_h = FastDivisor(pieces_h)
        self.by_teams_w = FastDivisor(teams_w)
        self.by_columns = FastDivisor(columns)
        self.per_row = UInt32(ceildiv(1 << 32, Int(p.w.input)))
        self.per_window_w = UInt32(ceildiv(1 << 16, Int(p.w.window)))

    @staticmethod
    def fitted(p: PoolingProblem) -> Optional[Blocks]:
        """The cut with the least windows that teams have room for, over the pixels, weighed by the threads that wait
        for each other; None if none fits."""
        var best = Optional[Blocks](None)
        var least = Float64.MAX
        for cuts_h in range(1, MOST_CUTS + 1):
            for cuts_w in range(1, MOST_CUTS + 1):
                var blocks = Blocks(p, pieces_h=cuts_h, pieces_w=cuts_w)
                if (
                    blocks.threads > MOST_THREADS
                    or blocks.shared_bytes() > MOST_BYTES
                ):
                    continue
                var cost = blocks.cost()
                if cost < least:
                    least = cost
                    best = blocks
        return best

    def cost(self) -> Float64:
        var room = self.teams_h * self.phases * self.teams_w * 2 * RUN
        var pixels = self.rows * self.columns
        return (
            Float64(room)
            / Float64(pixels)
            * (1 + Float64(self.threads) / SLOW_THREADS)
        )

    def shared_bytes(self) -> Int:
        return (
            Int(self.rows * self.columns) * CHANNELS + Int(self.threads)
        ) * 4
