"""Checks that a tensor is plain memory before a kernel gets its address."""

from __future__ import annotations

import torch

from torch_max_backend.torch_compat import is_wrapped, is_zero_tensor


class WrappedError(Exception):
    """An argument is a wrapper tensor of a transform (``vmap``, ``is_grads_batched``)."""


def plain(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """A tensor with the same elements in memory: ``tensor`` itself, detached, where possible.

    Made are the elements of zero tensors (``torch._efficientzerotensor``: autograd's gradients that are known to be
    zero), of views that stand for a negative or a conjugate, and of sparse and MKL-DNN tensors.

    Raises:
        ValueError: it has no memory: a subclass that holds other tensors, a fake tensor, a freed storage.
        WrappedError: see there.
    """
    if is_wrapped(tensor):
        raise WrappedError(name)
    view = tensor.detach() if tensor.requires_grad else tensor
    if view.layout is not torch.strided:
        return view.to_dense()
    if is_zero_tensor(view):
        return torch.zeros(view.shape, dtype=view.dtype, device=view.device)
    view = view.resolve_conj().resolve_neg()
    if view.numel():
        _check_memory(view, name)
    return view


def _check_memory(tensor: torch.Tensor, name: str) -> None:
    """Raises ValueError unless all elements of a tensor are within its storage."""
    last = sum(step * (extent - 1) for extent, step in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.dtype.itemsize
    try:
        storage = tensor.untyped_storage()
        there = storage.nbytes() if storage.data_ptr() else 0
    except (NotImplementedError, RuntimeError):
        there = 0
    if there < needed:
        kind = "tensor" if type(tensor) in (torch.Tensor, torch.nn.Parameter) else type(tensor).__name__
        raise ValueError(
            f"{name}: expected a tensor with memory, got a {kind} whose storage has {there} bytes of {needed}"
        )
