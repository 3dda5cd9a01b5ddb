"""ps_roi_align and ps_roi_pool: bin b of output channel c reads channel c * bins + b of the image, a plane of its
own."""

from std.math import ceildiv

from max.gpu import global_idx
from max.gpu.host import DeviceContext

from ..common.vectors import for_each_share, smallest_share
from ..common.pointer import Ptr, accumulation_type
from .problem import (
    Region,
    RegionsProblem,
    Sample,
    aligned_region,
    pooled_region,
)

comptime THREADS = 256


@always_inline
def _region[
    dtype: DType, //, align: Bool
](
    regions: Ptr[dtype],
    number: Int,
    p: RegionsProblem,
    out region: Region[accumulation_type[dtype]],
):
    comptime if align:
        return aligned_region[positions=True](regions, number, p)
    else:
        return pooled_region[positions=True](regions, number, p)


@always_inline
def _value[
    dtype: DType, //, align: Bool
](
    x: Ptr[dtype],
    region: Region[accumulation_type[dtype]],
    p: RegionsProblem,
    channel: Int,
) -> Scalar[dtype]:
    """Returns the value of a channel's bin in a region. Bins of an output channel read neighbouring planes.
    """
    comptime Acc = accumulation_type[dtype]
    var bin = channel % p.bins()
    var row = Int32(bin // Int(p.columns))
    var column = Int32(bin % Int(p.columns))
    var total = Scalar[Acc](0)
    if region.image < 0:
        return 0
    var plane = x.unsafe_offset(
        Int(region.image) * p.image() + channel * p.pixels()
    )
    comptime if align:
        for i in range(region.h.samples):
            var h = region.h.sample(row, i)
            if h.low < 0:
                continue
            var low = plane.unsafe_offset(Int(h.low) * Int(p.width))
            var high = plane.unsafe_offset(Int(h.high) * Int(p.width))
            for j in range(region.w.samples):
                var w = region.w.sample(column, j)
                if w.low >= 0:
                    total += (1 - h.share) * _between(low, w) + (
                        h.share * _between(high, w)
                    )
        return (total / region.count).cast[dtype]()
    else:
        # torchvision leaves out the last row and the last column here, not in the gradient.
        var top, bottom = region.h.span(row, p.height - 1)
        var left, right = region.w.span(column, p.width - 1)
        if bottom <= top or right <= left:
            return 0
        for h in range(top, bottom):
            for w in range(left, right):
                total += plane[unsafe_offset=Int(h * p.width + w)].cast[Acc]()
        return (total / Scalar[Acc]((bottom - top) * (right - left))).cast[
            dtype
        ]()


@always_inline
def _between[
    dtype: DType, Acc: DType, //
](line: Ptr[dtype], w: Sample[Acc]) -> Scalar[Acc]:
    return (1 - w.share) * line[unsafe_offset=Int(w.low)].cast[
        Acc
    ]() + w.share * line[unsafe_offset=Int(w.high)].cast[Acc]()


@always_inline
def _gradient[
    dtype: DType, //, align: Bool
](
    dy: Ptr[dtype],
    regions: Ptr[dtype],
    p: RegionsProblem,
    n: Int,
    channel: Int,
    h: Int32,
    w: Int32,
) -> Scalar[accumulation_type[dtype]]:
    """Returns the gradient of one pixel: the sum of the contributions of its image's regions, in their order.
    """
    comptime Acc = accumulation_type[dtype]
    var bin = channel % p.bins()
    var row = Int32(bin // Int(p.columns))
    var column = Int32(bin % Int(p.columns))
    var total = Scalar[Acc](0)
    for number in range(Int(p.regions)):
        var region = _region[align=align](regions, number, p)
        if Int(region.image) != n:
            continue
        var weight: Scalar[Acc]
        comptime if align:
            weight = region.h.weight(row, h)
            if weight != 0:
                weight *= region.w.weight(column, w)
            if weight == 0:
                continue
            weight /= region.count
        else:
            var top, bottom = region.h.span(row, p.height)
            var left, right = region.w.span(column, p.width)
            if h < top or h >= bottom or w < left or w >= right:
                continue
            weight = 1 / Scalar[Acc]((bottom - top) * (right - left))
        total += (
            weight
            * dy[unsafe_offset=number * Int(p.channels) + channel].cast[Acc]()
        )
    return total


@no_inline
def positions_cpu[
    dtype: DType, //, *, align: Bool
](y: Ptr[dtype], x: Ptr[dtype], regions: Ptr[dtype], p: RegionsProblem):
    """y = the means of the bins."""
    var total = Int(p.regions) * Int(p.channels)

    def share(first: Int, last: Int) {imm}:
        var channels = Int(p.channels)
        for number in range(first // channels, ceildiv(last, channels)):
            var region = _region[align=align](regions, number, p)
            var begin = number * channels
            for item in range(max(first, begin), min(last, begin + channels)):
                y[unsafe_offset=item] = _value[align=align](
                    x, region, p, item - begin
                )

    for_each_share(share, total, smallest_share(16 * total, total))


@no_inline
def positions_gradient_cpu[
    dtype: DType, sums: DType, //, *, align: Bool
](
    sums_of_image: Ptr[sums],
    dy: Ptr[dtype],
    regions: Ptr[dtype],
    p: RegionsProblem,
):
    """Writes the images' gradient: each plane belongs to one core, which adds the regions' contributions in their
    order."""
    comptime Acc = accumulation_type[dtype]
    var dx = rebind[Ptr[Acc]](sums_of_image)
    var units = Int(p.batch) * Int(p.channels)

    def share(first: Int, last: Int) {imm}:
        var each = List[Region[Acc]](capacity=Int(p.regions))
        for number in range(Int(p.regions)):
            each.append(_region[align=align](regions, number, p))
        for unit in range(first, last):
            var plane = dx.unsafe_offset(unit * p.pixels())
            for at in range(p.pixels()):
                plane[unsafe_offset=at] = 0
            var n = unit // Int(p.channels)
            var channel = unit % Int(p.channels)
            var bin = channel % p.bins()
            var row = Int32(bin // Int(p.columns))
            var column = Int32(bin % Int(p.columns))
            for number in range(Int(p.regions)):
                ref region = each[number]
                if Int(region.image) != n:
                    continue
                var given = dy[
                    unsafe_offset=number * Int(p.channels) + channel
                ].cast[Acc]()
                comptime if align:
                    given /= region.count
                    for i in range(region.h.samples):
                        var h = region.h.sample(row, i)
                        if h.low < 0:
                            continue
                        for j in range(region.w.samples):
                            var w = region.w.sample(column, j)
                            if w.low >= 0:
                                var low = Int(h.low * p.width)
                                var high = Int(h.high * p.width)
                                var upper = given * (1 - h.share)
                                var lower = given * h.share
                                plane[
                                    unsafe_offset=low + Int(w.low)
                                ] += upper * (1 - w.share)
                                plane[unsafe_offset=low + Int(w.high)] += (
                                    upper * w.share
                                )
                                plane[
                                    unsafe_offset=high + Int(w.low)
                                ] += lower * (1 - w.share)
                                plane[unsafe_offset=high + Int(w.high)] += (
                                    lower * w.share
                                )
                else:
                    var top, bottom = region.h.span(row, p.height)
                    var left, right = region.w.span(column, p.width)
                    if bottom <= top or right <= left:
                        continue
                    given /= Scalar[Acc]((bottom - top) * (right - left))
                    for h in range(top, bottom):
                        for w in range(left, right):
                            plane[unsafe_offset=Int(h * p.width + w)] += given

    for_each_share(
        share,
        units,
        smallest_share(
            16 * Int(p.regions) * Int(p.channels) + Int(p.batch) * p.image(),
            units,
        ),
    )


@__name(t"positions_means_{dtype}_a{align}")
def position_means[
    dtype: DType, align: Bool
](y: Ptr[dtype], x: Ptr[dtype], regions: Ptr[dtype], p: RegionsProblem,):
    """A thread has one result."""
    var item = Int(global_idx.x)
    if item < Int(p.regions) * Int(p.channels):
        var region = _region[align=align](regions, item // Int(p.channels), p)
        y[unsafe_offset=item] = _value[align=align](
            x, region, p, item % Int(p.channels)
        )


@__name(t"positions_dgrad_gather_{dtype}_a{align}")
def position_gradients[
    dtype: DType, align: Bool
](
    dx: Ptr[accumulation_type[dtype]],
    dy: Ptr[dtype],
    regions: Ptr[dtype],
    p: RegionsProblem,
):
    """A thread has one pixel."""
    var item = Int(global_idx.x)
    if item >= Int(p.batch) * p.image():
        return
    var plane = item // p.pixels()
    var pixel = Int32(item % p.pixels())
    dx[unsafe_offset=item] = _gradient[align=align](
        dy,
        regions,
        p,
        plane // Int(p.channels),
        plane % Int(p.channels),
        pixel // p.width,
        pixel % p.width,
    )


@no_inline
def positions_gpu[
    dtype: DType, //, *, align: Bool
](
    ctx: DeviceContext,
    y: Ptr[dtype],
    x: Ptr[dtype],
    regions: Ptr[dtype],
    p: RegionsProblem,
) raises:
    """y = the means of the bins."""
    ctx.enqueue_function[position_means[dtype, align]](
        y,
        x,
        regions,
        p,
        grid_dim=ceildiv(Int(p.regions) * Int(p.channels), THREADS),
        block_dim=THREADS,
    )


@no_inline
def positions_gradient_gpu[
    dtype: DType, sums: DType, //, *, align: Bool
](
    ctx: DeviceContext,
    sums_of_image: Ptr[sums],
    dy: Ptr[dtype],
    regions: Ptr[dtype],
    p: RegionsProblem,
) raises:
    """The images' gradient: each pixel gathers, in the regions' order."""
    ctx.enqueue_function[position_gradients[dtype, align]](
        rebind[Ptr[accumulation_type[dtype]]](sums_of_image),
        dy,
        regions,
        p,
        grid_dim=ceildiv(Int(p.batch) * p.image(), THREADS),
        block_dim=THREADS,
    )
