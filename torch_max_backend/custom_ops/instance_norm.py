"""aten's instance normalization, traced as a group normalization with a group for each channel.

PyTorch's own formula makes its argument contiguous and normalizes a batch of one sample with N * C channels. A network
in channels-last would be transposed around each normalization.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from torch_max_backend.torch_compat import composite_kernel, tracing_kernels

aten = torch.ops.aten


def instance_norms_by_groups() -> AbstractContextManager[None]:
    """A context in which ``aten.instance_norm`` without running statistics is traced as ``aten.native_group_norm``."""
    return tracing_kernels({aten.instance_norm.default: _instance_norm}, {})


def _instance_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """Each channel of each sample over its own mean and standard deviation.

    Args:
        x: [N, C, ...].
        weight: [C], None for ones.
        bias: [C], None for zeros.
        running_mean: [C], updated with the mean over the batch of the samples' means; None where nothing is kept.
        running_var: [C], as ``running_mean``, of the unbiased variances.
        use_input_stats: whether the samples' own statistics are taken, else the running ones.
        momentum: the share of the batch in updated running statistics.
        eps: added to the variance.
        cudnn_enabled: has no meaning here.

    Returns:
        In ``x``'s shape and dtype, contiguous as eager's.
    """
    batch, channels, *extents = x.shape
    plain = use_input_stats and running_mean is None and running_var is None and x.is_floating_point()
    is_empty = any(isinstance(size, int) and size == 0 for size in x.shape)
    if not plain or not extents or is_empty or not isinstance(channels, int):
        own = composite_kernel(aten.instance_norm.default)
        return own(x, weight, bias, running_mean, running_var, use_input_stats, momentum, eps, cudnn_enabled)
    dtype = torch.promote_types(x.dtype, torch.float32)
    scale, shift = (None if each is None else each.to(dtype) for each in (weight, bias))
    pixels = math.prod(extents)
    y, _, _ = aten.native_group_norm(x.to(dtype), scale, shift, batch, channels, pixels, channels, eps)
    return y.to(x.dtype).contiguous()
