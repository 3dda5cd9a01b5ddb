"""roi_align and roi_pool on a CPU: vectors hold channels."""

from std.math import ceildiv

from ..common.parallel import worker_count
from ..common.vectors import (
    apart,
    clear_run,
    for_each_share,
    lanes,
    load_part,
    smallest_share,
    store_part,
)
from ..common.pointer import Ptr, accumulation_type
from .problem import Bins, RegionsProblem, aligned_region, pooled_region

comptime CHANNEL_VECTORS = 4
"""Vectors of channels that are summed side by side."""
comptime FLT_MAX = 3.4028234663852886e38
"""A bin's maximum is greater than its negative, or torchvision finds none."""


struct BinWeights[Acc: DType](Movable):
    """The weights by which the bins of a region read the places along one axis.
    """

    var first: List[Int]
    """The first place that each bin reads."""
    var begin: List[Int]
    """Where each bin's weights begin in `each`; one more element than there are bins."""
    var each: List[Scalar[Self.Acc]]

    def __init__(out self, bins: Int):
        self.first = List[Int](capacity=apart(bins))
        self.begin = List[Int](capacity=apart(bins + 1))
        self.each = List[Scalar[Self.Acc]](capacity=apart(4 * bins))

    def fill(mut self, bins: Bins[Self.Acc], first: Int, end: Int):
        """Computes the weights of the bins from `first` to before `end`."""
        self.first.clear()
        self.begin.clear()
        self.each.clear()
        for bin in range(first, end):
            # Samples come in order, up or down: the first and the last one inside bound the places.
            var low = Int32.MAX
            var high = Int32(-1)
            for number in range(bins.samples):
                var sample = bins.sample(Int32(bin), number)
                if sample.low >= 0:
                    low = min(low, sample.low)
                    high = max(high, sample.high)
            self.first.append(Int(low) if high >= 0 else 0)
            self.begin.append(len(self.each))
            if high < 0:
                continue
            for _ in range(high - low + 1):
                self.each.append(0)
            var at = self.begin[bin - first] - Int(low)
            for number in range(bins.samples):
                var sample = bins.sample(Int32(bin), number)
                if sample.low >= 0:
                    self.each[at + Int(sample.low)] += 1 - sample.share
                    self.each[at + Int(sample.high)] += sample.share
        self.begin.append(len(self.each))

    @always_inline
    def count(self, bin: Int) -> Int:
        """Returns the number of places that a bin reads."""
        return self.begin[bin + 1] - self.begin[bin]


@no_inline
def check_images[dtype: DType](regions: Ptr[dtype], p: RegionsProblem) raises:
    """Raises where a region's image does not exist."""
    for number in range(p.regions):
        var image = regions[unsafe_offset=Int(number) * 5].cast[DType.float64]()
        if not (image > -1 and image < Float64(p.batch)):
            raise Error(
                t"rois: row {number} names image {image}: there are {p.batch}"
            )


@no_inline
def align_cpu[
    dtype: DType, //
](y: Ptr[dtype], x: Ptr[dtype], regions: Ptr[dtype], p: RegionsProblem):
    """y = the mean of each bin's samples."""
    comptime Acc = accumulation_type[dtype]
    comptime V = lanes[dtype]
    comptime WIDE = CHANNEL_VECTORS * V
    var channels = Int(p.channels)
    var rows = Int(p.rows)
    var columns = Int(p.columns)
    var units = Int(p.regions) * rows

    def share(first: Int, last: Int) {imm}:
        var down = BinWeights[Acc](1)
        var along = BinWeights[Acc](columns)
        for unit in range(first, last):
            var number = unit // rows
            var bin_row = unit % rows
            var region = aligned_region[positions=False](regions, number, p)
            down.fill(region.h, bin_row, bin_row + 1)
            along.fill(region.w, 0, columns)
            var image = x.unsafe_offset(Int(region.image) * p.image())
            for bin in range(columns):
                var to = y.unsafe_offset((unit * columns + bin) * channels)
                var c = 0
                while c < channels:
                    if c + WIDE <= channels:
                        var sums = _sums[CHANNEL_VECTORS, V](
                            image.unsafe_offset(c),
                            channels,
                            channels - c,
                            down,
                            along,
                            bin,
                            p,
                        )
                        comptime for k in range(CHANNEL_VECTORS):
                            to.unsafe_store[alignment=1](
                                c + k * V,
                                (sums[k] / region.count).cast[dtype](),
                            )
                        c += WIDE
                    else:
                        var sums = _sums[1, V](
                            image.unsafe_offset(c),
                            channels,
                            channels - c,
                            down,
                            along,
                            bin,
                            p,
                        )
                        store_part(
                            to,
                            c,
                            channels,
                            (sums[0] / region.count).cast[dtype](),
                        )
                        c += V

    for_each_share(
        share, units, smallest_share(4 * units * columns * channels, units)
    )


