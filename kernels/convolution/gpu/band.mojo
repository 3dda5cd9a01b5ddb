"""Depthwise rows as products with banded matrices: geometry of the forward pass and the data gradient.

One channel's row of eight pixels of the result is the product of a row of 16 pixels of the source with a 16 x 8 matrix
that holds a row of the filter along its diagonals; 16 such rows make one product of tensor cores, and a wide band takes
several. On an axis a pixel of the result and one of the source belong to a tap where

    forward        source = result + tap * dilation - pad      (with a stride of 1 along W)
    data gradient  source * stride = result + pad - tap * dilation

so that a band repeats after `period` pieces of eight pixels of the result, one piece of the source on. Element (k, n)
of a band depends on k * k_step - n alone: a table of a filter's row by that difference holds all of it.
"""

from std.math import ceildiv

from max.gpu.memory import AddressSpace

from ...common.argument import KernelArgument
from ...common.arithmetic import Divisor, divide
from ...common.pointer import Ptr
from ..gather import PhaseAxis, forward_phases, gradient_phases
from ..problem import ConvolutionProblem
from .phase_table import AxisTable
from .planes import PIECE, TiledPlanes, WordPtr, watch

comptime OCTETS = 4
"""Vectors of channels of a block."""
comptime CHANNELS = OCTETS * PIECE
"""Channels of a block."""
comptime LINES = 16
"""Rows of a product."""
comptime DEPTH = 16
"""Columns of the source that a product has."""
comptime THREADS = 256
comptime MAX_TILES = 4
"""Pieces of the result side by side that a warp sums at once, for each place in the period."""
# A multiprocessor has 227 KiB for its blocks.
comptime MAX_SHARED_BYTES = 100 * 1024
comptime USUAL_SHARED_BYTES = 56 * 1024
comptime MAX_STEPS = 4
"""Most products that a band may be deep: longer bands are mostly zeros."""


@fieldwise_init
struct BandMatrix(KernelArgument):
    """The band of a filter's row."""

    var taps: Int32
    var dilation: Int32
    var pad: Int32
    var forward: Bool
    var k_step: Int32
    var period: Int32
    var first: Int32
    """Column of the source at which the band of the result's column 0 begins."""
    var steps: Int32
    """Products that the band is deep."""
    var lowest: Int32
    """The least difference in the table."""
    var span: Int32
    """Entries of the table, for each row of a channel's filter."""
    var by_span: Divisor

    @staticmethod
    def of(p: ConvolutionProblem, forward: Bool) -> Self:
        var reach = (p.s - 1) * p.dilation_w
        var step = p.stride_w
        var first = -p.pad_w
        var last = PIECE - 1 + reach - p.pad_w
        var lowest = -1
        var k_step = 1
        if not forward:
            first = (p.pad_w - reach) // step
            last = (PIECE * step - 1 + p.pad_w) // step
            k_step = step
            lowest = p.pad_w - first * step - reach - step
        var span = reach + 1 + k_step
        return Self(
            Int32(p.s),
            Int32(p.dilation_w),
            Int32(p.pad_w),
            forward,
            Int32(k_step),
            Int32(1 if forward else step),
            Int32(first),
            Int32(ceildiv(last - first + 1, DEPTH)),
            Int32(lowest),
            Int32(span),
            Divisor(span),
        )

    @always_inline
    def tap(self, entry: Int32) -> Int32:
        """Returns the tap at a table's entry, or -1."""
        var at = entry - self.k_step
        if not self.forward:
            at = self.span - 1 - entry
        if at < 0 or at >= self.span - self.k_step:
            return -1
        var tap, rest = divide(at, self.dilation)
        return tap if rest == 0 else -1

    @always_inline
    def entry(self, k: Int32, n: Int32) -> Int32:
        """Returns the table's index of elements (k, n) and (k + 1, n) of the band; outside of the table both are zeros.
        """
        return k * self.k_step - n - self.lowest

    @always_inline
    def source(self, column: Int32, tap: Int32) -> Int32:
        """Returns the column of the source for one of the result, negative where there is none.
        """
        var at = column + tap * self.dilation - self.pad
        if not self.forward:
            at = column + self.pad - tap * self.dilation
            if at < 0:
                return -1
            var quotient, rest = divide(at, self.k_step)
            return quotient if rest == 0 else -1
        return at


