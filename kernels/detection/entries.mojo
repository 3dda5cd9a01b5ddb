"""The entries of detection's operators, in libraries for any device.

Of regions, the geometry is H and W, the bins along each, the samples of a bin along an axis (0: one for each pixel), whether
pixels' centres have whole coordinates, and the bits of the scale, a float64.
"""

from std.memory import bitcast

from max.gpu.host import DeviceContext
from max.gpu.host.info import is_cpu
from std.utils.index import IndexList

from ..common.library import Arguments, Operand
from ..common.check import check_equal
from ..common.pointer import Ptr, accumulation_type
from .columns_cpu import (
    columns_cpu,
    columns_input_gradient_cpu,
    columns_offset_gradient_cpu,
)
from .columns_gpu import (
    columns_gpu,
    columns_input_gradient_gpu,
    columns_offset_gradient_gpu,
)
from .deformable import DeformableProblem, DeformedAxis
from .positions import (
    positions_cpu,
    positions_gpu,
    positions_gradient_cpu,
    positions_gradient_gpu,
)
from .problem import REGION, RegionsProblem
from .regions_cpu import (
    align_cpu,
    align_gradient_cpu,
    check_images,
    maxima_cpu,
    maxima_gradient_cpu,
)
from .regions_gpu import align_gpu, maxima_gpu, regions_gradient_gpu

comptime NUMBERS = 7
"""Of the geometry of regions."""
comptime DEFORMABLE_NUMBERS = 17
"""Of a deformable convolution: size, windows, taps, stride, padding and dilation of H, then those of W; groups, offset
groups, whether there is a mask; the channels; whether the result shall be deterministic."""


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
    geometry: Operand[DType.int64, 1],
) raises -> RegionsProblem:
    """Channels are innermost unless results are of `positions`."""
    comptime pixels = 2 if positions else 1
    comptime channels = 1 if positions else 2
    check_equal("geometry.length", geometry.dim_size(0), NUMBERS, "the entry's")
    var bins = Int(geometry[2]) * Int(geometry[3])
    if min(geometry[2], geometry[3]) < 1:
        raise Error(t"bins: {geometry[2]} by {geometry[3]}: must be at least 1")
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
        Int(geometry[0]) * Int(geometry[1]),
        "H * W",
    )
    _check_extents("image", image)
    _check_extents("result", result)
    return RegionsProblem(
        Int32(image[0]),
        Int32(image[channels]),
        Int32(geometry[0]),
        Int32(geometry[1]),
        Int32(regions[0]),
        Int32(geometry[2]),
        Int32(geometry[3]),
        Int32(max(geometry[4], 0)),
        geometry[5] != 0,
        bitcast[DType.float64](geometry[6]),
    )


