"""Depthwise forward passes and data gradients of elements of two bytes on tensor cores: see band.

A block has 32 channels of some rows of some images, all columns of them or a few pieces. A warp has four channels, and
sums a row of the filter after the other. Where the source or the filter is not finite, the zeros of a band would make
NaN of what the convolution never multiplies: such a block sums pixel by pixel.

convolution_by_kernel.json has times beside cuDNN's for drawn problems.
"""

from std.math import ceildiv
from std.memory import bitcast
from std.utils.static_tuple import StaticTuple

from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    barrier,
    block_idx,
    grid_dim,
    thread_idx,
)
from max.gpu.compute.mma import mma
from max.gpu.host import DeviceAttribute, DeviceContext, FuncAttribute
from max.gpu.memory import AddressSpace, external_memory

from ...common.arithmetic import divide
from ...common.pointer import Ptr
from ...common.ptx import load_matrices, syncwarp
from ...common.tensor_cores import pairs_compile
from ..passes import ANY_GROUPS, FPROP, WGRAD
from ..gather import PhaseAxis
from ..kernel import ConvolutionKernel, ConvolutionTensors
from ..problem import ConvolutionProblem
from .band import (
    CHANNELS,
    DEPTH,
    LINES,
    MAX_SHARED_BYTES,
    MAX_STEPS,
    OCTETS,
    THREADS,
    Band,
    BandMatrix,
    BlockExtents,
    axes_of_rows,
    band_of,
    band_word,
    choose_tiling,
    fill_tables,
    is_depthwise_in_pairs,
)
from .phase_table import MAX_STRIDE
from .planes import (
    PIECE,
    Corner,
    SharedWords,
    WordPtr,
    address,
    load_planes,
    place,
    store_octets,
)

comptime WARP_CHANNELS = CHANNELS // (THREADS // 32)
"""Channels of a warp."""
# Threads of a multiprocessor that registers must suffice for.
comptime RESIDENT_THREADS = 1024
comptime Sum = SIMD[DType.float32, 4]


@always_inline
def _add[
    dtype: DType
](
    mut sum: Sum,
    left: SIMD[DType.uint32, 2],
    right: SIMD[DType.uint32, 2],
    low: UInt32,
    high: UInt32,
):
    """Adds the product of two pieces of 16 rows and a band."""
    mma(
        sum,
        bitcast[dtype, 8](left.join(right)),
        bitcast[dtype, 4](SIMD[DType.uint32, 2](low, high)),
        sum,
    )


