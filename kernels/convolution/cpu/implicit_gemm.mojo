"""Forward pass and data gradient as implicit matrix products: no column matrix, rows are read through pointers.

Rows are pixels, columns are output channels of the pass, and the reduction runs over taps and the channels of one
group. Each block of rows has a table with one pointer for each live tap and row (a row of zeros where the tap lies in
the padding); taps that lie in the padding for the whole block are skipped.
"""

from std.math import ceildiv
from std.memory.alloc import unsafe_alloc
from std.sys.info import simd_width_of, size_of
from std.sys.intrinsics import masked_store

from max.gpu.host import DeviceContext

from ...common.amx import has_tiles
from ...common.parallel import sync_parallelize, worker_count
from ...common.pointer import Ptr, accumulation_type
from ...common.vectors import first_lanes
from ..passes import FPROP, WGRAD
from ..epilogue_callback import NO_EPILOGUE, EpilogueCallback
from ..kernel import ConvolutionKernel, ConvolutionTensors
from ..problem import ConvolutionProblem
from ..gather import Phase, forward_phases, gradient_phases
from .microkernel import (
    PANEL_VECTORS,
    ROW_GRANULE,
    PtrTable,
    gather_tile,
    packed_length,
    packed_type,
    tile_rows,
)
from .pack import (
    pack_forward,
    pack_forward_taps_inside,
    pack_gradient,
    pack_gradient_taps_inside,
    pair_rows,
)
from .row_table import PassOperands, fill_table, run_epilogue_on_rows
from .tiles import panel_rows_by_tiles

# Bytes of the moving operand that a block of rows may touch: it stays in the L2 cache beside a panel.
comptime BLOCK_BYTES = 384 * 1024
comptime MAX_BLOCK_ROWS = 960


@always_inline
def _vectors(columns: Int, width: Int) -> Int:
    return ceildiv(columns, width)


