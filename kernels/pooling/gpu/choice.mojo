"""The choice of fast kernels by a tensor's alignment on a GPU."""

from max.gpu.host import DeviceContext

from ..kernel import KernelChoice, PoolingKernel, PoolingTensors
from ..problem import PoolingProblem
from .params import fits_32_bits


struct ByAlignment[Aligned: KernelChoice, Other: PoolingKernel](KernelChoice):
    """`Aligned` for tensors that begin with whole vectors and whose elements 32-bit numbers can count, `Other` for the
    rest."""

    @staticmethod
    def launch[
        dtype: DType, argmax: DType, //, *, adaptive: Bool
    ](
        ctx: DeviceContext, t: PoolingTensors[dtype, argmax], p: PoolingProblem
    ) raises:
        if t.are_aligned() and fits_32_bits(p):
            Self.Aligned.launch[adaptive=adaptive](ctx, t, p)
        else:
            Self.Other.launch[dtype, argmax, adaptive](ctx, t, p)
