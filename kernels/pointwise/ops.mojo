"""Registrations of the pointwise family: thin ops over the entries of entries.mojo.

An op has a fixed number of operands, so there is one for each number of results and some numbers of inputs; a graph
repeats an input where it has fewer. `function` is the library function that the graph's builder chose, `inputs` how many
inputs it takes, `geometry` what entries.mojo says.
"""

import extensibility
from extensibility import (
    InputTensor,
    InputVariadicTensors,
    OutputTensor,
    OutputVariadicTensors,
)
from max.gpu.host import DeviceContext

from ..library import Call


@extensibility.register("pointwise_many")
struct PointwiseMany:
    """One input and one result for each pair, of equal sizes."""

    @staticmethod
    def execute[
        target: StaticString,
        result_dtype: DType,
        dtype: DType,
        size: Int,
        function: StaticString,
    ](
        results: OutputVariadicTensors[
            dtype=result_dtype, rank=1, size=size, ...
        ],
        inputs: InputVariadicTensors[dtype=dtype, rank=1, size=size, ...],
        ctx: DeviceContext,
    ) raises:
        var call = Call[1 + 3 * size]()
        call.append_word(size)
        comptime for pair in range(size):
            call.append_word(inputs[pair].dim_size(0))
            call.append_word(Int(results[pair].unsafe_ptr()))
            call.append_word(Int(inputs[pair].unsafe_ptr()))
        call.run[function](ctx)


