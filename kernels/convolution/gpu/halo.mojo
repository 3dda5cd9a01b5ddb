"""Tiles of result pixels over a halo of source pixels in shared memory, for the kernels of small groups.

    result: rows x columns of one image, or whole images      source: every pixel that one of the windows reads, once

    ┌─────────┐      tap (r, s) of result pixel (p, q):       ┌───────────┐
    │ p, q    │ ──▶  halo row p * step + r * offset_step, ──▶ │           │
    └─────────┘      column likewise                          └───────────┘

A pixel's channels, those of a few groups, lie together in shared memory, an odd number of 16-byte vectors; what lies
outside the source is zeros.
"""

from std.math import align_up, ceildiv
from std.sys import _RegisterPackType, size_of
from std.sys._assembly import inlined_assembly

from max.gpu.memory import AddressSpace

from ...common.argument import KernelArgument
from ...common.arithmetic import divide
from ...common.async_copy import copy_elements
from ...common.pointer import Ptr
from ...common.tensor_cores import Quad
from ..passes import DGRAD
from ..gather import PhaseAxis, Phase, forward_phases
from ..kernel import ConvolutionTensors
from ..problem import ConvolutionProblem
from .phase_table import PhaseTable
from .pipeline import block_refusal

comptime VECTOR = 8
"""Number of elements in 16 bytes."""
comptime CHUNK = 64
"""Most channels of a tile's source and result, in whole groups."""
comptime SHARED_BYTES = 96 * 1024
"""Most bytes of shared memory of a block: two blocks fit a multiprocessor of Hopper's, one any other's since sm_80."""
comptime MAX_PIXELS = 512
"""Most pixels of a tile."""


@no_inline
def halo_refusal[
    dtype: DType, pass_: Int
](t: ConvolutionTensors[dtype], p: ConvolutionProblem) -> Optional[String]:
    """Returns None, or why no kernel over halos takes the problem."""
    var reason = block_refusal[pass_](p)
    if reason:
        return reason
    if p.groups == 1:
        return String("takes groups")
    if p.is_deep():
        return String("takes two spatial axes, not three")
    var most = max(p.group_c(), p.group_k())
    if p.group_c() % VECTOR != 0 or p.group_k() % VECTOR != 0 or most > CHUNK:
        return String(
            t"{p.group_c()} and {p.group_k()} channels in a group; takes"
            t" multiples of {VECTOR} up to {CHUNK}"
        )
    if not t.are_aligned():
        return String("a tensor does not begin at a multiple of 16 bytes")
    return None


@always_inline
def halo_extent(count: Int32, axis: PhaseAxis) -> Int32:
    """Returns the number of source pixels along an axis that `count` neighbouring result pixels read.
    """
    return (
        (count - 1) * Int32(axis.step)
        + max(Int32(axis.taps) - 1, 0) * abs(Int32(axis.offset_step))
        + 1
    )


@always_inline
def lowest_offset(axis: PhaseAxis) -> Int32:
    """Returns the lowest offset of all taps."""
    return Int32(axis.first_offset) + min(
        Int32(0), max(Int32(axis.taps) - 1, 0) * Int32(axis.offset_step)
    )


@fieldwise_init
struct PixelIndex(ImplicitlyCopyable, TrivialRegisterPassable):
    """An image, and a row and a column of it."""

    var n: Int32
    var h: Int32
    var w: Int32

    @staticmethod
    @always_inline
    def of(index: Int32, rows: Int32, columns: Int32) -> Self:
        var line, w = divide(index, columns)
        var n, h = divide(line, rows)
        return Self(n, h, w)

    @always_inline
    def advance(mut self, by: Self, rows: Int32, columns: Int32):
        """Advances by as many pixels as `by` is from the first one."""
        self.n += by.n
        self.h += by.h
        self.w += by.w
        if self.w >= columns:
            self.w -= columns
            self.h += 1
        if self.h >= rows:
            self.h -= rows
            self.n += 1


