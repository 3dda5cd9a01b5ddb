"""Tiles of a channels-last tensor in shared memory, channel by channel, which tensor cores read as matrices of pixels.

Elements have two bytes. Each channel has a plane of rows of 16-byte pieces, eight pixels to a piece; a row has an odd
number of pieces, so that the eight rows of a matrix lie in different banks. A thread moves a square of eight pixels by
eight channels, an octet of them: in device memory octets of a pixel are neighbours, and so are the threads that have
them. The planes of different octets are exchanged piece by piece, so that their stores meet no bank conflicts either.
"""

from std.memory import bitcast

from max.gpu.memory import AddressSpace

from ...common.argument import KernelArgument
from ...common.arithmetic import Divisor
from ...common.pointer import Ptr

comptime PIECE = 8
"""Pixels of a piece, and channels of an octet."""
comptime Words = SIMD[DType.uint32, 4]
"""A piece of pixels, or an octet of channels."""
comptime WordPtr[space: AddressSpace] = MutPointer[
    UInt32, MutUntrackedOrigin, address_space=space
]

comptime SharedWords = WordPtr[AddressSpace.SHARED]


@fieldwise_init
struct TiledPlanes(KernelArgument):
    """A tensor [images, height, width, channels], and the tile of it that a block holds.
    """

    var channels: Int32
    var images: Int32
    var height: Int32
    var width: Int32
    var lines: Int32
    """Rows of one image in the tile."""
    var rows: Int32
    """Rows of all images in the tile."""
    var pieces: Int32
    """Pieces of a row."""
    var pitch: Int32
    """Pieces from one row to the next."""
    var size: Int32
    """Pieces of a channel's plane."""
    var by_lines: Divisor
    var by_pitch: Divisor

    @staticmethod
    def of(
        channels: Int,
        images: Int,
        height: Int,
        width: Int,
        lines: Int,
        tile_images: Int,
        pieces: Int,
    ) -> Self:
        var pitch = pieces | 1
        var rows = lines * tile_images
        return Self(
            Int32(channels),
            Int32(images),
            Int32(height),
            Int32(width),
            Int32(lines),
            Int32(rows),
            Int32(pieces),
            Int32(pitch),
            Int32((rows * pitch + 7) // 8 * 8),
            Divisor(lines),
            Divisor(pitch),
        )


@fieldwise_init
struct Corner(ImplicitlyCopyable, TrivialRegisterPassable):
    """The start of a tile; rows and columns may lie outside the tensor."""

    var image: Int32
    var row: Int32
    var column: Int32
    var channel: Int32


@always_inline
def place[octets: Int](piece: Int32, octet: Int32) -> Int32:
    """Returns the place of a piece in its plane, for a plane of the octet."""
    return piece ^ (octet * Int32(PIECE // octets))


@always_inline
def address(plane: SharedWords, piece: Int32) -> UInt32:
    """Returns the address of a plane's piece, as instructions take it."""
    return UInt32(Int(plane.unsafe_offset(Int(4 * piece))))


@always_inline
def exponent_mask[dtype: DType]() -> UInt32:
    """Returns the mask of the exponents of a pair of elements."""
    return 0x7F807F80 if dtype == DType.bfloat16 else 0x7C007C00


@always_inline
def watch[dtype: DType, width: Int](value: SIMD[DType.uint32, width]) -> UInt32:
    """Returns a nonzero value if an element of the pairs is infinite or NaN: its exponent is all ones, and one more
    carries."""
    comptime one: UInt32 = 0x00800080 if dtype == DType.bfloat16 else 0x04000400
    comptime mask = exponent_mask[dtype]()
    return (((value & mask) + one) & 0x80008000).reduce_or()


@always_inline
def transposed[line: Int](square: Array[Words, PIECE]) -> Words:
    """Returns line number `line` of the transposed square."""
    var result = Words(0)
    comptime for j in range(4):
        var a = square[2 * j][line // 2]
        var b = square[2 * j + 1][line // 2]
        comptime if line % 2 == 0:
            result[j] = (a & 0xFFFF) | (b << 16)
        else:
            result[j] = (a >> 16) | (b & 0xFFFF0000)
    return result


@always_inline
def _load_octet[
    dtype: DType, vector: Int
](source: Ptr[dtype], left: Int32) -> Words:
    """Loads the first `left` of eight channels, zeros behind them."""
    var result = Words(0)
    comptime for j in range(0, PIECE, vector):
        if vector == PIECE or Int32(j) < left:
            var part = bitcast[DType.uint32, vector // 2](
                source.unsafe_offset(j).unsafe_load[
                    width=vector, alignment=2 * vector
                ]()
            )
            comptime for i in range(vector // 2):
                result[j // 2 + i] = part[i]
    return result


@always_inline
def _store_octet[
    dtype: DType, vector: Int
](target: Ptr[dtype], left: Int32, value: Words):
    comptime for j in range(0, PIECE, vector):
        if vector == PIECE or Int32(j) < left:
            var part = SIMD[DType.uint32, vector // 2](0)
            comptime for i in range(vector // 2):
                part[i] = value[j // 2 + i]
            target.unsafe_offset(j).unsafe_store[alignment=2 * vector](
                bitcast[dtype, vector](part)
            )


@always_inline
def load_planes[
    dtype: DType, vector: Int, octets: Int, threads: Int, space: AddressSpace
](
    tile: WordPtr[space],
    source: Ptr[dtype],
    planes: TiledPlanes,
    corner: Corner,
    thread: Int32,
) -> UInt32:
    """Fills a tile of `octets` octets, with zeros where the tensor ends; returns a nonzero value if this thread met an
    infinite element or NaN.
    """
    var met = UInt32(0)
    var octet = thread % Int32(octets)
    var channel = corner.channel + octet * PIECE
    if channel >= planes.channels:
        return met
    var pixel_pitch = Int(planes.channels)
    var left = planes.channels - channel
    for piece in range(
        thread // Int32(octets),
        planes.rows * planes.pitch,
        Int32(threads // octets),
    ):
        var row, across = planes.by_pitch.divide(piece)
        var image, line = planes.by_lines.divide(row)
        var n = corner.image + image
        var h = corner.row + line
        var w = corner.column + across * PIECE
        var square = Array[Words, PIECE](fill=0)
        if (
            across < planes.pieces
            and n < planes.images
            and UInt32(h) < UInt32(planes.height)
        ):
            var pixel = (Int(n) * Int(planes.height) + Int(h)) * Int(
                planes.width
            ) + Int(w)
            var base = source.unsafe_offset(pixel * pixel_pitch + Int(channel))
            comptime for i in range(PIECE):
                if UInt32(w + Int32(i)) < UInt32(planes.width):
                    square[i] = _load_octet[dtype, vector](
                        base.unsafe_offset(i * pixel_pitch), left
                    )
            comptime for i in range(PIECE):
                met |= watch[dtype, 4](square[i])
        var at = octet * (PIECE * planes.size) + place[octets](piece, octet)
        comptime for e in range(PIECE):
            tile.unsafe_offset(
                Int((at + Int32(e) * planes.size) * 4)
            ).unsafe_store[alignment=16](transposed[e](square))
    return met


@always_inline
def store_octets[
    dtype: DType, vector: Int, octets: Int, space: AddressSpace
](
    target: Ptr[dtype],
    pixel_pitch: Int,
    pixels: Int32,
    left: Int32,
    tile: WordPtr[space],
    size: Int32,
    piece: Int32,
    octet: Int32,
):
    """Stores the first `pixels` pixels of a piece, and the first `left` channels of the octet.
    """
    var square = Array[Words, PIECE](fill=0)
    var at = octet * (PIECE * size) + place[octets](piece, octet)
    comptime for e in range(PIECE):
        square[e] = tile.unsafe_offset(
            Int((at + Int32(e) * size) * 4)
        ).unsafe_load[width=4, alignment=16]()
    comptime for i in range(PIECE):
        if Int32(i) < pixels:
            _store_octet[dtype, vector](
                target.unsafe_offset(i * pixel_pitch),
                left,
                transposed[i](square),
            )