@always_inline
def _sums[
    dtype: DType, Acc: DType, //, M: Int, V: Int
](
    image: Ptr[dtype],
    channels: Int,
    left: Int,
    down: BinWeights[Acc],
    along: BinWeights[Acc],
    bin: Int,
    p: RegionsProblem,
) -> Array[SIMD[Acc, V], M]:
    """M vectors of channels: the weighted sums over a bin's pixels. `left` channels are left from the first on.
    """
    var sums = Array[SIMD[Acc, V], M](fill=SIMD[Acc, V](0))
    var line = image.unsafe_offset(
        (down.first[0] * Int(p.width) + along.first[bin]) * channels
    )
    var begin = along.begin[bin]
    for r in range(down.count(0)):
        var pixel = line.unsafe_offset(r * Int(p.width) * channels)
        for s in range(along.count(bin)):
            var weight = down.each[r] * along.each[begin + s]
            comptime for k in range(M):
                sums[k] += load_part[V](pixel, k * V, left).cast[Acc]() * weight
            pixel = pixel.unsafe_offset(channels)
    return sums^


@always_inline
def _parts(p: RegionsProblem, V: Int) -> Tuple[Int, Int]:
    """Channels of a part of a gradient and how many parts there are: whole vectors, and no more than cores need, since
    each part looks at all regions."""
    var wanted = ceildiv(worker_count(), max(Int(p.batch), 1))
    var part = ceildiv(max(ceildiv(Int(p.channels), wanted), 1), V) * V
    return (part, ceildiv(Int(p.channels), part))


@no_inline
def align_gradient_cpu[
    dtype: DType, sums: DType, //
](
    sums_of_image: Ptr[sums],
    dy: Ptr[dtype],
    regions: Ptr[dtype],
    p: RegionsProblem,
):
    """Writes the images' gradient: each core adds the contributions of its channels' bins, in their order. The bits do
    not depend on the number of cores."""
    comptime Acc = accumulation_type[dtype]
    comptime V = lanes[dtype]
    var dx = rebind[Ptr[Acc]](sums_of_image)
    var channels = Int(p.channels)
    var rows = Int(p.rows)
    var columns = Int(p.columns)
    var part, parts = _parts(p, V)
    var units = Int(p.batch) * parts

    def share(first: Int, last: Int) {imm}:
        var down = BinWeights[Acc](rows)
        var along = BinWeights[Acc](columns)
        for unit in range(first, last):
            var n = unit // parts
            var c_begin = unit % parts * part
            var c_end = min(c_begin + part, channels)
            var image = dx.unsafe_offset(n * p.image())
            _clear(image, c_begin, c_end, p)
            for number in range(Int(p.regions)):
                var region = aligned_region[positions=False](regions, number, p)
                if Int(region.image) != n:
                    continue
                down.fill(region.h, 0, rows)
                along.fill(region.w, 0, columns)
                for bin_row in range(rows):
                    for bin in range(columns):
                        var given = dy.unsafe_offset(
                            ((number * rows + bin_row) * columns + bin)
                            * channels
                        )
                        for r in range(down.count(bin_row)):
                            var weight = (
                                down.each[down.begin[bin_row] + r]
                                / region.count
                            )
                            var pixel = image.unsafe_offset(
                                (
                                    (down.first[bin_row] + r) * Int(p.width)
                                    + along.first[bin]
                                )
                                * channels
                            )
                            for s in range(along.count(bin)):
                                var share = (
                                    weight * along.each[along.begin[bin] + s]
                                )
                                for c in range(c_begin, c_end, V):
                                    var sum = load_part[V](pixel, c, c_end)
                                    sum += (
                                        load_part[V](given, c, c_end).cast[
                                            Acc
                                        ]()
                                        * share
                                    )
                                    store_part(pixel, c, c_end, sum)
                                pixel = pixel.unsafe_offset(channels)

    for_each_share(
        share,
        units,
        smallest_share(
            4 * Int(p.regions) * p.bins() * channels + Int(p.batch) * p.image(),
            units,
        ),
    )


