"""Interpolation on a CPU: its kernels in the order of their speed, and its entry in libraries."""

from max.gpu.host import DeviceContext

from ...common.library import Arguments
from .. import entry
from ..kernel import Table
from .columns_then_rows import ColumnsThenRows
from .planes import Planes
from .rows_then_columns import RowsThenColumns
from .short_rows import ShortRows

comptime KERNELS = Table[Planes, ShortRows, ColumnsThenRows, RowsThenColumns]


def interpolate[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """y = the weighted sums of x that the tables name."""
    entry.interpolate[dtype, KERNELS](arguments, ctx)