@fieldwise_init
struct Band(KernelArgument):
    """One launch: its geometry, and the parts of it that a block has."""

    var planes: TiledPlanes
    var columns: BandMatrix
    var rows: AxisTable
    """The result's rows by their residue, as phases of a data gradient have them."""
    var lowest_row: Int32
    """Row of the source at which the tile of the result's row 0 begins."""
    var result_height: Int32
    var result_width: Int32
    var lines: Int32
    """Rows of the result, of one residue, that a block has of one image."""
    var images: Int32
    """Images of a block."""
    var out_pitch: Int32
    var out_size: Int32
    """Pieces of one channel in the tile of results."""
    var out_base: Int32
    """Start of the tile of results, in words; 0 where results take the place of the source."""
    var table_base: Int32
    var filter_rows: Int32
    var line_tiles: Int32
    var column_tiles: Int32
    var units: Int32
    var by_lines: Divisor
    var by_out_pitch: Divisor
    var by_rows: Divisor

    @always_inline
    def count(self) -> Int32:
        """Returns the number of rows of a product in use."""
        return self.lines * self.images

    @always_inline
    def table_words(self) -> Int32:
        return CHANNELS * self.filter_rows * self.columns.span

    def shared_bytes(self) -> Int:
        """Returns the bytes of a block's shared memory. The tables end with a word that tells of elements that are not
        finite."""
        return 4 * Int(self.table_base + self.table_words() + 4)

    @always_inline
    def line(self, row: Int32) -> Tuple[Int32, Int32]:
        """Returns the block's image of a row of the product, and the line of that image.
        """
        return self.by_lines.divide(min(row, self.count() - 1))

    @always_inline
    def source_row(self, axis: PhaseAxis, row: Int32) -> Int32:
        """Returns the row of the planes that a row of the product begins with.
        """
        var image, line = self.line(row)
        return (
            image * self.planes.lines
            + line * Int32(axis.step)
            + Int32(axis.first_offset)
            - self.lowest_row
        )


@fieldwise_init
struct BlockExtents(ImplicitlyCopyable, TrivialRegisterPassable):
    """Extents of the part of a problem that a block takes at once."""

    var tiles: Int
    """Pieces of the result in a row, for each place in the period."""
    var lines: Int
    var images: Int


def axes_of_rows(p: ConvolutionProblem, forward: Bool) -> List[PhaseAxis]:
    """Returns the axes of the result's rows, by residue."""
    if forward:
        return [forward_phases(p)[0].h]
    var phases = gradient_phases(p, 0)
    var across = min(p.stride_w, p.w)
    var axes = List[PhaseAxis]()
    for i in range(min(p.stride_h, p.h)):
        axes.append(phases[i * across].h)
    return axes^


def band_of(
    p: ConvolutionProblem,
    forward: Bool,
    axes: List[PhaseAxis],
    tiling: BlockExtents,
) -> Band:
    var columns = BandMatrix.of(p, forward)
    var lowest = Int.MAX
    var highest = Int.MIN
    for axis in axes:
        if axis.taps > 0:
            var last = axis.offset(axis.taps - 1)
            lowest = min(lowest, min(axis.first_offset, last))
            highest = max(highest, max(axis.first_offset, last))
    if lowest > highest:
        lowest = 0
        highest = 0
    var step = axes[0].step
    var planes = TiledPlanes.of(
        p.c,
        p.n,
        p.h if forward else p.p,
        p.w if forward else p.q,
        (tiling.lines - 1) * step + highest - lowest + 1,
        tiling.images,
        tiling.tiles - 1 + 2 * Int(columns.steps),
    )
    var across = tiling.tiles * Int(columns.period)
    var out_pitch = across | 1
    var words = CHANNELS * Int(planes.size) * 4
    var out_base = 0
    var out_size = Int(planes.size)
    if len(axes) > 1 or columns.period > 1:
        # Rows of other residues still need the source.
        out_base = words
        out_size = (tiling.lines * tiling.images * out_pitch + 7) // 8 * 8
        words += CHANNELS * out_size * 4
    var width = p.q if forward else p.w
    var line_tiles = ceildiv(axes[0].rows, tiling.lines)
    var column_tiles = ceildiv(width, PIECE * across)
    return Band(
        planes,
        columns,
        AxisTable.of(axes),
        Int32(lowest),
        Int32(p.p if forward else p.h),
        Int32(width),
        Int32(tiling.lines),
        Int32(tiling.images),
        Int32(out_pitch),
        Int32(out_size),
        Int32(out_base),
        Int32(words),
        Int32(p.r),
        Int32(line_tiles),
        Int32(column_tiles),
        Int32(line_tiles * column_tiles * ceildiv(p.n, tiling.images)),
        Divisor(tiling.lines),
        Divisor(out_pitch),
        Divisor(p.r),
    )


