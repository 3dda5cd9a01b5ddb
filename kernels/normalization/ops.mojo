"""Registrations of the normalization family: thin ops over the entries of entries.mojo, which says what operands are.

`function` is the library function that the graph's builder chose.
"""

import extensibility
from extensibility import InputTensor, OutputTensor
from max.gpu.host import DeviceContext

from ..common.library import Call


@extensibility.register("batch_norm_statistics")
struct BatchNormStatistics:
    """Mean and 1 / sqrt(variance + epsilon) of each channel, and the running statistics moved towards them (the
    variance by its unbiased estimate).
    """

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, acc: DType, function: StaticString
    ](
        mean: OutputTensor[dtype=acc, rank=1, ...],
        invstd: OutputTensor[dtype=acc, rank=1, ...],
        new_mean: OutputTensor[dtype=acc, rank=1, ...],
        new_variance: OutputTensor[dtype=acc, rank=1, ...],
        x: InputTensor[dtype=dtype, rank=2, ...],
        old_mean: InputTensor[dtype=acc, rank=1, ...],
        old_variance: InputTensor[dtype=acc, rank=1, ...],
        settings: InputTensor[dtype=DType.float64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(mean)
        call.append(invstd)
        call.append(new_mean)
        call.append(new_variance)
        call.append(x)
        call.append(old_mean)
        call.append(old_variance)
        call.append(settings)
        call.run[function](ctx)


@extensibility.register("batch_norm_statistics_only")
struct BatchNormStatisticsOnly:
    """Mean and 1 / sqrt(variance + epsilon) of each channel."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, acc: DType, function: StaticString
    ](
        mean: OutputTensor[dtype=acc, rank=1, ...],
        invstd: OutputTensor[dtype=acc, rank=1, ...],
        x: InputTensor[dtype=dtype, rank=2, ...],
        settings: InputTensor[dtype=DType.float64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(mean)
        call.append(invstd)
        call.append(x)
        call.append(settings)
        call.run[function](ctx)


@extensibility.register("batch_norm_gradient_sums")
struct BatchNormGradientSums:
    """Everything that the backward pass reduces, for each channel.

    sum_dy = sum(dy), grad_weight = sum(dy * xhat), mean_dy = sum_dy / rows, projection = grad_weight * invstd / rows,
    where xhat = (x - mean) * invstd.
    """

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, acc: DType, function: StaticString
    ](
        sum_dy: OutputTensor[dtype=acc, rank=1, ...],
        grad_weight: OutputTensor[dtype=acc, rank=1, ...],
        mean_dy: OutputTensor[dtype=acc, rank=1, ...],
        projection: OutputTensor[dtype=acc, rank=1, ...],
        dy: InputTensor[dtype=dtype, rank=2, ...],
        x: InputTensor[dtype=dtype, rank=2, ...],
        mean: InputTensor[dtype=acc, rank=1, ...],
        invstd: InputTensor[dtype=acc, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(sum_dy)
        call.append(grad_weight)
        call.append(mean_dy)
        call.append(projection)
        call.append(dy)
        call.append(x)
        call.append(mean)
        call.append(invstd)
        call.run[function](ctx)
