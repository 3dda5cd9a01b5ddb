"""Weight gradient as one matrix product for each group: dw[k, j] = sum over pixels of dy[pixel, k] * column[pixel, j].

j runs over taps and channels of the filter. Pixels are taken in blocks. In each block a tile of `columns` (the pixels
that tap j reads, zero in the padding) is packed once and met by every tile of dy's channels, so only a block's worth
of columns ever exists. The reduction may be split into slices of pixels; each slice has its own sums, which a second
stage adds in a fixed order.
"""

from std.math import ceildiv
from std.memory import unsafe_memset_zero
from std.memory.alloc import unsafe_alloc
from std.sys.info import simd_width_of, size_of

from max.gpu.host import DeviceContext

from ...common.amx import TILE, configure, has_tiles, release
from ...common.parallel import sync_parallelize, worker_count
from ...common.pointer import Ptr, accumulation_type
from ..kernel import ConvolutionKernel, ConvolutionTensors
from ..passes import WGRAD
from ..problem import ConvolutionProblem
from .microkernel import outer_tile, packed_length, packed_type
from .pack import pair_rows, write_filter
from .tiles import outer_by_tiles
from .wgrad_pack import (
    TILE_ROWS,
    TILE_VECTORS,
    pack_columns,
    pack_gradient_rows,
    runs_of,
    tile_rows,
    tile_vectors,
)

comptime BLOCK_PIXELS = 160 if has_tiles[DType.bfloat16] else 144
"""Most pixels of one block: a packed tile of columns fits the L1 cache beside dy's tile."""
comptime COLUMNS_BYTES = 64 * 1024
"""Bytes of packed columns that few pixels have at once."""
comptime SMALL_SUMS_BYTES = 512 * 1024
"""Sums of all of dw that are cheap to have twice."""


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
    comptime tile_columns = tile_vectors[dtype] * width
    var kg = p.group_k()
    var pitch = p.taps() * p.group_c()
    var runs = runs_of(p)
    comptime if has_tiles[dtype]:
        configure()
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
                    var any = pack_columns[dtype, packed_type[dtype], width](
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
                comptime row_step = 2 * TILE if has_tiles[dtype] else TILE_ROWS
                for row in range(0, kg, row_step):
                    var a = packed_dy.unsafe_offset(row * stored)
                    for column in range(start, stop, tile_columns):
                        var lanes = min(tile_columns, stop - column)
                        var vectors = ceildiv(lanes, width)
                        var b = packed_x.unsafe_offset(
                            (column - start) // tile_columns * tile_size
                        )
                        var target = sums.unsafe_offset(
                            (group * kg + row) * pitch + column
                        )
                        comptime if has_tiles[dtype]:
                            outer_by_tiles[dtype](
                                rebind[Ptr[DType.float32]](target),
                                pitch,
                                a,
                                b,
                                stored,
                                kg - row,
                                lanes,
                                stores,
                            )
                        else:
                            comptime for size in range(1, TILE_VECTORS + 1):
                                if vectors == size:
                                    _tile[dtype, acc_type, width, size](
                                        target,
                                        pitch,
                                        a,
                                        b,
                                        stored,
                                        kg - row,
                                        lanes,
                                        stores,
                                    )
    comptime if has_tiles[dtype]:
        release()


def columns_together[dtype: DType](count: Int) -> Int:
    """Returns the number of tiles of columns that are packed at once for `count` pixels.
    """
    comptime tile_columns = tile_vectors[dtype] * simd_width_of[
        accumulation_type[dtype]
    ]()
    comptime bytes = size_of[packed_type[dtype]]()
    return max(
        1,
        COLUMNS_BYTES // (max(1, count) * tile_columns * bytes),
    )


def _packed_dy_elements[dtype: DType](p: ConvolutionProblem) -> Int:
    comptime rows = tile_rows[dtype]
    return BLOCK_PIXELS * ceildiv(p.group_k(), rows) * rows


@no_inline
def wgrad_gemm_cpu[
    dtype: DType
](dw: Ptr[dtype], x: Ptr[dtype], dy: Ptr[dtype], p: ConvolutionProblem):
    """Computes the weight gradient of any problem; workers share the columns, or the pixels where columns are few.
    """
    comptime acc_type = accumulation_type[dtype]
    comptime width = simd_width_of[acc_type]()
    comptime tile_columns = tile_vectors[dtype] * width
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
    var scratch = packed_columns + _packed_dy_elements[dtype](p)
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
