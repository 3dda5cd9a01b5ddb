"""Selection of the kernel that runs a call."""

from max.gpu.host import DeviceContext
from max.gpu.host.info import is_cpu

from ..common.pointer import Ptr
from .cpu import sort_cpu
from .gpu import sort_digits_gpu, sort_short_gpu
from .keys import Sorting

comptime _SHORT = 512
"""Elements of the longest row that is sorted by counting, which costs less than the launches of the passes."""


@always_inline
def sort[
    target: StaticString, dtype: DType, descending: Bool
](
    values: Ptr[dtype],
    indices: Ptr[DType.int64],
    x: Ptr[dtype],
    sorting: Sorting,
    ctx: DeviceContext,
) raises:
    """Sorts rows; there is at least one element to write."""
    comptime if is_cpu[target]():
        sort_cpu[dtype, descending](values, indices, x, sorting)
    else:
        if sorting.length <= _SHORT:
            sort_short_gpu[dtype, descending](values, indices, x, sorting, ctx)
        else:
            sort_digits_gpu[dtype, descending](values, indices, x, sorting, ctx)