@always_inline
def _sum_channel[
    dtype: DType, tiles: Int
](
    plane: SharedWords,
    table: SharedWords,
    octet: Int32,
    band: Band,
    axis: PhaseAxis,
    place_in_period: Int32,
    lane: Int32,
) -> Array[Sum, tiles]:
    """Sums `tiles` pieces of a channel's result, one of each period, in 16 rows.
    """
    comptime pieces = tiles + 1
    var sums = Array[Sum, tiles](fill=0)
    var side = lane // LINES
    var n = lane // 4 + PIECE * place_in_period
    var row = band.source_row(axis, lane % LINES)
    for j in range(Int32(axis.taps)):
        var first = row * band.planes.pitch + side
        var filter = table.unsafe_offset(
            Int(
                (Int32(axis.first_tap) + j * Int32(axis.tap_step))
                * band.columns.span
            )
        )
        for step in range(band.columns.steps):
            var k = lane % 4 * 2 + step * DEPTH
            var low = band_word(filter, band.columns, k, n)
            var high = band_word(filter, band.columns, k + PIECE, n)
            # Neighbours share a piece.
            var halves = Array[SIMD[DType.uint32, 2], pieces](fill=0)
            comptime for i in range(0, pieces, 2):
                comptime count = 4 if i + 1 < pieces else 2
                var words = load_matrices[count](
                    address(plane, place[OCTETS](first + Int32(i), octet))
                )
                comptime for e in range(count // 2):
                    halves[i + e] = SIMD[DType.uint32, 2](
                        words[2 * e], words[2 * e + 1]
                    )
            comptime for i in range(tiles):
                _add[dtype](sums[i], halves[i], halves[i + 1], low, high)
            first += 2
        row += Int32(axis.offset_step)
    return sums^


@always_inline
def keep_sums[
    dtype: DType, tiles: Int, space: AddressSpace
](
    plane: WordPtr[space],
    octet: Int32,
    band: Band,
    place_in_period: Int32,
    lane: Int32,
    sums: Array[Sum, tiles],
):
    """Stores the sums, rounded, to the channel's plane of results."""
    comptime for i in range(tiles):
        comptime for half in range(2):
            var line = lane // 4 + Int32(8 * half)
            if line < band.count():
                var piece = (
                    line * band.out_pitch
                    + Int32(i) * band.columns.period
                    + place_in_period
                )
                var pair = SIMD[DType.float32, 2](
                    sums[i][2 * half], sums[i][2 * half + 1]
                ).cast[dtype]()
                plane[
                    unsafe_offset=Int(
                        4 * place[OCTETS](piece, octet) + lane % 4
                    )
                ] = bitcast[DType.uint32, 1](pair)


@always_inline
def store_tile[
    dtype: DType, vector: Int, tiles: Int, space: AddressSpace
](
    result: Ptr[dtype],
    planes: WordPtr[space],
    band: Band,
    axis: PhaseAxis,
    corner: Corner,
    thread: Int32,
):
    """Stores the rows of one residue; the corner is the result's, its row counted in the residue.
    """
    var octet = thread % OCTETS
    var channel = corner.channel + octet * PIECE
    var channels = Int(band.planes.channels)
    if channel >= band.planes.channels:
        return
    for piece in range(
        thread // OCTETS, band.count() * band.out_pitch, THREADS // OCTETS
    ):
        var row, across = band.by_out_pitch.divide(piece)
        var image, line = band.line(row)
        var n = corner.image + image
        var h = corner.row + line
        var w = corner.column + across * PIECE
        if (
            across < Int32(tiles) * band.columns.period
            and n < band.planes.images
            and h < Int32(axis.rows)
            and w < band.result_width
        ):
            var pixel = (
                Int(n) * Int(band.result_height)
                + axis.out_first
                + Int(h) * axis.out_step
            ) * Int(band.result_width) + Int(w)
            store_octets[dtype, vector, OCTETS](
                result.unsafe_offset(pixel * channels + Int(channel)),
                channels,
                band.result_width - w,
                band.planes.channels - channel,
                planes,
                band.out_size,
                piece,
                octet,
            )


@no_inline
def sum_plainly[
    dtype: DType, tiles: Int
](
    result: Ptr[dtype],
    source: Ptr[dtype],
    w: Ptr[dtype],
    band: Band,
    axis: PhaseAxis,
    corner: Corner,
    thread: Int32,
):
    """Computes and stores the same results as `_sum_channel` and the stores behind it, from device memory, with only
    the products that exist."""
    var channel = corner.channel + thread % CHANNELS
    var planes = band.planes
    if channel >= planes.channels:
        return
    var across = Int32(tiles * PIECE) * band.columns.period
    for pixel in range(
        thread // CHANNELS, band.count() * across, THREADS // CHANNELS
    ):
        var row, column = divide(pixel, across)
        var image, line = band.line(row)
        var n = corner.image + image
        var h = corner.row + line
        column += corner.column
        if (
            n >= planes.images
            or h >= Int32(axis.rows)
            or column >= band.result_width
        ):
            continue
        var sum = Float32(0)
        for r in range(axis.taps):
            var at_h = h * Int32(axis.step) + Int32(axis.offset(r))
            if UInt32(at_h) >= UInt32(planes.height):
                continue
            var taps = (
                Int(channel) * Int(band.filter_rows)
                + axis.first_tap
                + r * axis.tap_step
            ) * Int(band.columns.taps)
            for s in range(band.columns.taps):
                var at_w = band.columns.source(column, s)
                if UInt32(at_w) >= UInt32(planes.width):
                    continue
                var at = (Int(n) * Int(planes.height) + Int(at_h)) * Int(
                    planes.width
                ) + Int(at_w)
                sum = (
                    source[
                        unsafe_offset=at * Int(planes.channels) + Int(channel)
                    ]
                    .cast[DType.float32]()
                    .fma(
                        w[unsafe_offset=taps + Int(s)].cast[DType.float32](),
                        sum,
                    )
                )
        var at = (
            Int(n) * Int(band.result_height)
            + axis.out_first
            + Int(h) * axis.out_step
        ) * Int(band.result_width) + Int(column)
        result[
            unsafe_offset=at * Int(planes.channels) + Int(channel)
        ] = sum.cast[dtype]()


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](
        Int32(RESIDENT_THREADS)
    ),
)
@__name(t"conv_depthwise_band_{dtype}_v{vector}_{tiles}")
def depthwise_band_kernel[
    dtype: DType, vector: Int, tiles: Int
](result: Ptr[dtype], source: Ptr[dtype], w: Ptr[dtype], band: Band):
    """Computes the block's channels of every grid_dim.y-th unit: rows of some images by `tiles` periods of columns.
    """
    var thread = Int32(thread_idx.x)
    var lane = thread % 32
    var first_channel = Int32(block_idx.x) * CHANNELS
    var shared = external_memory[
        UInt32, address_space=AddressSpace.SHARED, alignment=128
    ]()
    var out = shared.unsafe_offset(Int(band.out_base))
    var tables = shared.unsafe_offset(Int(band.table_base))
    var flag = tables.unsafe_offset(Int(band.table_words()))
    if thread == 0:
        flag[] = 0
    barrier()
    var met = fill_tables[dtype](tables, w, band, first_channel, thread)
    for unit in range(Int32(block_idx.y), band.units, Int32(grid_dim.y)):
        var rest, column_tile = divide(unit, band.column_tiles)
        var group, line_tile = divide(rest, band.line_tiles)
        var first_line = line_tile * band.lines
        met |= load_planes[dtype, vector, OCTETS, THREADS](
            shared,
            source,
            band.planes,
            Corner(
                group * band.images,
                first_line * Int32(band.rows.same.step) + band.lowest_row,
                band.columns.first + column_tile * Int32(tiles * PIECE),
                first_channel,
            ),
            thread,
        )
        if met != 0:
            flag[] = 1
        barrier()
        var plain = flag[] != 0
        var corner = Corner(
            group * band.images,
            first_line,
            column_tile * Int32(tiles * PIECE) * band.columns.period,
            first_channel,
        )
        for residue in range(band.rows.residues):
            var axis = band.rows.axis(residue)
            if plain:
                sum_plainly[dtype, tiles](
                    result, source, w, band, axis, corner, thread
                )
                continue
            for own in range(WARP_CHANNELS):
                var channel = thread // 32 * WARP_CHANNELS + Int32(own)
                if first_channel + channel >= band.planes.channels:
                    break
                var octet = channel // PIECE
                for u in range(band.columns.period):
                    var sums = _sum_channel[dtype, tiles](
                        shared.unsafe_offset(
                            Int(4 * channel * band.planes.size)
                        ),
                        tables.unsafe_offset(
                            Int(channel * band.filter_rows * band.columns.span)
                        ),
                        octet,
                        band,
                        axis,
                        u,
                        lane,
                    )
                    # Results may take the place of what the warp has read.
                    syncwarp()
                    keep_sums[dtype, tiles](
                        out.unsafe_offset(Int(4 * channel * band.out_size)),
                        octet,
                        band,
                        u,
                        lane,
                        sums,
                    )
            barrier()
            store_tile[dtype, vector, tiles](
                result, out, band, axis, corner, thread
            )
            barrier()
        if plain:
            # The next unit's loads may set the flag.
            barrier()


