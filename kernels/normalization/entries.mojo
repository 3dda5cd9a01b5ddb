"""The normalization family's entries in its libraries: check the operands, then choose an implementation.

x and dy are contiguous [rows, C]; everything for each channel is [C] in the accumulation type (float64 for float64,
else float32).
"""

from max.gpu.host import DeviceContext
from max.gpu.host.info import is_cpu
from std.math import sqrt

from ..common.library import Arguments
from ..common.pointer import Ptr, accumulation_type
from .cpu import gradient_sums_cpu, statistics_cpu
from .gpu import gradient_sums_gpu, statistics_gpu
from .numbers import NormalizationNumbers


def _check_channels(name: StaticString, size: Int, channels: Int) raises:
    if size != channels:
        raise Error(
            t"batch norm: {name} has {size} elements, x has {channels} channels"
        )


@no_inline
def _finish_cpu[
    acc: DType, running: Bool
](
    mean: Ptr[acc],
    invstd: Ptr[acc],
    new_mean: Ptr[acc],
    new_variance: Ptr[acc],
    old_mean: Ptr[acc],
    old_variance: Ptr[acc],
    rows: Int,
    channels: Int,
    momentum: Scalar[acc],
    epsilon: Scalar[acc],
):
    """From the sums of squares, which `invstd` holds on entry, to what the op returns.
    """
    var n = Scalar[acc](rows)
    for c in range(channels):
        var m2 = invstd[unsafe_offset=c]
        invstd[unsafe_offset=c] = 1 / sqrt(m2 / n + epsilon)
        comptime if running:
            new_mean[unsafe_offset=c] = (
                momentum * mean[unsafe_offset=c]
                + (1 - momentum) * old_mean[unsafe_offset=c]
            )
            new_variance[unsafe_offset=c] = (
                momentum * (m2 / (n - 1))
                + (1 - momentum) * old_variance[unsafe_offset=c]
            )


