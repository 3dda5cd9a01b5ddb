"""Forward pass and data gradient of few pixels: each worker packs panels of the filter for itself and uses them at
once.

A large filter that few pixels meet is read once from memory, and its panels stay in the worker's cache. Planes of a few
pixels are mostly edges: there the rows of one product are one position's pixels of all images, which share the taps
that lie inside the input, and no other tap is computed.

convolution_by_kernel.json has times beside oneDNN's for drawn problems.
"""

from std.math import ceildiv
from std.memory.alloc import unsafe_alloc
from std.sys.info import simd_width_of, size_of

from max.gpu.host import DeviceContext

from ...common.parallel import sync_parallelize, worker_count
from ...common.pointer import Ptr, accumulation_type
from ..epilogue_callback import NO_EPILOGUE, run_epilogue
from ..gather import PhaseAxis, Phase, forward_phases, gradient_phases
from ..kernel import ConvolutionKernel, ConvolutionTensors
from ..passes import FPROP, WGRAD
from ..problem import ConvolutionProblem
from .implicit_gemm import pack_panel_part, panel_rows
from .microkernel import (
    PANEL_VECTORS,
    ROW_GRANULE,
    PtrTable,
    packed_length,
    packed_type,
)
from .row_table import PassOperands, fill_table

# Images that one position must have.
comptime MIN_IMAGES = 4