def _block_rows(depth_bytes: Int, step: Int, rows: Int) -> Int:
    """Returns the rows of a block. Blocks are equal: every block reads the whole filter, so a small last one would cost
    almost as much as the others."""
    var fit = max(
        ROW_GRANULE,
        min(BLOCK_BYTES // max(1, depth_bytes * step), MAX_BLOCK_ROWS),
    )
    # A quarter more than fits is better than one more block.
    var blocks = max(1, ceildiv(4 * rows, 5 * fit))
    return ceildiv(ceildiv(rows, blocks), ROW_GRANULE) * ROW_GRANULE


def panel_rows[
    dtype: DType
](
    ops: PassOperands[dtype],
    panel: Ptr[packed_type[dtype]],
    vectors: Int,
    table: PtrTable[dtype],
    results: PtrTable[dtype],
    live: MutPointer[Int, MutUntrackedOrigin],
    lines: Int,
    count: Int,
    pitch: Int,
    offset: Int,
    column: Int,
    lanes: Int,
):
    """Multiplies all rows of a block by one panel of so many vectors."""
    comptime if has_tiles[dtype]:
        panel_rows_by_tiles[dtype](
            ops,
            rebind[Ptr[dtype]](panel),
            vectors,
            table,
            results,
            live,
            lines,
            count,
            pitch,
            offset,
            column,
            lanes,
        )
        return
    comptime for size in range(1, PANEL_VECTORS + 1):
        if vectors == size:
            _panel_rows[dtype, size](
                ops,
                panel,
                table,
                results,
                live,
                lines,
                count,
                pitch,
                offset,
                column,
                lanes,
            )


@no_inline
def _panel_rows[
    dtype: DType, vectors: Int
](
    ops: PassOperands[dtype],
    panel: Ptr[packed_type[dtype]],
    table: PtrTable[dtype],
    results: PtrTable[dtype],
    live: MutPointer[Int, MutUntrackedOrigin],
    lines: Int,
    count: Int,
    pitch: Int,
    offset: Int,
    column: Int,
    lanes: Int,
):
    """Multiplies all rows of a block by one panel."""
    comptime acc_type = accumulation_type[dtype]
    comptime width = simd_width_of[acc_type]()
    comptime rows = tile_rows[vectors]()
    comptime few = 2 * rows // 3

    @always_inline
    def tile[rows: Int](first: Int) {imm}:
        _tile[dtype, rows, vectors](
            ops,
            panel,
            table.unsafe_offset(first),
            results.unsafe_offset(first),
            live,
            lines,
            count - first,
            pitch,
            offset,
            column,
            lanes,
        )

    var first = 0
    while count - first > few:
        tile[rows](first)
        first += rows
    if first < count:
        tile[few](first)


@always_inline
def _tile[
    dtype: DType, rows: Int, vectors: Int
](
    ops: PassOperands[dtype],
    panel: Ptr[packed_type[dtype]],
    table: PtrTable[dtype],
    results: PtrTable[dtype],
    live: MutPointer[Int, MutUntrackedOrigin],
    lines: Int,
    count: Int,
    pitch: Int,
    offset: Int,
    column: Int,
    lanes: Int,
):
    """Multiplies the first `rows` rows of a table, or the `count` that there are, by one panel.
    """
    comptime acc_type = accumulation_type[dtype]
    comptime width = simd_width_of[acc_type]()
    var depth = ops.depth()
    var tap_size = ops.packed_depth() * vectors * width
    var acc = Array[SIMD[acc_type, width], rows * vectors](fill=0)
    for i in range(lines):
        gather_tile[dtype, acc_type, width, rows, vectors](
            acc,
            table.unsafe_offset(i * pitch),
            offset,
            depth,
            panel.unsafe_offset(live[unsafe_offset=i] * tap_size),
        )
    if rows <= count:
        # Only the last vector may be a part of one.
        comptime last = (vectors - 1) * width
        var mask = first_lanes[width](lanes - last)
        comptime for row in range(rows):
            var target = results[unsafe_offset=row].unsafe_offset(column)
            comptime for v in range(vectors - 1):
                target.unsafe_offset(v * width).unsafe_store(
                    acc[row * vectors + v].cast[dtype]()
                )
            var value = acc[row * vectors + vectors - 1].cast[dtype]()
            if lanes == vectors * width:
                target.unsafe_offset(last).unsafe_store(value)
            else:
                masked_store(value, target.unsafe_offset(last), mask)
    else:
        _store_part[dtype, rows, vectors](acc, results, column, lanes, count)


@no_inline
def _store_part[
    dtype: DType, rows: Int, vectors: Int
](
    acc: Array[
        SIMD[
            accumulation_type[dtype], simd_width_of[accumulation_type[dtype]]()
        ],
        rows * vectors,
    ],
    results: PtrTable[dtype],
    column: Int,
    lanes: Int,
    count: Int,
):
    """Stores the tile's first `count` rows and `lanes` columns."""
    comptime width = simd_width_of[accumulation_type[dtype]]()
    var sums = acc.unsafe_ptr()
    for row in range(min(rows, count)):
        var target = results[unsafe_offset=row].unsafe_offset(column)
        for v in range(vectors):
            var value = sums[unsafe_offset=row * vectors + v].cast[dtype]()
            if lanes >= (v + 1) * width:
                target.unsafe_offset(v * width).unsafe_store(value)
            else:
                for lane in range(lanes - v * width):
                    target[unsafe_offset=v * width + lane] = value[lane]


@no_inline
def _rows[
    dtype: DType
](
    ops: PassOperands[dtype],
    phase: Phase,
    first: Int,
    last: Int,
    first_panel: Int,
    last_panel: Int,
    table: PtrTable[dtype],
    live: MutPointer[Int, MutUntrackedOrigin],
    block: Int,
):
    """Multiplies rows [first, last) of one phase by panels [first_panel, last_panel) of every group.
    """
    comptime acc_type = accumulation_type[dtype]
    comptime width = simd_width_of[acc_type]()
    comptime panel_columns = PANEL_VECTORS * width
    var taps = phase.taps()
    var depth = ops.depth()
    var packed_depth = ops.packed_depth()
    var columns = ops.columns()
    var group_size = _vectors(columns, width) * width * taps * packed_depth
    var results = table
    var lines_table = table.unsafe_offset(block)
    for start in range(first, last, block):
        var count = min(block, last - start)
        var lines = fill_table[dtype](
            lines_table, results, live, ops, phase, start, count, block
        )
        for group in range(ops.groups):
            var filter = ops.filter.unsafe_offset(
                phase.filter_offset + group * group_size
            )
            for panel in range(first_panel, last_panel):
                var column = panel * panel_columns
                var lanes = min(panel_columns, columns - column)
                var vectors = _vectors(lanes, width)
                var data = filter.unsafe_offset(column * taps * packed_depth)
                var offset = group * depth
                var target = group * columns + column
                panel_rows[dtype](
                    ops,
                    data,
                    vectors,
                    lines_table,
                    results,
                    live,
                    lines,
                    count,
                    block,
                    offset,
                    target,
                    lanes,
                )
        if ops.epilogue.is_present():
            var begin = first_panel * panel_columns
            var end = min(columns, last_panel * panel_columns)
            if begin == 0 and end == columns:
                run_epilogue_on_rows(
                    ops, results, count, 0, ops.result_channels
                )
            elif begin < end:
                for group in range(ops.groups):
                    run_epilogue_on_rows(
                        ops,
                        results,
                        count,
                        group * columns + begin,
                        end - begin,
                    )


def packed_filter_elements[
    dtype: DType, pass_: Int
](p: ConvolutionProblem) -> Int:
    comptime width = simd_width_of[accumulation_type[dtype]]()
    var columns = p.group_k() if pass_ == FPROP else p.group_c()
    var depth = p.group_c() if pass_ == FPROP else p.group_k()
    var packed_depth = packed_length[dtype](depth)
    return p.groups * p.taps() * packed_depth * _vectors(columns, width) * width


@no_inline
def pack_panel_part[
    dtype: DType, pass_: Int
](
    panel: Ptr[packed_type[dtype]],
    w: Ptr[dtype],
    p: ConvolutionProblem,
    phase: Phase,
    group: Int,
    first_vector: Int,
    vectors: Int,
    part: Int,
):
    """Packs one of as many parts of a panel as the phase has taps."""
    comptime packed = packed_type[dtype]
    comptime width = simd_width_of[accumulation_type[dtype]]()
    var depth = p.group_c() if pass_ == FPROP else p.group_k()
    var packed_depth = packed_length[dtype](depth)
    var taps = phase.taps()
    var columns = vectors * width
    if p.taps_inside:
        # All taps of some channels, whose number is a whole one of pairs.
        comptime step = packed_length[dtype](1)
        var start = packed_depth // step * part // taps * step
        var stop = min(depth, packed_depth // step * (part + 1) // taps * step)
        comptime if pass_ == FPROP:
            pack_forward_taps_inside[dtype, packed, width](
                panel, w, p, group, first_vector, vectors, start, stop
            )
        else:
            pack_gradient_taps_inside[dtype, packed, width](
                panel, w, p, phase, group, first_vector, vectors, start, stop
            )
        for tap in range(taps):
            pair_rows[dtype](
                panel.unsafe_offset((tap * packed_depth + start) * columns),
                stop - start,
                columns,
            )
        return
    var target = panel.unsafe_offset(part * packed_depth * columns)
    comptime if pass_ == FPROP:
        pack_forward[dtype, packed, width](
            target, w, p, phase, group, first_vector, vectors, part
        )
    else:
        pack_gradient[dtype, packed, width](
            target, w, p, phase, group, first_vector, vectors, part
        )
    pair_rows[dtype](target, depth, columns)


@no_inline
def implicit_gemm_cpu[
    dtype: DType, pass_: Int
](
    result: Ptr[dtype],
    source: Ptr[dtype],
    w: Ptr[dtype],
    p: ConvolutionProblem,
    pitch: Int = 0,
    epilogue: EpilogueCallback = NO_EPILOGUE,
):
    """Computes the forward pass (source x, result y) or the data gradient (source dy, result dx).

    The source's pixels lie `pitch` elements behind each other where they are not as long as they have channels.
    `epilogue` is called for what has been stored.
    """
    comptime acc_type = accumulation_type[dtype]
    comptime width = simd_width_of[acc_type]()
    comptime forward = pass_ == FPROP
    var channels = p.c if forward else p.k
    var depth = p.group_c() if forward else p.group_k()
    var columns = p.group_k() if forward else p.group_c()
    var vectors = _vectors(columns, width)
    var panels = ceildiv(vectors, PANEL_VECTORS)
    var packed_depth = packed_length[dtype](depth)
    var per_tap = p.groups * vectors * width * packed_depth
    var phases: List[Phase]
    comptime if forward:
        phases = forward_phases(p)
    else:
        phases = gradient_phases(p, per_tap)
    var most_taps = 0
    var most_rows = 0
    for phase in phases:
        most_taps = max(most_taps, phase.taps())
        most_rows = max(most_rows, phase.rows(p.n))
    if most_rows == 0:
        return
    var workers = worker_count()
    var by_panel = most_rows < 2 * workers * ROW_GRANULE and panels >= workers
    var share = most_rows if by_panel else ceildiv(most_rows, workers)
    var step = p.stride_w if forward else 1
    var block = _block_rows(depth * size_of[dtype](), step, share)

    var packed = unsafe_alloc[Scalar[packed_type[dtype]]](
        max(1, packed_filter_elements[dtype, pass_](p)), alignment=64
    )
    var zeros = unsafe_alloc[Scalar[dtype]](max(1, channels), alignment=64)
    for i in range(channels):
        zeros[unsafe_offset=i] = 0
    var table_size = block * (most_taps + 1)
    var tables = unsafe_alloc[Ptr[dtype]](workers * table_size, alignment=64)
    var lives = unsafe_alloc[Int](workers * max(1, most_taps))
    var ops = PassOperands[dtype](
        result=result,
        source=source,
        zeros=zeros,
        filter=packed,
        n=p.n,
        groups=p.groups,
        channels=channels,
        pitch=pitch if pitch > 0 else channels,
        result_channels=p.k if forward else p.c,
        epilogue=epilogue,
    )

    @always_inline
    def pack(worker: Int) {imm}:
        var item = 0
        for phase in phases:
            var taps = phase.taps()
            for group in range(p.groups):
                for panel in range(panels):
                    var first = panel * PANEL_VECTORS
                    var count = min(PANEL_VECTORS, vectors - first)
                    var base = packed.unsafe_offset(
                        phase.filter_offset
                        + (group * vectors + first)
                        * width
                        * taps
                        * packed_depth
                    )
                    for tap in range(taps):
                        item += 1
                        if item % workers == worker:
                            pack_panel_part[dtype, pass_](
                                base, w, p, phase, group, first, count, tap
                            )

    @always_inline
    def compute(worker: Int) {imm}:
        var table = tables.unsafe_offset(worker * table_size)
        var live = lives.unsafe_offset(worker * most_taps)
        if by_panel:
            for phase in phases:
                _rows[dtype](
                    ops,
                    phase,
                    0,
                    phase.rows(p.n),
                    panels * worker // workers,
                    panels * (worker + 1) // workers,
                    table,
                    live,
                    block,
                )
            return
        # A block of every phase after the other: together they write one part of the result.
        for start in range(0, share + ROW_GRANULE, block):
            for phase in phases:
                var rows = phase.rows(p.n)
                var granules = ceildiv(rows, ROW_GRANULE)
                var first = granules * worker // workers * ROW_GRANULE + start
                var last = granules * (worker + 1) // workers * ROW_GRANULE
                _rows[dtype](
                    ops,
                    phase,
                    first,
                    min(rows, last, first + block),
                    0,
                    panels,
                    table,
                    live,
                    block,
                )

    sync_parallelize(pack, workers)
    sync_parallelize(compute, workers)
    lives.unsafe_free()
    tables.unsafe_free()
    zeros.unsafe_free()
    packed.unsafe_free()


struct ImplicitGemm(ConvolutionKernel):
    comptime NAME: StaticString = "implicit_gemm"

    @staticmethod
    def compiles[dtype: DType, pass_: Int, grouping: Int]() -> Bool:
        return pass_ != WGRAD

    @staticmethod
    def refusal[
        dtype: DType, pass_: Int
    ](t: ConvolutionTensors[dtype], p: ConvolutionProblem) -> Optional[String]:
        var elements = packed_filter_elements[dtype, pass_](p)
        var packed = elements * size_of[packed_type[dtype]]()
        if packed > p.workspace_limit:
            return String(
                t"the packed filter takes {packed} bytes, the workspace limit"
                t" is {p.workspace_limit}"
            )
        return None

    @staticmethod
    def launch[
        dtype: DType, pass_: Int
    ](
        ctx: DeviceContext, t: ConvolutionTensors[dtype], p: ConvolutionProblem
    ) raises:
        implicit_gemm_cpu[dtype, pass_](
            t.result, t.a, t.b, p, epilogue=t.epilogue
        )
