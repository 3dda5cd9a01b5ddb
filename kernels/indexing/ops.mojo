"""Registrations of the indexing family: thin ops over the entries of entries.mojo, which says what operands are.

`function` is the library function that the graph's builder chose.
"""

import extensibility
from extensibility import InputTensor, OutputTensor
from max.gpu.host import DeviceContext

from ..common.library import Call


@extensibility.register("scatter_rows_add")
struct ScatterRowsAdd:
    """Whole rows added at the places of one list."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, function: StaticString
    ](
        y: OutputTensor[dtype=dtype, rank=3, ...],
        x: InputTensor[dtype=dtype, rank=3, ...],
        index: InputTensor[dtype=DType.int64, rank=1, ...],
        source: InputTensor[dtype=dtype, rank=3, ...],
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(y)
        call.append(x)
        call.append(index)
        call.append(source)
        call.run[function](ctx)


@extensibility.register("scatter_rows_set")
struct ScatterRowsSet:
    """Whole rows put at the places of one list; the last of equal places wins.
    """

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, function: StaticString
    ](
        y: OutputTensor[dtype=dtype, rank=3, ...],
        x: InputTensor[dtype=dtype, rank=3, ...],
        index: InputTensor[dtype=DType.int64, rank=1, ...],
        source: InputTensor[dtype=dtype, rank=3, ...],
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(y)
        call.append(x)
        call.append(index)
        call.append(source)
        call.run[function](ctx)


@extensibility.register("scatter_elements_add")
struct ScatterElementsAdd:
    """Elements added, each at a place of its own."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, function: StaticString
    ](
        y: OutputTensor[dtype=dtype, rank=3, ...],
        x: InputTensor[dtype=dtype, rank=3, ...],
        index: InputTensor[dtype=DType.int64, rank=3, ...],
        source: InputTensor[dtype=dtype, rank=3, ...],
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(y)
        call.append(x)
        call.append(index)
        call.append(source)
        call.run[function](ctx)


@extensibility.register("scatter_elements_set")
struct ScatterElementsSet:
    """Elements put, each at a place of its own; the last of equal places wins.
    """

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, function: StaticString
    ](
        y: OutputTensor[dtype=dtype, rank=3, ...],
        x: InputTensor[dtype=dtype, rank=3, ...],
        index: InputTensor[dtype=DType.int64, rank=3, ...],
        source: InputTensor[dtype=dtype, rank=3, ...],
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(y)
        call.append(x)
        call.append(index)
        call.append(source)
        call.run[function](ctx)


@extensibility.register("gather_rows")
struct GatherRows:
    """Whole rows taken from the places of one list."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, function: StaticString
    ](
        y: OutputTensor[dtype=dtype, rank=3, ...],
        x: InputTensor[dtype=dtype, rank=3, ...],
        index: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(y)
        call.append(x)
        call.append(index)
        call.run[function](ctx)


@extensibility.register("gather_elements")
struct GatherElements:
    """Elements taken, each from a place of its own."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, function: StaticString
    ](
        y: OutputTensor[dtype=dtype, rank=3, ...],
        x: InputTensor[dtype=dtype, rank=3, ...],
        index: InputTensor[dtype=DType.int64, rank=3, ...],
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(y)
        call.append(x)
        call.append(index)
        call.run[function](ctx)
