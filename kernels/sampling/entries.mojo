"""The entries of grid_sample, in libraries for any device.

`taps` are the places that a coordinate reads along an axis: 1 for nearest, 2 for linear, 4 for cubic. `deep` where the
image has three axes.
"""

from max.gpu.host import DeviceContext
from std.utils.index import IndexList

from ..common.check import check_equal
from ..common.library import Arguments
from ..common.pointer import accumulation_type
from . import dispatch
from .problem import SampledAxis, SamplingProblem


@fieldwise_init
struct SamplingNumbers(ImplicitlyCopyable):
    """The numbers of a call."""

    var extents: IndexList[3]
    """D, H and W."""
    var padding: Int
    var corners: Bool
    """Whether corners are aligned."""
    var deterministic: Bool
    """Whether the result must have the same bits in every run."""

    @staticmethod
    def take(mut arguments: Arguments) -> Self:
        return Self(
            arguments.take_words[3](),
            arguments.take_word(),
            arguments.take_word() != 0,
            arguments.take_word() != 0,
        )


def _problem[
    channels_last: Bool, deep: Bool
](
    image: IndexList[3],
    result: IndexList[3],
    grid: IndexList[3],
    numbers: SamplingNumbers,
) raises -> SamplingProblem:
    comptime c = 2 if channels_last else 1
    comptime places = 1 if channels_last else 2
    check_equal("result.N", result[0], image[0], "the image's N")
    check_equal("result.C", result[c], image[c], "the image's C")
    check_equal("grid.N", grid[0], image[0], "the image's N")
    check_equal("grid.points", grid[1], result[places], "the result's")
    check_equal("grid.axes", grid[2], 3 if deep else 2, "the image's")
    check_equal(
        "image.pixels",
        image[places],
        numbers.extents.flattened_length(),
        "D * H * W",
    )
    var padding = numbers.padding
    if padding < 0 or padding > 2:
        raise Error(t"padding={padding}: must be 0, 1 or 2")
    for a in range(3):
        if image[a] > Int(Int32.MAX) or result[a] > Int(Int32.MAX):
            raise Error(t"grid_sample: an extent of axis {a} is 2^31 or more")

    def axis(number: Int) raises {imm} -> SampledAxis:
        var size = numbers.extents[number]
        if size < 1:
            raise Error(t"the image has an axis of extent {size}")
        return SampledAxis(Int32(size), Int32(padding), numbers.corners)

    return SamplingProblem(
        Int32(image[0]),
        Int32(image[c]),
        Int32(grid[1]),
        axis(0),
        axis(1),
        axis(2),
    )


def sample_fprop[
    target: StaticString,
    dtype: DType,
    channels_last: Bool,
    taps: Int,
    deep: Bool,
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """y = the values that the points of the grid read in x."""
    var numbers = SamplingNumbers.take(arguments)
    var y = arguments.take[dtype, 3]()
    var x = arguments.take[dtype, 3]()
    var grid = arguments.take[dtype, 3]()
    var p = _problem[channels_last, deep](
        x.shape(), y.shape(), grid.shape(), numbers
    )
    if Int(p.batch) * p.result() == 0:
        return
    dispatch.sample[target, channels_last=channels_last, T=taps, deep=deep](
        y.data, x.data, grid.data, p, ctx
    )


def sample_dgrad_grid[
    target: StaticString,
    dtype: DType,
    channels_last: Bool,
    taps: Int,
    deep: Bool,
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """dgrid = the gradient of the grid, for dy, the gradient of the values that were read.
    """
    var numbers = SamplingNumbers.take(arguments)
    var dgrid = arguments.take[dtype, 3]()
    var dy = arguments.take[dtype, 3]()
    var x = arguments.take[dtype, 3]()
    var grid = arguments.take[dtype, 3]()
    var p = _problem[channels_last, deep](
        x.shape(), dy.shape(), grid.shape(), numbers
    )
    if dgrid.shape() != grid.shape():
        raise Error(t"dgrid is {dgrid.shape()}, the grid {grid.shape()}")
    if dgrid.shape().flattened_length() == 0:
        return
    dispatch.grid_gradient[
        target, channels_last=channels_last, T=taps, deep=deep
    ](dgrid.data, dy.data, x.data, grid.data, p, ctx)


def sample_dgrad_input[
    target: StaticString,
    dtype: DType,
    channels_last: Bool,
    taps: Int,
    deep: Bool,
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """dx = the gradient of the image, in the accumulation type. On a GPU additions are atomic unless the geometry asks
    for the same bits in every run."""
    var numbers = SamplingNumbers.take(arguments)
    var dx = arguments.take[accumulation_type[dtype], 3]()
    var dy = arguments.take[dtype, 3]()
    var grid = arguments.take[dtype, 3]()
    var p = _problem[channels_last, deep](
        dx.shape(), dy.shape(), grid.shape(), numbers
    )
    if Int(p.batch) * p.image() == 0:
        return
    dispatch.input_gradient[
        target, channels_last=channels_last, T=taps, deep=deep
    ](dx, dy.data, grid.data, p, numbers.deterministic, ctx)
