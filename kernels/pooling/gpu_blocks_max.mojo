"""Gradient of max pooling on a GPU over channels-last tensors, for windows that move by one: rectangles of dx in shared
memory that many threads add to.

A block owns CHANNELS channels of a rectangle of rows and columns, as float32 sums. Teams of lanes, two channels a lane,
take runs of neighbouring windows and add each dy where its entry points. Runs that may share a pixel are added one after
the other, with a barrier between: rows of windows in as many phases as windows without a common row are apart, and of a
row every second run.

    windows of a row      | run 0 | run 1 | run 2 | run 3 |      first the teams of runs 0 and 2, then those of 1 and 3

So a window costs the same however many taps it has, nothing is atomic, and additions always come in the same order.
The loads of a team's next run are under way while it adds one. An entry that names no pixel of its window, or none of
the rectangle, is added to a place that nobody reads.
"""

from max.gpu import barrier, block_idx, thread_idx
from max.gpu.host import DeviceContext, FuncAttribute
from max.gpu.memory import AddressSpace, external_memory
from std.sys import size_of
from std.sys._assembly import inlined_assembly
from std.sys.info import is_nvidia_gpu

from .direct import Data
from .gpu_blocks_plan import CHANNELS, LANES_OF_TEAM, RUN, V, Blocks
from .gpu_problem import GpuProblem, fits_32_bits
from .problem import PoolingAxis, PoolingProblem

comptime FEWEST_TAPS = 20
"""Of windows, from which on blocks are faster than comparing offsets."""
comptime FEWEST_PIXELS = 400
"""Of planes: smaller ones leave blocks little to do between their barriers."""


struct Run[dtype: DType, index: DType](Copyable):
    """RUN windows of a row as they lie in memory: what is done with them after waits for the loads. Bytes stay the words that
    they are loaded in."""

    comptime packed = Self.index == DType.uint8
    comptime kept = DType.uint16 if Self.packed else Self.index
    comptime words = 1 if Self.packed else V
    var dy: Array[SIMD[Self.dtype, V], RUN]
    var found: Array[SIMD[Self.kept, Self.words], RUN]

    @always_inline
    def __init__(out self):
        self.dy = Array[SIMD[Self.dtype, V], RUN](fill=SIMD[Self.dtype, V](0))
        self.found = Array[SIMD[Self.kept, Self.words], RUN](
            fill=SIMD[Self.kept, Self.words](0)
        )

    @always_inline
    def load(
        mut self,
        dy: Data[Self.dtype],
        found: Data[Self.index],
        start: Int,
        channels: Int32,
        count: Int32,
    ):
        """Loads `count` windows, `channels` apart; others stay what they were.
        """
        comptime data_bytes = V * size_of[Self.dtype]()
        comptime index_bytes = V * size_of[Self.index]()
        var dy_start = dy.unsafe_offset(start)
        var found_start = found.unsafe_offset(start)
        comptime for k in range(RUN):
            if Int32(k) < count:
                var at = Int(UInt32(k) * UInt32(channels))
                self.dy[k] = dy_start.unsafe_load[
                    width=V, alignment=data_bytes
                ](at)
                comptime if Self.packed:
                    self.found[k] = rebind[SIMD[Self.kept, Self.words]](
                        found_start.unsafe_offset(at).unsafe_bitcast[UInt16]()[]
                    )
                else:
                    self.found[k] = rebind[SIMD[Self.kept, Self.words]](
                        found_start.unsafe_load[width=V, alignment=index_bytes](
                            at
                        )
                    )

    @always_inline
    def entry[k: Int, offsets: Bool](self, v: Int32) -> UInt32:
        """Of one of the two channels; what names no tap or pixel is the largest number.
        """
        comptime if Self.packed:
            return (
                self.found[k][0].cast[DType.uint32]() >> (UInt32(v) * 8)
            ) & 0xFF
        else:
            var low = SIMD[DType.uint32, V](0)
            comptime for e in range(V):
                var whole = rebind[SIMD[Self.index, V]](self.found[k])[e]
                low[e] = whole.cast[DType.uint32]()
                comptime if size_of[Self.index]() == 8:
                    if (whole >> 32) != 0:
                        low[e] = 0xFFFFFFFF
            return low[1] if v != 0 else low[0]


