"""Interpolation on a GPU: its kernels in the order of their speed, and its entry in libraries."""

from max.gpu.host import DeviceContext

from ...common.library import Arguments
from .. import entry
from ..direct import Direct
from ..kernel import Table
from .rows_then_columns import RowsThenColumns
from .strips import Strips

comptime KERNELS = Table[Strips["gpu"], RowsThenColumns["gpu"], Direct["gpu"]]


def interpolate[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """y = the weighted sums of x that the tables name."""
    entry.interpolate[dtype, KERNELS](arguments, ctx)
