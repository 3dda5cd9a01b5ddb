"""Registrations of the indexing family.

x and y are [outer, places, inner], source is [outer, count, inner]; places count from zero, negative ones have been
resolved in the graph. On the CPU a place outside raises, on a GPU it is ignored.
"""

import extensibility
from extensibility import InputTensor, OutputTensor
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_cpu
from std.utils.index import IndexList

from ..convolution.common import Ptr
from .elements import elements_cpu, elements_gpu
from .rows import Rows, rows_cpu, rows_gpu


@always_inline
def _pointer[
    dtype: DType
](pointer: Pointer[mut=_, Scalar[dtype], _]) -> Ptr[dtype]:
    """A tensor's data; the caller keeps the tensor alive while kernels use it.
    """
    return pointer.unsafe_mut_cast[True]().unsafe_origin_cast[
        MutUntrackedOrigin
    ]()


@no_inline
def _rows(
    y: IndexList[3], x: IndexList[3], source: IndexList[3]
) raises -> Rows:
    if x[0] != y[0] or x[1] != y[1] or x[2] != y[2]:
        raise Error(t"scatter: x is {x}, y is {y}: must be equal")
    if source[0] != x[0] or source[2] != x[2]:
        raise Error(
            t"scatter: source is {source}, x is {x}: must agree in the first"
            t" and the last extent"
        )
    return Rows(x[0], x[1], source[1], x[2])


@no_inline
def _check_places(index: Ptr[DType.int64], count: Int, places: Int) raises:
    for i in range(count):
        var place = Int(index[unsafe_offset=i])
        if place < 0 or place >= places:
            raise Error(
                t"index out of range: {place} in a dimension of {places}"
            )


@always_inline
def _scatter_rows[
    target: StaticString, dtype: DType, accumulate: Bool
](
    y: OutputTensor[dtype=dtype, rank=3, ...],
    x: InputTensor[dtype=dtype, rank=3, ...],
    index: InputTensor[dtype=DType.int64, rank=1, ...],
    source: InputTensor[dtype=dtype, rank=3, ...],
    ctx: DeviceContext,
) raises:
    var rows = _rows(y.shape(), x.shape(), source.shape())
    if index.dim_size(0) != rows.count:
        raise Error(
            t"scatter: index has {index.dim_size(0)} places, source"
            t" {rows.count} rows"
        )
    comptime if is_cpu[target]():
        var places = _pointer(index.unsafe_ptr())
        _check_places(places, rows.count, rows.places)
        rows_cpu[dtype, accumulate](
            _pointer(y.unsafe_ptr()),
            _pointer(x.unsafe_ptr()),
            places,
            _pointer(source.unsafe_ptr()),
            rows,
        )
    else:
        rows_gpu[dtype, accumulate](
            y.to_device_buffer(ctx),
            x.to_device_buffer(ctx),
            index.to_device_buffer(ctx),
            source.to_device_buffer(ctx),
            rows,
            ctx,
        )


@always_inline
def _scatter_elements[
    target: StaticString, dtype: DType, accumulate: Bool
](
    y: OutputTensor[dtype=dtype, rank=3, ...],
    x: InputTensor[dtype=dtype, rank=3, ...],
    index: InputTensor[dtype=DType.int64, rank=3, ...],
    source: InputTensor[dtype=dtype, rank=3, ...],
    ctx: DeviceContext,
) raises:
    var rows = _rows(y.shape(), x.shape(), source.shape())
    if index.shape() != source.shape():
        raise Error(
            t"scatter: index is {index.shape()}, source is {source.shape()}:"
            t" must be equal"
        )
    comptime if is_cpu[target]():
        var places = _pointer(index.unsafe_ptr())
        _check_places(places, rows.outer * rows.count * rows.inner, rows.places)
        elements_cpu[dtype, accumulate](
            _pointer(y.unsafe_ptr()),
            _pointer(x.unsafe_ptr()),
            places,
            _pointer(source.unsafe_ptr()),
            rows,
        )
    else:
        elements_gpu[dtype, accumulate](
            y.to_device_buffer(ctx),
            x.to_device_buffer(ctx),
            index.to_device_buffer(ctx),
            source.to_device_buffer(ctx),
            rows,
            ctx,
        )


@extensibility.register("scatter_rows_add")
struct ScatterRowsAdd:
    """Whole rows added at the places of one list."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType
    ](
        y: OutputTensor[dtype=dtype, rank=3, ...],
        x: InputTensor[dtype=dtype, rank=3, ...],
        index: InputTensor[dtype=DType.int64, rank=1, ...],
        source: InputTensor[dtype=dtype, rank=3, ...],
        ctx: DeviceContext,
    ) raises:
        _scatter_rows[target, dtype, True](y, x, index, source, ctx)


@extensibility.register("scatter_rows_set")
struct ScatterRowsSet:
    """Whole rows put at the places of one list; the last of equal places wins.
    """

    @staticmethod
    def execute[
        target: StaticString, dtype: DType
    ](
        y: OutputTensor[dtype=dtype, rank=3, ...],
        x: InputTensor[dtype=dtype, rank=3, ...],
        index: InputTensor[dtype=DType.int64, rank=1, ...],
        source: InputTensor[dtype=dtype, rank=3, ...],
        ctx: DeviceContext,
    ) raises:
        _scatter_rows[target, dtype, False](y, x, index, source, ctx)


@extensibility.register("scatter_elements_add")
struct ScatterElementsAdd:
    """Elements added, each at a place of its own."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType
    ](
        y: OutputTensor[dtype=dtype, rank=3, ...],
        x: InputTensor[dtype=dtype, rank=3, ...],
        index: InputTensor[dtype=DType.int64, rank=3, ...],
        source: InputTensor[dtype=dtype, rank=3, ...],
        ctx: DeviceContext,
    ) raises:
        _scatter_elements[target, dtype, True](y, x, index, source, ctx)


@extensibility.register("scatter_elements_set")
struct ScatterElementsSet:
    """Elements put, each at a place of its own; the last of equal places wins.
    """

    @staticmethod
    def execute[
        target: StaticString, dtype: DType
    ](
        y: OutputTensor[dtype=dtype, rank=3, ...],
        x: InputTensor[dtype=dtype, rank=3, ...],
        index: InputTensor[dtype=DType.int64, rank=3, ...],
        source: InputTensor[dtype=dtype, rank=3, ...],
        ctx: DeviceContext,
    ) raises:
        _scatter_elements[target, dtype, False](y, x, index, source, ctx)
