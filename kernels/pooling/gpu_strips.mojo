"""The gradients of gpu_across.mojo over contiguous NCHW tensors, with a team's strip of windows and of dx in shared memory.

A warp asks for the rows of windows that reach into its strips, runs of 16 bytes of the tensors wherever rows begin, and
waits for nothing else; it puts rows of dx beside each other and stores them as one run. So rows that are no whole sectors
move each sector once, and rows of any width cost no more instructions than others. No block waits for another warp.
"""

from max.gpu import MAX_THREADS_PER_BLOCK_METADATA, block_idx, thread_idx
from max.gpu.memory import (
    AddressSpace,
    async_copy_wait_all,
    external_memory,
)
from max.gpu.sync import syncwarp
from std.builtin.device_passable import DevicePassable, DeviceTypeEncoder
from std.sys import size_of
from std.sys.info import is_nvidia_gpu
from std.utils.static_tuple import StaticTuple

from .direct import Data
from .gpu_across import LoadedRow, add_totals, add_window, exchange
from .gpu_across_plan import BLOCK, AcrossShape, Teams
from .gpu_problem import LANES, GpuProblem
from .gpu_runs import LINE, lines, load_run, shift, store_run
from .problem import PoolingProblem


@fieldwise_init
struct Stage(DevicePassable, TrivialRegisterPassable):
    """A team's part of shared memory: its rows of dy, of entries and of dx."""

    var entries_at: Int32
    """In bytes from the team's first, as the next two."""
    var dx_at: Int32
    var bytes: Int32
    var windows: Int64
    """Of the whole tensor."""

    comptime device_type: AnyType = Self

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        return "Stage"

    def __init__(
        out self,
        p: PoolingProblem,
        t: Teams,
        S: AcrossShape,
        *,
        data: Int,
        entry: Int,
    ):
        """`data` and `entry` are the bytes of a window's gradient and entry."""

        var windows = Int(t.rows) * Int(p.w.output)
        var dy = lines(windows, data)
        var entries = lines(windows, entry) if entry > 0 else 0
        var dx = lines(Int(t.rows) * S.sh * Int(p.w.input), data)
        self.entries_at = Int32(dy * LINE)
        self.dx_at = Int32((dy + entries) * LINE)
        self.bytes = self.dx_at + Int32(dx * LINE)
        self.windows = Int64(p.output_size())

    def shared_bytes(self, t: Teams) -> Int:
        var per_warp = LANES // Int(t.by_lanes.divisor)
        return BLOCK // LANES * per_warp * Int(self.bytes)


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(BLOCK)),
)
def pool_dgrad_strips[
    dtype: DType,
    index: DType,
    S: AcrossShape,
    vector: Bool,
    averaging: Bool,
    offsets: Bool,
](
    dx: Data[dtype],
    dy: Data[dtype],
    indices: Data[index],
    p: GpuProblem,
    t: Teams,
    s: Stage,
):
    """One thread's tile in one strip. `vector`: rows of dx are whole tiles, and rows of windows whole vectors. Averages
    have no indices."""
    comptime TW = S.columns
    comptime ROW = S.run()
    comptime Sums = SIMD[DType.float32, S.channels]
    comptime Row = LoadedRow[dtype, index, S, vector, averaging]

    # Blocks beside each other take the strips of the same planes.
    var block, strip = t.by_strips.divmod(Int32(block_idx.x))
    var warp_in_block = Int32(thread_idx.x) // LANES
    var own, lane = t.by_lanes.divmod(Int32(thread_idx.x) % LANES)
    var per_warp = t.by_lanes.div(LANES)
    var first_team = (block * Int32(BLOCK // LANES) + warp_in_block) * per_warp
    var teams = min(t.count - first_team, per_warp)
    if teams <= 0:
        return
    # Lanes that no team needs do as others do and store nothing.
    var live = own < teams
    own = min(own, teams - 1)
    var tile = min(lane, t.tiles - 1)
    var has_left = Int32(1) if tile > 0 else Int32(0)
    var has_right = Int32(1) if tile + 1 < t.tiles else Int32(0)
    var column = tile * Int32(TW)
    var start = tile * Int32(ROW)

    # Rows of windows and of dx of the strip.
    var first_group, end_group = t.stored[S](strip)
    var first_row = strip * t.groups
    var rows = max(min(end_group, p.h.output) - first_row, 0)
    var first_h = max(p.h.origin_by[S.sh](first_group), 0)
    var height = max(
        min(p.h.origin_by[S.sh](end_group), p.h.input) - first_h, 0
    )

    var plane_out = Int(p.h.output) * Int(p.w.output)
    var plane_in = Int(p.h.input) * Int(p.w.input)
    var stage = external_memory[
        UInt8, address_space=AddressSpace.SHARED, alignment=16
    ]().unsafe_offset(Int(warp_in_block * per_warp * s.bytes))
    var mine = stage.unsafe_offset(Int(own * s.bytes))
    var window = Int(first_team + own) * plane_out + Int(first_row * p.w.output)
    var pixel = Int(first_team + own) * plane_in + Int(first_h * p.w.input)
    var lanes = t.by_lanes.divisor
    var run = rows * p.w.output if live else 0
    load_run(mine, dy, window, run, Int(s.windows), lane, lanes)
    comptime if not averaging:
        load_run(
            mine.unsafe_offset(Int(s.entries_at)),
            indices,
            window,
            run,
            Int(s.windows),
            lane,
            lanes,
        )

    var places = Array[Int32, Row.count](fill=0)
    # One, and nothing for windows that are not there.
    var ones = Array[Int32, ROW](fill=1)
    comptime for i in range(Row.count):
        places[i] = min(start + Int32(i), p.w.output - 1)
    comptime for i in range(ROW):
        ones[i] = Int32(1) if start + Int32(i) < p.w.output else Int32(0)
    comptime if vector:
        places[0] = min(start, p.w.output - Int32(ROW))
    # One over what each window contributes to its divisor.
    var include = p.include_pad != 0
    var scale_w = Array[Float32, ROW](fill=p.scale)
    comptime if averaging:
        if p.scale == 0:
            comptime for i in range(ROW):
                scale_w[i] = p.w.scale[False](start + Int32(i), include)

    var dy_rows = mine.unsafe_bitcast[Scalar[dtype]]().unsafe_offset(
        Int(shift[dtype](window))
    )
    var entry_rows = (
        mine.unsafe_offset(Int(s.entries_at))
        .unsafe_bitcast[Scalar[index]]()
        .unsafe_offset(Int(shift[index](window)))
    )
    var dx_rows = (
        mine.unsafe_offset(Int(s.dx_at))
        .unsafe_bitcast[Scalar[dtype]]()
        .unsafe_offset(Int(shift[dtype](pixel) + column))
    )
    var plane_in_sample = p.d.by_input.divmod(first_team + own)[1]
    var stored = UInt32(height) if live else UInt32(0)

    comptime if is_nvidia_gpu():
        async_copy_wait_all()
    syncwarp()

    var sums = Array[Sums, S.kept() * S.width()](fill=Sums(0))
    var group = first_row
    var left = t.rows
    while left > 0:
        comptime for turn in range(S.turns()):
            var top = p.h.origin_by[S.sh](group)
            var there = Int32(1) if UInt32(group - first_row) < UInt32(
                rows
            ) else Int32(0)
            # What no window reaches.
            comptime for r in range(S.kept() - S.sh, S.kept()):
                comptime for j in range(S.width()):
                    comptime if not S.reached(r, j):
                        sums[S.sum_at(0, r, turn, j)] = Sums(0)
            var row = Row()
            row.load(
                dy_rows,
                entry_rows,
                max(min(group - first_row, rows - 1), 0) * p.w.output,
                places,
            )
            comptime if averaging:
                var totals = Array[Sums, ROW](fill=Sums(0))
                var scale = Float32(1)
                if p.scale == 0:
                    scale = p.h.scale[False](group, include)
                comptime for i in range(ROW):
                    totals[i] = row.gradient[i]() * (scale * scale_w[i])
                    if there & ones[0 if vector else i] == 0:
                        totals[i] = Sums(0)
                add_totals[S=S, turn=turn](sums, totals)
            else:
                var base = Int32(0)
                comptime if not offsets:
                    base = (
                        plane_in_sample * p.h.input + top
                    ) * p.w.input + column
                comptime for i in range(ROW):
                    add_window[S=S, step=0, i=i, turn=turn, offsets=offsets](
                        sums,
                        row.gradient[i](),
                        row.entries[i](),
                        there & ones[0 if vector else i],
                        base,
                        p.w.input,
                        p.h.input,
                    )
            comptime for r in range(S.sh):
                comptime at = S.sum_at(0, r, turn, S.pw)
                exchange[S=S, own=S.sum_at(0, r, turn, 0)](
                    sums, 1, has_left, has_right
                )
                var h = top + Int32(r) - first_h
                if UInt32(h) < stored:
                    comptime if vector:
                        var values = SIMD[DType.float32, TW](0)
                        comptime for j in range(TW):
                            values[j] = sums[at + j][0]
                        dx_rows.unsafe_store[
                            alignment=min(TW * size_of[dtype](), LINE)
                        ](Int(h * p.w.input), values.cast[dtype]())
                    else:
                        comptime for j in range(TW):
                            if column + Int32(j) < p.w.input:
                                dx_rows[
                                    unsafe_offset=Int(h * p.w.input) + j
                                ] = sums[at + j][0].cast[dtype]()
            group += 1
            left -= 1
    syncwarp()
    if live:
        store_run(
            dx,
            mine.unsafe_offset(Int(s.dx_at)),
            pixel,
            height * p.w.input,
            lane,
            lanes,
        )
