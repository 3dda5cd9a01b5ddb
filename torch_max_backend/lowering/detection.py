"""torchvision's operators of detection, where the user's code imports torchvision.

``torchvision.nms`` is not among them: the size of its result depends on values.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from math import prod
from typing import Any, TypeVar

import numpy as np
import torch
from max.dtype import DType
from max.graph import TensorValue
from torch.fx import Node

from torch_max_backend.dtypes import FLOATS
from torch_max_backend.errors import InvalidArgumentError
from torch_max_backend.ir import ops
from torch_max_backend.ir.layout import GraphTensor
from torch_max_backend.lowering import numerics
from torch_max_backend.lowering.context import LoweringContext
from torch_max_backend.lowering.convolution import bias_gradient
from torch_max_backend.lowering.linear import products_allow_tf32
from torch_max_backend.lowering.registry import Layout, lowering
from torch_max_backend.mojo_ops import detection as kernels
from torch_max_backend.mojo_ops.convolution import Geometry, conv_dgrad, conv_fprop, conv_wgrad, workspace_limit
from torch_max_backend.mojo_ops.detection import Deformable, Regions
from torch_max_backend.problems.convolution import ConvolutionProblem

T = TypeVar("T", Regions, Deformable)


def _supports(node: Node) -> str | None:
    tensors = [each.meta["val"] for each in node.all_input_nodes if isinstance(each.meta["val"], torch.Tensor)]
    floats = [each for each in tensors if each.dtype != torch.int32]
    if any(each.dtype not in FLOATS or each.dtype != floats[0].dtype for each in floats):
        return f"{node.target} runs where all tensors have one of {', '.join(map(str, FLOATS))}"
    if any(isinstance(arg, torch.SymInt) for arg in _values(node)):
        return f"{node.target} needs sizes that are known"
    images = [each for each in tensors if each.dim() == 4]
    if not all(isinstance(size, int) for each in images for size in each.shape[1:]):
        return f"{node.target} needs images of known extents"
    return None


def _values(node: Node) -> list[Any]:
    """The arguments that are no tensors."""
    return [arg.meta["val"] if isinstance(arg, Node) else arg for arg in node.args]


def _known(node: Node, make: type[T], *arguments: Any) -> T:
    try:
        return make(*arguments)
    except ValueError as error:
        raise InvalidArgumentError(f"{node.target}: {error}") from None


def _regions(
    ctx: LoweringContext,
    extents: Sequence[Any],
    height: int,
    width: int,
    scale: float,
    samples: int = 0,
    aligned: bool = False,
) -> Regions:
    """How regions of images of these extents are pooled to [height, width] bins."""
    return _known(ctx.node, Regions, tuple(extents), (height, width), max(samples, 0), aligned, float(scale))


def _flat(x: GraphTensor) -> TensorValue:
    """[N, places, C] of [N, C, H, W]."""
    value = x.channels_last()
    return ops.reshape(value, [value.shape[0], value.shape[1] * value.shape[2], value.shape[3]])


def _planes(x: GraphTensor) -> TensorValue:
    """[N, C, places] of [N, C, H, W]."""
    value = x.logical()
    return ops.reshape(value, [value.shape[0], value.shape[1], value.shape[2] * value.shape[3]])


def _raised(value: TensorValue, spatial: Sequence[int]) -> GraphTensor:
    """The inverse of ``_flat``."""
    return GraphTensor.from_channels_last(ops.reshape(value, [value.shape[0], *spatial, value.shape[2]]))


def _raised_planes(value: TensorValue, spatial: Sequence[int]) -> GraphTensor:
    """The inverse of ``_planes``."""
    return GraphTensor.contiguous(ops.reshape(value, [value.shape[0], value.shape[1], *spatial]))


@lowering("torchvision::roi_align", layout=Layout.RAW, supports=_supports)
def roi_align(
    ctx: LoweringContext,
    x: GraphTensor,
    rois: GraphTensor,
    scale: float,
    height: int,
    width: int,
    samples: int,
    aligned: bool,
) -> GraphTensor:
    """The means of samples in each bin of each region."""
    how = _regions(ctx, ctx.arg_meta(0).shape[2:], height, width, scale, samples, aligned)
    return _raised(kernels.roi_align_fprop(_flat(x), rois.logical(), how), how.bins)


@lowering("torchvision::_roi_align_backward", layout=Layout.RAW, supports=_supports)
def roi_align_backward(
    ctx: LoweringContext,
    grad: GraphTensor,
    rois: GraphTensor,
    scale: float,
    height: int,
    width: int,
    batch: int,
    channels: int,
    *sizes_and_samples: Any,
) -> GraphTensor:
    """The gradient of the images; see ``_deterministic``."""
    *extents, samples, aligned = sizes_and_samples
    how = _regions(ctx, extents, height, width, scale, samples, aligned)
    sums = kernels.roi_align_dgrad(_flat(grad), rois.logical(), how, batch, deterministic=_deterministic())
    return _gradient(sums, grad, how)


@lowering("torchvision::roi_pool", layout=Layout.RAW, supports=_supports)
def roi_pool(
    ctx: LoweringContext, x: GraphTensor, rois: GraphTensor, scale: float, height: int, width: int
) -> tuple[GraphTensor, GraphTensor]:
    """The maxima in each bin of each region, and their pixels."""
    how = _regions(ctx, ctx.arg_meta(0).shape[2:], height, width, scale)
    values, places = kernels.roi_pool_fprop(_flat(x), rois.logical(), how)
    return _raised(values, how.bins), _raised(places, how.bins)


@lowering("torchvision::_roi_pool_backward", layout=Layout.RAW, supports=_supports)
def roi_pool_backward(
    ctx: LoweringContext,
    grad: GraphTensor,
    rois: GraphTensor,
    places: GraphTensor,
    scale: float,
    height: int,
    width: int,
    batch: int,
    channels: int,
    *extents: int,
) -> GraphTensor:
    """The gradient of the images; see ``_deterministic``."""
    how = _regions(ctx, extents, height, width, scale)
    sums = kernels.roi_pool_dgrad(
        _flat(grad), rois.logical(), _flat(places), how, batch, deterministic=_deterministic()
    )
    return _gradient(sums, grad, how)


def _deterministic() -> bool:
    """Whether gradients have the same bits in every run on a GPU, too.

    Under ``torch.use_deterministic_algorithms(True)``, for whose change Dynamo compiles anew; else a GPU adds
    atomically.
    """
    return torch.are_deterministic_algorithms_enabled()


def _gradient(sums: TensorValue, grad: GraphTensor, how: Regions) -> GraphTensor:
    return _raised(numerics.cast(sums, grad.dtype), how.extents)


@lowering("torchvision::ps_roi_align", "torchvision::ps_roi_pool", layout=Layout.RAW, supports=_supports)
def position_sensitive(
    ctx: LoweringContext,
    x: GraphTensor,
    rois: GraphTensor,
    scale: float,
    height: int,
    width: int,
    samples: int = 0,
) -> tuple[GraphTensor, GraphTensor]:
    """The means in each bin of each region, of channels of its own, and which these are."""
    image = ctx.arg_meta(0)
    how = _regions(ctx, image.shape[2:], height, width, scale, samples, aligned=True)
    align = "align" in str(ctx.node.target)
    y = kernels.ps_roi_fprop(_planes(x), rois.logical(), how, align=align)
    shape = ctx.out_shape(1)
    channels = np.arange(image.shape[1], dtype=np.int32).reshape(1, -1, *how.bins)
    mapping = ops.broadcast_to(ops.constant(channels, DType.int32, device=ctx.device), shape)
    return _raised_planes(y, how.bins), GraphTensor.contiguous(mapping)


@lowering("torchvision::_ps_roi_align_backward", "torchvision::_ps_roi_pool_backward", layout=Layout.RAW,
          supports=_supports)  # fmt: skip
def position_sensitive_backward(
    ctx: LoweringContext,
    grad: GraphTensor,
    rois: GraphTensor,
    mapping: GraphTensor,
    scale: float,
    height: int,
    width: int,
    *rest: int,
) -> GraphTensor:
    """The gradient of the images; see ``_deterministic``."""
    align = "align" in str(ctx.node.target)
    samples, (batch, _, *extents) = (rest[0], rest[1:]) if align else (0, rest)
    how = _regions(ctx, extents, height, width, scale, samples, aligned=True)
    sums = kernels.ps_roi_dgrad(_planes(grad), rois.logical(), how, batch, align=align, deterministic=_deterministic())
    return _raised_planes(numerics.cast(sums, grad.dtype), how.extents)


class _Windows:
    """A deformable convolution as one of columns by one pixel.

    Args:
        node: the call.
        x: the images.
        weight: the filters.
        numbers: stride, padding and dilation along both axes, the groups, and whether there is a mask.
    """

    def __init__(self, node: Node, x: torch.Tensor, weight: torch.Tensor, numbers: Sequence[Any]) -> None:
        *pairs, groups, offset_groups, masked = numbers
        stride, padding, dilation = (tuple(pairs[at : at + 2]) for at in (0, 2, 4))
        extents, taps = tuple(x.shape[2:]), tuple(weight.shape[2:])
        self.how = _known(
            node, Deformable, extents, taps, stride, padding, dilation, x.shape[1], groups, offset_groups, bool(masked)
        )
        self.filters = weight.shape[0]
        shapes = [x.shape[0], self.how.column, *self.how.windows], [self.filters, self.how.column // groups, 1, 1]
        problem = ConvolutionProblem.from_aten(*shapes, [1, 1], [0, 0], [1, 1], False, [0, 0], groups)
        limit = workspace_limit(problem, x.dtype.itemsize, x.device.type != "cpu")
        # torchvision calls it a product, and PyTorch rounds that only if the user lets it.
        tf32 = x.device.type == "cuda" and products_allow_tf32()
        self.geometry = Geometry(groups=groups, workspace_limit=limit, allow_tf32=tf32)

    def image(self, value: TensorValue) -> TensorValue:
        """[N, P * Q, C] as a convolution takes it."""
        return ops.reshape(value, [value.shape[0], 1, *self.how.windows, value.shape[2]])

    def flat(self, weight: GraphTensor) -> TensorValue:
        """The filters, taps before channels."""
        return ops.reshape(weight.channels_last(), [self.filters, 1, 1, 1, self.how.column // self.how.groups])


@lowering("torchvision::deform_conv2d", layout=Layout.RAW, supports=_supports)
def deform_conv2d(
    ctx: LoweringContext,
    x: GraphTensor,
    weight: GraphTensor,
    offset: GraphTensor,
    mask: GraphTensor,
    bias: GraphTensor,
    *numbers: Any,
) -> GraphTensor:
    """A convolution whose windows read where offsets move their taps."""
    windows = _Windows(ctx.node, ctx.arg_meta(0), ctx.arg_meta(1), numbers)
    how = windows.how
    columns = kernels.deformable_columns(_flat(x), _flat(offset), _flat(mask) if how.masked else None, how)
    y = conv_fprop(windows.image(columns), windows.flat(weight), windows.geometry, output_size=(1, *how.windows))
    return GraphTensor.from_channels_last(ops.add(ops.reshape(y, [y.shape[0], *how.windows, y.shape[4]]), bias.value))


@lowering("torchvision::_deform_conv2d_backward", layout=Layout.RAW, supports=_supports)
def deform_conv2d_backward(
    ctx: LoweringContext,
    grad: GraphTensor,
    x: GraphTensor,
    weight: GraphTensor,
    offset: GraphTensor,
    mask: GraphTensor,
    bias: GraphTensor,
    *numbers: Any,
) -> tuple[GraphTensor | None, ...]:
    """The gradients of images, filters, offsets, mask and bias, those that are read.

    What several windows give to a pixel is added in the same order in every run on a CPU, and on a GPU under
    ``torch.use_deterministic_algorithms(True)`` (Dynamo compiles anew when that changes); else a GPU adds atomically.
    """
    windows = _Windows(ctx.node, ctx.arg_meta(1), ctx.arg_meta(2), numbers)
    how = windows.how
    wanted = {user.args[1] for user in ctx.node.users if user.target is operator.getitem}
    dy = windows.image(_flat(grad))
    points = _flat(offset), _flat(mask) if how.masked else None
    dx = dweight = doffset = dmask = dbias = None
    if 1 in wanted:
        columns = windows.image(kernels.deformable_columns(_flat(x), *points, how))
        dw = conv_wgrad(columns, dy, windows.geometry, filter_size=(1, 1, 1))
        taps = how.taps
        dweight = GraphTensor.from_channels_last(
            ops.reshape(dw, [windows.filters, *taps, how.channels // how.groups])
        )  # fmt: skip
    if wanted & {0, 2, 3}:
        dcolumns = conv_dgrad(dy, windows.flat(weight), windows.geometry, input_size=(1, *how.windows))
        dcolumns = ops.reshape(dcolumns, [dy.shape[0], prod(how.windows), how.column])
        if 0 in wanted:
            sums = kernels.deformable_dgrad_input(dcolumns, *points, how, deterministic=_deterministic())
            dx = _raised(numerics.cast(sums, x.dtype), how.extents)
        if wanted & {2, 3}:
            moved, weighed = kernels.deformable_dgrad_offset(dcolumns, _flat(x), *points, how)
            doffset = _raised(moved, how.windows)
            dmask = _raised(weighed, how.windows) if how.masked else None
    if dmask is None:
        dmask = mask.with_value(ops.broadcast_to(ctx.scalar(0.0, mask.dtype), mask.value.shape))
    if 4 in wanted:
        dbias = GraphTensor.contiguous(bias_gradient(dy))
    return dx, dweight, doffset, dmask, dbias
