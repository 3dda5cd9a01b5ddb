"""The entries of detection's operators, in libraries for any device."""

from max.gpu.host import DeviceContext
from std.utils.index import IndexList

from ..common.library import Arguments
from ..common.check import check_equal
from ..common.pointer import accumulation_type
from . import dispatch
from .deformable import DeformableProblem, DeformedAxis
from .problem import REGION, RegionsProblem


@fieldwise_init
struct RegionsNumbers(ImplicitlyCopyable):
    """The numbers of a call for regions."""

    var extents: IndexList[2]
    """H and W."""
    var bins: IndexList[2]
    """Bins along H and W."""
    var samples: Int
    """Samples of a bin along an axis; 0 for one sample per pixel."""
    var aligned: Bool
    """Whether pixels' centres have integer coordinates."""
    var deterministic: Bool
    """Whether gradients must have the same bits in every run."""
    var scale: Float64

    @staticmethod
    def take(mut arguments: Arguments) -> Self:
        return Self(
            arguments.take_words[2](),
            arguments.take_words[2](),
            arguments.take_word(),
            arguments.take_word() != 0,
            arguments.take_word() != 0,
            arguments.take_float(),
        )


@fieldwise_init
struct DeformableAxisNumbers(ImplicitlyCopyable):
    """The numbers of a call for one axis of a deformable convolution."""

    var size: Int
    var windows: Int
    var taps: Int
    var stride: Int
    var padding: Int
    var dilation: Int

    @staticmethod
    def take(mut arguments: Arguments) -> Self:
        var words = arguments.take_words[6]()
        return Self(words[0], words[1], words[2], words[3], words[4], words[5])


@fieldwise_init
struct DeformableNumbers(ImplicitlyCopyable):
    """The numbers of a call for a deformable convolution."""

    var h: DeformableAxisNumbers
    var w: DeformableAxisNumbers
    var groups: Int
    var offset_groups: Int
    var masked: Bool
    var channels: Int
    var deterministic: Bool
    """Whether the result must have the same bits in every run."""

    @staticmethod
    def take(mut arguments: Arguments) -> Self:
        return Self(
            DeformableAxisNumbers.take(arguments),
            DeformableAxisNumbers.take(arguments),
            arguments.take_word(),
            arguments.take_word(),
            arguments.take_word() != 0,
            arguments.take_word(),
            arguments.take_word() != 0,
        )


def _check_extents(name: String, shape: IndexList[3]) raises:
    for axis in range(3):
        if shape[axis] > Int(Int32.MAX):
            raise Error(t"{name}: extent {axis} is 2^31 or more")


def _regions_problem[
    positions: Bool
](
    image: IndexList[3],
    result: IndexList[3],
    regions: IndexList[2],
    own: RegionsNumbers,
) raises -> RegionsProblem:
    """Channels are innermost unless results are of `positions`."""
    comptime pixels = 2 if positions else 1
    comptime channels = 1 if positions else 2
    var bins = own.bins.flattened_length()
    if min(own.bins[0], own.bins[1]) < 1:
        raise Error(t"bins: {own.bins}: must be at least 1")
    check_equal("regions.numbers", regions[1], REGION, "a region's")
    check_equal("result.regions", result[0], regions[0], "the list's")
    check_equal("result.bins", result[pixels], bins, "the geometry's")
    comptime if positions:
        check_equal(
            "image.C", image[channels], result[channels] * bins, "C * bins"
        )
    else:
        check_equal(
            "result.C", result[channels], image[channels], "the image's C"
        )
    check_equal(
        "image.pixels",
        image[pixels],
        own.extents.flattened_length(),
        "H * W",
    )
    _check_extents("image", image)
    _check_extents("result", result)
    return RegionsProblem(
        Int32(image[0]),
        Int32(image[channels]),
        Int32(own.extents[0]),
        Int32(own.extents[1]),
        Int32(regions[0]),
        Int32(own.bins[0]),
        Int32(own.bins[1]),
        Int32(max(own.samples, 0)),
        own.aligned,
        own.scale,
    )


