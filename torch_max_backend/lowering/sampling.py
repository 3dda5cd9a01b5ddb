"""grid_sample in two and three dimensions, and its gradients."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any, cast

import torch
from max.graph import Dim, TensorValue
from torch.fx import Node

from torch_max_backend.dtypes import FLOATS
from torch_max_backend.errors import InvalidArgumentError
from torch_max_backend.ir import ops
from torch_max_backend.ir.layout import GraphTensor, channels_last_order, contiguous_order
from torch_max_backend.lowering import numerics
from torch_max_backend.lowering.context import LoweringContext
from torch_max_backend.lowering.registry import Layout, lowering
from torch_max_backend.mojo_ops import sampling as kernels
from torch_max_backend.mojo_ops.sampling import Padding, Sampling, SamplingMode

aten = torch.ops.aten


def _supports(node: Node) -> str | None:
    tensors = [each.meta["val"] for each in node.all_input_nodes]
    if any(each.dtype not in FLOATS or each.dtype != tensors[0].dtype for each in tensors):
        return f"grid_sample runs where all tensors have one of {', '.join(map(str, FLOATS))}"
    if tensors[0].dtype == torch.float64 and tensors[0].device.type != "cpu":
        return "grid_sample in float64 runs on the CPU only"
    image = cast(Node, node.args[1 if "backward" in str(node.target) else 0]).meta["val"]
    if not all(isinstance(size, int) for size in image.shape[2:]):
        return "grid_sample needs known extents of the image"
    return None


def _sampling(image: torch.Tensor, x: GraphTensor, mode: int, padding: int, corners: bool) -> Sampling:
    """Images lie as ``x`` does: with channels last, or else contiguous."""
    last = x.order == channels_last_order(x.rank) and x.order != contiguous_order(x.rank)
    try:
        return Sampling(tuple(image.shape[2:]), SamplingMode(mode), Padding(padding), corners, last)
    except ValueError as error:
        raise InvalidArgumentError(f"grid_sample: {error}") from None


def _flat(x: GraphTensor, sampling: Sampling) -> TensorValue:
    """[N, C, places], or [N, places, C], of [N, C, spatial...]."""
    order = channels_last_order(x.rank) if sampling.channels_last else contiguous_order(x.rank)
    places = _product(x.shape[2:])
    n, c = x.shape[:2]
    shape = [n, places, c] if sampling.channels_last else [n, c, places]
    return ops.reshape(x.to_order(order).value, shape)


def _unflattened(value: TensorValue, shape: Sequence[Dim], sampling: Sampling) -> GraphTensor:
    order = channels_last_order(len(shape)) if sampling.channels_last else contiguous_order(len(shape))
    return GraphTensor(ops.reshape(value, [shape[dim] for dim in order]), order)


def _points(grid: GraphTensor) -> TensorValue:
    """[N, P, axes]."""
    shape = grid.shape
    return ops.reshape(grid.logical(), [shape[0], _product(shape[1:-1]), shape[-1]])


def _product(dims: Sequence[Dim]) -> Dim:
    return functools.reduce(operator.mul, dims, Dim(1))


@lowering(aten.grid_sampler_2d.default, aten.grid_sampler_3d.default, layout=Layout.RAW, supports=_supports)
def grid_sampler(
    ctx: LoweringContext,
    x: GraphTensor,
    grid: GraphTensor,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
) -> GraphTensor:
    """Samples ``x`` [N, C, *extents] at the points of ``grid`` [N, *points, axes]."""
    sampling = _sampling(ctx.arg_meta(0), x, interpolation_mode, padding_mode, align_corners)
    return _unflattened(kernels.sample_fprop(_flat(x, sampling), _points(grid), sampling), ctx.out_shape(), sampling)


@lowering(
    aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default, layout=Layout.RAW, supports=_supports
)
def grid_sampler_backward(
    ctx: LoweringContext,
    grad: GraphTensor,
    x: GraphTensor,
    grid: GraphTensor,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
    output_mask: Sequence[bool] = (True, True),
) -> tuple[Any, Any]:
    """The gradients of x and grid.

    What several points give to a pixel is added in the same order in every run on a CPU, and on a GPU under
    ``torch.use_deterministic_algorithms(True)`` (Dynamo compiles anew when that changes); else a GPU adds atomically.
    """
    sampling = _sampling(ctx.arg_meta(1), x, interpolation_mode, padding_mode, align_corners)
    dy, points = _flat(grad, sampling), _points(grid)
    dx = dgrid = None
    if output_mask[0]:
        deterministic = torch.are_deterministic_algorithms_enabled()
        sums = kernels.sample_dgrad_input(dy, points, sampling, deterministic=deterministic)
        dx = _unflattened(numerics.cast(sums, x.dtype), x.shape, sampling)
    if output_mask[1]:
        if sampling.mode is SamplingMode.NEAREST:
            value = ops.broadcast_to(ctx.scalar(0.0, grid.dtype), points.shape)
        else:
            value = kernels.sample_dgrad_grid(dy, _flat(x, sampling), points, sampling)
        dgrid = GraphTensor.contiguous(ops.reshape(value, grid.shape))
    return dx, dgrid
