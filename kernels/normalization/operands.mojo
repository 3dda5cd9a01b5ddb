"""The operands of the entries: checked tensors, and their extents.

x and dy are contiguous [rows, C]; per-channel tensors are [C] in the accumulation type (float64 for float64, else
float32).
"""

from ..common.library import Arguments, Operand
from ..common.pointer import Ptr, accumulation_type


def _check_channels(name: StaticString, size: Int, channels: Int) raises:
    if size != channels:
        raise Error(
            t"batch norm: {name} has {size} elements, x has {channels} channels"
        )


@fieldwise_init
struct Statistics[dtype: DType](ImplicitlyCopyable):
    """Mean and 1 / sqrt(variance + epsilon) of each channel of x, and the running statistics moved towards them.
    """

    comptime Acc = accumulation_type[Self.dtype]

    var mean: Ptr[Self.Acc]
    var invstd: Ptr[Self.Acc]
    var new_mean: Ptr[Self.Acc]
    """The new running mean; this and the other running statistics point anywhere where there are none."""
    var new_variance: Ptr[Self.Acc]
    var x: Ptr[Self.dtype]
    var old_mean: Ptr[Self.Acc]
    var old_variance: Ptr[Self.Acc]
    var rows: Int
    var channels: Int

    @staticmethod
    def take[running: Bool](mut arguments: Arguments) raises -> Self:
        """Takes the operands of a call, with running statistics if `running`.
        """
        var mean = arguments.take[Self.Acc, 1]()
        var invstd = arguments.take[Self.Acc, 1]()
        var new_mean, new_variance = mean, mean
        comptime if running:
            new_mean = arguments.take[Self.Acc, 1]()
            new_variance = arguments.take[Self.Acc, 1]()
        var x = arguments.take[Self.dtype, 2]()
        var old_mean, old_variance = mean, mean
        comptime if running:
            old_mean = arguments.take[Self.Acc, 1]()
            old_variance = arguments.take[Self.Acc, 1]()
        var channels = x.dim_size(1)
        _check_channels("mean", mean.dim_size(0), channels)
        _check_channels("invstd", invstd.dim_size(0), channels)
        _check_channels("the new mean", new_mean.dim_size(0), channels)
        _check_channels("the new variance", new_variance.dim_size(0), channels)
        _check_channels("running_mean", old_mean.dim_size(0), channels)
        _check_channels("running_var", old_variance.dim_size(0), channels)
        return Self(
            mean.data,
            invstd.data,
            new_mean.data,
            new_variance.data,
            x.data,
            old_mean.data,
            old_variance.data,
            x.dim_size(0),
            channels,
        )


@fieldwise_init
struct GradientSums[dtype: DType](ImplicitlyCopyable):
    """The per-channel sums of the backward pass.

    sum_dy = sum(dy), grad_weight = sum(dy * xhat), mean_dy = sum_dy / rows, projection = grad_weight * invstd / rows,
    where xhat = (x - mean) * invstd."""

    comptime Acc = accumulation_type[Self.dtype]

    var sum_dy: Ptr[Self.Acc]
    var grad_weight: Ptr[Self.Acc]
    var mean_dy: Ptr[Self.Acc]
    var projection: Ptr[Self.Acc]
    var dy: Ptr[Self.dtype]
    var x: Ptr[Self.dtype]
    var mean: Ptr[Self.Acc]
    var invstd: Ptr[Self.Acc]
    var rows: Int
    var channels: Int

    @staticmethod
    def take(mut arguments: Arguments) raises -> Self:
        var sum_dy = arguments.take[Self.Acc, 1]()
        var grad_weight = arguments.take[Self.Acc, 1]()
        var mean_dy = arguments.take[Self.Acc, 1]()
        var projection = arguments.take[Self.Acc, 1]()
        var dy = arguments.take[Self.dtype, 2]()
        var x = arguments.take[Self.dtype, 2]()
        var mean = arguments.take[Self.Acc, 1]()
        var invstd = arguments.take[Self.Acc, 1]()
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
        return Self(
            sum_dy.data,
            grad_weight.data,
            mean_dy.data,
            projection.data,
            dy.data,
            x.data,
            mean.data,
            invstd.data,
            rows,
            channels,
        )