@fieldwise_init
struct TileGrid(KernelArgument):
    """Tiles into which a phase's result pixels are cut."""

    var images: Int32
    """Images of a tile: more than one only where they are whole images."""
    var rows: Int32
    var columns: Int32
    var tiles_n: Int32
    var tiles_h: Int32
    var tiles_w: Int32

    @staticmethod
    def of(
        images: Int, rows: Int, columns: Int, n: Int, h: PhaseAxis, w: PhaseAxis
    ) -> Self:
        return Self(
            Int32(images),
            Int32(rows),
            Int32(columns),
            Int32(ceildiv(n, images)),
            Int32(ceildiv(h.rows, rows)),
            Int32(ceildiv(w.rows, columns)),
        )

    @always_inline
    def tiles(self) -> Int32:
        return self.tiles_n * self.tiles_h * self.tiles_w

    @always_inline
    def pixels(self) -> Int32:
        """Returns the pixels of a tile."""
        return self.images * self.rows * self.columns

    @always_inline
    def first(self, tile: Int32) -> PixelIndex:
        """Returns a tile's first pixel."""
        var place = PixelIndex.of(tile, self.tiles_h, self.tiles_w)
        return PixelIndex(
            place.n * self.images, place.h * self.rows, place.w * self.columns
        )

    @always_inline
    def pixel(self, index: Int32) -> PixelIndex:
        """Returns a pixel of a tile by its number, relative to the tile's first one.
        """
        return PixelIndex.of(index, self.rows, self.columns)

    @always_inline
    def source(
        self, first: PixelIndex, place: PixelIndex, phase: Phase
    ) -> PixelIndex:
        """Returns the source pixel of a place in the halo; it may lie outside the source.
        """
        return PixelIndex(
            first.n + place.n,
            first.h * Int32(phase.h.step) + lowest_offset(phase.h) + place.h,
            first.w * Int32(phase.w.step) + lowest_offset(phase.w) + place.w,
        )

    @always_inline
    def live_pixels(self, first: PixelIndex, n: Int32, phase: Phase) -> Int32:
        """Returns the number of pixels of a tile up to the last row that the result has; some of them may lie past its
        right edge."""
        if self.images > 1:
            return min(self.images, n - first.n) * self.rows * self.columns
        return min(self.rows, Int32(phase.h.rows) - first.h) * self.columns

    @always_inline
    def is_pixel(
        self, first: PixelIndex, pixel: PixelIndex, n: Int32, phase: Phase
    ) -> Bool:
        """Returns whether the result has this pixel of the tile."""
        return (
            pixel.n < self.images
            and first.n + pixel.n < n
            and first.h + pixel.h < Int32(phase.h.rows)
            and first.w + pixel.w < Int32(phase.w.rows)
        )


@always_inline
def row_bytes(vectors: Int32) -> Int32:
    """Returns the bytes of a pixel in shared memory."""
    return (vectors | 1) * 16


@fieldwise_init
struct Halo(ImplicitlyCopyable, TrivialRegisterPassable):
    """The layout of a tile's source pixels in shared memory; bytes from one to the next.

    Rows and images are padded so that result pixel i reads from bank group i, counted on from row to row: any 8
    neighbours meet all banks (with a stride of 2 half of them).
    """

    var rows: Int32
    var columns: Int32
    var pixel: Int32
    var row: Int32
    var image: Int32

    @staticmethod
    @always_inline
    def of(tiling: TileGrid, phase: Phase, vectors: Int32) -> Self:
        """Returns the layout for pixels of `vectors` vectors of channels."""
        var rows = halo_extent(tiling.rows, phase.h)
        var columns = halo_extent(tiling.columns, phase.w)
        var pixel = row_bytes(vectors)
        var row = columns * pixel + ((tiling.columns - columns) * pixel & 127)
        var image = rows * row + ((tiling.rows - rows) * row & 127)
        return Self(rows, columns, pixel, row, image)

    @always_inline
    def place(self, index: Int32) -> PixelIndex:
        """Returns the indices of source pixel number `index` of the tile."""
        return PixelIndex.of(index, self.rows, self.columns)

    @always_inline
    def at(self, place: PixelIndex) -> Int32:
        return place.n * self.image + place.h * self.row + place.w * self.pixel

    @always_inline
    def lowest(self, pixel: PixelIndex, phase: Phase) -> Int32:
        """Returns the offset in bytes of the source pixel that a tile's pixel reads through the lowest offsets.
        """
        return self.at(
            PixelIndex(
                pixel.n,
                pixel.h * Int32(phase.h.step),
                pixel.w * Int32(phase.w.step),
            )
        )

    @always_inline
    def moved(self, r: Int32, s: Int32, phase: Phase) -> Int32:
        """Returns the distance in bytes from the source pixel of `lowest` to the one that is read through tap (r, s).
        """
        var h = (
            Int32(phase.h.first_offset)
            + r * Int32(phase.h.offset_step)
            - lowest_offset(phase.h)
        )
        var w = (
            Int32(phase.w.first_offset)
            + s * Int32(phase.w.offset_step)
            - lowest_offset(phase.w)
        )
        return h * self.row + w * self.pixel


