"""The entry, in libraries, of interpolation: it takes and checks operands, then a device's table chooses the kernel
(`Kernels`, of its dispatch.mojo)."""

from max.gpu.host import DeviceContext

from ..common.check import check_equal
from ..common.library import Arguments
from ..common.pointer import accumulation_type
from .kernel import KernelChoice, InterpolationTensors
from .problem import Axis, InterpolationProblem, Spans


def _axis[
    Acc: DType
](
    mut arguments: Arguments, name: String, extent: Int, results: Int
) raises -> Axis[Acc]:
    var places = arguments.take[DType.int32, 2]()
    var weights = arguments.take[Acc, 2]()
    var rule = String("y's ", name)
    check_equal(
        String("places_", name, ".results"), places.dim_size(0), results, rule
    )
    check_equal(
        String("places_", name, ".numbers"),
        places.dim_size(1),
        2,
        "first and count",
    )
    check_equal(
        String("weights_", name, ".results"), weights.dim_size(0), results, rule
    )
    if weights.dim_size(1) < 1:
        raise Error(t"weights_{name} has no taps")
    return Axis[Acc](
        Int32(extent),
        Int32(results),
        Int32(weights.dim_size(1)),
        places.data,
        weights.data,
    )


def interpolate[
    target: StaticString, dtype: DType, Kernels: KernelChoice
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """y = the weighted sums of x that the tables name."""
    comptime Acc = accumulation_type[dtype]
    var spans = arguments.take_list()
    var y = arguments.take[dtype, 5]()
    var x = arguments.take[dtype, 5]()
    var d = _axis[Acc](arguments, "D", x.dim_size(1), y.dim_size(1))
    var h = _axis[Acc](arguments, "H", x.dim_size(2), y.dim_size(2))
    var w = _axis[Acc](arguments, "W", x.dim_size(3), y.dim_size(3))
    check_equal("y.N", y.dim_size(0), x.dim_size(0), "x's N")
    check_equal("y.C", y.dim_size(4), x.dim_size(4), "x's C")
    if spans.dim_size(0) < 1:
        raise Error("spans is empty")
    for axis in range(5):
        if max(x.dim_size(axis), y.dim_size(axis)) > Int(Int32.MAX):
            raise Error(t"axis {axis} has an extent of 2^31 or more")
    var p = InterpolationProblem[Acc](
        Int32(x.dim_size(0)), Int32(x.dim_size(4)), d, h, w
    )
    if p.size() != 0:
        Kernels.launch(
            ctx,
            InterpolationTensors(y.data, x.data),
            p,
            Spans(spans.data, spans.dim_size(0)),
        )
