"""Selection of the kernel that runs a call.

Gradients of images are added atomically on a GPU unless `deterministic` asks for the same bits in every run.
"""

from max.gpu.host import DeviceContext
from max.gpu.host.info import is_cpu

from ..common.library import Operand
from ..common.pointer import Ptr
from .columns_cpu import (
    columns_cpu,
    columns_input_gradient_cpu,
    columns_offset_gradient_cpu,
)
from .columns_gpu import (
    columns_gpu,
    columns_input_gradient_gpu,
    columns_offset_gradient_gpu,
)
from .deformable import DeformableProblem
from .positions import (
    positions_cpu,
    positions_gpu,
    positions_gradient_cpu,
    positions_gradient_gpu,
)
from .problem import RegionsProblem
from .regions_cpu import (
    align_cpu,
    align_gradient_cpu,
    check_images,
    maxima_cpu,
    maxima_gradient_cpu,
)
from .regions_gpu import (
    align_gpu,
    check_sizes,
    maxima_gpu,
    regions_gradient_gpu,
)
from .scatter_gpu import scatter_positions_gpu, scatter_regions_gpu


@always_inline
def align[
    dtype: DType, //, target: StaticString
](
    y: Ptr[dtype],
    x: Ptr[dtype],
    regions: Ptr[dtype],
    p: RegionsProblem,
    ctx: DeviceContext,
) raises:
    """Writes the mean of each bin's samples."""
    comptime if is_cpu[target]():
        check_images(regions, p)
        align_cpu(y, x, regions, p)
    else:
        align_gpu(ctx, y, x, regions, p)


@always_inline
def align_gradient[
    dtype: DType, sums: DType, //, target: StaticString
](
    dx: Operand[sums, 3],
    dy: Ptr[dtype],
    regions: Ptr[dtype],
    p: RegionsProblem,
    deterministic: Bool,
    ctx: DeviceContext,
) raises:
    """Writes the images' gradient."""
    comptime if is_cpu[target]():
        check_images(regions, p)
        align_gradient_cpu(dx.data, dy, regions, p)
    else:
        check_sizes(p)
        var nothing = rebind[Ptr[DType.int32]](dx.data)
        if deterministic:
            regions_gradient_gpu[maxima=False](
                ctx, dx.data, dy, nothing, regions, p
            )
        else:
            scatter_regions_gpu[maxima=False](
                ctx, dx.to_device_buffer(ctx), dy, nothing, regions, p
            )


@always_inline
def maxima[
    dtype: DType, //, target: StaticString
](
    y: Ptr[dtype],
    places: Ptr[DType.int32],
    x: Ptr[dtype],
    regions: Ptr[dtype],
    p: RegionsProblem,
    ctx: DeviceContext,
) raises:
    """Writes the maximum of each bin, and its pixel."""
    comptime if is_cpu[target]():
        check_images(regions, p)
        maxima_cpu(y, places, x, regions, p)
    else:
        maxima_gpu(ctx, y, places, x, regions, p)


@always_inline
def maxima_gradient[
    dtype: DType, sums: DType, //, target: StaticString
](
    dx: Operand[sums, 3],
    dy: Ptr[dtype],
    places: Ptr[DType.int32],
    regions: Ptr[dtype],
    p: RegionsProblem,
    deterministic: Bool,
    ctx: DeviceContext,
) raises:
    """Writes the images' gradient."""
    comptime if is_cpu[target]():
        check_images(regions, p)
        maxima_gradient_cpu(dx.data, dy, regions, places, p)
    else:
        check_sizes(p)
        if deterministic:
            regions_gradient_gpu[maxima=True](
                ctx, dx.data, dy, places, regions, p
            )
        else:
            scatter_regions_gpu[maxima=True](
                ctx, dx.to_device_buffer(ctx), dy, places, regions, p
            )


@always_inline
def positions[
    dtype: DType, //, target: StaticString, *, align: Bool
](
    y: Ptr[dtype],
    x: Ptr[dtype],
    regions: Ptr[dtype],
    p: RegionsProblem,
    ctx: DeviceContext,
) raises:
    """Writes the mean of each bin in its own channel."""
    comptime if is_cpu[target]():
        check_images(regions, p)
        positions_cpu[align=align](y, x, regions, p)
    else:
        positions_gpu[align=align](ctx, y, x, regions, p)


@always_inline
def positions_gradient[
    dtype: DType, sums: DType, //, target: StaticString, *, align: Bool
](
    dx: Operand[sums, 3],
    dy: Ptr[dtype],
    regions: Ptr[dtype],
    p: RegionsProblem,
    deterministic: Bool,
    ctx: DeviceContext,
) raises:
    """Writes the images' gradient."""
    comptime if is_cpu[target]():
        check_images(regions, p)
        positions_gradient_cpu[align=align](dx.data, dy, regions, p)
    else:
        check_sizes(p)
        if deterministic:
            positions_gradient_gpu[align=align](ctx, dx.data, dy, regions, p)
        else:
            scatter_positions_gpu[align=align](
                ctx, dx.to_device_buffer(ctx), dy, regions, p
            )


@always_inline
def columns[
    dtype: DType, //, target: StaticString
](
    columns: Ptr[dtype],
    x: Ptr[dtype],
    offset: Ptr[dtype],
    mask: Ptr[dtype],
    p: DeformableProblem,
    ctx: DeviceContext,
) raises:
    """Writes the elements that the windows of a deformable convolution read."""
    comptime if is_cpu[target]():
        columns_cpu(columns, x, offset, mask, p)
    else:
        columns_gpu(ctx, columns, x, offset, mask, p)


@always_inline
def columns_input_gradient[
    dtype: DType, sums: DType, //, target: StaticString
](
    dx: Operand[sums, 3],
    dcolumns: Ptr[dtype],
    offset: Ptr[dtype],
    mask: Ptr[dtype],
    p: DeformableProblem,
    deterministic: Bool,
    ctx: DeviceContext,
) raises:
    """Writes the images' gradient."""
    comptime if is_cpu[target]():
        columns_input_gradient_cpu(dx.data, dcolumns, offset, mask, p)
    else:
        var image = dx.to_device_buffer(ctx)
        if deterministic:
            columns_input_gradient_gpu[in_order=True](
                ctx, image, dcolumns, offset, mask, p
            )
        else:
            columns_input_gradient_gpu[in_order=False](
                ctx, image, dcolumns, offset, mask, p
            )


@always_inline
def columns_offset_gradient[
    dtype: DType, //, target: StaticString
](
    doffset: Ptr[dtype],
    dmask: Ptr[dtype],
    dcolumns: Ptr[dtype],
    x: Ptr[dtype],
    offset: Ptr[dtype],
    mask: Ptr[dtype],
    p: DeformableProblem,
    ctx: DeviceContext,
) raises:
    """Writes the gradients of offsets and masks."""
    comptime if is_cpu[target]():
        columns_offset_gradient_cpu(
            doffset, dmask, dcolumns, x, offset, mask, p
        )
    else:
        columns_offset_gradient_gpu(
            ctx, doffset, dmask, dcolumns, x, offset, mask, p
        )
