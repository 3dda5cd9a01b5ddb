"""The entries of sliding windows, in libraries for any device."""

from max.gpu.host import DeviceContext
from max.gpu.host.info import is_cpu
from std.utils.index import IndexList

from ..common.check import check_equal
from ..common.library import Arguments, Operand
from .cpu import add_up_cpu, lay_out_cpu
from .gpu import add_up_gpu, lay_out_gpu
from .problem import WindowAxis, WindowsProblem

comptime NUMBERS = 8
"""Of the geometry: taps, stride, padding and dilation of H, then those of W."""


def _axis(
    name: String,
    extent: Int,
    windows: Int,
    taps: Int,
    geometry: Operand[DType.int64, 1],
    first: Int,
) raises -> WindowAxis:
    var stride = Int(geometry[first + 1])
    var padding = Int(geometry[first + 2])
    var dilation = Int(geometry[first + 3])
    check_equal(
        String("columns' taps of ", name),
        taps,
        Int(geometry[first]),
        "the geometry's",
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
    x: IndexList[4], columns: IndexList[6], geometry: Operand[DType.int64, 1]
) raises -> WindowsProblem:
    """Columns are [N, R, S, P, Q, C] or [N, P, Q, R, S, C]."""
    check_equal("geometry.length", geometry.dim_size(0), NUMBERS, "the entry's")
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
        _axis("H", x[1], columns[windows], columns[taps], geometry, 0),
        _axis("W", x[2], columns[windows + 1], columns[taps + 1], geometry, 4),
    )


def lay_out_windows[
    target: StaticString, dtype: DType, taps_first: Bool
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """Columns = the elements under each window of x."""
    var columns = arguments.take[dtype, 6]()
    var x = arguments.take[dtype, 4]()
    var geometry = arguments.take[DType.int64, 1]()
    var p = _problem[taps_first](x.shape(), columns.shape(), geometry)
    if p.columns_size() == 0:
        return
    comptime if is_cpu[target]():
        lay_out_cpu[taps_first=taps_first](columns.data, x.data, p)
    else:
        lay_out_gpu[taps_first=taps_first](ctx, columns.data, x.data, p)


def add_up_windows[
    target: StaticString, dtype: DType, taps_first: Bool
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """Each element of x = the sum of what columns have for it. Deterministic.
    """
    var x = arguments.take[dtype, 4]()
    var columns = arguments.take[dtype, 6]()
    var geometry = arguments.take[DType.int64, 1]()
    var p = _problem[taps_first](x.shape(), columns.shape(), geometry)
    if p.size() == 0:
        return
    comptime if is_cpu[target]():
        add_up_cpu[taps_first=taps_first](x.data, columns.data, p)
    else:
        add_up_gpu[taps_first=taps_first](ctx, x.data, columns.data, p)
