"""Depthwise weight gradients of elements of two bytes on tensor cores, for strides of 1 along W.

One channel's 16 rows of dy, eight columns of them, times the rows of x that tap row r reads, 16 columns, are a 16 x 8
matrix whose diagonals are the products of the taps in that row: element (k, n) belongs to tap k - n. A warp has such
sums of every tap row of its two channels, over all pixels of its block, and adds up their diagonals at the end. Slices
of pixels are added in order. What is not finite is summed pixel by pixel, as in depthwise_band.

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
from max.gpu.host import (
    DeviceAttribute,
    DeviceBuffer,
    DeviceContext,
    FuncAttribute,
)
from max.gpu.memory import AddressSpace, external_memory

from ...common.argument import KernelArgument
from ...common.arithmetic import divide
from ...common.library import scratch
from ...common.pointer import Ptr
from ...common.ptx import load_matrices, syncwarp
from ...common.tensor_cores import pairs_compile
from ..kernel import ConvolutionKernel, ConvolutionTensors
from ..passes import ANY_GROUPS, WGRAD
from ..problem import ConvolutionProblem
from .band import LINES, MAX_SHARED_BYTES, THREADS, is_depthwise_in_pairs
from .depthwise import is_aligned
from .depthwise_band import Sum
from .planes import (
    PIECE,
    Corner,
    TiledPlanes,
    SharedWords,
    address,
    load_planes,
    place,
)
from .tiled import add_slices

comptime OCTETS = 2
"""Vectors of channels of a block."""
comptime CHANNELS = OCTETS * PIECE
"""Channels of a block."""
comptime WARP_CHANNELS = CHANNELS // (THREADS // 32)
"""Channels of a warp."""
comptime MAX_TILES = 4
"""Pieces of eight pixels of a row of dy that a block takes at once."""
comptime MAX_ROWS = 9
"""Most rows of the filter: a warp has sums for each."""
comptime MAX_REACH = PIECE
"""Most pixels from a row's first tap to its last."""
# Threads of a multiprocessor that registers must suffice for.
comptime RESIDENT_THREADS = 512


@fieldwise_init
struct BandWgrad(KernelArgument):
    """One launch: its geometry, and the parts of it that a block has at once.
    """

    var x: TiledPlanes
    var dy: TiledPlanes
    var filter_rows: Int32
    var taps: Int32
    """Taps of a row of the filter."""
    var stride_h: Int32
    var dilation_h: Int32
    var dilation_w: Int32
    var pad_h: Int32
    var pad_w: Int32
    var images: Int32
    """Images of a block, with `dy.lines` rows of each."""
    var line_tiles: Int32
    var column_tiles: Int32
    var units: Int32

    @staticmethod
    def of(p: ConvolutionProblem, tiles: Int, lines: Int, images: Int) -> Self:
        var line_tiles = ceildiv(p.p, lines)
        var column_tiles = ceildiv(p.q, PIECE * tiles)
        return Self(
            TiledPlanes.of(
                p.c,
                p.n,
                p.h,
                p.w,
                (lines - 1) * p.stride_h + (p.r - 1) * p.dilation_h + 1,
                images,
                tiles + 1,
            ),
            TiledPlanes.of(p.c, p.n, p.p, p.q, lines, images, tiles),
            Int32(p.r),
            Int32(p.s),
            Int32(p.stride_h),
            Int32(p.dilation_h),
            Int32(p.dilation_w),
            Int32(p.pad_h),
            Int32(p.pad_w),
            Int32(images),
            Int32(line_tiles),
            Int32(column_tiles),
            Int32(line_tiles * column_tiles * ceildiv(p.n, images)),
        )

    @always_inline
    def dy_base(self) -> Int:
        """Returns the start of dy's tile in shared memory, in words."""
        return 4 * CHANNELS * Int(self.x.size)

    @always_inline
    def sums_base(self) -> Int:
        return self.dy_base() + 4 * CHANNELS * Int(self.dy.size)

    @always_inline
    def sum_count(self) -> Int32:
        return CHANNELS * self.filter_rows * self.taps

    def shared_bytes(self) -> Int:
        """Returns the bytes of a block's shared memory. The sums made plainly, and a word that tells whether there are
        any, come last."""
        return 4 * (self.sums_base() + Int(self.sum_count()) + 1)

    @always_inline
    def line(self, row: Int32) -> Tuple[Int32, Int32]:
        """Returns the block's image of a row of the product, and the line of that image.
        """
        return self.dy.by_lines.divide(min(row, self.dy.rows - 1))

    @always_inline
    def x_row(self, row: Int32) -> Int32:
        """Returns the row of x's planes that tap row 0 reads."""
        var image, line = self.line(row)
        return image * self.x.lines + line * self.stride_h

    @always_inline
    def corners(self, unit: Int32, channel: Int32) -> Tuple[Corner, Corner]:
        """Returns the corners of a unit's tiles of x and dy."""
        var rest, column_tile = divide(unit, self.column_tiles)
        var group, line_tile = divide(rest, self.line_tiles)
        var image = group * self.images
        var p = line_tile * self.dy.lines
        var q = column_tile * self.dy.pieces * PIECE
        return (
            Corner(
                image,
                p * self.stride_h - self.pad_h,
                q - self.pad_w,
                channel,
            ),
            Corner(image, p, q, channel),
        )


