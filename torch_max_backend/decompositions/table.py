"""Chooses the composite operators that PyTorch decomposes before we see the graph.

These are PyTorch's core-aten decompositions without the operators that run whole here: decomposing a convolution, a
pooling or a normalization would hide its backward pass behind dozens of elementwise operators.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_max_backend.custom_ops.interpolation import FORWARD as INTERPOLATIONS
from torch_max_backend.decompositions.normalization import group_norm_backward
from torch_max_backend.decompositions.optimizers import optimizer_decompositions
from torch_max_backend.decompositions.selection import selection_decompositions
from torch_max_backend.torch_compat import OpOverload, OpOverloadPacket, core_aten_decompositions, get_decompositions

aten = torch.ops.aten

#: Run whole: a lowering of ours is better than PyTorch's decomposition, or must see the op to draw as eager does.
KEPT_WHOLE: tuple[OpOverloadPacket, ...] = (
    aten.convolution_backward,
    aten.max_pool2d_with_indices_backward,
    aten.max_pool3d_with_indices_backward,
    aten.avg_pool2d_backward,
    aten.avg_pool3d_backward,
    aten._adaptive_avg_pool2d_backward,
    aten._adaptive_avg_pool3d_backward,
    aten._adaptive_avg_pool2d,
    aten._adaptive_avg_pool3d,
    aten.adaptive_max_pool2d,
    aten.adaptive_max_pool3d,
    aten.max_pool2d_with_indices,
    aten.max_pool3d_with_indices,
    aten.max_unpool2d,
    aten.max_unpool3d,
    aten.native_batch_norm,
    aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_functional,
    aten._native_batch_norm_legit_no_training,
    aten.native_batch_norm_backward,
    aten.native_dropout,
    aten.bernoulli,
    aten.rand_like,
    aten.randn_like,
    aten.randint_like,
    aten._softmax,
    aten._softmax_backward_data,
    aten._log_softmax,
    aten._log_softmax_backward_data,
    aten.slice_backward,
    aten.select_backward,
    aten.select_scatter,
    aten.roll,
    aten.grid_sampler_2d,
    aten.grid_sampler_3d,
    # As advanced indexing, negative places would be counted from the end.
    aten.index_add,
    aten.index_copy,
    aten.im2col,
    aten.col2im,
    aten.unfold_backward,
    aten.reflection_pad1d_backward,
    aten.reflection_pad2d_backward,
    aten.reflection_pad3d_backward,
    aten.nll_loss_forward,
    aten.nll_loss_backward,
    aten.nll_loss2d_forward,
    aten.nll_loss2d_backward,
    aten.addmm,
    aten.linear,
    aten._scaled_dot_product_flash_attention_for_cpu,
)

#: Taken apart though core aten keeps them whole: their pieces run in MAX.
TAKEN_APART: tuple[OpOverloadPacket | OpOverload, ...] = (
    aten.cudnn_batch_norm,
    aten.cudnn_batch_norm_backward,
    aten.miopen_batch_norm,
    aten.miopen_batch_norm_backward,
    aten.linalg_vector_norm,
    aten.native_dropout_backward,
    aten.dist,
    aten.ldexp,
    aten.narrow_copy,
    aten.permute_copy,
    aten.unbind_copy,
    aten.view_copy,
)


def weight_norm_backward(
    grad: torch.Tensor, v: torch.Tensor, g: torch.Tensor, norms: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """``aten._weight_norm_interface_backward``: the gradients of v and g, where w = g * v / norms and ``norms`` are the
    lengths of v's slices along ``dim``."""
    norms = norms.to(g.dtype)
    others = [axis for axis in range(v.dim()) if axis != dim % v.dim()]
    along = (grad * v).sum(others, keepdim=True) / norms
    return (grad - v * (along / norms)) * (g / norms), along


def shrink_backward(grad: torch.Tensor, x: torch.Tensor, lambd: float) -> torch.Tensor:
    """``aten.hardshrink_backward`` and ``softshrink_backward``: nothing is passed back where |x| <= ``lambd``."""
    return torch.where((x >= -lambd) & (x <= lambd), torch.zeros_like(grad), grad)


