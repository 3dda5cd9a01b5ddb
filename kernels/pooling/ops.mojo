"""Registrations of the pooling family: thin ops over the entries of entries.mojo, which says what operands are.

`function` is the library function that the graph's builder chose; it knows the types and whether windows are adaptive.
"""

import extensibility
from extensibility import InputTensor, OutputTensor
from max.gpu.host import DeviceContext

from ..common.library import Call


@extensibility.register("max_pool_fprop")
struct MaxPoolFprop:
    """y, entries = the maxima of x and where they are: int64 indices, flat in the unpadded plane, or in one byte the number
    of the winning tap in its window."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, entry: DType, function: StaticString
    ](
        y: OutputTensor[dtype=dtype, rank=5, ...],
        entries: OutputTensor[dtype=entry, rank=5, ...],
        x: InputTensor[dtype=dtype, rank=5, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(y)
        call.append(entries)
        call.append(x)
        call.append(geometry)
        call.run[function](ctx)


@extensibility.register("max_pool_dgrad")
struct MaxPoolDgrad:
    """dx gathers, for each pixel, the dy of the windows above it whose entry names it. Deterministic; an entry
    that names no pixel under its window is ignored."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, entry: DType, function: StaticString
    ](
        dx: OutputTensor[dtype=dtype, rank=5, ...],
        dy: InputTensor[dtype=dtype, rank=5, ...],
        entries: InputTensor[dtype=entry, rank=5, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(dx)
        call.append(dy)
        call.append(entries)
        call.append(geometry)
        call.run[function](ctx)


@extensibility.register("avg_pool")
struct AvgPool:
    """y = the averages of x; or dx gathers, for each pixel, the dy of the windows above it, each over its divisor.
    """

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, function: StaticString
    ](
        result: OutputTensor[dtype=dtype, rank=5, ...],
        source: InputTensor[dtype=dtype, rank=5, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(result)
        call.append(source)
        call.append(geometry)
        call.run[function](ctx)


@extensibility.register("pool_by_index")
struct PoolByIndex:
    """Max unpooling, forward and backward, and the scattering form of max pooling's gradient.
    """

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, function: StaticString
    ](
        result: OutputTensor[dtype=dtype, rank=5, ...],
        source: InputTensor[dtype=dtype, rank=5, ...],
        indices: InputTensor[dtype=DType.int64, rank=5, ...],
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(result)
        call.append(source)
        call.append(indices)
        call.run[function](ctx)
