"""The entry, in libraries for any device, of mirrored and repeated borders."""

from max.gpu.host import DeviceContext
from max.gpu.host.info import is_cpu
from std.utils.index import IndexList

from ..common.check import check_equal
from ..common.library import Arguments
from .cpu import border_dgrad_cpu, border_fprop_cpu
from .gpu import border_gpu
from .problem import PaddedAxis, PaddingProblem


@fieldwise_init
struct PaddingNumbers(ImplicitlyCopyable):
    """The numbers of a call: elements in front of D, H and W, and behind, and whether borders are mirrored.
    """

    var counts: IndexList[6]
    var mirrored: Bool

    @staticmethod
    def take(mut arguments: Arguments) -> Self:
        return Self(arguments.take_words[6](), arguments.take_word() != 0)


def _problem(
    x: IndexList[5], y: IndexList[5], numbers: PaddingNumbers
) raises -> PaddingProblem:
    """Returns the problem with the given extents without and with borders."""
    check_equal("padded N", y[0], x[0], "N")
    check_equal("padded C", y[4], x[4], "C")
    var mirrored = numbers.mirrored

    def axis(number: Int) raises {imm} -> PaddedAxis:
        var extent = x[1 + number]
        var low = numbers.counts[2 * number]
        var high = numbers.counts[2 * number + 1]
        check_equal(
            String("padded.shape[", 1 + number, "]"),
            y[1 + number],
            extent + low + high,
            "the extent with its border",
        )
        if mirrored and max(low, high) >= extent and max(low, high) > 0:
            raise Error(
                "padding=",
                max(low, high),
                ": a mirrored border must be less than the extent, ",
                extent,
            )
        return PaddedAxis(
            Int32(extent), Int32(y[1 + number]), Int32(low), mirrored
        )

    return PaddingProblem(Int32(x[0]), Int32(x[4]), axis(0), axis(1), axis(2))


def border_fprop[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """y = x with a border."""
    var numbers = PaddingNumbers.take(arguments)
    var y = arguments.take[dtype, 5]()
    var x = arguments.take[dtype, 5]()
    var p = _problem(x.shape(), y.shape(), numbers)
    if y.shape().flattened_length() == 0:
        return
    if p.rows() * p.length() == 0:
        raise Error("x has no elements to show in a border")
    comptime if is_cpu[target]():
        border_fprop_cpu(y.data, x.data, p)
    else:
        border_gpu[forward=True](ctx, y.data, x.data, p)


def border_dgrad[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """dx is, for each element, the sum of dy over the places where padding shows it. Deterministic.
    """
    var numbers = PaddingNumbers.take(arguments)
    var dx = arguments.take[dtype, 5]()
    var dy = arguments.take[dtype, 5]()
    var p = _problem(dx.shape(), dy.shape(), numbers)
    if p.rows() * p.length() == 0:
        return
    comptime if is_cpu[target]():
        border_dgrad_cpu(dx.data, dy.data, p)
    else:
        border_gpu[forward=False](ctx, dx.data, dy.data, p)
