"""The gradients of regions' bins on a GPU, scattered: a thread has an element of the result and adds atomically, so
that the last bits may differ from run to run. regions_gpu.mojo and positions.mojo gather in a fixed order, which takes
a look at all regions for each pixel."""

from std.math import ceildiv

from max.gpu import global_idx
from max.gpu.host import DeviceBuffer, DeviceContext

from ..common.arithmetic import Divisor
from ..common.atomics import add_atomically
from ..common.pointer import Ptr, accumulation_type, device_pointer
from .problem import (
    Bins,
    Region,
    RegionsProblem,
    aligned_region,
    pooled_region,
)

comptime THREADS = 256


struct SampleWeights[Acc: DType](TrivialRegisterPassable):
    """The weights that the samples of a bin give along one axis, place after place; weights of neighbouring samples at
    the same place are added up."""

    var bins: Bins[Self.Acc]
    var bin: Int32
    var number: Int32
    """The next sample."""
    var place: Int32
    var weight: Scalar[Self.Acc]
    var higher: Int32
    var ahead: Scalar[Self.Acc]
    """The weight that earlier samples give the place `higher`."""

    @always_inline
    def __init__(out self, bins: Bins[Self.Acc], bin: Int32):
        self.bins = bins
        self.bin = bin
        self.number = 0
        self.place = -1
        self.weight = 0
        self.higher = -1
        self.ahead = 0

    @always_inline
    def advance(mut self) -> Bool:
        """Moves to the next place and returns whether there is one; the same place may come again.
        """
        var found = self.ahead != 0
        self.place = self.higher
        self.weight = self.ahead
        self.ahead = 0
        while self.number < self.bins.samples:
            var sample = self.bins.sample(self.bin, self.number)
            if sample.low >= 0:
                if not found:
                    self.place = sample.low
                    found = True
                if sample.low != self.place or (
                    self.ahead != 0 and sample.high != self.higher
                ):
                    break
                self.weight += 1 - sample.share
                self.ahead += sample.share
                self.higher = sample.high
            self.number += 1
        return found


