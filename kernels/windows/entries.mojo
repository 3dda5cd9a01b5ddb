"""The entries of sliding windows, in libraries for any device."""

from max.gpu.host import DeviceContext
from max.gpu.host.info import is_cpu
from std.utils.index import IndexList

from ..common.check import check_equal
from ..common.library import Arguments
from .cpu import add_up_cpu, lay_out_cpu
from .gpu import add_up_gpu, lay_out_gpu
from .problem import WindowAxis, WindowsProblem


@fieldwise_init
struct WindowsAxisNumbers(ImplicitlyCopyable):
    """The numbers of a call for one of its two axes, H first."""

    var taps: Int
    var stride: Int
    var padding: Int
    var dilation: Int

    @staticmethod
    def take(mut arguments: Arguments) -> Self:
        var words = arguments.take_words[4]()
        return Self(words[0], words[1], words[2], words[3])


def _axis(
    name: String,
    extent: Int,
    windows: Int,
    taps: Int,
    numbers: WindowsAxisNumbers,
) raises -> WindowAxis:
    var stride, padding, dilation = (
        numbers.stride,
        numbers.padding,
        numbers.dilation,
    )
    check_equal(
        String("columns' taps of ", name), taps, numbers.taps, "the windows'"
    )
    if min(taps, min(stride, dilation)) < 1 or padding < 0:
        raise Error(
            name,
            ": taps=",
            taps,
            ", stride=",
            stride,
            ", dilation=",
            dilation,
            ": must be at least 1; padding=",
            padding,
            ": at least 0",
        )
    var reach = dilation * (taps - 1) + 1
    if max(max(extent, reach) + 2 * padding, stride) > Int(Int32.MAX) // 2:
        raise Error(name, " reaches over 2^30 elements and more")
    var room = extent + 2 * padding - reach
    check_equal(
        String("columns' windows of ", name),
        windows,
        room // stride + 1 if room >= 0 else 0,
        "the number that fit",
    )
    return WindowAxis(extent, windows, taps, stride, padding, dilation)


def _problem[
    taps_first: Bool
](
    x: IndexList[4],
    columns: IndexList[6],
    h: WindowsAxisNumbers,
    w: WindowsAxisNumbers,
) raises -> WindowsProblem:
    """Columns are [N, R, S, P, Q, C] or [N, P, Q, R, S, C]."""
    check_equal("columns.N", columns[0], x[0], "x's N")
    check_equal("columns.C", columns[5], x[3], "x's C")
    comptime taps = 1 if taps_first else 3
    comptime windows = 3 if taps_first else 1
    comptime if taps_first:
        check_equal("x.C", x[3], 1, "of a plane")
    if max(x[0], x[3]) > Int(Int32.MAX):
        raise Error("x has an extent of 2^31 or more")
    return WindowsProblem(
        Int32(x[0]),
        Int32(x[3]),
        _axis("H", x[1], columns[windows], columns[taps], h),
        _axis("W", x[2], columns[windows + 1], columns[taps + 1], w),
    )


def lay_out_windows[
    target: StaticString, dtype: DType, taps_first: Bool
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """Columns = the elements under each window of x."""
    var h = WindowsAxisNumbers.take(arguments)
    var w = WindowsAxisNumbers.take(arguments)
    var columns = arguments.take[dtype, 6]()
    var x = arguments.take[dtype, 4]()
    var p = _problem[taps_first](x.shape(), columns.shape(), h, w)
    if p.columns_size() == 0:
        return
    comptime if is_cpu[target]():
        lay_out_cpu[taps_first=taps_first](columns.data, x.data, p)
    else:
        lay_out_gpu[taps_first=taps_first](ctx, columns.data, x.data, p)


def add_up_windows[
    target: StaticString, dtype: DType, taps_first: Bool
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """Each element of x = the sum of its elements in the columns. Deterministic.
    """
    var h = WindowsAxisNumbers.take(arguments)
    var w = WindowsAxisNumbers.take(arguments)
    var x = arguments.take[dtype, 4]()
    var columns = arguments.take[dtype, 6]()
    var p = _problem[taps_first](x.shape(), columns.shape(), h, w)
    if p.size() == 0:
        return
    comptime if is_cpu[target]():
        add_up_cpu[taps_first=taps_first](x.data, columns.data, p)
    else:
        add_up_gpu[taps_first=taps_first](ctx, x.data, columns.data, p)