@always_inline
def result_pixel(first: PixelIndex, pixel: PixelIndex, phase: Phase) -> Int:
    """Returns the index of a tile's pixel in the result, counted through all of it.
    """
    return (
        Int(first.n + pixel.n) * phase.h.out_extent
        + phase.h.out_first
        + Int(first.h + pixel.h) * phase.h.out_step
    ) * phase.w.out_extent + (
        phase.w.out_first + Int(first.w + pixel.w) * phase.w.out_step
    )


@always_inline
def filter_tap(r: Int32, s: Int32, phase: Phase, filter_s: Int32) -> Int32:
    """Returns the index of a phase's tap, counted in the filter's taps."""
    return (
        Int32(phase.h.first_tap) + r * Int32(phase.h.tap_step)
    ) * filter_s + (Int32(phase.w.first_tap) + s * Int32(phase.w.tap_step))


def phases_of[pass_: Int](p: ConvolutionProblem) -> PhaseTable:
    comptime if pass_ == DGRAD:
        return PhaseTable.of(p)
    else:
        return PhaseTable.single(forward_phases(p)[0])


def widest(table: PhaseTable) -> Phase:
    """Returns a phase with as many rows and taps as any: its halo has room for all.
    """
    var phase = table.first()
    for i in range(Int(table.h.residues)):
        phase.h.taps = max(phase.h.taps, table.h.axis(Int32(i)).taps)
    for i in range(Int(table.w.residues)):
        phase.w.taps = max(phase.w.taps, table.w.axis(Int32(i)).taps)
    return phase


@fieldwise_init
struct SharedBudget(ImplicitlyCopyable, TrivialRegisterPassable):
    """The capacity of a block's shared memory: two tiles' halos, and with `result_bytes` their result pixels.
    """

    var bytes: Int
    var vectors: Int
    """Vectors of a source pixel."""
    var result_bytes: Int
    """Bytes of a result pixel, 0 where results are not kept."""

    def halo_bytes(self, tiling: TileGrid, phase: Phase) -> Int:
        """Returns the bytes of one tile's halo."""
        return Int(
            tiling.images * Halo.of(tiling, phase, Int32(self.vectors)).image
        )

    def tile_bytes(self, tiling: TileGrid, phase: Phase) -> Int:
        """Returns the bytes of one tile."""
        return (
            self.halo_bytes(tiling, phase)
            + align_up(Int(tiling.pixels()), 16) * self.result_bytes
        )

    def fits(self, tiling: TileGrid, phase: Phase) -> Bool:
        return (
            tiling.pixels() <= MAX_PIXELS
            and 2 * self.tile_bytes(tiling, phase) <= self.bytes
        )


comptime _MAX_PARTS = 64
"""Most parts of an axis."""


def smallest(n: Int, phase: Phase) -> TileGrid:
    """Returns the smallest tile, which fits where any does."""
    return TileGrid.of(
        1,
        ceildiv(phase.h.rows, _MAX_PARTS),
        ceildiv(phase.w.rows, _MAX_PARTS),
        n,
        phase.h,
        phase.w,
    )


def tilings(n: Int, phase: Phase, budget: SharedBudget) -> List[TileGrid]:
    """Returns the ways to cut a phase's pixels that are worth considering: parts of an image as equal as possible, or
    several whole images."""
    var h = phase.h
    var w = phase.w
    var result = List[TileGrid]()
    var last = 0
    for down in range(1, min(h.rows, _MAX_PARTS) + 1):
        var rows = ceildiv(h.rows, down)
        if rows == last:
            continue
        last = rows
        # Narrower ones read more of the halo.
        for across in range(1, min(w.rows, _MAX_PARTS) + 1):
            var tiling = TileGrid.of(1, rows, ceildiv(w.rows, across), n, h, w)
            if budget.fits(tiling, phase):
                result.append(tiling)
                break
    for images in range(2, n + 1):
        var tiling = TileGrid.of(images, h.rows, w.rows, n, h, w)
        if not budget.fits(tiling, phase):
            break
        result.append(tiling)
    return result^