@always_inline
def _launch[
    dtype: DType, vector: Int, tiles: Int
](
    result: Ptr[dtype],
    source: Ptr[dtype],
    w: Ptr[dtype],
    band: Band,
    blocks: Int,
    ctx: DeviceContext,
) raises:
    """Launches the kernel; `blocks` blocks run at once."""
    var across = ceildiv(Int(band.planes.channels), CHANNELS)
    var units = Int(band.units)
    var rounds = ceildiv(units, max(1, blocks // across))
    ctx.enqueue_function[depthwise_band_kernel[dtype, vector, tiles]](
        result,
        source,
        w,
        band,
        grid_dim=(across, ceildiv(units, rounds)),
        block_dim=THREADS,
        shared_mem_bytes=band.shared_bytes(),
        func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(
            UInt32(band.shared_bytes())
        ),
    )


struct DepthwiseBand(ConvolutionKernel):
    comptime NAME: StaticString = "depthwise_band"

    @staticmethod
    def compiles[dtype: DType, pass_: Int, grouping: Int]() -> Bool:
        return (
            pairs_compile[dtype]() and pass_ != WGRAD and grouping == ANY_GROUPS
        )

    @staticmethod
    def refusal[
        dtype: DType, pass_: Int
    ](t: ConvolutionTensors[dtype], p: ConvolutionProblem) -> Optional[String]:
        comptime forward = pass_ == FPROP
        var reason = is_depthwise_in_pairs(p, t.result, t.a)
        if reason:
            return reason
        if max(p.stride_h, p.stride_w) > MAX_STRIDE:
            return String(
                t"strides {p.stride_h} and {p.stride_w}; at most {MAX_STRIDE}"
            )
        if forward and p.stride_w > 1:
            return String(t"stride {p.stride_w} along W")
        var columns = BandMatrix.of(p, forward)
        if columns.steps > MAX_STEPS:
            return String(t"{p.s} taps, dilation {p.dilation_w}: a sparse band")
        var bytes = band_of(
            p, forward, axes_of_rows(p, forward), BlockExtents(1, 1, 1)
        ).shared_bytes()
        if bytes > MAX_SHARED_BYTES:
            return String(t"a row of the result takes {bytes} bytes")
        return None

    @staticmethod
    @no_inline
    def launch[
        dtype: DType, pass_: Int
    ](
        ctx: DeviceContext, t: ConvolutionTensors[dtype], p: ConvolutionProblem
    ) raises:
        comptime forward = pass_ == FPROP
        var multiprocessors = ctx.get_attribute(
            DeviceAttribute.MULTIPROCESSOR_COUNT
        )
        var axes = axes_of_rows(p, forward)
        var tiling = choose_tiling(p, forward, axes, multiprocessors)
        var band = band_of(p, forward, axes, tiling)
        # A block's own kilobyte of shared memory comes on top.
        var resident = min(
            RESIDENT_THREADS // THREADS,
            227 * 1024 // (band.shared_bytes() + 1024),
        )
        var blocks = resident * multiprocessors
        var wide = p.c % PIECE == 0 and (Int(t.result) | Int(t.a)) % 16 == 0
        comptime for tiles in [1, 2, 4]:
            if tiling.tiles == tiles:
                if wide:
                    _launch[dtype, PIECE, tiles](
                        t.result, t.a, t.b, band, blocks, ctx
                    )
                else:
                    _launch[dtype, 2, tiles](
                        t.result, t.a, t.b, band, blocks, ctx
                    )