def choose_tiling(
    p: ConvolutionProblem, forward: Bool, axes: List[PhaseAxis], enough: Int
) -> BlockExtents:
    """Chooses extents as large as shared memory allows, but such that there are `enough` blocks if possible.
    """
    var columns = BandMatrix.of(p, forward)
    var pieces = ceildiv(p.q if forward else p.w, PIECE * Int(columns.period))
    var tiling = BlockExtents(1, 1, 1)
    # The fewest pieces to load.
    var least = Int.MAX
    var tiles = 1
    while tiles <= MAX_TILES and tiles < 2 * pieces:
        var cost = ceildiv(pieces, tiles) * (tiles - 1 + 2 * Int(columns.steps))
        if cost <= least:
            least = cost
            tiling.tiles = tiles
        tiles *= 2
    var rows = axes[0].rows
    tiling.lines = ceildiv(rows, ceildiv(rows, LINES))
    if tiling.lines == rows:
        tiling.images = min(p.n, LINES // rows)
    var channel_blocks = ceildiv(p.c, CHANNELS)
    while tiling.images > 1 or tiling.lines > 1:
        var band = band_of(p, forward, axes, tiling)
        var fits = band.shared_bytes() <= USUAL_SHARED_BYTES
        var few = channel_blocks * Int(band.units) < enough
        if fits and (not few or (tiling.images == 1 and tiling.lines <= 4)):
            break
        if tiling.images > 1:
            tiling.images = ceildiv(tiling.images, 2)
        else:
            tiling.lines = ceildiv(tiling.lines, 2)
    while (
        tiling.tiles > 1
        and band_of(p, forward, axes, tiling).shared_bytes()
        > USUAL_SHARED_BYTES
    ):
        tiling.tiles //= 2
    return tiling


@always_inline
def fill_tables[
    dtype: DType, space: AddressSpace
](
    tables: WordPtr[space],
    w: Ptr[dtype],
    band: Band,
    first_channel: Int32,
    thread: Int32,
) -> UInt32:
    """Writes every row of the block's filters by the differences of band elements, in pairs; returns a nonzero value if
    this thread met an infinite element or NaN, as `load_planes` does."""
    comptime BATCH = 4
    var met = UInt32(0)
    var words = band.table_words()
    for first in range(thread, words, BATCH * THREADS):
        var batch = SIMD[DType.uint32, BATCH](0)
        comptime for i in range(BATCH):
            var word = first + Int32(i * THREADS)
            var row, entry = band.columns.by_span.divide(min(word, words - 1))
            var channel, _ = band.by_rows.divide(row)
            if first_channel + channel < band.planes.channels:
                var base = w.unsafe_bitcast[UInt16]().unsafe_offset(
                    (Int(first_channel) * Int(band.filter_rows) + Int(row))
                    * Int(band.columns.taps)
                )
                var low = band.columns.tap(entry)
                var high = band.columns.tap(entry + band.columns.k_step)
                if low >= 0:
                    batch[i] = UInt32(base[unsafe_offset=Int(low)])
                if high >= 0:
                    batch[i] |= UInt32(base[unsafe_offset=Int(high)]) << 16
        comptime for i in range(BATCH):
            var word = first + Int32(i * THREADS)
            if word < words:
                tables[unsafe_offset=Int(word)] = batch[i]
        met |= watch[dtype, BATCH](batch)
    return met


@always_inline
def band_word[
    space: AddressSpace
](table: WordPtr[space], columns: BandMatrix, k: Int32, n: Int32) -> UInt32:
    """Returns elements (k, n) and (k + 1, n) of a band as one word."""
    var entry = columns.entry(k, n)
    var inside = UInt32(entry) < UInt32(columns.span)
    var word = table[unsafe_offset=Int(entry if inside else 0)]
    return word if inside else 0


def is_depthwise_in_pairs[
    dtype: DType
](p: ConvolutionProblem, a: Ptr[dtype], b: Ptr[dtype]) -> Optional[String]:
    """Returns None, or why tensor cores do not take the depthwise problem with these tensors of pixels, whatever its
    window."""
    if dtype != DType.bfloat16 and dtype != DType.float16:
        return String("elements have not two bytes")
    if p.groups != p.c or p.groups != p.k:
        return String(t"C = {p.c}, K = {p.k} and groups = {p.groups} differ")
    if p.c % 2 != 0 or (Int(a) | Int(b)) % 4 != 0:
        return String(t"C = {p.c}: pairs of channels are not aligned")
    if p.is_deep():
        return String("three axes")
    if min(p.x_size(), min(p.y_size(), p.w_size())) == 0:
        return String("a tensor is empty")
    if max(p.input_pixels(), p.output_pixels()) >= 1 << 30:
        return String("more than 2^30 pixels")
    return None
