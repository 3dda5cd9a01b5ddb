"""Registrations of the sampling family: thin ops over the entries, which say what operands are.

`function` is the library function that the graph's builder chose.
"""

import extensibility
from extensibility import InputTensor, OutputTensor
from max.gpu.host import DeviceContext

from ..common.library import Call


@extensibility.register("sample_fprop")
struct SampleFprop:
    """What the points of a grid read in an image."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, function: StaticString
    ](
        y: OutputTensor[dtype=dtype, rank=3, ...],
        x: InputTensor[dtype=dtype, rank=3, ...],
        grid: InputTensor[dtype=dtype, rank=3, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(y)
        call.append(x)
        call.append(grid)
        call.append(geometry)
        call.run[function](ctx)


@extensibility.register("sample_dgrad_grid")
struct SampleDgradGrid:
    """The gradient of the grid."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, function: StaticString
    ](
        dgrid: OutputTensor[dtype=dtype, rank=3, ...],
        dy: InputTensor[dtype=dtype, rank=3, ...],
        x: InputTensor[dtype=dtype, rank=3, ...],
        grid: InputTensor[dtype=dtype, rank=3, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(dgrid)
        call.append(dy)
        call.append(x)
        call.append(grid)
        call.append(geometry)
        call.run[function](ctx)


@extensibility.register("sample_dgrad_input")
struct SampleDgradInput:
    """The gradient of the image."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, sums: DType, function: StaticString
    ](
        dx: OutputTensor[dtype=sums, rank=3, ...],
        dy: InputTensor[dtype=dtype, rank=3, ...],
        grid: InputTensor[dtype=dtype, rank=3, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(dx)
        call.append(dy)
        call.append(grid)
        call.append(geometry)
        call.run[function](ctx)