@always_inline
def _scatter_bin[
    Acc: DType
](
    image: Ptr[Acc],
    step: Int,
    region: Region[Acc],
    bin: Int32,
    given: Scalar[Acc],
    p: RegionsProblem,
):
    """Adds `given`, weighted by the samples of a bin, to an image whose pixels lie `step` elements apart.
    """
    var down = SampleWeights[Acc](region.h, bin // p.columns)
    while down.advance():
        var along = SampleWeights[Acc](region.w, bin % p.columns)
        var share = given * down.weight
        while along.advance():
            var pixel = Int(down.place * p.width + along.place)
            add_atomically(
                image.unsafe_offset(pixel * step), share * along.weight
            )


@always_inline
def scatter_mean[
    dtype: DType
](
    dx: Ptr[accumulation_type[dtype]],
    dy: Ptr[dtype],
    regions: Ptr[dtype],
    p: RegionsProblem,
    by_channels: Divisor,
    by_bins: Divisor,
    item: Int,
):
    """roi_align: a channel of a bin. `dx` is zero before."""
    comptime Acc = accumulation_type[dtype]
    var row, c = by_channels.divide(Int32(item))
    if row >= p.regions * by_bins.value:
        return
    var number, bin = by_bins.divide(row)
    var region = aligned_region[positions=False](regions, Int(number), p)
    if region.image < 0:
        return
    _scatter_bin[Acc](
        dx.unsafe_offset(Int(region.image) * p.image() + Int(c)),
        Int(p.channels),
        region,
        bin,
        dy[unsafe_offset=item].cast[Acc]() / region.count,
        p,
    )


@always_inline
def scatter_maximum[
    dtype: DType
](
    dx: Ptr[accumulation_type[dtype]],
    dy: Ptr[dtype],
    places: Ptr[DType.int32],
    regions: Ptr[dtype],
    p: RegionsProblem,
    by_channels: Divisor,
    by_bins: Divisor,
    item: Int,
):
    """roi_pool: a channel of a bin. `dx` is zero before."""
    comptime Acc = accumulation_type[dtype]
    var row, c = by_channels.divide(Int32(item))
    if row >= p.regions * by_bins.value:
        return
    var number = Int(by_bins.quotient(row))
    var image = pooled_region[positions=False](regions, number, p).image
    var place = Int(places[unsafe_offset=item])
    if image < 0 or place < 0 or place >= p.pixels():
        return
    add_atomically(
        dx.unsafe_offset(
            Int(image) * p.image() + place * Int(p.channels) + Int(c)
        ),
        dy[unsafe_offset=item].cast[Acc](),
    )


@always_inline
def scatter_position[
    dtype: DType, align: Bool
](
    dx: Ptr[accumulation_type[dtype]],
    dy: Ptr[dtype],
    regions: Ptr[dtype],
    p: RegionsProblem,
    by_channels: Divisor,
    by_bins: Divisor,
    item: Int,
):
    """ps_roi_align or ps_roi_pool: a bin of a channel, which has a plane of its own. `dx` is zero before.
    """
    comptime Acc = accumulation_type[dtype]
    var number, channel = by_channels.divide(Int32(item))
    if number >= p.regions:
        return
    var region: Region[Acc]
    comptime if align:
        region = aligned_region[positions=True](regions, Int(number), p)
    else:
        region = pooled_region[positions=True](regions, Int(number), p)
    if region.image < 0:
        return
    var bin = channel - by_bins.quotient(channel) * by_bins.value
    var given = dy[unsafe_offset=item].cast[Acc]()
    var plane = dx.unsafe_offset(
        Int(region.image) * p.image() + Int(channel) * p.pixels()
    )
    comptime if align:
        _scatter_bin[Acc](plane, 1, region, bin, given / region.count, p)
    else:
        var top, bottom = region.h.span(bin // p.columns, p.height)
        var left, right = region.w.span(bin % p.columns, p.width)
        if bottom <= top or right <= left:
            return
        given /= Scalar[Acc]((bottom - top) * (right - left))
        for h in range(top, bottom):
            for w in range(left, right):
                add_atomically(plane.unsafe_offset(Int(h * p.width + w)), given)


@__name(t"regions_dgrad_scatter_means_{dtype}")
def scatter_means_kernel[
    dtype: DType
](
    dx: Ptr[accumulation_type[dtype]],
    dy: Ptr[dtype],
    regions: Ptr[dtype],
    p: RegionsProblem,
    by_channels: Divisor,
    by_bins: Divisor,
):
    scatter_mean[dtype](
        dx, dy, regions, p, by_channels, by_bins, Int(global_idx.x)
    )


@__name(t"regions_dgrad_scatter_maxima_{dtype}")
def scatter_maxima_kernel[
    dtype: DType
](
    dx: Ptr[accumulation_type[dtype]],
    dy: Ptr[dtype],
    places: Ptr[DType.int32],
    regions: Ptr[dtype],
    p: RegionsProblem,
    by_channels: Divisor,
    by_bins: Divisor,
):
    scatter_maximum[dtype](
        dx, dy, places, regions, p, by_channels, by_bins, Int(global_idx.x)
    )


@__name(t"positions_dgrad_scatter_{dtype}_a{align}")
def scatter_positions_kernel[
    dtype: DType, align: Bool
](
    dx: Ptr[accumulation_type[dtype]],
    dy: Ptr[dtype],
    regions: Ptr[dtype],
    p: RegionsProblem,
    by_channels: Divisor,
    by_bins: Divisor,
):
    scatter_position[dtype, align](
        dx, dy, regions, p, by_channels, by_bins, Int(global_idx.x)
    )


@no_inline
def scatter_regions_gpu[
    dtype: DType, sums: DType, //, *, maxima: Bool
](
    ctx: DeviceContext,
    dx: DeviceBuffer[sums],
    dy: Ptr[dtype],
    places: Ptr[DType.int32],
    regions: Ptr[dtype],
    p: RegionsProblem,
) raises:
    """The images' gradient; `places` are read of maxima alone. The result has fewer than 2^31 elements.
    """
    ctx.enqueue_memset(dx, 0)
    var size = Int(p.regions) * p.bins() * Int(p.channels)
    if size == 0:
        return
    var to = rebind[Ptr[accumulation_type[dtype]]](device_pointer(dx))
    var by_channels = Divisor(Int(p.channels))
    var by_bins = Divisor(p.bins())
    comptime if maxima:
        ctx.enqueue_function[scatter_maxima_kernel[dtype]](
            to,
            dy,
            places,
            regions,
            p,
            by_channels,
            by_bins,
            grid_dim=ceildiv(size, THREADS),
            block_dim=THREADS,
        )
    else:
        ctx.enqueue_function[scatter_means_kernel[dtype]](
            to,
            dy,
            regions,
            p,
            by_channels,
            by_bins,
            grid_dim=ceildiv(size, THREADS),
            block_dim=THREADS,
        )


@no_inline
def scatter_positions_gpu[
    dtype: DType, sums: DType, //, *, align: Bool
](
    ctx: DeviceContext,
    dx: DeviceBuffer[sums],
    dy: Ptr[dtype],
    regions: Ptr[dtype],
    p: RegionsProblem,
) raises:
    """The images' gradient. The result has fewer than 2^31 elements."""
    ctx.enqueue_memset(dx, 0)
    var size = Int(p.regions) * Int(p.channels)
    if size == 0:
        return
    ctx.enqueue_function[scatter_positions_kernel[dtype, align]](
        rebind[Ptr[accumulation_type[dtype]]](device_pointer(dx)),
        dy,
        regions,
        p,
        Divisor(Int(p.channels)),
        Divisor(p.bins()),
        grid_dim=ceildiv(size, THREADS),
        block_dim=THREADS,
    )