@extensibility.register("concatenate")
struct Concatenate:
    """Any number of inputs of one dtype, flat; see movement/entries.mojo."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, size: Int, function: StaticString
    ](
        y: OutputTensor,
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        parts: InputVariadicTensors[dtype=dtype, rank=1, size=size, ...],
        ctx: DeviceContext,
    ) raises:
        var call = Call[3 + size]()
        call.append(geometry)
        call.append_word(Int(y.unsafe_ptr()))
        comptime for part in range(size):
            call.append_word(Int(parts[part].unsafe_ptr()))
        call.run[function](ctx)


@extensibility.register("pointwise_1_4")
struct Pointwise1Of4:
    """1 result of up to 4 inputs."""

    @staticmethod
    def execute[
        target: StaticString, function: StaticString, inputs: Int
    ](
        y0: OutputTensor,
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        x0: InputTensor,
        x1: InputTensor,
        x2: InputTensor,
        x3: InputTensor,
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(geometry)
        call.append_word(Int(y0.unsafe_ptr()))
        call.append_word(Int(x0.unsafe_ptr()))
        call.append_word(Int(x1.unsafe_ptr()))
        call.append_word(Int(x2.unsafe_ptr()))
        call.append_word(Int(x3.unsafe_ptr()))
        call.run[function](ctx)


@extensibility.register("pointwise_1_12")
struct Pointwise1Of12:
    """1 result of up to 12 inputs."""

    @staticmethod
    def execute[
        target: StaticString, function: StaticString, inputs: Int
    ](
        y0: OutputTensor,
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        x0: InputTensor,
        x1: InputTensor,
        x2: InputTensor,
        x3: InputTensor,
        x4: InputTensor,
        x5: InputTensor,
        x6: InputTensor,
        x7: InputTensor,
        x8: InputTensor,
        x9: InputTensor,
        x10: InputTensor,
        x11: InputTensor,
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(geometry)
        call.append_word(Int(y0.unsafe_ptr()))
        call.append_word(Int(x0.unsafe_ptr()))
        call.append_word(Int(x1.unsafe_ptr()))
        call.append_word(Int(x2.unsafe_ptr()))
        call.append_word(Int(x3.unsafe_ptr()))
        call.append_word(Int(x4.unsafe_ptr()))
        call.append_word(Int(x5.unsafe_ptr()))
        call.append_word(Int(x6.unsafe_ptr()))
        call.append_word(Int(x7.unsafe_ptr()))
        call.append_word(Int(x8.unsafe_ptr()))
        call.append_word(Int(x9.unsafe_ptr()))
        call.append_word(Int(x10.unsafe_ptr()))
        call.append_word(Int(x11.unsafe_ptr()))
        call.run[function](ctx)


@extensibility.register("pointwise_1_48")
struct Pointwise1Of48:
    """1 result of up to 48 inputs."""

    @staticmethod
    def execute[
        target: StaticString, function: StaticString, inputs: Int
    ](
        y0: OutputTensor,
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        x0: InputTensor,
        x1: InputTensor,
        x2: InputTensor,
        x3: InputTensor,
        x4: InputTensor,
        x5: InputTensor,
        x6: InputTensor,
        x7: InputTensor,
        x8: InputTensor,
        x9: InputTensor,
        x10: InputTensor,
        x11: InputTensor,
        x12: InputTensor,
        x13: InputTensor,
        x14: InputTensor,
        x15: InputTensor,
        x16: InputTensor,
        x17: InputTensor,
        x18: InputTensor,
        x19: InputTensor,
        x20: InputTensor,
        x21: InputTensor,
        x22: InputTensor,
        x23: InputTensor,
        x24: InputTensor,
        x25: InputTensor,
        x26: InputTensor,
        x27: InputTensor,
        x28: InputTensor,
        x29: InputTensor,
        x30: InputTensor,
        x31: InputTensor,
        x32: InputTensor,
        x33: InputTensor,
        x34: InputTensor,
        x35: InputTensor,
        x36: InputTensor,
        x37: InputTensor,
        x38: InputTensor,
        x39: InputTensor,
        x40: InputTensor,
        x41: InputTensor,
        x42: InputTensor,
        x43: InputTensor,
        x44: InputTensor,
        x45: InputTensor,
        x46: InputTensor,
        x47: InputTensor,
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(geometry)
        call.append_word(Int(y0.unsafe_ptr()))
        call.append_word(Int(x0.unsafe_ptr()))
        call.append_word(Int(x1.unsafe_ptr()))
        call.append_word(Int(x2.unsafe_ptr()))
        call.append_word(Int(x3.unsafe_ptr()))
        call.append_word(Int(x4.unsafe_ptr()))
        call.append_word(Int(x5.unsafe_ptr()))
        call.append_word(Int(x6.unsafe_ptr()))
        call.append_word(Int(x7.unsafe_ptr()))
        call.append_word(Int(x8.unsafe_ptr()))
        call.append_word(Int(x9.unsafe_ptr()))
        call.append_word(Int(x10.unsafe_ptr()))
        call.append_word(Int(x11.unsafe_ptr()))
        call.append_word(Int(x12.unsafe_ptr()))
        call.append_word(Int(x13.unsafe_ptr()))
        call.append_word(Int(x14.unsafe_ptr()))
        call.append_word(Int(x15.unsafe_ptr()))
        call.append_word(Int(x16.unsafe_ptr()))
        call.append_word(Int(x17.unsafe_ptr()))
        call.append_word(Int(x18.unsafe_ptr()))
        call.append_word(Int(x19.unsafe_ptr()))
        call.append_word(Int(x20.unsafe_ptr()))
        call.append_word(Int(x21.unsafe_ptr()))
        call.append_word(Int(x22.unsafe_ptr()))
        call.append_word(Int(x23.unsafe_ptr()))
        call.append_word(Int(x24.unsafe_ptr()))
        call.append_word(Int(x25.unsafe_ptr()))
        call.append_word(Int(x26.unsafe_ptr()))
        call.append_word(Int(x27.unsafe_ptr()))
        call.append_word(Int(x28.unsafe_ptr()))
        call.append_word(Int(x29.unsafe_ptr()))
        call.append_word(Int(x30.unsafe_ptr()))
        call.append_word(Int(x31.unsafe_ptr()))
        call.append_word(Int(x32.unsafe_ptr()))
        call.append_word(Int(x33.unsafe_ptr()))
        call.append_word(Int(x34.unsafe_ptr()))
        call.append_word(Int(x35.unsafe_ptr()))
        call.append_word(Int(x36.unsafe_ptr()))
        call.append_word(Int(x37.unsafe_ptr()))
        call.append_word(Int(x38.unsafe_ptr()))
        call.append_word(Int(x39.unsafe_ptr()))
        call.append_word(Int(x40.unsafe_ptr()))
        call.append_word(Int(x41.unsafe_ptr()))
        call.append_word(Int(x42.unsafe_ptr()))
        call.append_word(Int(x43.unsafe_ptr()))
        call.append_word(Int(x44.unsafe_ptr()))
        call.append_word(Int(x45.unsafe_ptr()))
        call.append_word(Int(x46.unsafe_ptr()))
        call.append_word(Int(x47.unsafe_ptr()))
        call.run[function](ctx)


@extensibility.register("pointwise_2_4")
struct Pointwise2Of4:
    """2 results of up to 4 inputs."""

    @staticmethod
    def execute[
        target: StaticString, function: StaticString, inputs: Int
    ](
        y0: OutputTensor,
        y1: OutputTensor,
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        x0: InputTensor,
        x1: InputTensor,
        x2: InputTensor,
        x3: InputTensor,
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(geometry)
        call.append_word(Int(y0.unsafe_ptr()))
        call.append_word(Int(y1.unsafe_ptr()))
        call.append_word(Int(x0.unsafe_ptr()))
        call.append_word(Int(x1.unsafe_ptr()))
        call.append_word(Int(x2.unsafe_ptr()))
        call.append_word(Int(x3.unsafe_ptr()))
        call.run[function](ctx)


@extensibility.register("pointwise_2_12")
struct Pointwise2Of12:
    """2 results of up to 12 inputs."""

    @staticmethod
    def execute[
        target: StaticString, function: StaticString, inputs: Int
    ](
        y0: OutputTensor,
        y1: OutputTensor,
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        x0: InputTensor,
        x1: InputTensor,
        x2: InputTensor,
        x3: InputTensor,
        x4: InputTensor,
        x5: InputTensor,
        x6: InputTensor,
        x7: InputTensor,
        x8: InputTensor,
        x9: InputTensor,
        x10: InputTensor,
        x11: InputTensor,
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(geometry)
        call.append_word(Int(y0.unsafe_ptr()))
        call.append_word(Int(y1.unsafe_ptr()))
        call.append_word(Int(x0.unsafe_ptr()))
        call.append_word(Int(x1.unsafe_ptr()))
        call.append_word(Int(x2.unsafe_ptr()))
        call.append_word(Int(x3.unsafe_ptr()))
        call.append_word(Int(x4.unsafe_ptr()))
        call.append_word(Int(x5.unsafe_ptr()))
        call.append_word(Int(x6.unsafe_ptr()))
        call.append_word(Int(x7.unsafe_ptr()))
        call.append_word(Int(x8.unsafe_ptr()))
        call.append_word(Int(x9.unsafe_ptr()))
        call.append_word(Int(x10.unsafe_ptr()))
        call.append_word(Int(x11.unsafe_ptr()))
        call.run[function](ctx)


@extensibility.register("pointwise_3_4")
struct Pointwise3Of4:
    """3 results of up to 4 inputs."""

    @staticmethod
    def execute[
        target: StaticString, function: StaticString, inputs: Int
    ](
        y0: OutputTensor,
        y1: OutputTensor,
        y2: OutputTensor,
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        x0: InputTensor,
        x1: InputTensor,
        x2: InputTensor,
        x3: InputTensor,
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(geometry)
        call.append_word(Int(y0.unsafe_ptr()))
        call.append_word(Int(y1.unsafe_ptr()))
        call.append_word(Int(y2.unsafe_ptr()))
        call.append_word(Int(x0.unsafe_ptr()))
        call.append_word(Int(x1.unsafe_ptr()))
        call.append_word(Int(x2.unsafe_ptr()))
        call.append_word(Int(x3.unsafe_ptr()))
        call.run[function](ctx)


@extensibility.register("pointwise_3_12")
struct Pointwise3Of12:
    """3 results of up to 12 inputs."""

    @staticmethod
    def execute[
        target: StaticString, function: StaticString, inputs: Int
    ](
        y0: OutputTensor,
        y1: OutputTensor,
        y2: OutputTensor,
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        x0: InputTensor,
        x1: InputTensor,
        x2: InputTensor,
        x3: InputTensor,
        x4: InputTensor,
        x5: InputTensor,
        x6: InputTensor,
        x7: InputTensor,
        x8: InputTensor,
        x9: InputTensor,
        x10: InputTensor,
        x11: InputTensor,
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(geometry)
        call.append_word(Int(y0.unsafe_ptr()))
        call.append_word(Int(y1.unsafe_ptr()))
        call.append_word(Int(y2.unsafe_ptr()))
        call.append_word(Int(x0.unsafe_ptr()))
        call.append_word(Int(x1.unsafe_ptr()))
        call.append_word(Int(x2.unsafe_ptr()))
        call.append_word(Int(x3.unsafe_ptr()))
        call.append_word(Int(x4.unsafe_ptr()))
        call.append_word(Int(x5.unsafe_ptr()))
        call.append_word(Int(x6.unsafe_ptr()))
        call.append_word(Int(x7.unsafe_ptr()))
        call.append_word(Int(x8.unsafe_ptr()))
        call.append_word(Int(x9.unsafe_ptr()))
        call.append_word(Int(x10.unsafe_ptr()))
        call.append_word(Int(x11.unsafe_ptr()))
        call.run[function](ctx)


@extensibility.register("pointwise_5_12")
struct Pointwise5Of12:
    """5 results of up to 12 inputs."""

    @staticmethod
    def execute[
        target: StaticString, function: StaticString, inputs: Int
    ](
        y0: OutputTensor,
        y1: OutputTensor,
        y2: OutputTensor,
        y3: OutputTensor,
        y4: OutputTensor,
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        x0: InputTensor,
        x1: InputTensor,
        x2: InputTensor,
        x3: InputTensor,
        x4: InputTensor,
        x5: InputTensor,
        x6: InputTensor,
        x7: InputTensor,
        x8: InputTensor,
        x9: InputTensor,
        x10: InputTensor,
        x11: InputTensor,
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(geometry)
        call.append_word(Int(y0.unsafe_ptr()))
        call.append_word(Int(y1.unsafe_ptr()))
        call.append_word(Int(y2.unsafe_ptr()))
        call.append_word(Int(y3.unsafe_ptr()))
        call.append_word(Int(y4.unsafe_ptr()))
        call.append_word(Int(x0.unsafe_ptr()))
        call.append_word(Int(x1.unsafe_ptr()))
        call.append_word(Int(x2.unsafe_ptr()))
        call.append_word(Int(x3.unsafe_ptr()))
        call.append_word(Int(x4.unsafe_ptr()))
        call.append_word(Int(x5.unsafe_ptr()))
        call.append_word(Int(x6.unsafe_ptr()))
        call.append_word(Int(x7.unsafe_ptr()))
        call.append_word(Int(x8.unsafe_ptr()))
        call.append_word(Int(x9.unsafe_ptr()))
        call.append_word(Int(x10.unsafe_ptr()))
        call.append_word(Int(x11.unsafe_ptr()))
        call.run[function](ctx)
