"""Weight gradient as one matrix product for each group: dw[k, j] = sum over pixels of dy[pixel, k] * column[pixel, j].

j runs over taps and channels of the filter. Pixels are taken in blocks. In each block a tile of `columns` (the pixels
that tap j reads, zero in the padding) is packed once and met by every tile of dy's channels, so only a block's worth
of columns ever exists. The reduction may be split into slices of pixels; each slice has its own sums, which a second
stage adds in a fixed order.
"""

from std.math import ceildiv, iota
from std.memory import unsafe_memset_zero
from std.memory.alloc import unsafe_alloc
from std.sys.info import simd_width_of, size_of
from std.sys.intrinsics import (
    PrefetchOptions,
    masked_load,
    masked_store,
    prefetch,
)

from max.gpu.host import DeviceContext

from ...common.packed import REGISTERS
from ...common.parallel import sync_parallelize, worker_count
from ...common.pointer import Ptr, accumulation_type
from ..kernel import ConvolutionKernel, ConvolutionTensors
from ..passes import WGRAD
from ..problem import ConvolutionProblem
from .microkernel import outer_tile, packed_length, packed_type
from .pack import pair_rows, write_filter

# Most pixels of one block: a packed tile of columns (block * 48 values) fits the L1 cache beside dy's tile.
comptime BLOCK_PIXELS = 144
# Bytes of packed columns that few pixels have at once.
comptime COLUMNS_BYTES = 64 * 1024
# Vectors of columns in a tile, and dy channels that meet them: 24 accumulators, or 12 of 16 registers.
comptime TILE_VECTORS = 3
comptime TILE_ROWS = REGISTERS // 4
# Tiles of dy that are packed together.
comptime TILES_TOGETHER = 8
comptime TILES_OF_A_LINE[dtype: DType] = 64 // (TILE_ROWS * size_of[dtype]())
comptime SMALL_SUMS_BYTES = 512 * 1024


@fieldwise_init
struct Runs(ImplicitlyCopyable, TrivialRegisterPassable):
    """The columns of one pixel as contiguous runs of the input: `length` values for each of `count` runs.

    Taps along W are one run where they are neighbours in memory (no dilation along W, one group).
    """

    var length: Int
    var count: Int
    var merged: Bool


def _runs(p: ConvolutionProblem) -> Runs:
    var merged = p.dilation_w == 1 and p.groups == 1
    if merged:
        return Runs(p.s * p.c, p.t * p.r, True)
    return Runs(p.group_c(), p.taps(), False)


@always_inline
def first_lanes[width: Int](lanes: Int) -> SIMD[DType.bool, width]:
    return iota[DType.int32, width]().lt(SIMD[DType.int32, width](lanes))


@always_inline
def _copy_run[
    dtype: DType, acc_type: DType, width: Int
](target: Ptr[acc_type], source: Ptr[dtype], length: Int):
    var i = 0
    while i + width <= length:
        target.unsafe_offset(i).unsafe_store(
            source.unsafe_offset(i).unsafe_load[width=width]().cast[acc_type]()
        )
        i += width
    if i < length:
        var mask = first_lanes[width](length - i)
        var value = masked_load[width](
            source.unsafe_offset(i), mask, SIMD[dtype, width](0)
        )
        masked_store(value.cast[acc_type](), target.unsafe_offset(i), mask)


@always_inline
def _zero_run[acc_type: DType, width: Int](target: Ptr[acc_type], length: Int):
    var zero = SIMD[acc_type, width](0)
    var i = 0
    while i + width <= length:
        target.unsafe_offset(i).unsafe_store(zero)
        i += width
    if i < length:
        masked_store(
            zero, target.unsafe_offset(i), first_lanes[width](length - i)
        )


@always_inline
def _copy_spans[
    dtype: DType, acc_type: DType, width: Int
](
    target: Ptr[acc_type],
    pitch: Int,
    source: Ptr[dtype],
    step: Int,
    count: Int,
    span: Int,
):
    """Copies `count` pixels, `step` elements apart, of `span` values each."""

    @always_inline
    def copy[vectors: Int]() {imm}:
        var a = source
        var b = target
        for _ in range(count):
            comptime for v in range(vectors):
                b.unsafe_offset(v * width).unsafe_store(
                    a.unsafe_offset(v * width)
                    .unsafe_load[width=width]()
                    .cast[acc_type]()
                )
            a = a.unsafe_offset(step)
            b = b.unsafe_offset(pitch)

    comptime for vectors in range(1, TILE_VECTORS + 1):
        if span == vectors * width:
            copy[vectors]()
            return
    for m in range(count):
        _copy_run[dtype, acc_type, width](
            target.unsafe_offset(m * pitch),
            source.unsafe_offset(m * step),
            span,
        )


