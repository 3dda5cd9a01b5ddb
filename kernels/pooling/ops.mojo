"""Registrations of the pooling family: thin ops over the entries of entries.mojo, which says what operands are.

`function` is the library function that the graph's builder chose.
"""

import extensibility
from extensibility import InputTensor, OutputTensor
from max.gpu.host import DeviceContext

from ..library import Call


@extensibility.register("max_pool_fprop")
struct MaxPoolFprop:
    """y, indices = the maxima of x and where they are, flat in the unpadded plane.
    """

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, function: StaticString
    ](
        y: OutputTensor[dtype=dtype, rank=5, ...],
        indices: OutputTensor[dtype=DType.int64, rank=5, ...],
        x: InputTensor[dtype=dtype, rank=5, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(y)
        call.append(indices)
        call.append(x)
        call.append(geometry)
        call.run[function](ctx)


@extensibility.register("max_pool_fprop_offsets")
struct MaxPoolFpropOffsets:
    """As max_pool_fprop, with the number of the winning tap within its window in place of the index.
    """

    @staticmethod
    def execute[
        target: StaticString,
        dtype: DType,
        offset: DType,
        function: StaticString,
    ](
        y: OutputTensor[dtype=dtype, rank=5, ...],
        offsets: OutputTensor[dtype=offset, rank=5, ...],
        x: InputTensor[dtype=dtype, rank=5, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(y)
        call.append(offsets)
        call.append(x)
        call.append(geometry)
        call.run[function](ctx)


@extensibility.register("max_pool_dgrad")
struct MaxPoolDgrad:
    """dx gathers, for each pixel, the dy of the windows above it whose index names it. Deterministic; an index
    that names no pixel under its window is ignored."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, function: StaticString
    ](
        dx: OutputTensor[dtype=dtype, rank=5, ...],
        dy: InputTensor[dtype=dtype, rank=5, ...],
        indices: InputTensor[dtype=DType.int64, rank=5, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(dx)
        call.append(dy)
        call.append(indices)
        call.append(geometry)
        call.run[function](ctx)


@extensibility.register("max_pool_dgrad_offsets")
struct MaxPoolDgradOffsets:
    """As max_pool_dgrad, from the numbers of the winning taps."""

    @staticmethod
    def execute[
        target: StaticString,
        dtype: DType,
        offset: DType,
        function: StaticString,
    ](
        dx: OutputTensor[dtype=dtype, rank=5, ...],
        dy: InputTensor[dtype=dtype, rank=5, ...],
        offsets: InputTensor[dtype=offset, rank=5, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(dx)
        call.append(dy)
        call.append(offsets)
        call.append(geometry)
        call.run[function](ctx)


@extensibility.register("max_pool_dgrad_scatter")
struct MaxPoolDgradScatter:
    """dx scatters dy to where the indices point, whatever produced them. Atomic on a GPU, so not deterministic
    there; an index outside the plane is ignored."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, function: StaticString
    ](
        dx: OutputTensor[dtype=dtype, rank=5, ...],
        dy: InputTensor[dtype=dtype, rank=5, ...],
        indices: InputTensor[dtype=DType.int64, rank=5, ...],
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(dx)
        call.append(dy)
        call.append(indices)
        call.run[function](ctx)


@extensibility.register("max_unpool_fprop")
struct MaxUnpoolFprop:
    """y is zero but for x at the indices; an index outside the plane is ignored.
    """

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, function: StaticString
    ](
        y: OutputTensor[dtype=dtype, rank=5, ...],
        x: InputTensor[dtype=dtype, rank=5, ...],
        indices: InputTensor[dtype=DType.int64, rank=5, ...],
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(y)
        call.append(x)
        call.append(indices)
        call.run[function](ctx)


@extensibility.register("max_unpool_dgrad")
struct MaxUnpoolDgrad:
    """dx takes dy at the indices; an index outside the plane gives zero."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, function: StaticString
    ](
        dx: OutputTensor[dtype=dtype, rank=5, ...],
        dy: InputTensor[dtype=dtype, rank=5, ...],
        indices: InputTensor[dtype=DType.int64, rank=5, ...],
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(dx)
        call.append(dy)
        call.append(indices)
        call.run[function](ctx)


@extensibility.register("avg_pool_fprop")
struct AvgPoolFprop:
    """y = the averages of x."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, function: StaticString
    ](
        y: OutputTensor[dtype=dtype, rank=5, ...],
        x: InputTensor[dtype=dtype, rank=5, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(y)
        call.append(x)
        call.append(geometry)
        call.run[function](ctx)


@extensibility.register("avg_pool_dgrad")
struct AvgPoolDgrad:
    """dx gathers, for each pixel, the dy of the windows above it, each over its divisor. Deterministic.
    """

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, function: StaticString
    ](
        dx: OutputTensor[dtype=dtype, rank=5, ...],
        dy: InputTensor[dtype=dtype, rank=5, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(dx)
        call.append(dy)
        call.append(geometry)
        call.run[function](ctx)


@extensibility.register("adaptive_max_pool_fprop")
struct AdaptiveMaxPoolFprop:
    @staticmethod
    def execute[
        target: StaticString, dtype: DType, function: StaticString
    ](
        y: OutputTensor[dtype=dtype, rank=5, ...],
        indices: OutputTensor[dtype=DType.int64, rank=5, ...],
        x: InputTensor[dtype=dtype, rank=5, ...],
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(y)
        call.append(indices)
        call.append(x)
        call.run[function](ctx)


@extensibility.register("adaptive_max_pool_dgrad")
struct AdaptiveMaxPoolDgrad:
    @staticmethod
    def execute[
        target: StaticString, dtype: DType, function: StaticString
    ](
        dx: OutputTensor[dtype=dtype, rank=5, ...],
        dy: InputTensor[dtype=dtype, rank=5, ...],
        indices: InputTensor[dtype=DType.int64, rank=5, ...],
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(dx)
        call.append(dy)
        call.append(indices)
        call.run[function](ctx)


@extensibility.register("adaptive_avg_pool_fprop")
struct AdaptiveAvgPoolFprop:
    @staticmethod
    def execute[
        target: StaticString, dtype: DType, function: StaticString
    ](
        y: OutputTensor[dtype=dtype, rank=5, ...],
        x: InputTensor[dtype=dtype, rank=5, ...],
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(y)
        call.append(x)
        call.run[function](ctx)


@extensibility.register("adaptive_avg_pool_dgrad")
struct AdaptiveAvgPoolDgrad:
    @staticmethod
    def execute[
        target: StaticString, dtype: DType, function: StaticString
    ](
        dx: OutputTensor[dtype=dtype, rank=5, ...],
        dy: InputTensor[dtype=dtype, rank=5, ...],
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(dx)
        call.append(dy)
        call.run[function](ctx)
