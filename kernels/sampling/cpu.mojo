"""grid_sample on a CPU. Planes: vectors hold neighbouring points, whose pixels are gathered, for one channel after the
other. Channels innermost: vectors hold channels, for one point after the other."""

from std.math import ceildiv, iota

from ..common.parallel import worker_count
from ..common.pointer import Ptr, accumulation_type
from ..common.vectors import (
    clear_run,
    for_each_share,
    lanes,
    load_part,
    smallest_share,
    store_part,
)
from .problem import Corners, SamplingProblem

comptime SPARSE = 4
"""Points of a vector for each that reads a pixel, from which on the others are left out."""
comptime SHARED = 256
"""Points of a unit of work."""


@always_inline
def _read[
    dtype: DType, W: SIMDLength, //
](plane: Ptr[dtype], pixel: SIMD[DType.int32, W]) -> SIMD[
    accumulation_type[dtype], W
]:
    """Reads the pixels; a pixel outside the image is zero."""
    comptime Acc = accumulation_type[dtype]
    var inside = pixel.ge(0)
    var value = plane.gather(max(pixel, 0)).cast[Acc]()
    return inside.select(value, SIMD[Acc, W](0))


@always_inline
def _live[
    Acc: DType, W: SIMDLength, T: Int, deep: Bool, //
](corners: Corners[Acc, W, T, deep], count: Int) -> SIMD[DType.bool, W]:
    """Returns which of the first `count` points read at least one pixel."""
    var live = SIMD[DType.bool, W](fill=False)
    comptime for k in range(corners.K):
        live = live | corners.pixel[k].ge(0)
    return live & iota[DType.int32, W]().lt(Int32(count))