def _live(axis: PhaseAxis) -> Int:
    """Returns the number of pairs of a tap and a row that lie inside the source.
    """
    var count = 0
    for tap in range(axis.taps):
        var shift = axis.offset(tap)
        var low = min(axis.rows, max(0, ceildiv(-shift, axis.step)))
        var high = min(axis.rows, (axis.source - 1 - shift) // axis.step + 1)
        count += max(0, high - low)
    return count


def _by_position(phases: List[Phase], n: Int) -> Bool:
    """Returns whether the taps inside are so few that tiles which end with a position's images cost less.
    """
    var live = 0
    var pairs = 0
    for phase in phases:
        live += _live(phase.d) * _live(phase.h) * _live(phase.w)
        pairs += phase.rows(1) * phase.taps()
    # Tiles have 4 or 6 rows.
    var rows = max(ceildiv(n, 6) * 6 - (2 if n % 6 in [1, 2, 3, 4] else 0), 4)
    return n >= MIN_IMAGES and 10 * live * rows < 9 * pairs * n


@no_inline
def _fill_position[
    dtype: DType
](
    table: PtrTable[dtype],
    results: PtrTable[dtype],
    live: MutPointer[Int, MutUntrackedOrigin],
    ops: PassOperands[dtype],
    phase: Phase,
    position: Int,
    pitch: Int,
) -> Int:
    """Fills a table as `fill_table` does, for the pixels of all images at one position.
    """
    var q = position % phase.w.rows
    var p = position // phase.w.rows % phase.h.rows
    var o = position // phase.w.rows // phase.h.rows
    var pixel = (
        (phase.d.out_first + o * phase.d.out_step) * phase.h.out_extent
        + phase.h.out_first
        + p * phase.h.out_step
    ) * phase.w.out_extent + (phase.w.out_first + q * phase.w.out_step)
    var image = phase.d.out_extent * phase.h.out_extent * phase.w.out_extent
    for n in range(ops.n):
        results[unsafe_offset=n] = ops.result.unsafe_offset(
            (n * image + pixel) * ops.result_channels
        )
    var source_image = phase.d.source * phase.h.source * phase.w.source
    var lines = 0
    var tap = 0
    for t in range(phase.d.taps):
        var d = o * phase.d.step + phase.d.offset(t)
        for r in range(phase.h.taps):
            var h = p * phase.h.step + phase.h.offset(r)
            for s in range(phase.w.taps):
                var w = q * phase.w.step + phase.w.offset(s)
                if (
                    d >= 0
                    and d < phase.d.source
                    and h >= 0
                    and h < phase.h.source
                    and w >= 0
                    and w < phase.w.source
                ):
                    var line = table.unsafe_offset(lines * pitch)
                    var at = (d * phase.h.source + h) * phase.w.source + w
                    for n in range(ops.n):
                        line[unsafe_offset=n] = ops.source.unsafe_offset(
                            (n * source_image + at) * ops.pitch
                        )
                    for n in range(ops.n, pitch):
                        line[unsafe_offset=n] = ops.zeros
                    live[unsafe_offset=lines] = tap
                    lines += 1
                tap += 1
    return lines


@fieldwise_init
struct PhaseRows(ImplicitlyCopyable, TrivialRegisterPassable):
    """Rows that share their taps: a phase, and its number among that phase's.
    """

    var phase: Int
    var number: Int


@no_inline
def panel_gemm_cpu[
    dtype: DType, pass_: Int
](
    result: Ptr[dtype],
    source: Ptr[dtype],
    w: Ptr[dtype],
    p: ConvolutionProblem,
):
    """Computes the forward pass (source x, result y) or the data gradient (source dy, result dx) of the problems that
    `PanelGemm` takes."""
    comptime acc_type = accumulation_type[dtype]
    comptime width = simd_width_of[acc_type]()
    comptime forward = pass_ == FPROP
    var channels = p.c if forward else p.k
    var depth = p.group_c() if forward else p.group_k()
    var columns = p.group_k() if forward else p.group_c()
    var vectors = ceildiv(columns, width)
    var panels = ceildiv(vectors, PANEL_VECTORS)
    # One tap of a whole panel.
    var tap_size = PANEL_VECTORS * width * packed_length[dtype](depth)
    var phases: List[Phase]
    comptime if forward:
        phases = forward_phases(p)
    else:
        phases = gradient_phases(p, tap_size)
    var by_position = _by_position(phases, p.n)
    var units = List[PhaseRows]()
    var most_rows = 0
    var most_taps = 0
    for number in range(len(phases)):
        var phase = phases[number]
        most_taps = max(most_taps, phase.taps())
        most_rows = max(most_rows, phase.rows(p.n))
        if phase.rows(p.n) > 0:
            for unit in range(phase.rows(1) if by_position else 1):
                units.append(PhaseRows(number, unit))
    if most_rows == 0:
        return
    if by_position:
        most_rows = p.n
    var pitch = ceildiv(most_rows, ROW_GRANULE) * ROW_GRANULE
    var workers = worker_count()
    var panel_size = tap_size * p.taps()
    var buffers = unsafe_alloc[Scalar[packed_type[dtype]]](
        max(1, workers * panel_size), alignment=64
    )
    var zeros = unsafe_alloc[Scalar[dtype]](max(1, channels), alignment=64)
    for i in range(channels):
        zeros[unsafe_offset=i] = 0
    var table_size = pitch * (most_taps + 1)
    var tables = unsafe_alloc[Ptr[dtype]](len(units) * table_size, alignment=64)
    var lives = unsafe_alloc[Int](len(units) * (most_taps + 1))
    var ops = PassOperands[dtype](
        result=result,
        source=source,
        zeros=zeros,
        filter=buffers,
        n=p.n,
        groups=p.groups,
        channels=channels,
        pitch=channels,
        result_channels=p.k if forward else p.c,
        epilogue=NO_EPILOGUE,
    )
    var every = phases.unsafe_ptr()
    var unit = units.unsafe_ptr()
    for i in range(len(units)):
        var phase = every[unsafe_offset=unit[unsafe_offset=i].phase]
        var results = tables.unsafe_offset(i * table_size)
        var table = results.unsafe_offset(pitch)
        var live = lives.unsafe_offset(i * (most_taps + 1))
        # The number of live taps comes first.
        if by_position:
            live[] = _fill_position[dtype](
                table,
                results,
                live.unsafe_offset(1),
                ops,
                phase,
                unit[unsafe_offset=i].number,
                pitch,
            )
        else:
            live[] = fill_table[dtype](
                table,
                results,
                live.unsafe_offset(1),
                ops,
                phase,
                0,
                phase.rows(p.n),
                pitch,
            )

    @always_inline
    def task(worker: Int) {imm}:
        var data = buffers.unsafe_offset(worker * panel_size)
        var items = p.groups * panels
        for item in range(
            items * worker // workers, items * (worker + 1) // workers
        ):
            var group = item // panels
            var first = item % panels * PANEL_VECTORS
            var count = min(PANEL_VECTORS, vectors - first)
            for phase in phases:
                for part in range(phase.taps()):
                    pack_panel_part[dtype, pass_](
                        data.unsafe_offset(phase.filter_offset),
                        w,
                        p,
                        phase,
                        group,
                        first,
                        count,
                        part,
                    )
            var column = first * width
            var lanes = min(PANEL_VECTORS * width, columns - column)
            for i in range(len(units)):
                var phase = every[unsafe_offset=unit[unsafe_offset=i].phase]
                var results = tables.unsafe_offset(i * table_size)
                var live = lives.unsafe_offset(i * (most_taps + 1))
                panel_rows[dtype](
                    ops,
                    data.unsafe_offset(phase.filter_offset),
                    count,
                    results.unsafe_offset(pitch),
                    results,
                    live.unsafe_offset(1),
                    live[],
                    p.n if by_position else phase.rows(p.n),
                    pitch,
                    group * depth,
                    group * columns + column,
                    lanes,
                )

    sync_parallelize(task, workers)
    _ = phases^
    _ = units^
    lives.unsafe_free()
    tables.unsafe_free()
    zeros.unsafe_free()
    buffers.unsafe_free()


struct PanelGemm(ConvolutionKernel):
    comptime NAME: StaticString = "panel_gemm"

    @staticmethod
    def compiles[dtype: DType, pass_: Int, grouping: Int]() -> Bool:
        return pass_ != WGRAD

    @staticmethod
    def refusal[
        dtype: DType, pass_: Int
    ](t: ConvolutionTensors[dtype], p: ConvolutionProblem) -> Optional[String]:
        comptime panel = PANEL_VECTORS * simd_width_of[
            accumulation_type[dtype]
        ]() * size_of[packed_type[dtype]]()
        var depth = p.group_c() if pass_ == FPROP else p.group_k()
        var bytes = packed_length[dtype](depth) * p.taps() * panel
        if worker_count() * (bytes + 64 * 1024) > p.workspace_limit:
            return String(
                t"a packed panel takes {bytes} bytes, the workspace limit for"
                t" all workers is {p.workspace_limit}"
            )
        return None

    @staticmethod
    def launch[
        dtype: DType, pass_: Int
    ](
        ctx: DeviceContext, t: ConvolutionTensors[dtype], p: ConvolutionProblem
    ) raises:
        panel_gemm_cpu[dtype, pass_](t.result, t.a, t.b, p)
        run_epilogue[pass_](p, t.epilogue)
