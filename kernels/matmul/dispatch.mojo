"""Selection of the kernel that runs a product."""

from max.gpu.host import DeviceContext
from max.gpu.host.info import is_cpu

from ..common.pointer import Ptr
from ..common.ptx import compiling_for_hopper
from ..common.tensor_cores import pairs_compile
from .cpu.panels import panels_cpu
from .gpu.tensor_core import tensor_core_refusal, tensor_core_gpu
from .gpu.tiled import tiled_gpu
from .gpu.warpgroup import warpgroup_refusal, warpgroup_gpu
from .problem import MatmulProblem


@no_inline
def run[
    target: StaticString, dtype: DType
](
    c: Ptr[dtype],
    a: Ptr[dtype],
    b: Ptr[dtype],
    p: MatmulProblem,
    ctx: DeviceContext,
) raises:
    """Writes C; a sum of nothing is 0."""
    if p.m * p.n * p.batch() == 0:
        return
    if p.c.row == 1 and p.c.column != 1:
        # Kernels write rows.
        _run[target, dtype](c, b, a, p.transposed(), ctx)
    else:
        _run[target, dtype](c, a, b, p, ctx)


@no_inline
def _run[
    target: StaticString, dtype: DType
](
    c: Ptr[dtype],
    a: Ptr[dtype],
    b: Ptr[dtype],
    p: MatmulProblem,
    ctx: DeviceContext,
) raises:
    comptime if is_cpu[target]():
        panels_cpu[dtype](c, a, b, p)
    else:
        comptime if pairs_compile[dtype]():
            comptime if compiling_for_hopper():
                if not warpgroup_refusal[dtype](c, a, b, p):
                    warpgroup_gpu[dtype](c, a, b, p, ctx)
                    return
            if not tensor_core_refusal[dtype](p):
                tensor_core_gpu[dtype](c, a, b, p, ctx)
                return
        tiled_gpu[dtype](c, a, b, p, ctx)
