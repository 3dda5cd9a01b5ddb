"""Selection of the kernel that runs a call."""

from std.sys import size_of

from max.gpu.host import DeviceContext
from max.gpu.host.info import is_cpu

from .cpu import gradient_sums_cpu, statistics_cpu
from .folded_rows import folded
from .gpu import gradient_sums_gpu, statistics_gpu
from .numbers import NormalizationNumbers
from .operands import GradientSums, Statistics


@always_inline
def _has_vectors[
    dtype: DType
](addresses: Int, rows: Int, channels: Int) -> Bool:
    """Returns whether tensors can be read 16 bytes at a time: they are aligned (`addresses` are their addresses, joined
    by `or`), and a row is a whole number of vectors."""
    comptime V = 16 // size_of[dtype]()
    return folded(rows, channels, V, V).width() % V == 0 and addresses % 16 == 0


@always_inline
def statistics[
    dtype: DType, //, target: StaticString, *, running: Bool
](
    t: Statistics[dtype], numbers: NormalizationNumbers, ctx: DeviceContext
) raises:
    """Writes the statistics, with `running` the new running ones, too."""
    if t.channels == 0:
        return
    comptime if is_cpu[target]():
        statistics_cpu[running=running](t, numbers)
    else:
        if _has_vectors[dtype](Int(t.x), t.rows, t.channels):
            comptime V = 16 // size_of[dtype]()
            statistics_gpu[V, running](t, numbers, ctx)
        else:
            statistics_gpu[1, running](t, numbers, ctx)


@always_inline
def gradient_sums[
    dtype: DType, //, target: StaticString
](t: GradientSums[dtype], ctx: DeviceContext) raises:
    """Writes the sums."""
    if t.channels == 0:
        return
    comptime if is_cpu[target]():
        gradient_sums_cpu(t)
    else:
        if _has_vectors[dtype](Int(t.dy) | Int(t.x), t.rows, t.channels):
            comptime V = 16 // size_of[dtype]()
            gradient_sums_gpu[V](t, ctx)
        else:
            gradient_sums_gpu[1](t, ctx)
