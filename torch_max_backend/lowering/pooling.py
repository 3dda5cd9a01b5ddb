"""Max, average and adaptive max pooling, 2-D and 3-D (1-D arrives as 2-D), forward and backward.

Adaptive averages are interpolations (interpolation.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from max.dtype import DType
from max.graph import Dim, TensorValue
from torch.fx import Node

from torch_max_backend.custom_ops import pool_offsets as _  # noqa: F401  (registers the ops)
from torch_max_backend.dtypes import FLOATS, device_ref, max_dtype
from torch_max_backend.errors import CannotLower, InvalidArgumentError
from torch_max_backend.ir import ops
from torch_max_backend.ir.layout import GraphTensor, Order, channels_last_order, contiguous_order
from torch_max_backend.lowering.context import LoweringContext
from torch_max_backend.lowering.registry import Layout, lowering
from torch_max_backend.mojo_ops import pooling as kernels
from torch_max_backend.mojo_ops.functions import LibraryFunction, target_of
from torch_max_backend.mojo_ops.pooling import pool_function
from torch_max_backend.problems.pooling import AdaptivePoolingProblem, PoolingProblem

aten = torch.ops.aten


def _supports(node: Node) -> str | None:
    tensors = [arg.meta["val"] for arg in node.all_input_nodes]
    if tensors[0].dtype not in FLOATS:
        return f"pooling runs in {', '.join(map(str, FLOATS))}, not {tensors[0].dtype}"
    return None


def _problem(spatial_rank: int, x: torch.Tensor, *args: Any, **kwargs: Any) -> PoolingProblem:
    try:
        return PoolingProblem.from_aten(_traced(x.shape[-spatial_rank:]), *args, **kwargs)
    except ValueError as error:
        raise InvalidArgumentError(f"pooling: {error}") from None


def _adaptive(spatial_rank: int, x: torch.Tensor, output_size: Sequence[int]) -> AdaptivePoolingProblem:
    try:
        return AdaptivePoolingProblem.from_aten(_traced(x.shape[-spatial_rank:]), _traced(output_size))
    except ValueError as error:
        raise InvalidArgumentError(f"adaptive pooling: {error}") from None


def _traced(sizes: Sequence[int | torch.SymInt]) -> list[int]:
    """Sizes as numbers: those that the graph was traced with where they are symbolic.

    The problem checks them; what the kernels get are the window, which is always known, and extents of tensors.
    """
    if not all(isinstance(size, int) or size.node.has_hint() for size in sizes):
        raise CannotLower("pooling over an extent that depends on data")
    return [size if isinstance(size, int) else cast(int, size.node.hint) for size in sizes]


def _result_extents(ctx: LoweringContext) -> list[Dim]:
    """The extents [D, H, W] of the (first) result, symbolic ones among them."""
    rank = _rank(ctx)
    return [*[Dim(1)] * (3 - rank), *ctx.out_shape()[-rank:]]


def _functions_of(entry: str, kept: DType | None = None) -> Callable[[Node], Iterable[LibraryFunction]]:
    """Gives the library functions that a node of the op calls."""

    def functions(node: Node) -> Iterable[LibraryFunction]:
        fake = cast(Node, node.args[0]).meta["val"]
        if fake.dtype in FLOATS:
            # Behind the incoming gradient and x; a forward pass has the same kernels for any window.
            window = cast(Sequence[int], node.args[2]) if entry.endswith("dgrad") else ()
            deep = len(window) == 3 and window[0] > 1
            yield pool_function(entry, target_of(device_ref(fake.device)), max_dtype(fake.dtype), kept, deep=deep)

    return functions


class _View:
    """How a pooling's tensors are shown to its kernels, [N, D, H, W, C], and taken back.

    A channels-last tensor shows its channels; a contiguous one is shown as N x C planes of one channel, which
    spares the conversion. Every tensor of one op has to use the same view.
    """

    def __init__(self, leader: GraphTensor, spatial_rank: int) -> None:
        self.spatial_rank = spatial_rank
        self.batched = leader.rank == spatial_rank + 2
        rank = leader.rank
        planar = leader.order == contiguous_order(rank)
        self.order: Order = contiguous_order(rank) if planar or not self.batched else channels_last_order(rank)
        self.planar = self.order == contiguous_order(rank)
        self.shape = leader.shape

    def show(self, tensor: GraphTensor) -> TensorValue:
        value = tensor.to_order(self.order).value
        spatial = tensor.shape[-self.spatial_rank :]
        full = [*[1] * (3 - self.spatial_rank), *spatial]
        if not self.planar:
            return ops.reshape(value, [tensor.shape[0], *full, tensor.shape[1]])
        planes = tensor.shape[0]
        if self.batched:
            planes = planes * tensor.shape[1]
        return ops.reshape(value, [planes, *full, 1])

    def take(self, value: TensorValue) -> GraphTensor:
        spatial = list(value.shape[4 - self.spatial_rank : 4])
        if self.planar:
            leading = self.shape[: -self.spatial_rank]
            return GraphTensor(ops.reshape(value, [*leading, *spatial]), self.order)
        return GraphTensor(ops.reshape(value, [value.shape[0], *spatial, value.shape[4]]), self.order)


def _rank(ctx: LoweringContext) -> int:
    """2 or 3, from the op's name."""
    name = str(ctx.node.target)
    if "2d" in name:
        return 2
    if "3d" in name:
        return 3
    raise CannotLower(f"{name} is no 2-D or 3-D pooling")


