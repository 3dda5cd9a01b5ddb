"""Selection of the kernel that runs a call."""

from max.gpu.host import DeviceContext
from max.gpu.host.info import is_cpu

from ..common.pointer import Ptr
from .concatenate import ConcatenatedParts, concatenate_cpu, concatenate_gpu
from .transpose import (
    Permutation,
    narrow_transpose_refusal,
    narrow_transpose_gpu,
    transpose_cpu,
    transpose_gpu,
)


@always_inline
def transpose[
    dtype: DType, //, target: StaticString
](
    y: Ptr[dtype], x: Ptr[dtype], permutation: Permutation, ctx: DeviceContext
) raises:
    """Writes the copy with axes in another order."""
    comptime if is_cpu[target]():
        transpose_cpu[dtype](y, x, permutation)
    else:
        if not narrow_transpose_refusal(permutation):
            narrow_transpose_gpu[dtype](y, x, permutation, ctx)
        else:
            transpose_gpu[dtype](y, x, permutation, ctx)


@always_inline
def concatenate[
    dtype: DType, //, target: StaticString
](
    y: Ptr[dtype],
    mut parts: ConcatenatedParts,
    count: Int,
    width: Int,
    ctx: DeviceContext,
) raises:
    """Writes `count` parts beside each other, `width` elements of each row together.
    """
    comptime if is_cpu[target]():
        concatenate_cpu[dtype](y, parts, count, width)
    else:
        concatenate_gpu[dtype](y, parts, count, ctx)
