"""Registrations of the convolution family: thin ops; operands.mojo says what operands are.

`function` is the library function that the graph's builder chose.
"""

import extensibility
from extensibility import InputTensor, InputVariadicTensors, OutputTensor
from max.gpu.host import DeviceContext

from ..common.library import Call


@extensibility.register("conv_fprop")
struct ConvFprop:
    """The forward pass, y = x * w."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, function: StaticString
    ](
        y: OutputTensor[dtype=dtype, rank=5, ...],
        x: InputTensor[dtype=dtype, rank=5, ...],
        w: InputTensor[dtype=dtype, rank=5, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(y)
        call.append(x)
        call.append(w)
        call.append(geometry)
        call.run[function](ctx)


@extensibility.register("conv_dgrad")
struct ConvDgrad:
    """Gradient of x; input pixels that no window covers get zero.

    Nothing reads `after`: who makes it comes first. MAX reuses the memory of a
    value when all its readers are known to have run, which follows from
    operands alone.
    """

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, function: StaticString
    ](
        dx: OutputTensor[dtype=dtype, rank=5, ...],
        dy: InputTensor[dtype=dtype, rank=5, ...],
        w: InputTensor[dtype=dtype, rank=5, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        after: InputVariadicTensors[dtype=dtype, rank=5, ...],
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(dx)
        call.append(dy)
        call.append(w)
        call.append(geometry)
        call.run[function](ctx)


@extensibility.register("conv_wgrad")
struct ConvWgrad:
    """Gradient of w, reduced over N, O, P and Q."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, function: StaticString
    ](
        dw: OutputTensor[dtype=dtype, rank=5, ...],
        x: InputTensor[dtype=dtype, rank=5, ...],
        dy: InputTensor[dtype=dtype, rank=5, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(dw)
        call.append(x)
        call.append(dy)
        call.append(geometry)
        call.run[function](ctx)