def roi_align_fprop[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """y = the mean of the values that the samples of each bin read in x."""
    var own = RegionsNumbers.take(arguments)
    var y = arguments.take[dtype, 3]()
    var x = arguments.take[dtype, 3]()
    var regions = arguments.take[dtype, 2]()
    var p = _regions_problem[False](x.shape(), y.shape(), regions.shape(), own)
    if y.shape().flattened_length() == 0:
        return
    dispatch.align[target](y.data, x.data, regions.data, p, ctx)


def roi_align_dgrad[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """dx = the images' gradient, in the accumulation type. On a GPU additions are atomic unless the call asks for the
    same bits in every run."""
    var own = RegionsNumbers.take(arguments)
    var dx = arguments.take[accumulation_type[dtype], 3]()
    var dy = arguments.take[dtype, 3]()
    var regions = arguments.take[dtype, 2]()
    var p = _regions_problem[False](
        dx.shape(), dy.shape(), regions.shape(), own
    )
    if dx.shape().flattened_length() == 0:
        return
    dispatch.align_gradient[target](
        dx, dy.data, regions.data, p, own.deterministic, ctx
    )


def roi_pool_fprop[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """y = the maximum of each bin of x, and its pixel."""
    var own = RegionsNumbers.take(arguments)
    var y = arguments.take[dtype, 3]()
    var places = arguments.take[DType.int32, 3]()
    var x = arguments.take[dtype, 3]()
    var regions = arguments.take[dtype, 2]()
    var p = _regions_problem[False](x.shape(), y.shape(), regions.shape(), own)
    if places.shape() != y.shape():
        raise Error(t"places is {places.shape()}, y is {y.shape()}")
    if y.shape().flattened_length() == 0:
        return
    dispatch.maxima[target](y.data, places.data, x.data, regions.data, p, ctx)


def roi_pool_dgrad[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """dx = the images' gradient, in the accumulation type. On a GPU additions are atomic unless the call asks for the
    same bits in every run."""
    var own = RegionsNumbers.take(arguments)
    var dx = arguments.take[accumulation_type[dtype], 3]()
    var dy = arguments.take[dtype, 3]()
    var regions = arguments.take[dtype, 2]()
    var places = arguments.take[DType.int32, 3]()
    var p = _regions_problem[False](
        dx.shape(), dy.shape(), regions.shape(), own
    )
    if places.shape() != dy.shape():
        raise Error(t"places is {places.shape()}, dy is {dy.shape()}")
    if dx.shape().flattened_length() == 0:
        return
    dispatch.maxima_gradient[target](
        dx, dy.data, places.data, regions.data, p, own.deterministic, ctx
    )


def ps_roi_fprop[
    target: StaticString, dtype: DType, align: Bool
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """y = the mean of each bin in its own channel of x."""
    var own = RegionsNumbers.take(arguments)
    var y = arguments.take[dtype, 3]()
    var x = arguments.take[dtype, 3]()
    var regions = arguments.take[dtype, 2]()
    var p = _regions_problem[True](x.shape(), y.shape(), regions.shape(), own)
    if y.shape().flattened_length() == 0:
        return
    dispatch.positions[target, align=align](
        y.data, x.data, regions.data, p, ctx
    )


def ps_roi_dgrad[
    target: StaticString, dtype: DType, align: Bool
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """dx = the images' gradient, in the accumulation type. On a GPU additions are atomic unless the call asks for the
    same bits in every run."""
    var own = RegionsNumbers.take(arguments)
    var dx = arguments.take[accumulation_type[dtype], 3]()
    var dy = arguments.take[dtype, 3]()
    var regions = arguments.take[dtype, 2]()
    var p = _regions_problem[True](dx.shape(), dy.shape(), regions.shape(), own)
    if dx.shape().flattened_length() == 0:
        return
    dispatch.positions_gradient[target, align=align](
        dx, dy.data, regions.data, p, own.deterministic, ctx
    )


def _deformable_problem(
    image: IndexList[3],
    columns: IndexList[3],
    offset: IndexList[3],
    mask: IndexList[3],
    own: DeformableNumbers,
) raises -> DeformableProblem:
    def axis(
        name: String, own: DeformableAxisNumbers
    ) raises {imm} -> DeformedAxis:
        var size, taps, stride = own.size, own.taps, own.stride
        var padding, dilation = own.padding, own.dilation
        if min(taps, min(stride, dilation)) < 1 or padding < 0:
            raise Error(
                t"{name}: taps={taps}, stride={stride}, dilation={dilation}:"
                t" must be at least 1; padding={padding}: at least 0"
            )
        var reach = dilation * (taps - 1) + 1
        if max(max(size, reach) + 2 * padding, stride) > Int(Int32.MAX) // 2:
            raise Error(t"{name} reaches over 2^30 elements and more")
        var room = size + 2 * padding - reach
        check_equal(
            String(name, ".windows"),
            own.windows,
            room // stride + 1 if room >= 0 else 0,
            "the number that fit",
        )
        return DeformedAxis(
            Int32(size),
            Int32(own.windows),
            Int32(taps),
            Int32(stride),
            Int32(padding),
            Int32(dilation),
        )

    var h = axis("H", own.h)
    var w = axis("W", own.w)
    var groups, offset_groups = own.groups, own.offset_groups
    var masked, channels = own.masked, own.channels
    if min(groups, offset_groups) < 1:
        raise Error(
            t"groups={groups}, offset_groups={offset_groups}: must be at"
            t" least 1"
        )
    check_equal("C % groups", channels % groups, 0, "whole groups'")
    check_equal(
        "C % offset_groups", channels % offset_groups, 0, "whole groups'"
    )
    var p = DeformableProblem(
        Int32(image[0]),
        Int32(channels),
        Int32(groups),
        Int32(offset_groups),
        masked,
        h,
        w,
    )
    check_equal("image.C", image[2], channels, "the geometry's")
    check_equal("image.pixels", image[1], p.pixels(), "H * W")
    check_equal("columns.N", columns[0], image[0], "the image's N")
    check_equal("columns.windows", columns[1], p.windows(), "the geometry's")
    check_equal("columns.length", columns[2], p.column(), "taps * C")
    check_equal("offset.N", offset[0], image[0], "the image's N")
    check_equal("offset.windows", offset[1], p.windows(), "the geometry's")
    var numbers = offset_groups * p.taps()
    check_equal("offset.numbers", offset[2], 2 * numbers, "the taps'")
    if masked:
        check_equal("mask.N", mask[0], image[0], "the image's N")
        check_equal("mask.windows", mask[1], p.windows(), "the geometry's")
        check_equal("mask.numbers", mask[2], numbers, "the taps'")
    _check_extents("image", image)
    _check_extents("columns", columns)
    return p


def deformable_columns[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """Columns = the elements of x that the windows of a deformable convolution read.
    """
    var own = DeformableNumbers.take(arguments)
    var columns = arguments.take[dtype, 3]()
    var x = arguments.take[dtype, 3]()
    var offset = arguments.take[dtype, 3]()
    var mask = arguments.take[dtype, 3]()
    var p = _deformable_problem(
        x.shape(), columns.shape(), offset.shape(), mask.shape(), own
    )
    if columns.shape().flattened_length() == 0:
        return
    dispatch.columns[target](
        columns.data, x.data, offset.data, mask.data, p, ctx
    )


def deformable_dgrad_input[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """dx = the images' gradient for that of the columns, in the accumulation type. On a GPU additions are atomic unless
    the call asks for the same bits in every run."""
    var own = DeformableNumbers.take(arguments)
    var dx = arguments.take[accumulation_type[dtype], 3]()
    var dcolumns = arguments.take[dtype, 3]()
    var offset = arguments.take[dtype, 3]()
    var mask = arguments.take[dtype, 3]()
    var p = _deformable_problem(
        dx.shape(), dcolumns.shape(), offset.shape(), mask.shape(), own
    )
    if dx.shape().flattened_length() == 0:
        return
    dispatch.columns_input_gradient[target](
        dx, dcolumns.data, offset.data, mask.data, p, own.deterministic, ctx
    )


def deformable_dgrad_offset[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """The gradients of offsets and masks for that of the columns."""
    var own = DeformableNumbers.take(arguments)
    var doffset = arguments.take[dtype, 3]()
    var dmask = arguments.take[dtype, 3]()
    var dcolumns = arguments.take[dtype, 3]()
    var x = arguments.take[dtype, 3]()
    var offset = arguments.take[dtype, 3]()
    var mask = arguments.take[dtype, 3]()
    var p = _deformable_problem(
        x.shape(), dcolumns.shape(), offset.shape(), mask.shape(), own
    )
    if doffset.shape() != offset.shape() or dmask.shape() != mask.shape():
        raise Error(
            t"doffset is {doffset.shape()}, dmask {dmask.shape()}: must be"
            t" {offset.shape()} and {mask.shape()}"
        )
    if doffset.shape().flattened_length() == 0:
        return
    dispatch.columns_offset_gradient[target](
        doffset.data,
        dmask.data,
        dcolumns.data,
        x.data,
        offset.data,
        mask.data,
        p,
        ctx,
    )
