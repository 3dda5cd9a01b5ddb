"""The kernel that ``scaled_dot_product_attention`` takes on a GPU that is not present.

PyTorch asks the GPU which of its kernels supports a call, and without a GPU decomposes the call into products and a
softmax. Here the architecture answers by the rules of PyTorch's ``sdp_utils.cpp`` (2.11 to 2.15), so that the traced
graph is the one that the machine with the GPU traces.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.backends import cuda
from torch.fx.experimental.symbolic_shapes import guard_or_false
from torch.nn.attention import SDPBackend

from torch_max_backend.torch_compat import attention_order, composite_replaced

aten = torch.ops.aten

_HALVES = (torch.bfloat16, torch.float16)
_CUDNN_FIRST = ("sm_90a", "sm_100a", "sm_103a")
"""Where PyTorch tries cuDNN before its own kernels, from this version of cuDNN on."""
_CUDNN_FIRST_FROM = 91501
_CUDNN_LARGE_HEADS_FROM = 92201


def attention_as_on(architecture: str) -> AbstractContextManager[None]:
    """A context in which attention is decomposed as on a GPU of this architecture, if Python's dispatcher is on."""
    return composite_replaced(
        aten.scaled_dot_product_attention.default, functools.partial(_attention, architecture=architecture)
    )


