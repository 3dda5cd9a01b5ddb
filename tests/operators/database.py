"""PyTorch's own operator database (OpInfo), without the side effect of importing it.

Its modules close PyTorch's flags (``torch.backends.cudnn.benchmark = ...`` raises from then on), for every other test
of the process too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_flatten, tree_unflatten

from tests import harness

# An assignment to torch.backends itself would reach the object that stands before the module.
torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True

__all__ = ["DTYPES", "OpInfo", "SampleInput", "bound", "differentiated", "entries", "op_db", "passes", "samples"]

DTYPES = (torch.float32, torch.bfloat16)


def entries() -> dict[str, OpInfo]:
    """The database's entries that have float32 samples, by their full names."""
    # Jiterator compiles CUDA text; sparse tensors have no strides for a graph to speak of.
    return {
        info.full_name: info
        for info in op_db
        if torch.float32 in info.dtypes and not info.name.startswith(("jiterator", "sparse"))
    }


def passes(info: OpInfo, device: str = "cpu") -> list[tuple[torch.dtype, bool]]:
    """The dtypes of an entry, each forward and, where there is one, with its gradient."""
    forward, backward = info.supported_dtypes(device), info.supported_backward_dtypes(device)
    return [
        (dtype, gradient)
        for dtype in DTYPES
        for gradient in (False, True)
        if dtype in forward and (not gradient or (info.supports_autograd and dtype in backward))
    ]


def bound(info: OpInfo, sample: SampleInput) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """The entry as a function of a sample's tensors alone, and these."""
    leaves, structure = tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def call(*tensors: torch.Tensor) -> Any:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        first, args, keywords = tree_unflatten(filled, structure)
        result = info.op(first, *args, **keywords)
        return result if sample.output_process_fn_grad is None else sample.output_process_fn_grad(result)

    return call, [leaves[place].detach() for place in places]


def differentiated(function: Callable[..., Any], wanted: Sequence[bool]) -> Callable[..., Any]:
    """The results that depend on inputs that are wanted, and the gradients with respect to these; unused ones are left
    out. Incoming gradients are ones, or stand behind the inputs."""

    def call(*tensors: torch.Tensor) -> list[torch.Tensor]:
        inputs, incoming = tensors[: len(wanted)], tensors[len(wanted) :]
        leaves = [x.detach().requires_grad_(want) for x, want in zip(inputs, wanted, strict=True)]
        results = [leaf for leaf in harness.flatten(function(*leaves)) if leaf.requires_grad]
        chosen = [leaf for leaf in leaves if leaf.requires_grad]
        coming = list(incoming) or [torch.ones_like(result) for result in results]
        found = torch.autograd.grad(results, chosen, coming, allow_unused=True)
        return [*results, *(gradient for gradient in found if gradient is not None)]

    return call


def samples(info: OpInfo, dtype: torch.dtype, gradient: bool, most: int, device: str = "cpu") -> list[SampleInput]:
    """At most ``most`` of an entry's samples, spread over all of them."""
    found = list(info.sample_inputs(device, dtype, requires_grad=gradient))
    return found[:: max(1, -(-len(found) // most))]