@always_inline
def _are_few[W: SIMDLength, //](live: SIMD[DType.bool, W]) -> Bool:
    """Returns whether so few points are live that vectors of channels waste less work than vectors of points.
    """
    return SPARSE * Int(live.cast[DType.int32]().reduce_add()) <= Int(W)


@always_inline
def _channels[
    dtype: DType, //, V: Int
](data: Ptr[dtype], c: Int, channels: Int, step: Int) -> SIMD[
    accumulation_type[dtype], V
]:
    """An element of V planes that lie `step` apart, from plane `c` on; zeros behind the last plane.
    """
    comptime Acc = accumulation_type[dtype]
    var numbers = Int32(c) + iota[DType.int32, V]()
    var inside = numbers.lt(Int32(channels))
    var offsets = inside.select(
        numbers, SIMD[DType.int32, V](Int32(channels - 1))
    ).cast[DType.int64]() * Int64(step)
    return inside.select(data.gather(offsets).cast[Acc](), SIMD[Acc, V](0))


@no_inline
def sample_cpu[
    dtype: DType, //, *, channels_last: Bool, T: Int, deep: Bool
](y: Ptr[dtype], x: Ptr[dtype], grid: Ptr[dtype], p: SamplingProblem):
    """y = the values that the points read."""
    comptime Acc = accumulation_type[dtype]
    comptime V = lanes[dtype]
    var points = Int(p.points)
    var channels = Int(p.channels)
    var blocks = ceildiv(points, SHARED)
    var units = Int(p.batch) * blocks

    def share(first: Int, last: Int) {imm}:
        for unit in range(first, last):
            var n = unit // blocks
            var begin = unit % blocks * SHARED
            var end = min(begin + SHARED, points)
            var image = x.unsafe_offset(n * p.image())
            var result = y.unsafe_offset(n * p.result())
            comptime if channels_last:
                for point in range(begin, end):
                    var corners = Corners[Acc, 1, T, deep](grid, point, p, n)
                    var to = result.unsafe_offset(point * channels)
                    for c in range(0, channels, V):
                        var total = SIMD[Acc, V](0)
                        comptime for k in range(corners.K):
                            var pixel = Int(corners.pixel[k])
                            if pixel >= 0:
                                total += (
                                    load_part[V](
                                        image.unsafe_offset(pixel * channels),
                                        c,
                                        channels,
                                    ).cast[Acc]()
                                    * corners.weight(k)[0]
                                )
                        store_part(to, c, channels, total.cast[dtype]())
            else:
                for point in range(begin, end, V):
                    var corners = Corners[Acc, V, T, deep](grid, point, p, n)
                    var live = _live(corners, end - point)
                    if _are_few(live):
                        for c in range(channels):
                            store_part(
                                result.unsafe_offset(c * points),
                                point,
                                end,
                                SIMD[dtype, V](0),
                            )
                        for lane in range(V):
                            if live[lane]:
                                _read_point(
                                    result.unsafe_offset(point + lane),
                                    image,
                                    corners,
                                    lane,
                                    p,
                                )
                        continue
                    for c in range(channels):
                        var plane = image.unsafe_offset(c * p.pixels())
                        var total = SIMD[Acc, V](0)
                        comptime for k in range(corners.K):
                            total += _read(
                                plane, corners.pixel[k]
                            ) * corners.weight(k)
                        store_part(
                            result.unsafe_offset(c * points),
                            point,
                            end,
                            total.cast[dtype](),
                        )

    for_each_share(
        share, units, smallest_share(Int(p.batch) * p.result(), units)
    )


@no_inline
def _read_point[
    dtype: DType, W: SIMDLength, T: Int, deep: Bool, //
](
    result: Ptr[dtype],
    image: Ptr[dtype],
    corners: Corners[accumulation_type[dtype], W, T, deep],
    lane: Int,
    p: SamplingProblem,
):
    """Computes one point of planes, as vectors of channels."""
    comptime Acc = accumulation_type[dtype]
    comptime V = lanes[dtype]
    var channels = Int(p.channels)
    for c in range(0, channels, V):
        var total = SIMD[Acc, V](0)
        comptime for k in range(corners.K):
            var pixel = Int(corners.pixel[k][lane])
            if pixel >= 0:
                total += (
                    _channels[V](
                        image.unsafe_offset(pixel), c, channels, p.pixels()
                    )
                    * corners.weight(k)[lane]
                )
        for i in range(min(V, channels - c)):
            result[unsafe_offset=(c + i) * Int(p.points)] = total[i].cast[
                dtype
            ]()


comptime PixelProducts[Acc: DType, W: SIMDLength, T: Int, deep: Bool] = Array[
    SIMD[Acc, W], Corners[Acc, W, T, deep].K
]
"""For each pixel that points read, the sum over channels of dy times the pixel."""


@always_inline
def _products_channels_last[
    dtype: DType, Acc: DType, W: SIMDLength, T: Int, deep: Bool, //
](
    corners: Corners[Acc, W, T, deep],
    image: Ptr[dtype],
    from_: Ptr[dtype],
    channels: Int,
) -> PixelProducts[Acc, W, T, deep]:
    """Returns the products of one point, whose dy begins at `from_`."""
    comptime V = lanes[dtype]
    var along = PixelProducts[Acc, W, T, deep](fill=SIMD[Acc, W](0))
    comptime for k in range(corners.K):
        var pixel = Int(corners.pixel[k])
        if pixel >= 0:
            var total = SIMD[Acc, V](0)
            var run = image.unsafe_offset(pixel * channels)
            for c in range(0, channels, V):
                total += (
                    load_part[V](run, c, channels).cast[Acc]()
                    * load_part[V](from_, c, channels).cast[Acc]()
                )
            along[k] = SIMD[Acc, W](total.reduce_add())
    return along^


@always_inline
def _products_of_few[
    dtype: DType, Acc: DType, W: SIMDLength, T: Int, deep: Bool, //
](
    corners: Corners[Acc, W, T, deep],
    image: Ptr[dtype],
    given: Ptr[dtype],
    p: SamplingProblem,
    point: Int,
    live: SIMD[DType.bool, W],
) -> PixelProducts[Acc, W, T, deep]:
    """Returns the products of the live points from `point` on, one after the other.
    """
    comptime V = lanes[dtype]
    var channels = Int(p.channels)
    var points = Int(p.points)
    var along = PixelProducts[Acc, W, T, deep](fill=SIMD[Acc, W](0))
    for lane in range(W):
        if not live[lane]:
            continue
        for c in range(0, channels, V):
            var value = _channels[V](
                given.unsafe_offset(point + lane),
                c,
                channels,
                points,
            )
            comptime for k in range(corners.K):
                var pixel = Int(corners.pixel[k][lane])
                if pixel >= 0:
                    along[k][lane] += (
                        (
                            value
                            * _channels[V](
                                image.unsafe_offset(pixel),
                                c,
                                channels,
                                p.pixels(),
                            )
                        )
                        .reduce_add()
                        .cast[Acc]()
                    )
    return along^


@always_inline
def _products_of_planes[
    dtype: DType, Acc: DType, W: SIMDLength, T: Int, deep: Bool, //
](
    corners: Corners[Acc, W, T, deep],
    image: Ptr[dtype],
    given: Ptr[dtype],
    p: SamplingProblem,
    point: Int,
    end: Int,
) -> PixelProducts[Acc, W, T, deep]:
    """Returns the products of the points from `point` to before `end`, together.
    """
    var channels = Int(p.channels)
    var points = Int(p.points)
    var along = PixelProducts[Acc, W, T, deep](fill=SIMD[Acc, W](0))
    for c in range(channels):
        var plane = image.unsafe_offset(c * p.pixels())
        var value = load_part[W](
            given.unsafe_offset(c * points), point, end
        ).cast[Acc]()
        comptime for k in range(corners.K):
            # An infinite gradient of what lies outside is no number here.
            along[k] += (
                corners.pixel[k]
                .ge(0)
                .select(
                    value * _read(plane, corners.pixel[k]).cast[Acc](),
                    SIMD[Acc, W](0),
                )
            )
    return along^


@no_inline
def sample_grid_gradient_cpu[
    dtype: DType, //, *, channels_last: Bool, T: Int, deep: Bool
](
    dgrid: Ptr[dtype],
    dy: Ptr[dtype],
    x: Ptr[dtype],
    grid: Ptr[dtype],
    p: SamplingProblem,
):
    """The grid's gradient."""
    comptime Acc = accumulation_type[dtype]
    comptime V = lanes[dtype]
    comptime W = 1 if channels_last else V
    var points = Int(p.points)
    var channels = Int(p.channels)
    var blocks = ceildiv(points, SHARED)
    var units = Int(p.batch) * blocks

    def share(first: Int, last: Int) {imm}:
        for unit in range(first, last):
            var n = unit // blocks
            var begin = unit % blocks * SHARED
            var end = min(begin + SHARED, points)
            var image = x.unsafe_offset(n * p.image())
            var given = dy.unsafe_offset(n * p.result())
            for point in range(begin, end, W):
                var corners = Corners[Acc, W, T, deep](grid, point, p, n)
                var along: PixelProducts[Acc, W, T, deep]
                comptime if channels_last:
                    along = _products_channels_last(
                        corners,
                        image,
                        given.unsafe_offset(point * channels),
                        channels,
                    )
                else:
                    var live = _live(corners, end - point)
                    if _are_few(live):
                        along = _products_of_few(
                            corners, image, given, p, point, live
                        )
                    else:
                        along = _products_of_planes(
                            corners, image, given, p, point, end
                        )
                comptime for axis in range(corners.AXES):
                    var total = SIMD[Acc, W](0)
                    comptime for k in range(corners.K):
                        total += along[k] * corners.slope[axis](k)
                    comptime for lane in range(W):
                        if point + lane < end:
                            dgrid[
                                unsafe_offset=(n * points + point + lane)
                                * corners.AXES
                                + axis
                            ] = total[lane].cast[dtype]()

    for_each_share(
        share, units, smallest_share(Int(p.batch) * p.result(), units)
    )


@always_inline
def _add_channels_last[
    dtype: DType, Acc: DType, //, *, T: Int, deep: Bool
](
    image: Ptr[Acc],
    given: Ptr[dtype],
    grid: Ptr[dtype],
    p: SamplingProblem,
    n: Int,
    c_begin: Int,
    c_end: Int,
):
    """Adds the contributions of all points of image `n` to its channels [c_begin, c_end).
    """
    comptime V = lanes[dtype]
    var points = Int(p.points)
    var channels = Int(p.channels)
    for point in range(points):
        var corners = Corners[Acc, 1, T, deep](grid, point, p, n)
        var from_ = given.unsafe_offset(point * channels)
        comptime for k in range(corners.K):
            var pixel = Int(corners.pixel[k])
            if pixel >= 0:
                var run = image.unsafe_offset(pixel * channels)
                var weight = corners.weight(k)[0]
                for c in range(c_begin, c_end, V):
                    var sum = load_part[V](run, c, c_end)
                    sum += load_part[V](from_, c, c_end).cast[Acc]() * weight
                    store_part(run, c, c_end, sum)


@always_inline
def _add_to_planes[
    dtype: DType, Acc: DType, //, *, T: Int, deep: Bool
](
    image: Ptr[Acc],
    given: Ptr[dtype],
    grid: Ptr[dtype],
    p: SamplingProblem,
    n: Int,
    c_begin: Int,
    c_end: Int,
):
    """Adds the contributions of all points of image `n` to its channels [c_begin, c_end).
    """
    comptime V = lanes[dtype]
    var points = Int(p.points)
    for point in range(0, points, V):
        var corners = Corners[Acc, V, T, deep](grid, point, p, n)
        # Of all pairs of a point and a pixel those that add something, and room for one that does not.
        var pixels = Array[Int32, V * corners.K + 1](fill=0)
        var weights = Array[Scalar[Acc], V * corners.K + 1](fill=0)
        var of_point = Array[Int32, V * corners.K + 1](fill=0)
        var count = 0
        comptime for k in range(corners.K):
            var weight = corners.weight(k)
            comptime for lane in range(V):
                pixels[count] = corners.pixel[k][lane]
                weights[count] = weight[lane]
                of_point[count] = Int32(lane)
                if pixels[count] >= 0 and point + lane < points:
                    count += 1
        if count == 0:
            continue
        for c in range(c_begin, c_end):
            var plane = image.unsafe_offset(c * p.pixels())
            var from_ = given.unsafe_offset(c * points + point)
            for i in range(count):
                plane[unsafe_offset=Int(pixels[i])] += (
                    from_[unsafe_offset=Int(of_point[i])].cast[Acc]()
                    * weights[i]
                )


@no_inline
def sample_input_gradient_cpu[
    dtype: DType, sums: DType, //, *, channels_last: Bool, T: Int, deep: Bool
](
    sums_of_image: Ptr[sums],
    dy: Ptr[dtype],
    grid: Ptr[dtype],
    p: SamplingProblem,
):
    """Writes the image's gradient: cores share the channels, and each adds the points' contributions in their order.
    The bits do not depend on the number of cores."""
    comptime Acc = accumulation_type[dtype]
    comptime V = lanes[dtype]
    var points = Int(p.points)
    var channels = Int(p.channels)
    var dx = rebind[Ptr[Acc]](sums_of_image)
    # Parts of channels: whole vectors where they are innermost, and no more than cores need, since each part looks at
    # all points.
    var wanted = ceildiv(worker_count(), Int(p.batch))
    var part = max(ceildiv(channels, wanted), 1)
    comptime if channels_last:
        part = ceildiv(part, V) * V
    var parts = ceildiv(channels, part)
    var units = Int(p.batch) * parts

    def share(first: Int, last: Int) {imm}:
        for unit in range(first, last):
            var n = unit // parts
            var c_begin = unit % parts * part
            var c_end = min(c_begin + part, channels)
            var image = dx.unsafe_offset(n * p.image())
            var given = dy.unsafe_offset(n * p.result())
            comptime if channels_last:
                if parts == 1:
                    clear_run(image, p.image())
                else:
                    for pixel in range(p.pixels()):
                        var run = image.unsafe_offset(
                            pixel * channels + c_begin
                        )
                        for at in range(0, c_end - c_begin, V):
                            store_part(
                                run, at, c_end - c_begin, SIMD[Acc, V](0)
                            )
                _add_channels_last[T=T, deep=deep](
                    image, given, grid, p, n, c_begin, c_end
                )
            else:
                clear_run(
                    image.unsafe_offset(c_begin * p.pixels()),
                    (c_end - c_begin) * p.pixels(),
                )
                _add_to_planes[T=T, deep=deep](
                    image, given, grid, p, n, c_begin, c_end
                )

    for_each_share(
        share, units, smallest_share(Int(p.batch) * p.result(), units)
    )
