"""Selection of the kernel that runs a problem on a GPU."""

from ..direct import Direct
from ..kernel import AlwaysWorthwhile, Table
from .rows_then_columns import RowsThenColumns
from .strips import Strips

comptime INTERPOLATE_KERNELS = Table[
    AlwaysWorthwhile, Strips["gpu"], RowsThenColumns["gpu"], Direct["gpu"]
]
