"""Selection of the kernel that runs a problem on a CPU."""

from ...common.pointer import accumulation_type
from ...common.vectors import lanes
from ..kernel import Heuristic, InterpolationKernel, Table
from ..problem import Axis, InterpolationProblem
from .columns_then_rows import ColumnsThenRows
from .planes import Planes
from .rows_then_columns import RowsThenColumns
from .short_rows import ShortRows
from .sums import SPARSE

comptime _MIN_BATCH = 32
"""Samples that pay for a table of all axes."""
comptime _MAX_RESULTS = 1 << 20
"""Results of a sample from which on that table costs more than it saves."""
comptime _SHORT = 64
"""Results of a row."""
comptime _MAX_VECTORS = 8
"""Vectors of a short row of results, at most."""


def _reading[Acc: DType, //](axis: Axis[Acc]) -> Int:
    """Returns how many results read at least one element."""
    var found = 0
    for i in range(axis.results):
        if axis.count(i) > 0:
            found += 1
    return found


def _has_short_or_empty_rows[
    Acc: DType, //
](p: InterpolationProblem[Acc]) -> Bool:
    if Int(p.w.results) < _SHORT:
        return True
    var reading = _reading(p.d) * _reading(p.h) * _reading(p.w)
    return SPARSE * reading <= p.results()


struct _CpuHeuristic(Heuristic):
    @staticmethod
    def is_worthwhile[
        Kernel: InterpolationKernel, dtype: DType
    ](p: InterpolationProblem[accumulation_type[dtype]]) -> Bool:
        comptime if Kernel.NAME == Planes.NAME:
            return (
                Int(p.batch) >= _MIN_BATCH
                and p.results() < _MAX_RESULTS
                and _has_short_or_empty_rows(p)
            )
        elif Kernel.NAME == ShortRows.NAME:
            var length = Int(p.w.results) * Int(p.channels)
            return (
                length <= _MAX_VECTORS * lanes[dtype]
                and p.batch > 1
                and p.h.results > p.h.extent
            )
        elif Kernel.NAME == ColumnsThenRows.NAME:
            # More rows of results than of elements.
            var rows = Int(p.d.results) * Int(p.h.results)
            return rows > Int(p.d.extent) * Int(p.h.extent)
        else:
            return True


comptime INTERPOLATE_KERNELS = Table[
    _CpuHeuristic, Planes, ShortRows, ColumnsThenRows, RowsThenColumns
]
