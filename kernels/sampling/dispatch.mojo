"""Selection of the kernel that runs a call."""

from max.gpu.host import DeviceContext
from max.gpu.host.info import is_cpu

from ..common.library import Operand
from ..common.pointer import Ptr
from .cpu import sample_cpu, sample_grid_gradient_cpu, sample_input_gradient_cpu
from .gpu import (
    sample_gpu,
    sample_grid_gradient_gpu,
    sample_input_gradient_atomic_gpu,
    sample_input_gradient_in_order_gpu,
)
from .problem import SamplingProblem


@always_inline
def sample[
    dtype: DType,
    //,
    target: StaticString,
    *,
    channels_last: Bool,
    T: Int,
    deep: Bool,
](
    y: Ptr[dtype],
    x: Ptr[dtype],
    grid: Ptr[dtype],
    p: SamplingProblem,
    ctx: DeviceContext,
) raises:
    """Writes the values that the points read."""
    comptime if is_cpu[target]():
        sample_cpu[channels_last=channels_last, T=T, deep=deep](y, x, grid, p)
    else:
        sample_gpu[channels_last=channels_last, T=T, deep=deep](
            ctx, y, x, grid, p
        )


@always_inline
def grid_gradient[
    dtype: DType,
    //,
    target: StaticString,
    *,
    channels_last: Bool,
    T: Int,
    deep: Bool,
](
    dgrid: Ptr[dtype],
    dy: Ptr[dtype],
    x: Ptr[dtype],
    grid: Ptr[dtype],
    p: SamplingProblem,
    ctx: DeviceContext,
) raises:
    """Writes the grid's gradient."""
    comptime if is_cpu[target]():
        sample_grid_gradient_cpu[channels_last=channels_last, T=T, deep=deep](
            dgrid, dy, x, grid, p
        )
    else:
        sample_grid_gradient_gpu[channels_last=channels_last, T=T, deep=deep](
            ctx, dgrid, dy, x, grid, p
        )


@always_inline
def input_gradient[
    dtype: DType,
    sums: DType,
    //,
    target: StaticString,
    *,
    channels_last: Bool,
    T: Int,
    deep: Bool,
](
    dx: Operand[sums, 3],
    dy: Ptr[dtype],
    grid: Ptr[dtype],
    p: SamplingProblem,
    deterministic: Bool,
    ctx: DeviceContext,
) raises:
    """Writes the image's gradient; `deterministic`: with the same bits in every run, on a GPU, too.
    """
    comptime if is_cpu[target]():
        sample_input_gradient_cpu[channels_last=channels_last, T=T, deep=deep](
            dx.data, dy, grid, p
        )
    else:
        var result = dx.to_device_buffer(ctx)
        if deterministic:
            sample_input_gradient_in_order_gpu[
                channels_last=channels_last, T=T, deep=deep
            ](ctx, result, dy, grid, p)
        else:
            sample_input_gradient_atomic_gpu[
                channels_last=channels_last, T=T, deep=deep
            ](ctx, result, dy, grid, p)