@always_inline
def _clear[
    Acc: DType, //
](image: Ptr[Acc], c_begin: Int, c_end: Int, p: RegionsProblem):
    """Clears channels `c_begin` to before `c_end` of an image."""
    comptime V = lanes[Acc]
    if c_end - c_begin == Int(p.channels):
        clear_run(image, p.image())
        return
    for pixel in range(p.pixels()):
        var run = image.unsafe_offset(pixel * Int(p.channels))
        for c in range(c_begin, c_end, V):
            store_part(run, c, c_end, SIMD[Acc, V](0))


@no_inline
def maxima_cpu[
    dtype: DType, //
](
    y: Ptr[dtype],
    places: Ptr[DType.int32],
    x: Ptr[dtype],
    regions: Ptr[dtype],
    p: RegionsProblem,
):
    """Writes to y the maximum of each bin, and the pixel where it lies: the first of equal ones, -1 where there is
    none."""
    comptime Acc = accumulation_type[dtype]
    comptime V = lanes[dtype]
    var channels = Int(p.channels)
    var rows = Int(p.rows)
    var columns = Int(p.columns)
    var units = Int(p.regions) * rows

    def share(first: Int, last: Int) {imm}:
        for unit in range(first, last):
            var region = pooled_region[positions=False](
                regions, unit // rows, p
            )
            var image = x.unsafe_offset(Int(region.image) * p.image())
            var top, bottom = region.h.span(Int32(unit % rows), p.height)
            for bin in range(columns):
                var left, right = region.w.span(Int32(bin), p.width)
                var at = (unit * columns + bin) * channels
                var empty = bottom <= top or right <= left
                for c in range(0, channels, V):
                    var most = SIMD[Acc, V](
                        0 if empty else Scalar[Acc](-FLT_MAX)
                    )
                    var place = SIMD[DType.int32, V](-1)
                    for h in range(top, bottom):
                        for w in range(left, right):
                            var pixel = h * p.width + w
                            var value = load_part[V](
                                image.unsafe_offset(Int(pixel) * channels),
                                c,
                                channels,
                            ).cast[Acc]()
                            var more = value.gt(most)
                            most = more.select(value, most)
                            place = more.select(
                                SIMD[DType.int32, V](pixel), place
                            )
                    store_part(
                        y.unsafe_offset(at), c, channels, most.cast[dtype]()
                    )
                    store_part(places.unsafe_offset(at), c, channels, place)

    for_each_share(
        share, units, smallest_share(4 * units * columns * channels, units)
    )


@no_inline
def maxima_gradient_cpu[
    dtype: DType, sums: DType, //
](
    sums_of_image: Ptr[sums],
    dy: Ptr[dtype],
    regions: Ptr[dtype],
    places: Ptr[DType.int32],
    p: RegionsProblem,
):
    """The images' gradient, as of align_gradient_cpu. A place outside the image is ignored.
    """
    comptime Acc = accumulation_type[dtype]
    comptime V = lanes[dtype]
    var dx = rebind[Ptr[Acc]](sums_of_image)
    var channels = Int(p.channels)
    var pixels = Int32(p.pixels())
    var part, parts = _parts(p, V)
    var units = Int(p.batch) * parts

    def share(first: Int, last: Int) {imm}:
        for unit in range(first, last):
            var n = unit // parts
            var c_begin = unit % parts * part
            var c_end = min(c_begin + part, channels)
            var image = dx.unsafe_offset(n * p.image())
            _clear(image, c_begin, c_end, p)
            for number in range(Int(p.regions)):
                var region = pooled_region[positions=False](regions, number, p)
                if Int(region.image) != n:
                    continue
                for bin in range(p.bins()):
                    var at = (number * p.bins() + bin) * channels
                    for c in range(c_begin, c_end):
                        var place = places[unsafe_offset=at + c]
                        if place >= 0 and place < pixels:
                            image[
                                unsafe_offset=Int(place) * channels + c
                            ] += dy[unsafe_offset=at + c].cast[Acc]()

    for_each_share(
        share,
        units,
        smallest_share(
            Int(p.regions) * p.bins() * channels + Int(p.batch) * p.image(),
            units,
        ),
    )
