"""Registrations of the pointwise family: thin ops over the entries of entries.mojo.

An op has a fixed number of operands, so there is one for each number of results and some numbers of inputs; a graph
repeats an input where it has fewer. `function` is the library function that the graph's builder chose, `geometry` what
entries.mojo says.
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
            call.append_word(Int(results[pair].unsafe_ptr()))
            call.append_word(Int(inputs[pair].unsafe_ptr()))
            call.append_word(inputs[pair].dim_size(0))
        call.run[function](ctx)


@extensibility.register("pointwise_1_1")
struct Pointwise1Of1:
    """1 result of 1 input."""

    @staticmethod
    def execute[
        target: StaticString, function: StaticString
    ](
        y0: OutputTensor,
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        x0: InputTensor,
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(geometry)
        call.append_word(Int(y0.unsafe_ptr()))
        call.append_word(Int(x0.unsafe_ptr()))
        call.run[function](ctx)


@extensibility.register("pointwise_1_2")
struct Pointwise1Of2:
    """1 result of up to 2 inputs."""

    @staticmethod
    def execute[
        target: StaticString, function: StaticString
    ](
        y0: OutputTensor,
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        x0: InputTensor,
        x1: InputTensor,
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(geometry)
        call.append_word(Int(y0.unsafe_ptr()))
        call.append_word(Int(x0.unsafe_ptr()))
        call.append_word(Int(x1.unsafe_ptr()))
        call.run[function](ctx)


@extensibility.register("pointwise_1_4")
struct Pointwise1Of4:
    """1 result of up to 4 inputs."""

    @staticmethod
    def execute[
        target: StaticString, function: StaticString
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


@extensibility.register("pointwise_1_8")
struct Pointwise1Of8:
    """1 result of up to 8 inputs."""

    @staticmethod
    def execute[
        target: StaticString, function: StaticString
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
        call.run[function](ctx)


@extensibility.register("pointwise_1_12")
struct Pointwise1Of12:
    """1 result of up to 12 inputs."""

    @staticmethod
    def execute[
        target: StaticString, function: StaticString
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


@extensibility.register("pointwise_2_1")
struct Pointwise2Of1:
    """2 results of 1 input."""

    @staticmethod
    def execute[
        target: StaticString, function: StaticString
    ](
        y0: OutputTensor,
        y1: OutputTensor,
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        x0: InputTensor,
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(geometry)
        call.append_word(Int(y0.unsafe_ptr()))
        call.append_word(Int(y1.unsafe_ptr()))
        call.append_word(Int(x0.unsafe_ptr()))
        call.run[function](ctx)


@extensibility.register("pointwise_2_2")
struct Pointwise2Of2:
    """2 results of up to 2 inputs."""

    @staticmethod
    def execute[
        target: StaticString, function: StaticString
    ](
        y0: OutputTensor,
        y1: OutputTensor,
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        x0: InputTensor,
        x1: InputTensor,
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(geometry)
        call.append_word(Int(y0.unsafe_ptr()))
        call.append_word(Int(y1.unsafe_ptr()))
        call.append_word(Int(x0.unsafe_ptr()))
        call.append_word(Int(x1.unsafe_ptr()))
        call.run[function](ctx)


@extensibility.register("pointwise_2_4")
struct Pointwise2Of4:
    """2 results of up to 4 inputs."""

    @staticmethod
    def execute[
        target: StaticString, function: StaticString
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


@extensibility.register("pointwise_2_8")
struct Pointwise2Of8:
    """2 results of up to 8 inputs."""

    @staticmethod
    def execute[
        target: StaticString, function: StaticString
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
        call.run[function](ctx)


@extensibility.register("pointwise_2_12")
struct Pointwise2Of12:
    """2 results of up to 12 inputs."""

    @staticmethod
    def execute[
        target: StaticString, function: StaticString
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


@extensibility.register("pointwise_3_1")
struct Pointwise3Of1:
    """3 results of 1 input."""

    @staticmethod
    def execute[
        target: StaticString, function: StaticString
    ](
        y0: OutputTensor,
        y1: OutputTensor,
        y2: OutputTensor,
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        x0: InputTensor,
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(geometry)
        call.append_word(Int(y0.unsafe_ptr()))
        call.append_word(Int(y1.unsafe_ptr()))
        call.append_word(Int(y2.unsafe_ptr()))
        call.append_word(Int(x0.unsafe_ptr()))
        call.run[function](ctx)


@extensibility.register("pointwise_3_2")
struct Pointwise3Of2:
    """3 results of up to 2 inputs."""

    @staticmethod
    def execute[
        target: StaticString, function: StaticString
    ](
        y0: OutputTensor,
        y1: OutputTensor,
        y2: OutputTensor,
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        x0: InputTensor,
        x1: InputTensor,
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(geometry)
        call.append_word(Int(y0.unsafe_ptr()))
        call.append_word(Int(y1.unsafe_ptr()))
        call.append_word(Int(y2.unsafe_ptr()))
        call.append_word(Int(x0.unsafe_ptr()))
        call.append_word(Int(x1.unsafe_ptr()))
        call.run[function](ctx)


@extensibility.register("pointwise_3_4")
struct Pointwise3Of4:
    """3 results of up to 4 inputs."""

    @staticmethod
    def execute[
        target: StaticString, function: StaticString
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


@extensibility.register("pointwise_3_8")
struct Pointwise3Of8:
    """3 results of up to 8 inputs."""

    @staticmethod
    def execute[
        target: StaticString, function: StaticString
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
        call.run[function](ctx)


@extensibility.register("pointwise_3_12")
struct Pointwise3Of12:
    """3 results of up to 12 inputs."""

    @staticmethod
    def execute[
        target: StaticString, function: StaticString
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
