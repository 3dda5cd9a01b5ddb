"""Selection of the kernel that runs a call."""

from max.gpu.host import DeviceContext
from max.gpu.host.info import is_cpu

from ..common.tensor_cores import pairs_compile
from .cpu.backward import backward_cpu
from .cpu.forward import forward_cpu
from .gpu.flash import (
    backward_addresses,
    flash_refusal,
    forward_addresses,
)
from .gpu.flash_backward import flash_backward_gpu
from .gpu.flash_forward import flash_forward_gpu
from .gpu.tiled_backward import tiled_backward_gpu
from .gpu.tiled_forward import tiled_forward_gpu
from .pointers import BackwardPointers, ForwardPointers
from .problem import AttentionProblem


@no_inline
def run_forward[
    target: StaticString,
    dtype: DType,
    bias_type: DType,
    biased: Bool,
    wide: Bool,
](
    at: ForwardPointers[dtype, bias_type],
    problem: AttentionProblem,
    ctx: DeviceContext,
) raises:
    """Writes output and logsumexp."""
    comptime if is_cpu[target]():
        forward_cpu[dtype, bias_type, biased](at, problem)
    else:
        comptime if pairs_compile[dtype]():
            if not flash_refusal[dtype, wide](problem, forward_addresses(at)):
                flash_forward_gpu[dtype, bias_type, biased, wide](
                    at, problem, ctx
                )
                return
        tiled_forward_gpu[dtype, bias_type, biased](at, problem, ctx)


@no_inline
def run_backward[
    target: StaticString,
    dtype: DType,
    bias_type: DType,
    biased: Bool,
    bias_wanted: Bool,
    wide: Bool,
](
    at: BackwardPointers[dtype, bias_type],
    problem: AttentionProblem,
    ctx: DeviceContext,
) raises:
    """Writes the gradients."""
    comptime if is_cpu[target]():
        backward_cpu[dtype, bias_type, biased, bias_wanted](at, problem)
    else:
        comptime if pairs_compile[dtype]():
            if not flash_refusal[dtype, wide](problem, backward_addresses(at)):
                flash_backward_gpu[dtype, bias_type, biased, bias_wanted, wide](
                    at, problem, ctx
                )
                return
        tiled_backward_gpu[dtype, bias_type, biased, bias_wanted](
            at, problem, ctx
        )