@always_inline
def place_or(
    other: UInt32,
    place: UInt32,
    a: UInt32,
    most_a: UInt32,
    b: UInt32,
    most_b: UInt32,
    c: UInt32,
    most_c: UInt32,
) -> UInt32:
    """The place where each number is less than its bound, else the other one.
    """
    comptime if is_nvidia_gpu():
        return inlined_assembly[
            (
                "{.reg .pred fits; setp.lt.u32 fits, $3, $4;"
                " setp.lt.and.u32 fits, $5, $6, fits;"
                " setp.lt.and.u32 fits, $7, $8, fits;"
                " selp.b32 $0, $1, $2, fits;}"
            ),
            UInt32,
            constraints="=r,r,r,r,r,r,r,r,r",
            has_side_effect=False,
        ](place, other, a, most_a, b, most_b, c, most_c)
    else:
        return place if (a < most_a) & (b < most_b) & (c < most_c) else other


@always_inline
def high_product(a: UInt32, b: UInt32) -> UInt32:
    return ((UInt64(a) * UInt64(b)) >> 32).cast[DType.uint32]()


def max_pool_dgrad_blocks[
    dtype: DType, index: DType, *, offsets: Bool
](
    dx: Data[dtype],
    dy: Data[dtype],
    indices: Data[index],
    p: GpuProblem,
    t: Blocks,
):
    var sums = external_memory[
        Float32, address_space=AddressSpace.SHARED, alignment=16
    ]()
    var thread = Int32(thread_idx.x)
    var rest, chunk = t.by_chunks.divmod(Int32(block_idx.x))
    var rest_w, piece_w = t.by_pieces_w.divmod(rest)
    var n, piece_h = t.by_pieces_h.divmod(rest_w)
    var lane = thread % LANES_OF_TEAM
    var team_h, team_w = t.by_teams_w.divmod(thread // LANES_OF_TEAM)
    # Teams of a warp begin with different channels of their two: with different banks of shared memory.
    var swap = thread // LANES_OF_TEAM & 1
    var c = chunk * CHANNELS + lane * V

    var y0 = piece_h * t.rows
    var x0 = piece_w * t.columns
    var height = min(t.rows, p.h.input - y0)
    var width = min(t.columns, p.w.input - x0)
    var oh0 = p.h.outputs_over[False](y0)[0]
    var oh1 = p.h.outputs_over[False](y0 + height - 1)[1]
    var ow0 = p.w.outputs_over[False](x0)[0]
    var ow1 = p.w.outputs_over[False](x0 + width - 1)[1]
    if team_h >= t.teams_h:
        oh1 = oh0
    var sample = Int(n) * Int(p.output_plane()) * Int(p.channels) + Int(c)
    var dy_n = dy.unsafe_offset(sample)
    var indices_n = indices.unsafe_offset(sample)
    var size = t.rows * t.columns * CHANNELS

    @always_inline
    def count_of(phase: Int32, second: Int32) {imm} -> Tuple[Int, Int32]:
        """Where a team's run begins, and how many windows it has."""
        var oh = oh0 + phase + team_h * t.phases
        var ow = ow0 + (team_w * 2 + second) * RUN
        var count = Int32(0)
        if phase < t.phases and oh < oh1:
            count = min(ow1 - ow, RUN)
        return (Int((oh * p.w.output + ow) * p.channels), count)

    var next = Run[dtype, index]()
    var left = count_of(0, 0)
    next.load(dy_n, indices_n, left[0], p.channels, left[1])
    var at = thread * 4
    while at < size:
        sums.unsafe_store[alignment=16](Int(at), SIMD[DType.float32, 4](0))
        at += t.threads * 4
    barrier()

    for phase in range(t.phases):
        for second in range(Int32(2)):
            var now = next.copy()
            var count = left[1]
            left = count_of(phase + second, 1 - second)
            next.load(dy_n, indices_n, left[0], p.channels, left[1])
            if count > 0:
                _add_run[offsets=offsets](
                    now,
                    sums,
                    p,
                    t,
                    oh=oh0 + phase + team_h * t.phases,
                    ow=ow0 + (team_w * 2 + second) * RUN,
                    count=count,
                    y0=y0,
                    x0=x0,
                    height=height,
                    width=width,
                    cell=UInt32(lane * V),
                    swap=swap,
                    nowhere=UInt32(size + thread),
                )
            barrier()

    var base = (Int(n) * Int(p.h.input) + Int(y0)) * Int(p.w.input) + Int(x0)
    var out = dx.unsafe_offset(base * Int(p.channels) + Int(chunk * CHANNELS))
    var item = thread
    while item < t.rows * t.columns * (CHANNELS // 4):
        var pixel = item // (CHANNELS // 4)
        var channel = item % (CHANNELS // 4) * 4
        var row, column = t.by_columns.divmod(pixel)
        var values = sums.unsafe_load[width=4, alignment=16](Int(item * 4))
        if row < height and column < width:
            out.unsafe_store[alignment=4 * size_of[dtype]()](
                Int((row * p.w.input + column) * p.channels + channel),
                values.cast[dtype](),
            )
        item += t.threads


@always_inline
def _add_run[
    dtype: DType,
    index: DType,
    //,
    *,
    offsets: Bool,
](
    now: Run[dtype, index],
    sums: MutPointer[Float32, _, address_space=AddressSpace.SHARED],
    p: GpuProblem,
    t: Blocks,
    *,
    oh: Int32,
    ow: Int32,
    count: Int32,
    y0: Int32,
    x0: Int32,
    height: Int32,
    width: Int32,
    cell: UInt32,
    swap: Int32,
    nowhere: UInt32,
):
    var top = p.h.origin(oh) - y0
    # Rows of the rectangle that lie under the windows, counted from the windows' first.
    var before = max(-top, 0)
    var rows = UInt32(max(min(p.h.reach, height - top) - before, 0))
    var start = top * t.columns * CHANNELS
    comptime for k in range(RUN):
        var left_of = p.w.origin(ow + Int32(k)) - x0
        var origin = UInt32(0)
        comptime if not offsets:
            origin = UInt32((top + y0) * p.w.input + left_of + x0)
        var wide = UInt32(0)
        if Int32(k) < count:
            wide = UInt32(p.w.reach)
        var places = Array[UInt32, V](fill=0)
        comptime for j in range(V):
            var v = Int32(j) ^ swap
            var entry = now.entry[k, offsets](v)
            var row: UInt32
            var column: UInt32
            comptime if offsets:
                row = (entry * t.per_window_w) >> 16
                column = entry - row * UInt32(p.w.window)
            else:
                var from_here = entry - origin
                row = high_product(from_here, t.per_row)
                column = from_here - row * UInt32(p.w.input)
            var beside = column + UInt32(left_of)
            var place = (
                UInt32(start)
                + (row * UInt32(t.columns) + beside) * CHANNELS
                + cell
            )
            # Of a window that is wider than the rectangle both bounds of columns are needed.
            places[j] = place_or(
                nowhere - UInt32(v),
                place,
                row - UInt32(before),
                rows,
                column,
                wide,
                beside,
                UInt32(width),
            ) + UInt32(v)
        # The channels' sums are read side by side.
        var total = SIMD[DType.float32, V](0)
        comptime for j in range(V):
            total[j] = sums[unsafe_offset=Int(places[j])]
        var g = now.dy[k].cast[DType.float32]()
        comptime for j in range(V):
            total[j] += g[1 - j] if swap != 0 else g[j]
        comptime for j in range(V):
            sums[unsafe_offset=Int(places[j])] = total[j]


@always_inline
def launch_max_pool_dgrad_blocks[
    dtype: DType, index: DType, //, *, offsets: Bool
](
    ctx: DeviceContext,
    dx: Data[dtype],
    dy: Data[dtype],
    indices: Data[index],
    p: PoolingProblem,
) raises -> Bool:
    """False where other kernels are as fast: windows that do not move by one, few taps, small planes; and for
    channels that do not fill teams, windows wider than two runs, and numbers beyond 32 bits.
    """

    @always_inline
    def moves(axis: PoolingAxis) -> Bool:
        return (
            axis.stride == 1
            and axis.dilation == 1
            and axis.window >= 3
            # Every second run of a row shares no pixel.
            and axis.window <= RUN + 1
            and axis.window <= axis.input
        )

    if not (
        p.d.input == 1
        and p.d.window == 1
        and moves(p.h)
        and moves(p.w)
        and p.window_size() >= (FEWEST_TAPS if offsets else 1)
        and p.input_plane() >= FEWEST_PIXELS
        and Int(p.channels) % CHANNELS == 0
        and fits_32_bits(p)
        # Divisions by the width are exact for pixels under a window.
        and Int(p.h.window) * Int(p.w.input) * Int(p.w.input) < 1 << 32
        and Int(dx) % 16 == 0
        and Int(dy) % 16 == 0
        and Int(indices) % 16 == 0
    ):
        return False
    var plan = Blocks.fitted(p)
    if not plan:
        return False
    var blocks = plan.value()
    var bytes = blocks.shared_bytes()
    comptime kernel = max_pool_dgrad_blocks[dtype, index, offsets=offsets]
    ctx.enqueue_function[kernel](
        dx,
        dy,
        indices,
        GpuProblem(p, extent_d=p.d.input, vector=V),
        blocks,
        grid_dim=Int(blocks.total),
        block_dim=Int(blocks.threads),
        shared_mem_bytes=bytes,
        func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(
            UInt32(bytes)
        ),
    )
    return True
