"""The normalization family's entries in its libraries: they take operands, dispatch.mojo chooses the kernels."""

from max.gpu.host import DeviceContext

from ..common.library import Arguments
from . import dispatch
from .numbers import NormalizationNumbers
from .operands import GradientSums, Statistics


def batch_norm_statistics[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """Mean and 1 / sqrt(variance + epsilon) of each channel, and the running statistics moved towards them (the
    variance by its unbiased estimate)."""
    var numbers = NormalizationNumbers.take(arguments)
    var t = Statistics[dtype].take[True](arguments)
    dispatch.statistics[target, running=True](t, numbers, ctx)


def batch_norm_statistics_only[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """Mean and 1 / sqrt(variance + epsilon) of each channel."""
    var numbers = NormalizationNumbers.take(arguments)
    var t = Statistics[dtype].take[False](arguments)
    dispatch.statistics[target, running=False](t, numbers, ctx)


def batch_norm_gradient_sums[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """Computes every per-channel sum of the backward pass (operands.mojo)."""
    dispatch.gradient_sums[target](GradientSums[dtype].take(arguments), ctx)
