"""The entry, in libraries for any device, of gradients of mirrored and repeated borders."""

from max.gpu.host import DeviceContext
from max.gpu.host.info import is_cpu

from ..library import Arguments
from ..pooling.passes import data_of
from ..pooling.problem import check_equal
from .cpu import border_dgrad_cpu
from .gpu import border_dgrad_gpu
from .problem import PaddedAxis, PaddingProblem

comptime NUMBERS = 7
"""Of the geometry: low and high of D, H and W, and whether borders are mirrored."""


def border_dgrad[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """dx gathers, for each element, what dy has where padding shows it. Deterministic.
    """
    var dx = arguments.take[dtype, 5]()
    var dy = arguments.take[dtype, 5]()
    var geometry = arguments.take[DType.int64, 1]()
    check_equal("geometry.length", geometry.dim_size(0), NUMBERS, "the entry's")
    check_equal("dy.N", dy.dim_size(0), dx.dim_size(0), "dx's N")
    check_equal("dy.C", dy.dim_size(4), dx.dim_size(4), "dx's C")
    var mirrored = geometry[6] != 0

    def axis(number: Int) raises {imm} -> PaddedAxis:
        var extent = dx.dim_size(1 + number)
        var padded = dy.dim_size(1 + number)
        var low = Int(geometry[2 * number])
        var high = Int(geometry[2 * number + 1])
        var rule = "that of dx with its border"
        check_equal(
            String("dy.shape[", 1 + number, "]"),
            padded,
            extent + low + high,
            rule,
        )
        if mirrored and max(low, high) >= extent and max(low, high) > 0:
            raise Error(
                "padding=",
                max(low, high),
                ": a mirrored border must be less than the extent, ",
                extent,
            )
        return PaddedAxis(Int32(extent), Int32(padded), Int32(low), mirrored)

    var p = PaddingProblem(
        Int32(dx.dim_size(0)),
        Int32(dx.dim_size(4)),
        axis(0),
        axis(1),
        axis(2),
    )
    if p.rows() * p.length() == 0:
        return
    comptime if is_cpu[target]():
        border_dgrad_cpu(data_of(dx), data_of(dy), p)
    else:
        border_dgrad_gpu(ctx, data_of(dx), data_of(dy), p)
