"""Results that are views: they leave as views of what they look at, with the strides that eager PyTorch gives them."""

from __future__ import annotations

import operator
from collections.abc import Collection

import torch
from torch.fx import Node

from torch_max_backend.ir.layout import dense_order
from torch_max_backend.runtime.interface import View

_VIEWS = frozenset({
    torch.ops.aten.alias.default,
    torch.ops.aten.as_strided.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.diagonal.default,
    torch.ops.aten.expand.default,
    torch.ops.aten.permute.default,
    torch.ops.aten.select.int,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.split.Tensor,
    torch.ops.aten.split_with_sizes.default,
    torch.ops.aten.squeeze.dims,
    torch.ops.aten.t.default,
    torch.ops.aten.transpose.int,
    torch.ops.aten.unbind.int,
    torch.ops.aten.unfold.default,
    torch.ops.aten.unsqueeze.default,
    torch.ops.aten.view.default,
    operator.getitem,
})  # fmt: skip


def viewed(node: Node, updated: Collection[Node]) -> tuple[Node, View] | None:
    """The dense value that ``node`` is a view of, and the view; None where the value of ``node`` is dense itself, or
    no view of anything that is.

    Args:
        node: a result; it may be a size.
        updated: arguments that the graph overwrites.
    """
    fake = node.meta["val"]
    if not isinstance(fake, torch.Tensor) or not _is_static(fake) or dense_order(fake) is not None:
        return None
    base = node
    while base.target in _VIEWS and base.op == "call_function":
        base = base.all_input_nodes[0]
        whole = base.meta["val"]
        if not isinstance(whole, torch.Tensor) or dense_order(whole) is None:
            continue
        if base in updated or not _is_static(whole) or whole.dtype is not fake.dtype or whole.is_neg():
            return None
        offset = int(fake.storage_offset() - whole.storage_offset())
        last = offset + sum(
            step * (extent - 1) for extent, step in zip(fake.shape, fake.stride(), strict=True) if extent
        )
        if not 0 <= offset <= last < whole.numel():
            return None
        return base, View(tuple(fake.shape), tuple(fake.stride()), offset)
    return None


def _is_static(tensor: torch.Tensor) -> bool:
    numbers = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    return all(isinstance(number, int) for number in numbers)