def diagonal_scatter(x: torch.Tensor, src: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> torch.Tensor:
    """``aten.diagonal_scatter``: ``x`` with ``src`` [..., L] on a diagonal of L elements, without writing in place."""
    if src.shape[-1] == 0:
        return x.clone()
    rows, columns = (torch.arange(x.shape[dim], device=x.device) for dim in (dim1, dim2))
    # Which element of the diagonal each row has; rows beside it take any.
    place = (rows - max(0, -offset)).clamp(0, src.shape[-1] - 1)
    spread = src.index_select(-1, place)[..., None].expand(*src.shape[:-1], len(rows), len(columns))
    on_it = (rows[:, None] + offset == columns).expand_as(spread)
    mask, value = (each.movedim((-2, -1), (dim1, dim2)) for each in (on_it, spread))
    # `where` takes the order of the first operand that has one; the result has that of x.
    order = sorted(range(x.dim()), key=x.stride, reverse=True)
    result = torch.where(mask, value, x).permute(order).contiguous()
    return result.permute([order.index(axis) for axis in range(x.dim())])


def addbmm(
    x: torch.Tensor, batch1: torch.Tensor, batch2: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    """``beta * x`` and the sum of ``alpha * batch1[i] @ batch2[i]`` over i, which is one product of matrices."""
    joined = batch1.permute(1, 0, 2).flatten(1), batch2.flatten(0, 1)
    return torch.addmm(x, *joined, beta=beta, alpha=alpha)


def round_decimals(x: torch.Tensor, *, decimals: int) -> torch.Tensor:
    """``aten.round.decimals``: to that many digits behind the point, as eager does by scaling."""
    scale = 10.0 ** abs(decimals)
    return torch.round(x * scale) / scale if decimals >= 0 else torch.round(x / scale) * scale


def soft_margin_loss_backward(
    grad: torch.Tensor, x: torch.Tensor, target: torch.Tensor, reduction: int
) -> torch.Tensor:
    """``aten.soft_margin_loss_backward``. PyTorch's own takes 1 from a sigmoid that is nearly 1."""
    share = 1 / x.numel() if reduction == 1 else 1.0
    return -target * torch.sigmoid(-target * x) * grad * share


def cdist_forward(x1: torch.Tensor, x2: torch.Tensor, p: float, compute_mode: int | None) -> torch.Tensor:
    """``aten._cdist_forward``: the distances [..., P, R] of the rows of x1 [..., P, M] and x2 [..., R, M]."""
    apart = (x1.unsqueeze(-2) - x2.unsqueeze(-3)).abs()
    if p == 0:
        return (apart != 0).to(apart.dtype).sum(-1)
    if p == math.inf:
        return apart.amax(-1) if apart.shape[-1] else apart.sum(-1)
    if p == 2:
        return apart.square().sum(-1).sqrt()
    return apart.sum(-1) if p == 1 else apart.pow(p).sum(-1).pow(1 / p)


def cdist_backward(
    grad: torch.Tensor, x1: torch.Tensor, x2: torch.Tensor, p: float, distances: torch.Tensor
) -> torch.Tensor:
    """``aten._cdist_backward``: the gradient of x1; rows that lie on each other give none, nor do counts (p = 0)."""
    if p == 0:
        return torch.zeros_like(x1)
    apart = x1.unsqueeze(-2) - x2.unsqueeze(-3)
    grad, distances = grad.unsqueeze(-1), distances.unsqueeze(-1)
    if p == 1:
        parts = apart.sign() * grad
    elif p == math.inf:
        parts = torch.where(apart.abs() == distances, apart.sign() * grad, 0.0)
    elif p == 2:
        parts = torch.where(distances == 0, 0.0, apart * (grad / distances))
    else:
        # The last factor is infinite where p < 1 and two numbers are equal.
        share = apart.sign() * apart.abs().pow(p - 1) * (grad / distances.pow(p - 1))
        parts = torch.where((distances == 0) | (apart == 0), 0.0, share)
    return parts.sum(-2).sum_to_size(x1.shape)


def trilinear(
    x1: torch.Tensor,
    x2: torch.Tensor,
    x3: torch.Tensor,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> torch.Tensor:
    """``aten._trilinear``: the product of three tensors, which get axes of extent 1 at ``expand``, summed over
    ``sumdim``."""
    factors = []
    for x, axes in ((x1, expand1), (x2, expand2), (x3, expand3)):
        for axis in sorted(axes):
            x = x.unsqueeze(axis)
        factors.append(x)
    product = factors[0] * factors[1] * factors[2]
    return product.sum(list(sumdim)) if sumdim else product


def normal(mean: torch.Tensor | float, std: torch.Tensor | float, generator: torch.Generator | None = None) -> Any:
    """``aten.normal`` where the mean or the standard deviation is a tensor: drawn as eager draws, whatever they are."""
    if generator is not None:
        return NotImplemented
    like = torch.broadcast_tensors(*(each for each in (mean, std) if isinstance(each, torch.Tensor)))[0]
    drawn = torch.empty_like(like, memory_format=torch.contiguous_format)
    if isinstance(std, torch.Tensor):
        return aten.normal_functional(drawn) * std + mean
    return aten.normal_functional(drawn, 0.0, std) + mean


def bernoulli(p: torch.Tensor, *, generator: torch.Generator | None = None) -> Any:
    """``aten.bernoulli`` on a CPU, where each element compares a uniform number with its probability. A GPU's kernel
    draws in another way."""
    if generator is not None or p.device.type != "cpu":
        return NotImplemented
    wide = p.dtype if p.dtype == torch.float64 else torch.float32
    return (torch.rand(p.shape, dtype=wide, device=p.device) < p.contiguous()).to(p.dtype)


def _at_median(x: torch.Tensor, dim: int, keepdim: bool, *, ignores_nan: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if x.dim() == 0:
        return x.clone(), torch.zeros((), dtype=torch.int64, device=x.device)
    values, places = x.sort(dim=dim, stable=True)
    length = x.shape[dim]
    if x.is_floating_point():
        # NaN stands last.
        numbers = x.isnan().logical_not().sum(dim, keepdim=True)
        middle = (numbers - 1).clamp(min=0).div(2, rounding_mode="floor")
        at = middle if ignores_nan else torch.where(numbers < length, numbers, middle)
        found = values.gather(dim, at), places.gather(dim, at)
    else:
        found = values.narrow(dim, (length - 1) // 2, 1), places.narrow(dim, (length - 1) // 2, 1)
    value, place = (each.clone() if keepdim else each.squeeze(dim) for each in found)
    return value, place


def median_along(x: torch.Tensor, dim: int, keepdim: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """``aten.median.dim``: the lower of the two in the middle, or NaN where there is one; of equal elements the place
    of one, not always eager's."""
    return _at_median(x, dim, keepdim, ignores_nan=False)


def nanmedian_along(x: torch.Tensor, dim: int, keepdim: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """``aten.nanmedian.dim``: the same over elements that are not NaN; NaN where all are."""
    return _at_median(x, dim, keepdim, ignores_nan=True)


def median(x: torch.Tensor) -> Any:
    """``aten.median`` of all elements."""
    return _at_median(x.reshape(-1), 0, False, ignores_nan=False)[0] if x.numel() else NotImplemented


def nanmedian(x: torch.Tensor) -> Any:
    """``aten.nanmedian`` of all elements."""
    return _at_median(x.reshape(-1), 0, False, ignores_nan=True)[0] if x.numel() else NotImplemented


def cudnn_grid_sampler(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    """``aten.cudnn_grid_sampler``: what PyTorch calls on a GPU for linear reading, zeros outside, corners aligned."""
    return aten.grid_sampler_2d(x, grid, 0, 0, True)


def cudnn_grid_sampler_backward(
    x: torch.Tensor, grid: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``aten.cudnn_grid_sampler_backward``."""
    return aten.grid_sampler_2d_backward(grad, x, grid, 0, 0, True, [True, True])


#: Mirrored and repeated borders.
BORDERS = tuple(
    getattr(aten, f"{name}_pad{rank}d").default for name in ("reflection", "replication") for rank in (1, 2, 3)
)


def _for_whole_numbers(ops: Sequence[OpOverload]) -> dict[OpOverload, Callable[..., Any]]:
    """PyTorch's decompositions of ops that stay whole for floats."""
    table = get_decompositions(list(ops))
    return {op: _unless_float(table[op]) for op in ops if op in table}


def _unless_float(function: Callable[..., Any]) -> Callable[..., Any]:
    def decomposed(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return NotImplemented if x.is_floating_point() else function(x, *args, **kwargs)

    return decomposed


@functools.cache
def decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """The decomposition table that AOTAutograd traces with."""
    table = {
        **core_aten_decompositions(),
        **get_decompositions(TAKEN_APART),
        **optimizer_decompositions(),
        **_for_whole_numbers((*INTERPOLATIONS, *BORDERS)),
        **selection_decompositions(),
        aten._weight_norm_interface_backward.default: weight_norm_backward,
        aten.native_group_norm_backward.default: group_norm_backward,
        aten.hardshrink_backward.default: shrink_backward,
        aten.softshrink_backward.default: shrink_backward,
        aten.addbmm.default: addbmm,
        aten.diagonal_scatter.default: diagonal_scatter,
        aten.round.decimals: round_decimals,
        aten.soft_margin_loss_backward.default: soft_margin_loss_backward,
        aten._cdist_forward.default: cdist_forward,
        aten._cdist_backward.default: cdist_backward,
        aten._trilinear.default: trilinear,
        aten.cudnn_grid_sampler.default: cudnn_grid_sampler,
        aten.cudnn_grid_sampler_backward.default: cudnn_grid_sampler_backward,
        aten.normal.Tensor_Tensor: normal,
        aten.normal.Tensor_float: normal,
        aten.normal.float_Tensor: normal,
        aten.median.default: median,
        aten.median.dim: median_along,
        aten.nanmedian.default: nanmedian,
        aten.nanmedian.dim: nanmedian_along,
    }
    kept = {getattr(packet, name) for packet in KEPT_WHOLE for name in packet.overloads()}
    return {op: function for op, function in table.items() if op not in kept} | {aten.bernoulli.default: bernoulli}