@no_inline
def _pack_columns[
    dtype: DType, acc_type: DType, width: Int
](
    packed: Ptr[acc_type],
    x: Ptr[dtype],
    problem: ConvolutionProblem,
    runs: Runs,
    group: Int,
    pixel: Int,
    count: Int,
    column: Int,
    length: Int,
    pitch: Int,
) -> Bool:
    """Packs columns [column, column + length) of pixels [pixel, pixel + count) into packed[count][pitch]; returns False
    if all of them are padding."""
    var inside_input = False
    if length < pitch:
        for m in range(count):
            _zero_run[acc_type, width](
                packed.unsafe_offset(m * pitch + length), pitch - length
            )
    var first = column
    while first < column + length:
        var run = first // runs.length
        var inside = first % runs.length
        var span = min(runs.length - inside, column + length - first)
        var s = 0
        var r: Int
        var t: Int
        if runs.merged:
            r = run % problem.r
            t = run // problem.r
        else:
            s = run % problem.s
            r = run // problem.s % problem.r
            t = run // problem.s // problem.r
        var q = pixel % problem.q
        var rest = pixel // problem.q
        var p = rest % problem.p
        rest //= problem.p
        var o = rest % problem.o
        var n = rest // problem.o
        # The columns of W whose pixels hold the whole span, where their row lies inside.
        var first_whole = 0
        var last_whole = problem.w - 1
        if runs.merged:
            first_whole = -(inside // problem.c)
            last_whole = problem.w - ceildiv(inside + span, problem.c)
        var shift = s * problem.dilation_w - problem.pad_w
        var whole_low = max(0, ceildiv(first_whole - shift, problem.stride_w))
        var whole_high = (last_whole - shift) // problem.stride_w + 1
        var target = packed.unsafe_offset(first - column)
        var m = 0
        while m < count:
            var row = min(problem.q - q, count - m)
            var d = (
                o * problem.stride_d + t * problem.dilation_d - problem.pad_d
            )
            var h = (
                p * problem.stride_h + r * problem.dilation_h - problem.pad_h
            )
            var line = ((n * problem.d + d) * problem.h + h) * problem.w

            @always_inline
            def edge(q: Int, target: Ptr[acc_type]) {mut inside_input, imm}:
                """Copies a pixel that may lack a part of the span."""
                var col = q * problem.stride_w + shift
                # Values of the run that lie inside the input, counted from the run's start.
                var low = 0
                var high = 0
                if runs.merged:
                    low = max(0, -col) * problem.c
                    high = min(problem.s, problem.w - col) * problem.c
                elif col >= 0 and col < problem.w:
                    high = runs.length
                low = min(max(low, inside), inside + span)
                high = max(low, min(high, inside + span))
                inside_input = inside_input or high > low
                _zero_run[acc_type, width](target, low - inside)
                _copy_run[dtype, acc_type, width](
                    target.unsafe_offset(low - inside),
                    x.unsafe_offset(
                        (line + col) * problem.c
                        + group * problem.group_c()
                        + low
                    ),
                    high - low,
                )
                _zero_run[acc_type, width](
                    target.unsafe_offset(high - inside), inside + span - high
                )

            if d < 0 or d >= problem.d or h < 0 or h >= problem.h:
                for i in range(row):
                    _zero_run[acc_type, width](
                        target.unsafe_offset(i * pitch), span
                    )
            else:
                var low = min(row, max(0, whole_low - q))
                var high = max(low, min(row, whole_high - q))
                for i in range(low):
                    edge(q + i, target.unsafe_offset(i * pitch))
                if high > low:
                    inside_input = True
                    _copy_spans[dtype, acc_type, width](
                        target.unsafe_offset(low * pitch),
                        pitch,
                        x.unsafe_offset(
                            (line + (q + low) * problem.stride_w + shift)
                            * problem.c
                            + group * problem.group_c()
                            + inside
                        ),
                        problem.stride_w * problem.c,
                        high - low,
                        span,
                    )
                for i in range(high, row):
                    edge(q + i, target.unsafe_offset(i * pitch))
            target = target.unsafe_offset(row * pitch)
            m += row
            q = 0
            p += 1
            if p == problem.p:
                p = 0
                o += 1
                if o == problem.o:
                    o = 0
                    n += 1
        first += span
    return inside_input


@no_inline
def pack_gradient_rows[
    dtype: DType
](
    packed: Ptr[packed_type[dtype]],
    dy: Ptr[dtype],
    k: Int,
    channels: Int,
    pixel: Int,
    count: Int,
):
    """Packs the `channels` channels of dy, from `dy` on, as packed[tile][pixel][TILE_ROWS], zero beyond the last.
    """
    var stored = packed_length[dtype](count)
    var tiles = channels // TILE_ROWS
    # Some tiles at once: dy is read in whole cache lines.
    for start in range(0, tiles, TILES_TOGETHER):
        var some = min(TILES_TOGETHER, tiles - start)
        for m in range(count):
            var source = dy.unsafe_offset((pixel + m) * k + start * TILE_ROWS)
            var target = packed.unsafe_offset((start * stored + m) * TILE_ROWS)
            # The next block's, while this one is multiplied.
            for part in range(0, some, TILES_OF_A_LINE[dtype]):
                prefetch[PrefetchOptions().for_read().low_locality()](
                    source.unsafe_offset(count * k + part * TILE_ROWS)
                )
            for tile in range(some):
                target.unsafe_offset(tile * stored * TILE_ROWS).unsafe_store(
                    source.unsafe_offset(tile * TILE_ROWS)
                    .unsafe_load[width=TILE_ROWS]()
                    .cast[packed_type[dtype]]()
                )
    for tile in range(tiles):
        pair_rows[dtype](
            packed.unsafe_offset(tile * stored * TILE_ROWS), count, TILE_ROWS
        )
    var left = channels - tiles * TILE_ROWS
    if left > 0:
        var source = dy.unsafe_offset(pixel * k + tiles * TILE_ROWS)
        var target = packed.unsafe_offset(tiles * stored * TILE_ROWS)
        var mask = first_lanes[TILE_ROWS](left)
        for m in range(count):
            target.unsafe_offset(m * TILE_ROWS).unsafe_store(
                masked_load[TILE_ROWS](
                    source.unsafe_offset(m * k), mask, SIMD[dtype, TILE_ROWS](0)
                ).cast[packed_type[dtype]]()
            )
        pair_rows[dtype](target, count, TILE_ROWS)


@no_inline
def _tile[
    dtype: DType, acc_type: DType, width: Int, vectors: Int
](
    sums: Ptr[acc_type],
    pitch: Int,
    a: Ptr[packed_type[dtype]],
    b: Ptr[packed_type[dtype]],
    count: Int,
    rows: Int,
    lanes: Int,
    first: Bool,
):
    """Adds one block's product to a tile of sums, `rows` rows of `pitch` values by `lanes` columns; the `first` block's
    is stored.
    """
    comptime size = TILE_ROWS * vectors
    var acc = Array[SIMD[acc_type, width], size](fill=0)
    outer_tile[dtype, acc_type, width, TILE_ROWS, vectors](acc, a, b, count)
    if rows >= TILE_ROWS and lanes == vectors * width and first:
        comptime for row in range(TILE_ROWS):
            comptime for v in range(vectors):
                sums.unsafe_offset(row * pitch + v * width).unsafe_store(
                    acc[row * vectors + v]
                )
        return
    if rows >= TILE_ROWS and lanes == vectors * width:
        comptime for row in range(TILE_ROWS):
            comptime for v in range(vectors):
                var target = sums.unsafe_offset(row * pitch + v * width)
                target.unsafe_store(
                    target.unsafe_load[width=width]() + acc[row * vectors + v]
                )
        return
    var spill = Array[SIMD[acc_type, width], size](fill=0)
    comptime for i in range(size):
        spill[i] = acc[i]
    for row in range(min(rows, TILE_ROWS)):
        for i in range(lanes):
            var value = spill[row * vectors + i // width][i % width]
            if not first:
                value += sums[unsafe_offset=row * pitch + i]
            sums[unsafe_offset=row * pitch + i] = value


@no_inline
def _slice[
    dtype: DType
](
    sums: Ptr[accumulation_type[dtype]],
    x: Ptr[dtype],
    dy: Ptr[dtype],
    p: ConvolutionProblem,
    first: Int,
    last: Int,
    first_column: Int,
    last_column: Int,
    packed_x: Ptr[packed_type[dtype]],
    packed_dy: Ptr[packed_type[dtype]],
):
    """Adds pixels [first, last) to columns [first_column, last_column) of every group of dw.
    """
    comptime acc_type = accumulation_type[dtype]
    comptime width = simd_width_of[acc_type]()
    comptime tile_columns = TILE_VECTORS * width
    var kg = p.group_k()
    var pitch = p.taps() * p.group_c()
    var runs = _runs(p)
    # Equal blocks: each one reads and writes all sums.
    var blocks = ceildiv(last - first, BLOCK_PIXELS)
    for block in range(blocks):
        var pixel = first + (last - first) * block // blocks
        var count = first + (last - first) * (block + 1) // blocks - pixel
        var stores = pixel == first
        # Of few pixels many tiles are packed at once: rows of sums are then written from front to back.
        var stored = packed_length[dtype](count)
        var tile_size = stored * tile_columns
        var together = columns_together[dtype](stored) * tile_columns
        for group in range(p.groups):
            pack_gradient_rows[dtype](
                packed_dy, dy.unsafe_offset(group * kg), p.k, kg, pixel, count
            )
            for start in range(first_column, last_column, together):
                var stop = min(start + together, last_column)
                var live = False
                for column in range(start, stop, tile_columns):
                    var lanes = min(tile_columns, stop - column)
                    var tile_pitch = ceildiv(lanes, width) * width
                    var tile = packed_x.unsafe_offset(
                        (column - start) // tile_columns * tile_size
                    )
                    var any = _pack_columns[dtype, packed_type[dtype], width](
                        tile,
                        x,
                        p,
                        runs,
                        group,
                        pixel,
                        count,
                        column,
                        lanes,
                        tile_pitch,
                    )
                    pair_rows[dtype](tile, count, tile_pitch)
                    live = live or any
                # Wide dilations keep whole blocks of a tap in the padding.
                if not live and not stores:
                    continue
                for row in range(0, kg, TILE_ROWS):
                    for column in range(start, stop, tile_columns):
                        var lanes = min(tile_columns, stop - column)
                        var vectors = ceildiv(lanes, width)
                        comptime for size in range(1, TILE_VECTORS + 1):
                            if vectors == size:
                                _tile[dtype, acc_type, width, size](
                                    sums.unsafe_offset(
                                        (group * kg + row) * pitch + column
                                    ),
                                    pitch,
                                    packed_dy.unsafe_offset(row * stored),
                                    packed_x.unsafe_offset(
                                        (column - start)
                                        // tile_columns
                                        * tile_size
                                    ),
                                    stored,
                                    kg - row,
                                    lanes,
                                    stores,
                                )


def columns_together[dtype: DType](count: Int) -> Int:
    """Returns the number of tiles of columns that are packed at once for `count` pixels.
    """
    comptime tile_columns = TILE_VECTORS * simd_width_of[
        accumulation_type[dtype]
    ]()
    comptime bytes = size_of[packed_type[dtype]]()
    return max(
        1,
        COLUMNS_BYTES // (max(1, count) * tile_columns * bytes),
    )


def _packed_dy_elements(p: ConvolutionProblem) -> Int:
    return BLOCK_PIXELS * ceildiv(p.group_k(), TILE_ROWS) * TILE_ROWS


@no_inline
def wgrad_gemm_cpu[
    dtype: DType
](dw: Ptr[dtype], x: Ptr[dtype], dy: Ptr[dtype], p: ConvolutionProblem):
    """Computes the weight gradient of any problem; workers share the columns, or the pixels where columns are few.
    """
    comptime acc_type = accumulation_type[dtype]
    comptime width = simd_width_of[acc_type]()
    comptime tile_columns = TILE_VECTORS * width
    var workers = worker_count()
    var pixels = p.output_pixels()
    var columns = p.taps() * p.group_c()
    var tiles = ceildiv(columns, tile_columns)
    var size = p.w_size()
    var slices = 1
    # Sums that stay in the L2 cache are cheap to have twice, and then nobody packs what another packs too.
    if tiles < 2 * workers or size * size_of[acc_type]() <= SMALL_SUMS_BYTES:
        var budget = p.workspace_limit // max(1, size * size_of[acc_type]())
        slices = max(
            1, min(min(workers, ceildiv(pixels, 4 * BLOCK_PIXELS)), budget)
        )
    # Slice 0 adds straight into dw where dtypes agree.
    var in_place = dtype == acc_type and not p.taps_inside
    var extra = slices - 1 if in_place else slices
    var partials = unsafe_alloc[Scalar[acc_type]](
        max(1, extra * size), alignment=64
    )
    var packed_columns = max(
        BLOCK_PIXELS * tile_columns,
        COLUMNS_BYTES // size_of[packed_type[dtype]](),
    )
    var scratch = packed_columns + _packed_dy_elements(p)
    var buffers = unsafe_alloc[Scalar[packed_type[dtype]]](
        workers * scratch, alignment=64
    )

    @always_inline
    def sums_of(slice: Int) {imm} -> Ptr[acc_type]:
        comptime if dtype == acc_type:
            if in_place:
                if slice == 0:
                    return rebind[Ptr[acc_type]](dw)
                return partials.unsafe_offset((slice - 1) * size)
        return partials.unsafe_offset(slice * size)

    @always_inline
    def reduce(worker: Int) {imm}:
        var packed_x = buffers.unsafe_offset(worker * scratch)
        var packed_dy = packed_x.unsafe_offset(packed_columns)
        if slices > 1:
            if worker < slices:
                _slice[dtype](
                    sums_of(worker),
                    x,
                    dy,
                    p,
                    pixels * worker // slices,
                    pixels * (worker + 1) // slices,
                    0,
                    columns,
                    packed_x,
                    packed_dy,
                )
            return
        var first = min(columns, tiles * worker // workers * tile_columns)
        var last = min(columns, tiles * (worker + 1) // workers * tile_columns)
        if first == last:
            return
        _slice[dtype](
            sums_of(0), x, dy, p, 0, pixels, first, last, packed_x, packed_dy
        )

    @always_inline
    def finish(worker: Int) {imm}:
        for k in range(p.k * worker // workers, p.k * (worker + 1) // workers):
            var total = sums_of(0).unsafe_offset(k * columns)
            for slice in range(1, slices):
                var other = sums_of(slice).unsafe_offset(k * columns)
                for i in range(columns):
                    total[unsafe_offset=i] += other[unsafe_offset=i]
            if not in_place:
                write_filter[dtype, acc_type](
                    dw.unsafe_offset(k * columns),
                    total,
                    p.taps(),
                    p.group_c(),
                    p.group_c(),
                    p.group_c(),
                    p.taps_inside,
                )

    if pixels == 0:
        unsafe_memset_zero(dw, size)
    else:
        sync_parallelize(reduce, workers)
    if pixels > 0 and (slices > 1 or not in_place):
        sync_parallelize(finish, workers)
    buffers.unsafe_free()
    partials.unsafe_free()


struct WgradGemm(ConvolutionKernel):
    comptime NAME: StaticString = "wgrad_gemm"

    @staticmethod
    def compiles[dtype: DType, pass_: Int, grouping: Int]() -> Bool:
        return pass_ == WGRAD

    @staticmethod
    def refusal[
        dtype: DType, pass_: Int
    ](t: ConvolutionTensors[dtype], p: ConvolutionProblem) -> Optional[String]:
        comptime acc_type = accumulation_type[dtype]
        var bytes = 0
        if dtype != acc_type or p.taps_inside:
            bytes = p.w_size() * size_of[acc_type]()
        if bytes > p.workspace_limit:
            return String(
                t"the sums take {bytes} bytes, the workspace limit is"
                t" {p.workspace_limit}"
            )
        return None

    @staticmethod
    def launch[
        dtype: DType, pass_: Int
    ](
        ctx: DeviceContext, t: ConvolutionTensors[dtype], p: ConvolutionProblem
    ) raises:
        wgrad_gemm_cpu[dtype](t.result, t.a, t.b, p)
