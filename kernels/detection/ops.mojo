"""Registrations of the detection family: thin ops over the entries, which say what operands are.

`function` is the library function that the graph's builder chose.
"""

import extensibility
from extensibility import InputTensor, OutputTensor
from max.gpu.host import DeviceContext

from ..common.library import Call


@extensibility.register("roi_align_fprop")
struct RoiAlignFprop:
    """The means of regions' bins."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, function: StaticString
    ](
        y: OutputTensor[dtype=dtype, rank=3, ...],
        x: InputTensor[dtype=dtype, rank=3, ...],
        regions: InputTensor[dtype=dtype, rank=2, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(y)
        call.append(x)
        call.append(regions)
        call.append(geometry)
        call.run[function](ctx)


@extensibility.register("roi_align_dgrad")
struct RoiAlignDgrad:
    """The gradient of the images that regions lie in."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, sums: DType, function: StaticString
    ](
        dx: OutputTensor[dtype=sums, rank=3, ...],
        dy: InputTensor[dtype=dtype, rank=3, ...],
        regions: InputTensor[dtype=dtype, rank=2, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(dx)
        call.append(dy)
        call.append(regions)
        call.append(geometry)
        call.run[function](ctx)


@extensibility.register("roi_pool_fprop")
struct RoiPoolFprop:
    """The maxima of regions' bins, and their pixels."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, function: StaticString
    ](
        y: OutputTensor[dtype=dtype, rank=3, ...],
        places: OutputTensor[dtype=DType.int32, rank=3, ...],
        x: InputTensor[dtype=dtype, rank=3, ...],
        regions: InputTensor[dtype=dtype, rank=2, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(y)
        call.append(places)
        call.append(x)
        call.append(regions)
        call.append(geometry)
        call.run[function](ctx)


@extensibility.register("roi_pool_dgrad")
struct RoiPoolDgrad:
    """The gradient of the images that maxima were taken of."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, sums: DType, function: StaticString
    ](
        dx: OutputTensor[dtype=sums, rank=3, ...],
        dy: InputTensor[dtype=dtype, rank=3, ...],
        regions: InputTensor[dtype=dtype, rank=2, ...],
        places: InputTensor[dtype=DType.int32, rank=3, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(dx)
        call.append(dy)
        call.append(regions)
        call.append(places)
        call.append(geometry)
        call.run[function](ctx)


@extensibility.register("ps_roi_fprop")
struct PsRoiFprop:
    """The means of regions' bins, each in a channel of its own."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, function: StaticString
    ](
        y: OutputTensor[dtype=dtype, rank=3, ...],
        x: InputTensor[dtype=dtype, rank=3, ...],
        regions: InputTensor[dtype=dtype, rank=2, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(y)
        call.append(x)
        call.append(regions)
        call.append(geometry)
        call.run[function](ctx)


@extensibility.register("ps_roi_dgrad")
struct PsRoiDgrad:
    """The gradient of the images whose channels belong to bins."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, sums: DType, function: StaticString
    ](
        dx: OutputTensor[dtype=sums, rank=3, ...],
        dy: InputTensor[dtype=dtype, rank=3, ...],
        regions: InputTensor[dtype=dtype, rank=2, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(dx)
        call.append(dy)
        call.append(regions)
        call.append(geometry)
        call.run[function](ctx)


@extensibility.register("deformable_columns")
struct DeformableColumns:
    """What the windows of a deformable convolution read."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, function: StaticString
    ](
        columns: OutputTensor[dtype=dtype, rank=3, ...],
        x: InputTensor[dtype=dtype, rank=3, ...],
        offset: InputTensor[dtype=dtype, rank=3, ...],
        mask: InputTensor[dtype=dtype, rank=3, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(columns)
        call.append(x)
        call.append(offset)
        call.append(mask)
        call.append(geometry)
        call.run[function](ctx)


@extensibility.register("deformable_dgrad_input")
struct DeformableDgradInput:
    """The gradient of the images, for that of the columns."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, sums: DType, function: StaticString
    ](
        dx: OutputTensor[dtype=sums, rank=3, ...],
        dcolumns: InputTensor[dtype=dtype, rank=3, ...],
        offset: InputTensor[dtype=dtype, rank=3, ...],
        mask: InputTensor[dtype=dtype, rank=3, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(dx)
        call.append(dcolumns)
        call.append(offset)
        call.append(mask)
        call.append(geometry)
        call.run[function](ctx)


@extensibility.register("deformable_dgrad_offset")
struct DeformableDgradOffset:
    """The gradients of offsets and masks, for that of the columns."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, function: StaticString
    ](
        doffset: OutputTensor[dtype=dtype, rank=3, ...],
        dmask: OutputTensor[dtype=dtype, rank=3, ...],
        dcolumns: InputTensor[dtype=dtype, rank=3, ...],
        x: InputTensor[dtype=dtype, rank=3, ...],
        offset: InputTensor[dtype=dtype, rank=3, ...],
        mask: InputTensor[dtype=dtype, rank=3, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(doffset)
        call.append(dmask)
        call.append(dcolumns)
        call.append(x)
        call.append(offset)
        call.append(mask)
        call.append(geometry)
        call.run[function](ctx)