@dataclass(frozen=True)
class AttentionCall:
    """A call on ``architecture``; ``grouped`` lets several heads of queries share one of keys."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout: float
    is_causal: bool
    grouped: bool
    architecture: str

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value

    def has_dtype(self, dtypes: Sequence[torch.dtype]) -> bool:
        """Whether all have the same one, of these."""
        return self.query.dtype in dtypes and len({tensor.dtype for tensor in self.tensors}) == 1

    @property
    def trains(self) -> bool:
        """Whether a gradient of them may be asked for."""
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors)


def chosen(call: AttentionCall) -> SDPBackend:
    """The kernel that PyTorch takes."""
    takes = {
        SDPBackend.CUDNN_ATTENTION: _cudnn_takes,
        SDPBackend.FLASH_ATTENTION: _flash_takes,
        SDPBackend.EFFICIENT_ATTENTION: _efficient_takes,
    }
    if not _is_for_a_kernel(call):
        return SDPBackend.MATH
    for backend in _order(call.architecture):
        if backend == SDPBackend.MATH or takes[backend](call):
            return backend
    return SDPBackend.MATH


def _order(architecture: str) -> list[SDPBackend]:
    order: list[SDPBackend] = [
        backend for backend in attention_order() if backend not in (SDPBackend.OVERRIDEABLE, SDPBackend.ERROR)
    ]
    is_default = order[0] == SDPBackend.FLASH_ATTENTION
    first = architecture in _CUDNN_FIRST and (torch.backends.cudnn.version() or 0) >= _CUDNN_FIRST_FROM
    if is_default and first and os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1":
        order.sort(key=lambda backend: backend != SDPBackend.CUDNN_ATTENTION)
    return order


def _is_for_a_kernel(call: AttentionCall) -> bool:
    """Whether a call meets the conditions of every kernel."""
    query, key, value = call.tensors
    if any(tensor.dim() != 4 for tensor in call.tensors):
        return False
    alike = [(query.shape[0], key.shape[0]), (query.shape[0], value.shape[0]), (key.shape[1], value.shape[1])]
    alike.append((query.shape[1] % key.shape[1], 0) if call.grouped else (query.shape[1], key.shape[1]))
    empty = [query.shape[2] == 0, key.shape[2] == 0]
    dense = all(_holds(tensor.stride(-1) == 1) for tensor in call.tensors) or _holds(query.shape[3] == 1)
    return all(_holds(a == b) for a, b in alike) and not any(map(_holds, empty)) and dense


def _holds(condition: Any) -> bool:
    return bool(guard_or_false(condition))


def _cudnn_takes(call: AttentionCall) -> bool:
    version = torch.backends.cudnn.version() or 0
    query, key, value = call.tensors
    heads = query.shape[3], value.shape[3]
    if not (call.architecture.startswith("sm_") and cuda.cudnn_sdp_enabled() and call.has_dtype(_HALVES)):
        return False
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        return False
    if call.dropout * 16 != math.floor(call.dropout * 16) or (call.dropout and _holds(query.shape[2] == 1)):
        return False
    if not _holds(key.shape[2] != 1) or not all(_holds(size % 8 == 0) for size in heads):
        return False
    pairs = [(192, 128)]
    if call.architecture in _CUDNN_FIRST and version >= _CUDNN_LARGE_HEADS_FROM:
        pairs.append((256, 256))
        if not call.trains and all(_holds(size <= 256) for size in heads):
            return _is_mask_of(call)
    fits = all(_holds(size <= 128) for size in heads)
    return (fits or any(_holds(heads[0] == a) and _holds(heads[1] == b) for a, b in pairs)) and _is_mask_of(call)


def _is_mask_of(call: AttentionCall) -> bool:
    """Whether there is no mask, or one without a gradient that is broadcast in single dimensions alone."""
    mask, query = call.mask, call.query
    if mask is None:
        return True
    if mask.requires_grad or mask.dim() not in (2, 4):
        return False
    wanted = [query.shape[0], query.shape[1], query.shape[2], call.key.shape[2]][-mask.dim() :]
    return all(_holds(size == 1) or _holds(size == other) for size, other in zip(mask.shape, wanted, strict=True))


def _flash_takes(call: AttentionCall) -> bool:
    query, key, value = call.tensors
    if call.mask is not None or not cuda.flash_sdp_enabled() or not call.has_dtype(_HALVES):
        return False
    if call.is_causal and not _holds(query.shape[2] == key.shape[2]):
        return False
    head = query.shape[3]
    return _holds(head == key.shape[3]) and _holds(head == value.shape[3]) and _holds(head <= 256)


def _efficient_takes(call: AttentionCall) -> bool:
    query, key, value = call.tensors
    if not cuda.mem_efficient_sdp_enabled() or not call.has_dtype((*_HALVES, torch.float32)):
        return False
    alignment = 16 // query.element_size()
    heads = query.shape[3], value.shape[3]
    return _holds(heads[0] == key.shape[3]) and all(_holds(size % alignment == 0) for size in heads)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    architecture: str,
) -> Tensor:
    """``aten.scaled_dot_product_attention``."""
    call = AttentionCall(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, architecture)
    backend = chosen(call)
    if backend == SDPBackend.FLASH_ATTENTION:
        padded = [_padded(tensor) for tensor in call.tensors]
        wanted = 1 / math.sqrt(query.shape[3]) if scale is None else scale
        output = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=wanted)[0]
        return output if output.shape[3] == value.shape[3] else output[..., : value.shape[3]]
    mask = attn_mask
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, torch.scalar_tensor(-math.inf, dtype=query.dtype, device=mask.device))
    if backend == SDPBackend.CUDNN_ATTENTION:
        return aten._scaled_dot_product_cudnn_attention(
            query, key, value, mask, call.trains, dropout_p, is_causal, False, scale=scale
        )[0]
    if backend == SDPBackend.EFFICIENT_ATTENTION:
        mask = None if mask is None else _for_efficient(mask, call)
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, call.trains, dropout_p, is_causal, scale=scale
        )[0]
    return aten._scaled_dot_product_attention_math(
        query, key, value, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]


def _padded(tensor: Tensor) -> Tensor:
    """The tensor, padded to heads of a multiple of 8 elements."""
    over = tensor.shape[3] % 8
    return torch.nn.functional.pad(tensor, (0, 8 - over)) if over else tensor


def _for_efficient(mask: Tensor, call: AttentionCall) -> Tensor:
    """A mask of all scores, whose rows begin at multiples of 16 elements."""
    batch, heads, queries, keys = *call.query.shape[:3], call.key.shape[2]
    spread = mask.expand(batch, heads, queries, keys)
    if keys % 16:
        return torch.nn.functional.pad(spread, (0, 16 - keys % 16))[..., :keys]
    return spread if all(stride % 16 == 0 for stride in spread.stride()[:3]) else spread.contiguous()