def roi_align_fprop[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """y = the mean of what the samples of each bin read in x."""
    var y = arguments.take[dtype, 3]()
    var x = arguments.take[dtype, 3]()
    var regions = arguments.take[dtype, 2]()
    var geometry = arguments.take[DType.int64, 1]()
    var p = _regions_problem[False](
        x.shape(), y.shape(), regions.shape(), geometry
    )
    if y.shape().flattened_length() == 0:
        return
    comptime if is_cpu[target]():
        check_images(regions.data, p)
        align_cpu(y.data, x.data, regions.data, p)
    else:
        align_gpu(ctx, y.data, x.data, regions.data, p)


def roi_align_dgrad[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """dx = the images' gradient, in what sums are kept in. Deterministic."""
    var dx = arguments.take[accumulation_type[dtype], 3]()
    var dy = arguments.take[dtype, 3]()
    var regions = arguments.take[dtype, 2]()
    var geometry = arguments.take[DType.int64, 1]()
    var p = _regions_problem[False](
        dx.shape(), dy.shape(), regions.shape(), geometry
    )
    if dx.shape().flattened_length() == 0:
        return
    comptime if is_cpu[target]():
        check_images(regions.data, p)
        align_gradient_cpu(dx.data, dy.data, regions.data, p)
    else:
        var nothing = rebind[Ptr[DType.int32]](dx.data)
        regions_gradient_gpu[maxima=False](
            ctx, dx.data, dy.data, nothing, regions.data, p
        )


def roi_pool_fprop[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """y = the maximum of each bin of x, and its pixel."""
    var y = arguments.take[dtype, 3]()
    var places = arguments.take[DType.int32, 3]()
    var x = arguments.take[dtype, 3]()
    var regions = arguments.take[dtype, 2]()
    var geometry = arguments.take[DType.int64, 1]()
    var p = _regions_problem[False](
        x.shape(), y.shape(), regions.shape(), geometry
    )
    if places.shape() != y.shape():
        raise Error(t"places is {places.shape()}, y is {y.shape()}")
    if y.shape().flattened_length() == 0:
        return
    comptime if is_cpu[target]():
        check_images(regions.data, p)
        maxima_cpu(y.data, places.data, x.data, regions.data, p)
    else:
        maxima_gpu(ctx, y.data, places.data, x.data, regions.data, p)


def roi_pool_dgrad[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """dx = the images' gradient, in what sums are kept in. Deterministic."""
    var dx = arguments.take[accumulation_type[dtype], 3]()
    var dy = arguments.take[dtype, 3]()
    var regions = arguments.take[dtype, 2]()
    var places = arguments.take[DType.int32, 3]()
    var geometry = arguments.take[DType.int64, 1]()
    var p = _regions_problem[False](
        dx.shape(), dy.shape(), regions.shape(), geometry
    )
    if places.shape() != dy.shape():
        raise Error(t"places is {places.shape()}, dy is {dy.shape()}")
    if dx.shape().flattened_length() == 0:
        return
    comptime if is_cpu[target]():
        check_images(regions.data, p)
        maxima_gradient_cpu(dx.data, dy.data, regions.data, places.data, p)
    else:
        regions_gradient_gpu[maxima=True](
            ctx, dx.data, dy.data, places.data, regions.data, p
        )


def ps_roi_fprop[
    target: StaticString, dtype: DType, align: Bool
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """y = the mean of each bin in its own channel of x."""
    var y = arguments.take[dtype, 3]()
    var x = arguments.take[dtype, 3]()
    var regions = arguments.take[dtype, 2]()
    var geometry = arguments.take[DType.int64, 1]()
    var p = _regions_problem[True](
        x.shape(), y.shape(), regions.shape(), geometry
    )
    if y.shape().flattened_length() == 0:
        return
    comptime if is_cpu[target]():
        check_images(regions.data, p)
        positions_cpu[align=align](y.data, x.data, regions.data, p)
    else:
        positions_gpu[align=align](ctx, y.data, x.data, regions.data, p)


def ps_roi_dgrad[
    target: StaticString, dtype: DType, align: Bool
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """dx = the images' gradient, in what sums are kept in. Deterministic."""
    var dx = arguments.take[accumulation_type[dtype], 3]()
    var dy = arguments.take[dtype, 3]()
    var regions = arguments.take[dtype, 2]()
    var geometry = arguments.take[DType.int64, 1]()
    var p = _regions_problem[True](
        dx.shape(), dy.shape(), regions.shape(), geometry
    )
    if dx.shape().flattened_length() == 0:
        return
    comptime if is_cpu[target]():
        check_images(regions.data, p)
        positions_gradient_cpu[align=align](dx.data, dy.data, regions.data, p)
    else:
        positions_gradient_gpu[align=align](
            ctx, dx.data, dy.data, regions.data, p
        )


def _deformable_problem(
    image: IndexList[3],
    columns: IndexList[3],
    offset: IndexList[3],
    mask: IndexList[3],
    geometry: Operand[DType.int64, 1],
) raises -> DeformableProblem:
    check_equal(
        "geometry.length",
        geometry.dim_size(0),
        DEFORMABLE_NUMBERS,
        "the entry's",
    )

    def axis(name: String, first: Int) raises {imm} -> DeformedAxis:
        var size = Int(geometry[first])
        var taps = Int(geometry[first + 2])
        var stride = Int(geometry[first + 3])
        var padding = Int(geometry[first + 4])
        var dilation = Int(geometry[first + 5])
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
            Int(geometry[first + 1]),
            room // stride + 1 if room >= 0 else 0,
            "the number that fit",
        )
        return DeformedAxis(
            Int32(size),
            Int32(geometry[first + 1]),
            Int32(taps),
            Int32(stride),
            Int32(padding),
            Int32(dilation),
        )

    var h = axis("H", 0)
    var w = axis("W", 6)
    var groups = Int(geometry[12])
    var offset_groups = Int(geometry[13])
    var masked = geometry[14] != 0
    var channels = Int(geometry[15])
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
    """Columns = what the windows of a deformable convolution read in x."""
    var columns = arguments.take[dtype, 3]()
    var x = arguments.take[dtype, 3]()
    var offset = arguments.take[dtype, 3]()
    var mask = arguments.take[dtype, 3]()
    var geometry = arguments.take[DType.int64, 1]()
    var p = _deformable_problem(
        x.shape(), columns.shape(), offset.shape(), mask.shape(), geometry
    )
    if columns.shape().flattened_length() == 0:
        return
    comptime if is_cpu[target]():
        columns_cpu(columns.data, x.data, offset.data, mask.data, p)
    else:
        columns_gpu(
            ctx,
            columns.data,
            x.data,
            offset.data,
            mask.data,
            p,
        )


def deformable_dgrad_input[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """dx = the images' gradient for that of the columns, in what sums are kept in. On a GPU additions are atomic unless the
    geometry asks for the same bits in every run."""
    var dx = arguments.take[accumulation_type[dtype], 3]()
    var dcolumns = arguments.take[dtype, 3]()
    var offset = arguments.take[dtype, 3]()
    var mask = arguments.take[dtype, 3]()
    var geometry = arguments.take[DType.int64, 1]()
    var p = _deformable_problem(
        dx.shape(), dcolumns.shape(), offset.shape(), mask.shape(), geometry
    )
    if dx.shape().flattened_length() == 0:
        return
    comptime if is_cpu[target]():
        columns_input_gradient_cpu(
            dx.data, dcolumns.data, offset.data, mask.data, p
        )
    else:
        columns_input_gradient_gpu(
            ctx,
            dx.to_device_buffer(ctx),
            dcolumns.data,
            offset.data,
            mask.data,
            p,
            geometry[16] != 0,
        )


def deformable_dgrad_offset[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """The gradients of offsets and masks for that of the columns."""
    var doffset = arguments.take[dtype, 3]()
    var dmask = arguments.take[dtype, 3]()
    var dcolumns = arguments.take[dtype, 3]()
    var x = arguments.take[dtype, 3]()
    var offset = arguments.take[dtype, 3]()
    var mask = arguments.take[dtype, 3]()
    var geometry = arguments.take[DType.int64, 1]()
    var p = _deformable_problem(
        x.shape(), dcolumns.shape(), offset.shape(), mask.shape(), geometry
    )
    if doffset.shape() != offset.shape() or dmask.shape() != mask.shape():
        raise Error(
            t"doffset is {doffset.shape()}, dmask {dmask.shape()}: must be"
            t" {offset.shape()} and {mask.shape()}"
        )
    if doffset.shape().flattened_length() == 0:
        return
    comptime if is_cpu[target]():
        columns_offset_gradient_cpu(
            doffset.data,
            dmask.data,
            dcolumns.data,
            x.data,
            offset.data,
            mask.data,
            p,
        )
    else:
        columns_offset_gradient_gpu(
            ctx,
            doffset.data,
            dmask.data,
            dcolumns.data,
            x.data,
            offset.data,
            mask.data,
            p,
        )