@lowering(
    aten.max_pool2d_with_indices.default,
    aten.max_pool3d_with_indices.default,
    layout=Layout.RAW,
    supports=_supports,
)
def max_pool_with_indices(
    ctx: LoweringContext,
    x: GraphTensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] | int = 0,
    dilation: Sequence[int] | int = 1,
    ceil_mode: bool = False,
) -> tuple[GraphTensor, GraphTensor]:
    """Maxima and their int64 indices, flat in the unpadded plane."""
    rank = _rank(ctx)
    problem = _problem(rank, ctx.arg_meta(0), kernel_size, stride, padding, dilation, ceil_mode)
    view = _View(x, rank)
    y, indices = kernels.max_pool_fprop(view.show(x), problem, _result_extents(ctx))
    return view.take(y), view.take(indices)


@lowering(
    aten.max_pool2d_with_indices_backward.default,
    aten.max_pool3d_with_indices_backward.default,
    layout=Layout.RAW,
    supports=_supports,
)
def max_pool_with_indices_backward(
    ctx: LoweringContext,
    grad: GraphTensor,
    x: GraphTensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: GraphTensor,
) -> GraphTensor:
    """Each pixel gathers the outputs whose index it is: deterministic.

    Where very many, very tall windows lie over a pixel a GPU scatters atomically instead, unless
    ``torch.use_deterministic_algorithms(True)`` forbids it (Dynamo compiles anew when that changes).
    """
    rank = _rank(ctx)
    problem = _problem(rank, ctx.arg_meta(1), kernel_size, stride, padding, dilation, ceil_mode)
    view = _View(indices, rank)
    deterministic = torch.are_deterministic_algorithms_enabled()
    dx = kernels.max_pool_dgrad(
        view.show(grad), view.show(indices), problem, _result_extents(ctx), deterministic=deterministic
    )
    return view.take(dx)


@lowering(
    aten.avg_pool2d.default,
    aten.avg_pool3d.default,
    layout=Layout.RAW,
    supports=_supports,
    functions=_functions_of("avg_pool_fprop"),
)
def avg_pool(
    ctx: LoweringContext,
    x: GraphTensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] | int = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> GraphTensor:
    """Window averages."""
    rank = _rank(ctx)
    rest = (kernel_size, stride, padding, 1, ceil_mode, count_include_pad, divisor_override)
    view = _View(x, rank)
    problem = _problem(rank, ctx.arg_meta(0), *rest)
    return view.take(kernels.avg_pool_fprop(view.show(x), problem, _result_extents(ctx)))


