"""Which kernel runs a product."""

from max.gpu.host import DeviceContext
from max.gpu.host.info import is_cpu

from ..convolution.common import Ptr
from ..convolution.gpu.pipeline import pairs_compile
from .cpu.panels import panels_cpu
from .gpu.tensor_core import tensor_core_can_implement, tensor_core_gpu
from .gpu.tiled import tiled_gpu
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
    comptime if is_cpu[target]():
        panels_cpu[dtype](c, a, b, p)
    else:
        comptime if pairs_compile[dtype]():
            if not tensor_core_can_implement[dtype](p):
                tensor_core_gpu[dtype](c, a, b, p, ctx)
                return
        tiled_gpu[dtype](c, a, b, p, ctx)
