"""The kernels of a GPU, run by a CPU lane by lane: an entry for tests."""

from max.gpu.host import DeviceContext

from ...common.library import Arguments
from .. import entry
from ..direct import Direct
from ..kernel import Table
from .rows_then_columns import RowsThenColumns
from .strips import Strips

comptime KERNELS = Table[Strips["cpu"], RowsThenColumns["cpu"], Direct["cpu"]]


def interpolate_by_lanes[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """y = the weighted sums of x that the tables name."""
    entry.interpolate[dtype, KERNELS](arguments, ctx)
