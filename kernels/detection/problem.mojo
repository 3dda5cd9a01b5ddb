"""Regions of images, and the pixels that their bins read.

A region is a row of five numbers: the image's number, then x and y of two corners. Along each axis it is cut into bins,
and along each axis a bin weighs the pixels: its value is the sum over rows and columns of both weights times the pixel.

ALIGN: a bin averages samples between pixels (Mask R-CNN, https://arxiv.org/abs/1703.06870). The samples form a grid, so
that the sum of what they read splits into weights of rows and of columns. POOL: all pixels of a bin that was rounded to
whole pixels (Fast R-CNN, https://arxiv.org/abs/1504.08083; R-FCN, https://arxiv.org/abs/1605.06409).
"""

from std.math import ceil, floor
from std.utils.numerics import isfinite

from ..common.argument import KernelArgument
from ..common.pointer import Ptr, accumulation_type

comptime REGION = 5
"""Numbers of a region."""
comptime MAX_SAMPLES = 1 << 30
"""Samples of a bin along an axis, at most."""


@fieldwise_init
struct RegionsProblem(KernelArgument):
    """The sizes of images, regions and results.

    Images are [N, H * W, C] and results [K, bins, C]; those of ps_roi_align and ps_roi_pool [N, C, H * W] and
    [K, C / bins, bins].
    """

    var batch: Int32
    var channels: Int32
    var height: Int32
    var width: Int32
    var regions: Int32
    var rows: Int32
    """Bins along H."""
    var columns: Int32
    """Bins along W."""
    var samples: Int32
    """Samples of a bin along an axis; 0 where a bin has as many samples as pixels."""
    var aligned: Bool
    """Whether pixels' centres have integer coordinates, so that corners lie half a pixel lower."""
    var scale: Float64
    """Pixels for a step of 1 in the regions' coordinates."""

    @always_inline
    def pixels(self) -> Int:
        return Int(self.height) * Int(self.width)

    @always_inline
    def bins(self) -> Int:
        return Int(self.rows) * Int(self.columns)

    @always_inline
    def image(self) -> Int:
        """Elements of one image."""
        return self.pixels() * Int(self.channels)


@fieldwise_init
struct Sample[Acc: DType](TrivialRegisterPassable):
    """The places that a sample reads along one axis: two neighbouring ones, or one twice at the image's end.
    """

    var low: Int32
    """The lower place; -1 outside the image."""
    var high: Int32
    var share: Scalar[Self.Acc]
    """The weight of the higher place; the lower one has the rest."""

    @always_inline
    def __init__(out self, coordinate: Scalar[Self.Acc], size: Int32):
        self.low = -1
        self.high = -1
        self.share = 0
        # NaN lies outside.
        if (
            coordinate >= -1
            and coordinate <= Scalar[Self.Acc](size)
            and size > 0
        ):
            var at = max(coordinate, 0)
            self.low = min(Int32(at), size - 1)
            self.high = min(self.low + 1, size - 1)
            if self.high > self.low:
                self.share = at - Scalar[Self.Acc](self.low)


@fieldwise_init
struct Bins[Acc: DType](TrivialRegisterPassable):
    """The bins of one region along one axis."""

    var start: Scalar[Self.Acc]
    var length: Scalar[Self.Acc]
    """The length of a bin."""
    var samples: Int32
    """Samples of a bin; 0 for POOL."""
    var size: Int32
    """The image's extent."""

    @always_inline
    def coordinate(self, bin: Int32, sample: Int32) -> Scalar[Self.Acc]:
        return (
            self.start
            + Scalar[Self.Acc](bin) * self.length
            + (Scalar[Self.Acc](sample) + 0.5)
            * self.length
            / Scalar[Self.Acc](self.samples)
        )

    @always_inline
    def sample(self, bin: Int32, sample: Int32) -> Sample[Self.Acc]:
        return Sample[Self.Acc](self.coordinate(bin, sample), self.size)

    @always_inline
    def span(self, bin: Int32, last: Int32) -> Tuple[Int32, Int32]:
        """POOL: the first pixel of a bin and the one behind its last, from 0 to `last`.
        """
        var start = Int32(self.start)
        var low = Int32(floor(Scalar[Self.Acc](bin) * self.length))
        var high = Int32(ceil(Scalar[Self.Acc](bin + 1) * self.length))
        return (
            min(max(low + start, 0), last),
            min(max(high + start, 0), last),
        )

    @always_inline
    def weight(self, bin: Int32, place: Int32) -> Scalar[Self.Acc]:
        """ALIGN: returns the sum of the weights that the samples of a bin give a place, 0 far from the bin.
        """
        if self.samples <= 0:
            return 0
        var low = Scalar[Self.Acc](place - 1)
        var high = Scalar[Self.Acc](place + 1)
        if place == self.size - 1:
            high = Scalar[Self.Acc](self.size)
        var first = Int32(0)
        var last = self.samples
        var step = self.length / Scalar[Self.Acc](self.samples)
        var begin = self.start + Scalar[Self.Acc](bin) * self.length
        # Of many samples only those next to the place are looked at, with one more on either side for rounding.
        var a = (low - begin) / step - 0.5
        var b = (high - begin) / step - 0.5
        var least = min(a, b)
        var most = max(a, b)
        if isfinite(least) and isfinite(most):
            comptime limit = Scalar[Self.Acc](MAX_SAMPLES)
            first = max(Int32(max(min(floor(least), limit), -limit)) - 1, 0)
            last = min(
                Int32(max(min(ceil(most), limit), -limit)) + 2, self.samples
            )
        var total = Scalar[Self.Acc](0)
        for number in range(first, last):
            var sample = self.sample(bin, number)
            if sample.low == place:
                total += 1 - sample.share
            if sample.high == place:
                total += sample.share
        return total

    @always_inline
    def over(
        self, first: Int32, last: Int32, bins: Int32
    ) -> Tuple[Int32, Int32]:
        """Returns the first bin, and one past the last, of those that may read places from `first` to `last`.
        """
        # Samples a place away still count, two at the image's end; and bins of whole pixels are rounded outwards.
        var a = (Scalar[Self.Acc](first - 2) - self.start) / self.length
        var b = (Scalar[Self.Acc](last + 2) - self.start) / self.length
        var least = floor(min(a, b)) - 1
        var most = ceil(max(a, b)) + 1
        if not (isfinite(least) and isfinite(most)):
            return (0, bins)
        var end = Scalar[Self.Acc](bins)
        return (
            Int32(min(max(least, 0), end)),
            Int32(min(max(most, 0), end)),
        )


