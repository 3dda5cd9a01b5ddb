"""Attention as PyTorch operators, with a bias that has a gradient.

PyTorch's own operators differ between devices, and none on a CPU computes the gradient of a bias. These replace
attention that a model writes out (``graph/written_attention/``). PyTorch runs the bodies below where a graph is cut
around the operators; in MAX the kernels of ``kernels/attention`` run (``lowering/attention.py``).
"""

from __future__ import annotations

import torch

from torch_max_backend.torch_compat import OpOverload


def _scores(
    query: torch.Tensor, key: torch.Tensor, bias: torch.Tensor | None, scale: float, wide: torch.dtype
) -> torch.Tensor:
    scores = scale * (query.to(wide) @ key.to(wide).transpose(-1, -2))
    if bias is not None:
        # A bias of fewer batches is repeated.
        scores = scores + bias.to(wide).repeat(query.shape[0] // bias.shape[0], 1, 1, 1)
    return scores


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _rows_inside(like: torch.Tensor, columns: int | torch.SymInt) -> torch.Tensor:
    """An empty [batch, heads, rows, columns] stored as [batch, rows, heads, columns]."""
    batch, heads, rows, _ = like.shape
    return like.new_empty(batch, rows, heads, columns).transpose(1, 2)


@torch.library.custom_op("torch_max_backend::attention", mutates_args=())
def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale * Q @ K.T + bias) @ V, and the logarithm of the sum of each row's exponentials.

    Args:
        query: [B, H, M, D].
        key: [B, H, N, D].
        value: [B, H, N, E].
        bias: floats [A, H or 1, M or 1, N or 1] where A divides B: batch b reads the bias's batch b % A.
        scale: of the products.

    Returns:
        [B, H, M, E] in the query's dtype and [B, H, M] in float32 (float64 for float64). A row whose scores are all
        -inf is NaN, as it is in softmax.
    """
    wide = _wide(query)
    scores = _scores(query, key, bias, scale, wide)
    output = _rows_inside(query, value.shape[3])
    output.copy_(scores.softmax(-1) @ value.to(wide))
    sums = scores.logsumexp(-1)
    return output, sums.masked_fill(sums == -torch.inf, torch.nan)


@attention.register_fake
def _(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return _rows_inside(query, value.shape[3]), query.new_empty(query.shape[:3], dtype=_wide(query))


@torch.library.custom_op("torch_max_backend::attention_backward", mutates_args=())
def attention_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    output: torch.Tensor,
    logsumexp: torch.Tensor,
    scale: float,
    scores_wanted: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of ``attention``'s first result.

    Args:
        grad: of the output, [B, H, M, E].
        query: as in the forward pass, like all that follows.
        key: see there.
        value: see there.
        bias: see there.
        output: the forward pass's.
        logsumexp: the forward pass's.
        scale: see there.
        scores_wanted: whether the scores' gradient is wanted, which summed over what is broadcast is the bias's.

    Returns:
        The gradients of query, key and value, and that of the scores [B, H, M, N], empty where it is not wanted.
    """
    wide = _wide(query)
    powers = torch.exp(_scores(query, key, bias, scale, wide) - logsumexp.unsqueeze(-1))
    slopes = grad.to(wide)
    of_value = powers.transpose(-1, -2) @ slopes
    delta = (slopes * output.to(wide)).sum(-1, keepdim=True)
    of_scores = powers * (slopes @ value.to(wide).transpose(-1, -2) - delta)
    of_query = scale * (of_scores @ key.to(wide))
    of_key = scale * (of_scores.transpose(-1, -2) @ query.to(wide))
    results = [torch.empty_like(x).copy_(y) for x, y in ((query, of_query), (key, of_key), (value, of_value))]
    scores = of_scores.to(query.dtype) if scores_wanted else query.new_empty(0)
    return results[0], results[1], results[2], scores


@attention_backward.register_fake
def _(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    output: torch.Tensor,
    logsumexp: torch.Tensor,
    scale: float,
    scores_wanted: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    scores = query.new_empty(*query.shape[:3], key.shape[2]) if scores_wanted else query.new_empty(0)
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), scores


FORWARD: OpOverload = torch.ops.torch_max_backend.attention.default
BACKWARD: OpOverload = torch.ops.torch_max_backend.attention_backward.default
