"""Interpolation's kernels for a GPU, run by a CPU lane by lane."""

from kernels.common.library import Arguments
from kernels.interpolation.direct import Direct
from kernels.interpolation.entries import interpolate
from kernels.interpolation.gpu.rows_then_columns import RowsThenColumns
from kernels.interpolation.gpu.strips import Strips
from kernels.interpolation.kernel import AlwaysWorthwhile, Table
from max.gpu.host import DeviceContext

comptime KERNELS = Table[
    AlwaysWorthwhile, Strips["cpu"], RowsThenColumns["cpu"], Direct["cpu"]
]


def interpolate_by_lanes[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """y = the weighted sums of x that the tables name."""
    interpolate[target, dtype, KERNELS](arguments, ctx)