@fieldwise_init
struct Region[Acc: DType](TrivialRegisterPassable):
    """One region, in pixels."""

    var image: Int32
    """The image's number; -1 where there is no such image."""
    var h: Bins[Self.Acc]
    var w: Bins[Self.Acc]
    var count: Scalar[Self.Acc]
    """Samples of a bin."""


@always_inline
def _image_of[Acc: DType, //](number: Scalar[Acc], p: RegionsProblem) -> Int32:
    # Truncated, as torchvision does; NaN is no image.
    if number > -1 and number < Scalar[Acc](p.batch):
        return Int32(number)
    return -1


@always_inline
def _samples_of[
    Acc: DType, //
](length: Scalar[Acc], p: RegionsProblem) -> Int32:
    """Returns the samples of a bin along an axis; a negative count, as torchvision computes it, becomes 0.
    """
    if p.samples > 0:
        return p.samples
    comptime limit = Scalar[Acc](MAX_SAMPLES)
    # NaN has none either.
    return Int32(
        max(min(ceil(length), limit), -limit)
    ) if length == length else Int32(0)


@always_inline
def aligned_region[
    dtype: DType, //, positions: Bool
](
    regions: Ptr[dtype],
    number: Int,
    p: RegionsProblem,
    out region: Region[accumulation_type[dtype]],
):
    """ALIGN: reads a region. With `positions` it is one of ps_roi_align, whose bins may be empty, with a mean of
    NaN."""
    comptime Acc = accumulation_type[dtype]
    var row = regions.unsafe_offset(number * REGION)
    var scale = Scalar[Acc](p.scale)
    var shift = Scalar[Acc](0.5 if positions or p.aligned else 0.0)

    @always_inline
    def corner(at: Int) {imm} -> Scalar[Acc]:
        return row[unsafe_offset=at].cast[Acc]() * scale - shift

    var x = corner(1)
    var y = corner(2)
    var width = corner(3) - x
    var height = corner(4) - y
    comptime if not positions:
        if not p.aligned:
            width = max(width, 1)
            height = max(height, 1)
    var h = height / Scalar[Acc](p.rows)
    var w = width / Scalar[Acc](p.columns)
    var down = _samples_of(h, p)
    var along = _samples_of(w, p)
    var count = Scalar[Acc](down) * Scalar[Acc](along)
    comptime if not positions:
        count = max(count, 1)
    return Region[Acc](
        _image_of(row[unsafe_offset=0].cast[Acc](), p),
        Bins[Acc](y, h, down, p.height),
        Bins[Acc](x, w, along, p.width),
        count,
    )


@always_inline
def _rounded[Acc: DType, //](value: Scalar[Acc]) -> Scalar[Acc]:
    """Rounds to the nearest integer that may be a coordinate in an image, halves away from zero; NaN becomes 0.
    """
    comptime limit = Scalar[Acc](1 << 29)
    var size = floor(abs(value) + 0.5)
    # Where adding a half has rounded.
    if size - abs(value) > 0.5:
        size -= 1
    var result = min(size, limit)
    result = -result if value < 0 else result
    return result if value == value else 0


@always_inline
def pooled_region[
    dtype: DType, //, positions: Bool
](
    regions: Ptr[dtype],
    number: Int,
    p: RegionsProblem,
    out region: Region[accumulation_type[dtype]],
):
    """POOL: reads a region. With `positions` it is one of ps_roi_pool, whose second corner lies outside.
    """
    comptime Acc = accumulation_type[dtype]
    comptime more = Scalar[Acc](0 if positions else 1)
    var row = regions.unsafe_offset(number * REGION)
    var scale = Scalar[Acc](p.scale)

    @always_inline
    def corner(at: Int) {imm} -> Scalar[Acc]:
        return _rounded(row[unsafe_offset=at].cast[Acc]() * scale)

    var x = corner(1)
    var y = corner(2)
    var width = max(corner(3) - x + more, 1)
    var height = max(corner(4) - y + more, 1)
    return Region[Acc](
        _image_of(row[unsafe_offset=0].cast[Acc](), p),
        Bins[Acc](y, height / Scalar[Acc](p.rows), 0, p.height),
        Bins[Acc](x, width / Scalar[Acc](p.columns), 0, p.width),
        1,
    )