def batch_norm_statistics[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """Mean and 1 / sqrt(variance + epsilon) of each channel, and the running statistics moved towards them (the
    variance by its unbiased estimate)."""

    comptime acc = accumulation_type[dtype]
    var numbers = NormalizationNumbers.take(arguments)
    var mean = arguments.take[acc, 1]()
    var invstd = arguments.take[acc, 1]()
    var new_mean = arguments.take[acc, 1]()
    var new_variance = arguments.take[acc, 1]()
    var x = arguments.take[dtype, 2]()
    var old_mean = arguments.take[acc, 1]()
    var old_variance = arguments.take[acc, 1]()
    var rows = x.dim_size(0)
    var channels = x.dim_size(1)
    _check_channels("mean", mean.dim_size(0), channels)
    _check_channels("invstd", invstd.dim_size(0), channels)
    _check_channels("the new mean", new_mean.dim_size(0), channels)
    _check_channels("the new variance", new_variance.dim_size(0), channels)
    _check_channels("running_mean", old_mean.dim_size(0), channels)
    _check_channels("running_var", old_variance.dim_size(0), channels)
    if channels == 0:
        return
    comptime if is_cpu[target]():
        statistics_cpu[dtype, acc](
            mean.data,
            invstd.data,
            x.data,
            rows,
            channels,
        )
        _finish_cpu[acc, True](
            mean.data,
            invstd.data,
            new_mean.data,
            new_variance.data,
            old_mean.data,
            old_variance.data,
            rows,
            channels,
            numbers.momentum.cast[acc](),
            numbers.epsilon.cast[acc](),
        )
    else:
        statistics_gpu[dtype, acc, True](
            mean.to_device_buffer(ctx),
            invstd.to_device_buffer(ctx),
            new_mean.to_device_buffer(ctx),
            new_variance.to_device_buffer(ctx),
            x.to_device_buffer(ctx),
            old_mean.to_device_buffer(ctx),
            old_variance.to_device_buffer(ctx),
            rows,
            channels,
            numbers.momentum,
            numbers.epsilon,
            ctx,
        )


def batch_norm_statistics_only[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """Mean and 1 / sqrt(variance + epsilon) of each channel."""

    comptime acc = accumulation_type[dtype]
    var numbers = NormalizationNumbers.take(arguments)
    var mean = arguments.take[acc, 1]()
    var invstd = arguments.take[acc, 1]()
    var x = arguments.take[dtype, 2]()
    var rows = x.dim_size(0)
    var channels = x.dim_size(1)
    _check_channels("mean", mean.dim_size(0), channels)
    _check_channels("invstd", invstd.dim_size(0), channels)
    if channels == 0:
        return
    comptime if is_cpu[target]():
        var mean_data = mean.data
        var invstd_data = invstd.data
        statistics_cpu[dtype, acc](
            mean_data,
            invstd_data,
            x.data,
            rows,
            channels,
        )
        # Without running statistics their four places are not touched.
        _finish_cpu[acc, False](
            mean_data,
            invstd_data,
            mean_data,
            mean_data,
            mean_data,
            mean_data,
            rows,
            channels,
            0,
            numbers.epsilon.cast[acc](),
        )
    else:
        var mean_data = mean.to_device_buffer(ctx)
        statistics_gpu[dtype, acc, False](
            mean_data,
            invstd.to_device_buffer(ctx),
            mean_data,
            mean_data,
            x.to_device_buffer(ctx),
            mean_data,
            mean_data,
            rows,
            channels,
            0,
            numbers.epsilon,
            ctx,
        )


def batch_norm_gradient_sums[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """Everything that the backward pass reduces, for each channel.

    sum_dy = sum(dy), grad_weight = sum(dy * xhat), mean_dy = sum_dy / rows, projection = grad_weight * invstd / rows,
    where xhat = (x - mean) * invstd."""

    comptime acc = accumulation_type[dtype]
    var sum_dy = arguments.take[acc, 1]()
    var grad_weight = arguments.take[acc, 1]()
    var mean_dy = arguments.take[acc, 1]()
    var projection = arguments.take[acc, 1]()
    var dy = arguments.take[dtype, 2]()
    var x = arguments.take[dtype, 2]()
    var mean = arguments.take[acc, 1]()
    var invstd = arguments.take[acc, 1]()
    var rows = x.dim_size(0)
    var channels = x.dim_size(1)
    if dy.dim_size(0) != rows or dy.dim_size(1) != channels:
        raise Error(
            t"batch norm: dy is {dy.dim_size(0)} x {dy.dim_size(1)}, x is"
            t" {rows} x {channels}"
        )
    _check_channels("sum_dy", sum_dy.dim_size(0), channels)
    _check_channels("grad_weight", grad_weight.dim_size(0), channels)
    _check_channels("mean_dy", mean_dy.dim_size(0), channels)
    _check_channels("projection", projection.dim_size(0), channels)
    _check_channels("mean", mean.dim_size(0), channels)
    _check_channels("invstd", invstd.dim_size(0), channels)
    if channels == 0:
        return
    comptime if is_cpu[target]():
        var sums = sum_dy.data
        var products = grad_weight.data
        var scales = invstd.data
        gradient_sums_cpu[dtype, acc](
            sums,
            products,
            dy.data,
            x.data,
            mean.data,
            rows,
            channels,
        )
        var n = Scalar[acc](rows)
        for c in range(channels):
            var scale = scales[unsafe_offset=c]
            var weight = products[unsafe_offset=c] * scale
            products[unsafe_offset=c] = weight
            mean_dy.data[unsafe_offset=c] = sums[unsafe_offset=c] / n
            projection.data[unsafe_offset=c] = weight * scale / n
    else:
        gradient_sums_gpu[dtype, acc](
            sum_dy.to_device_buffer(ctx),
            grad_weight.to_device_buffer(ctx),
            mean_dy.to_device_buffer(ctx),
            projection.to_device_buffer(ctx),
            dy.to_device_buffer(ctx),
            x.to_device_buffer(ctx),
            mean.to_device_buffer(ctx),
            invstd.to_device_buffer(ctx),
            rows,
            channels,
            ctx,
        )