@always_inline
def rows_in_use(word: UInt32, first: Int32, rows: Int32) -> UInt32:
    """Returns a pair of rows of the product with zeros for the rows behind the last one.
    """
    if first + 1 < rows:
        return word
    return word & 0xFFFF if first < rows else 0


@always_inline
def _add_unit[
    dtype: DType, rows: Int
](
    mut sums: Array[Sum, rows],
    x_plane: SharedWords,
    dy_plane: SharedWords,
    octet: Int32,
    band: BandWgrad,
    lane: Int32,
):
    """Adds one channel's products of a unit."""
    var row = lane % LINES
    var first = band.x_row(row) * band.x.pitch
    var step = band.dilation_h * band.x.pitch
    var dy_piece = min(row, band.dy.rows - 1) * band.dy.pitch
    var before = Array[SIMD[DType.uint32, 2], rows](fill=0)
    comptime for r in range(rows):
        # Behind the filter's last row the sums are not used.
        var at = first + min(Int32(r), band.filter_rows - 1) * step
        before[r] = load_matrices[2, True](
            address(x_plane, place[OCTETS](at, octet))
        )
    for i in range(band.dy.pieces):
        var gradient = load_matrices[2, True](
            address(dy_plane, place[OCTETS](dy_piece + i, octet))
        )
        var pair = lane % 4 * 2
        gradient[0] = rows_in_use(gradient[0], pair, band.dy.rows)
        gradient[1] = rows_in_use(gradient[1], pair + PIECE, band.dy.rows)
        var right = bitcast[dtype, 4](gradient)
        comptime for r in range(rows):
            var at = first + min(Int32(r), band.filter_rows - 1) * step
            var next = load_matrices[2, True](
                address(x_plane, place[OCTETS](at + i + 1, octet))
            )
            var left = SIMD[DType.uint32, 4](
                before[r][0], next[0], before[r][1], next[1]
            )
            mma(sums[r], bitcast[dtype, 8](left), right, sums[r])
            before[r] = next