@lowering(
    aten.avg_pool2d_backward.default,
    aten.avg_pool3d_backward.default,
    layout=Layout.RAW,
    supports=_supports,
    functions=_functions_of("avg_pool_dgrad"),
)
def avg_pool_backward(
    ctx: LoweringContext,
    grad: GraphTensor,
    x: GraphTensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> GraphTensor:
    """Each pixel gathers from the windows over it: deterministic, no atomics."""
    rank = _rank(ctx)
    rest = (kernel_size, stride, padding, 1, ceil_mode, count_include_pad, divisor_override)
    view = _View(grad, rank)
    problem = _problem(rank, ctx.arg_meta(1), *rest)
    return view.take(kernels.avg_pool_dgrad(view.show(grad), problem, _result_extents(ctx)))


@lowering(
    aten.adaptive_max_pool2d.default,
    aten.adaptive_max_pool3d.default,
    layout=Layout.RAW,
    supports=_supports,
)
def adaptive_max_pool(
    ctx: LoweringContext, x: GraphTensor, output_size: Sequence[int]
) -> tuple[GraphTensor, GraphTensor]:
    """Maxima over windows that cover the input evenly, and their indices."""
    rank = _rank(ctx)
    view = _View(x, rank)
    problem = _adaptive(rank, ctx.arg_meta(0), output_size)
    y, indices = kernels.adaptive_max_pool_fprop(view.show(x), problem, _result_extents(ctx))
    return view.take(y), view.take(indices)


@lowering(
    aten.adaptive_max_pool2d_backward.default,
    aten.adaptive_max_pool3d_backward.default,
    layout=Layout.RAW,
    supports=_supports,
)
def adaptive_max_pool_backward(
    ctx: LoweringContext, grad: GraphTensor, x: GraphTensor, indices: GraphTensor
) -> GraphTensor:
    """Each pixel gathers the outputs whose index it is."""
    rank = _rank(ctx)
    problem = _adaptive(rank, ctx.arg_meta(1), ctx.arg_meta(0).shape[-rank:])
    view = _View(indices, rank)
    dx = kernels.adaptive_max_pool_dgrad(view.show(grad), view.show(indices), problem, _result_extents(ctx))
    return view.take(dx)


@lowering(aten.max_unpool2d.default, aten.max_unpool3d.default, layout=Layout.RAW, supports=_supports)
def max_unpool(
    ctx: LoweringContext,
    x: GraphTensor,
    indices: GraphTensor,
    output_size: Sequence[int],
    *window: Sequence[int],
) -> GraphTensor:
    """Zeros with ``x`` at ``indices``; an index outside the plane is ignored and reported."""
    view = _View(x, _rank(ctx))
    return view.take(kernels.max_unpool_fprop(view.show(x), view.show(indices), _result_extents(ctx)))


@lowering(
    torch.ops.torch_max_backend.max_pool_offsets.default,
    layout=Layout.RAW,
    supports=_supports,
    functions=_functions_of("max_pool_fprop", DType.uint8),
)
def max_pool_with_offsets(
    ctx: LoweringContext, x: GraphTensor, *window_and_mode: Any
) -> tuple[GraphTensor, GraphTensor]:
    """Maxima and the numbers of their taps, a byte each."""
    rank = len(window_and_mode[0])
    view = _View(x, rank)
    y, offsets = kernels.max_pool_fprop_offsets(view.show(x), _problem(rank, ctx.arg_meta(0), *window_and_mode))
    return view.take(y), view.take(offsets)


@lowering(
    torch.ops.torch_max_backend.max_pool_offsets_backward.default,
    layout=Layout.RAW,
    supports=_supports,
    functions=_functions_of("max_pool_dgrad", DType.uint8),
)
def max_pool_with_offsets_backward(
    ctx: LoweringContext, grad: GraphTensor, shape: Sequence[int], *window_and_mode: Any
) -> GraphTensor:
    """Gathers from the tap numbers: deterministic."""
    *rest, offsets = window_and_mode
    rank = len(rest[0])
    view = _View(offsets, rank)
    problem = _problem(rank, ctx.meta, *rest)
    return view.take(kernels.max_pool_dgrad_offsets(view.show(grad), view.show(offsets), problem))