def width_of(columns: Int) -> Int:
    """Returns the widest share of a group's columns, a multiple of 8 up to 32, that a warp takes.
    """
    for width in range(32, 8, -8):
        if columns % width == 0:
            return width
    return 8


# Copies.


@always_inline
def copy_halo[
    dtype: DType, threads: Int
](
    shared: UInt32,
    source: Ptr[dtype],
    tiling: TileGrid,
    first: PixelIndex,
    phase: Phase,
    images: Int32,
    channels: Int32,
    first_channel: Int32,
    vectors: Int32,
    thread: Int32,
):
    """Starts the copy of a tile's halo; eight threads share a pixel."""
    comptime apart = Int32(threads // 8)
    var vector = thread % 8
    if vector >= vectors:
        return
    var halo = Halo.of(tiling, phase, vectors)
    var count = tiling.images * halo.rows * halo.columns
    var step = halo.place(apart)
    var index = thread // 8
    var place = halo.place(index)
    var target = shared + UInt32(vector * 16)
    var within = Int(first_channel + vector * VECTOR)
    while index < count:
        var at = tiling.source(first, place, phase)
        var pixel = (
            Int(at.n) * phase.h.source + Int(at.h)
        ) * phase.w.source + Int(at.w)
        copy_elements[VECTOR](
            target + UInt32(halo.at(place)),
            source,
            pixel * Int(channels) + within,
            at.n < images
            and UInt32(at.h) < UInt32(phase.h.source)
            and UInt32(at.w) < UInt32(phase.w.source),
        )
        place.advance(step, halo.rows, halo.columns)
        index += apart


# Products.


@always_inline
def multiply[
    dtype: DType
](mut sums: Quad, a: SIMD[DType.uint32, 4], b: SIMD[DType.uint32, 2]):
    """Adds the product of 16 rows x 16 steps and 16 steps x 8 columns."""
    comptime name = "bf16" if dtype == DType.bfloat16 else "f16"
    comptime text = (
        "mma.sync.aligned.m16n8k16.row.col.f32."
        + name
        + "."
        + name
        + ".f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11,"
        " $12, $13};"
    )
    var result = inlined_assembly[
        text,
        _RegisterPackType[Float32, Float32, Float32, Float32],
        constraints="=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        has_side_effect=False,
    ](
        a[0],
        a[1],
        a[2],
        a[3],
        b[0],
        b[1],
        sums[0],
        sums[1],
        sums[2],
        sums[3],
    )
    sums = Quad(result[0], result[1], result[2], result[3])


@always_inline
def multiply_half[
    dtype: DType
](mut sums: Quad, a: SIMD[DType.uint32, 2], b: UInt32):
    """Adds the product of 16 rows x 8 steps and 8 steps x 8 columns."""
    comptime name = "bf16" if dtype == DType.bfloat16 else "f16"
    comptime text = (
        "mma.sync.aligned.m16n8k8.row.col.f32."
        + name
        + "."
        + name
        + ".f32 {$0, $1, $2, $3}, {$4, $5}, {$6}, {$7, $8, $9, $10};"
    )
    var result = inlined_assembly[
        text,
        _RegisterPackType[Float32, Float32, Float32, Float32],
        constraints="=f,=f,=f,=f,r,r,r,f,f,f,f",
        has_side_effect=False,
    ](a[0], a[1], b, sums[0], sums[1], sums[2], sums[3])
    sums = Quad(result[0], result[1], result[2], result[3])


@always_inline
def shared_load[
    dtype: DType, width: Int
](address: UInt32) -> SIMD[dtype, width]:
    return Pointer[
        Scalar[dtype], MutAnyOrigin, address_space=AddressSpace.SHARED
    ](unsafe_from_address=Int(address)).unsafe_load[
        width=width, alignment=width * size_of[dtype]()
    ]()


@always_inline
def shared_store[
    dtype: DType, width: Int
](address: UInt32, value: SIMD[dtype, width]):
    Pointer[Scalar[dtype], MutAnyOrigin, address_space=AddressSpace.SHARED](
        unsafe_from_address=Int(address)
    ).unsafe_store[alignment=width * size_of[dtype]()](0, value)