@no_inline
def add_plainly[
    dtype: DType, space: AddressSpace
](
    sums: MutPointer[Float32, MutUntrackedOrigin, address_space=space],
    x: Ptr[dtype],
    dy: Ptr[dtype],
    band: BandWgrad,
    corner: Corner,
    thread: Int32,
):
    """Adds a unit's products that exist, from device memory, to [tap][channel]; the corner is dy's.
    """
    var planes = band.x
    var channels = Int(planes.channels)
    for index in range(thread, band.sum_count(), Int32(THREADS)):
        var channel = corner.channel + index % CHANNELS
        if channel >= planes.channels:
            continue
        var r, s = divide(index // CHANNELS, band.taps)
        var sum = Float32(0)
        for row in range(band.dy.rows):
            var image, line = band.line(row)
            var n = corner.image + image
            var p = corner.row + line
            var h = p * band.stride_h + r * band.dilation_h - band.pad_h
            if (
                n >= planes.images
                or p >= band.dy.height
                or UInt32(h) >= UInt32(planes.height)
            ):
                continue
            for q in range(
                corner.column,
                min(corner.column + band.dy.pieces * PIECE, band.dy.width),
            ):
                var w = q + s * band.dilation_w - band.pad_w
                if UInt32(w) >= UInt32(planes.width):
                    continue
                var at = (Int(n) * Int(planes.height) + Int(h)) * Int(
                    planes.width
                ) + Int(w)
                var dy_at = (Int(n) * Int(band.dy.height) + Int(p)) * Int(
                    band.dy.width
                ) + Int(q)
                sum = (
                    x[unsafe_offset=at * channels + Int(channel)]
                    .cast[DType.float32]()
                    .fma(
                        dy[unsafe_offset=dy_at * channels + Int(channel)].cast[
                            DType.float32
                        ](),
                        sum,
                    )
                )
        sums[unsafe_offset=Int(index)] += sum


@always_inline
def diagonal[
    space: AddressSpace
](
    matrix: MutPointer[Float32, MutUntrackedOrigin, address_space=space],
    offset: Int32,
) -> Float32:
    """Returns the sum of elements (offset + n, n) of a 16 x 8 matrix."""
    var total = Float32(0)
    comptime for n in range(PIECE):
        total += matrix[unsafe_offset=(Int(offset) + n) * PIECE + n]
    return total


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](
        Int32(RESIDENT_THREADS)
    ),
)
@__name(t"conv_depthwise_band_wgrad_{dtype}_v{vector}_{rows}")
def depthwise_band_wgrad_kernel[
    dtype: DType, vector: Int, rows: Int
](
    dw: Ptr[dtype],
    partials: Ptr[DType.float32],
    x: Ptr[dtype],
    dy: Ptr[dtype],
    band: BandWgrad,
):
    """Sums every grid_dim.y-th unit of the block's channels, from unit block_idx.y on: dw itself if the grid has one
    slice, else slice block_idx.y of the partials [slice][channel][tap]."""
    var thread = Int32(thread_idx.x)
    var lane = thread % 32
    var warp = thread // 32
    var first_channel = Int32(block_idx.x) * CHANNELS
    var shared = external_memory[
        UInt32, address_space=AddressSpace.SHARED, alignment=128
    ]()
    var dy_planes = shared.unsafe_offset(band.dy_base())
    var plain_sums = shared.unsafe_offset(band.sums_base()).unsafe_bitcast[
        Float32
    ]()
    var flag = shared.unsafe_offset(band.sums_base() + Int(band.sum_count()))
    for i in range(thread, band.sum_count(), Int32(THREADS)):
        plain_sums[unsafe_offset=Int(i)] = 0
    if thread == 0:
        flag[] = 0
    barrier()
    var sums = Array[Array[Sum, rows], WARP_CHANNELS](
        fill=Array[Sum, rows](fill=0)
    )
    var met = UInt32(0)
    for unit in range(Int32(block_idx.y), band.units, Int32(grid_dim.y)):
        var corners = band.corners(unit, first_channel)
        met |= load_planes[dtype, vector, OCTETS, THREADS](
            shared, x, band.x, corners[0], thread
        )
        met |= load_planes[dtype, vector, OCTETS, THREADS](
            dy_planes, dy, band.dy, corners[1], thread
        )
        if met != 0:
            flag[] = 1
        barrier()
        if flag[] != 0:
            add_plainly[dtype](plain_sums, x, dy, band, corners[1], thread)
        else:
            comptime for own in range(WARP_CHANNELS):
                var channel = warp * WARP_CHANNELS + Int32(own)
                if first_channel + channel < band.x.channels:
                    _add_unit[dtype, rows](
                        sums[own],
                        shared.unsafe_offset(Int(4 * channel * band.x.size)),
                        dy_planes.unsafe_offset(
                            Int(4 * channel * band.dy.size)
                        ),
                        channel // PIECE,
                        band,
                        lane,
                    )
        barrier()
    # A matrix for each warp takes the place of x.
    comptime size = LINES * PIECE
    var matrix = shared.unsafe_bitcast[Float32]().unsafe_offset(
        Int(warp * Int32(size))
    )
    comptime for own in range(WARP_CHANNELS):
        var channel = warp * WARP_CHANNELS + Int32(own)
        var live = first_channel + channel < band.x.channels
        comptime for r in range(rows):
            syncwarp()
            comptime for half in range(2):
                matrix.unsafe_offset(
                    Int((lane // 4 + Int32(8 * half)) * PIECE + lane % 4 * 2)
                ).unsafe_store(
                    SIMD[DType.float32, 2](
                        sums[own][r][2 * half], sums[own][r][2 * half + 1]
                    )
                )
            syncwarp()
            if live and Int32(r) < band.filter_rows and lane < band.taps:
                var tap = Int32(r) * band.taps + lane
                var total = (
                    diagonal(matrix, lane * band.dilation_w)
                    + plain_sums[unsafe_offset=Int(tap * CHANNELS + channel)]
                )
                var at = (
                    Int(block_idx.y) * Int(band.x.channels)
                    + Int(first_channel + channel)
                ) * Int(band.filter_rows * band.taps) + Int(tap)
                if grid_dim.y == 1:
                    dw[unsafe_offset=at] = total.cast[dtype]()
                else:
                    partials[unsafe_offset=at] = total


def choose_wgrad_band(p: ConvolutionProblem, enough: Int) -> BandWgrad:
    """Chooses a unit as large as shared memory allows, but such that there are `enough` blocks if possible.
    """
    var pieces = ceildiv(p.q, PIECE)
    var rounds = ceildiv(pieces, MAX_TILES)
    var tiles = ceildiv(pieces, rounds)
    var lines = ceildiv(p.p, ceildiv(p.p, LINES))
    var images = min(p.n, LINES // lines) if lines == p.p else 1
    var across = ceildiv(p.c, CHANNELS)
    while True:
        var band = BandWgrad.of(p, tiles, lines, images)
        var fits = band.shared_bytes() <= MAX_SHARED_BYTES
        var few = across * Int(band.units) < enough
        if fits and (not few or (images == 1 and lines <= 8)):
            return band
        if images > 1:
            images = ceildiv(images, 2)
        elif lines > 1:
            lines = ceildiv(lines, 2)
        elif tiles > 1:
            tiles = ceildiv(tiles, 2)
        else:
            return band


@always_inline
def _launch[
    dtype: DType, vector: Int
](
    dw: Ptr[dtype],
    partials: DeviceBuffer[DType.float32],
    x: Ptr[dtype],
    dy: Ptr[dtype],
    band: BandWgrad,
    slices: Int,
    ctx: DeviceContext,
) raises:
    comptime for rows in [5, 7, MAX_ROWS]:
        if Int(band.filter_rows) <= rows:
            ctx.enqueue_function[
                depthwise_band_wgrad_kernel[dtype, vector, rows]
            ](
                dw,
                partials,
                x,
                dy,
                band,
                grid_dim=(ceildiv(Int(band.x.channels), CHANNELS), slices),
                block_dim=THREADS,
                shared_mem_bytes=band.shared_bytes(),
                func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(
                    UInt32(band.shared_bytes())
                ),
            )
            return


struct DepthwiseBandWgrad(ConvolutionKernel):
    comptime NAME: StaticString = "depthwise_band_wgrad"

    @staticmethod
    def compiles[dtype: DType, pass_: Int, grouping: Int]() -> Bool:
        return (
            pairs_compile[dtype]() and pass_ == WGRAD and grouping == ANY_GROUPS
        )

    @staticmethod
    def refusal[
        dtype: DType, pass_: Int
    ](t: ConvolutionTensors[dtype], p: ConvolutionProblem) -> Optional[String]:
        var reason = is_depthwise_in_pairs(p, t.a, t.b)
        if reason:
            return reason
        if p.stride_w != 1:
            return String(t"stride {p.stride_w} along W")
        if p.r > MAX_ROWS or (p.s - 1) * p.dilation_w > MAX_REACH:
            return String(
                t"a window of {p.r} x {p.s}, dilation {p.dilation_w} along W"
            )
        var bytes = BandWgrad.of(p, 1, 1, 1).shared_bytes()
        if bytes > MAX_SHARED_BYTES:
            return String(t"a row of dy takes {bytes} bytes")
        return None

    @staticmethod
    @no_inline
    def launch[
        dtype: DType, pass_: Int
    ](
        ctx: DeviceContext, t: ConvolutionTensors[dtype], p: ConvolutionProblem
    ) raises:
        var multiprocessors = ctx.get_attribute(
            DeviceAttribute.MULTIPROCESSOR_COUNT
        )
        var band = choose_wgrad_band(p, multiprocessors)
        var units = Int(band.units)
        var blocks = RESIDENT_THREADS // THREADS * multiprocessors
        var at_once = max(1, blocks // ceildiv(p.c, CHANNELS))
        # Adding up slices takes as long as a few units.
        var most = min(p.workspace_limit // (4 * p.w_size()), 65535)
        var slices = 1
        if units > 2 and most > 1:
            var rounds = ceildiv(units, min(at_once, most))
            slices = ceildiv(units, rounds)
        var partials = scratch[DType.float32](
            ctx, slices * p.w_size() if slices > 1 else 1
        )
        if p.c % PIECE == 0 and is_aligned(t.a) and is_aligned(t.b):
            _launch[dtype, PIECE](
                t.result, partials, t.a, t.b, band, slices, ctx
            )
        else:
            _launch[dtype, 2](t.result, partials, t.a, t.b, band, slices, ctx)
        if slices > 1:
            add_slices(t.result, partials, p.w_size(), slices, ctx)
