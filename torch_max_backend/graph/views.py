"""Results that are views: they leave as views of what they look at, with the strides that eager PyTorch gives them."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Iterable

import torch
from torch.fx import Node

from torch_max_backend.ir.layout import dense_order
from torch_max_backend.runtime.tensors.interface import View

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


#: What they return has a tensor's memory.
_SEVERAL = frozenset({
    torch.ops.aten.split.Tensor,
    torch.ops.aten.split_with_sizes.default,
    torch.ops.aten.unbind.int,
})  # fmt: skip


def whole_of(node: Node) -> Node:
    """The value that ``node`` is a view of in the end; ``node`` itself if it is none."""
    while _looks_at(node):
        node = node.all_input_nodes[0]
    return node


def _looks_at(node: Node) -> bool:
    if node.op != "call_function" or node.target not in _VIEWS:
        return False
    return node.target is not operator.getitem or node.all_input_nodes[0].target in _SEVERAL


def looked_at_twice(results: Iterable[object]) -> frozenset[Node]:
    """The computed values whose memory more than one of ``results`` has in eager PyTorch."""
    wholes = Counter(whole_of(node) for node in set(results) if isinstance(node, Node))
    return frozenset(node for node, count in wholes.items() if count > 1 and node.op == "call_function")


def viewed(node: Node, updated: Collection[Node], shared: Collection[Node] = ()) -> tuple[Node, View] | None:
    """The dense value that ``node`` is a view of, and the view; None where the value of ``node`` is dense itself and
    nobody else's, or no view of anything that is.

    Args:
        node: a result; it may be a size.
        updated: arguments that the graph overwrites.
        shared: values whose memory another result has, too.
    """
    fake = node.meta["val"]
    if not isinstance(fake, torch.Tensor) or not _is_static(fake):
        return None
    whole = whole_of(node)
    if whole in shared and whole is not node:
        return _view(fake, whole, updated)
    if dense_order(fake) is not None:
        return None
    base = node
    while _looks_at(base):
        base = base.all_input_nodes[0]
        held = base.meta["val"]
        if isinstance(held, torch.Tensor) and dense_order(held) is not None:
            return _view(fake, base, updated)
    return None


def _view(fake: torch.Tensor, base: Node, updated: Collection[Node]) -> tuple[Node, View] | None:
    """``fake`` as a view of what ``base`` computes; None where it cannot be one."""
    held = base.meta["val"]
    if (
        base in updated or not isinstance(held, torch.Tensor) or not _is_static(held) or dense_order(held) is None
        or held.dtype is not fake.dtype or held.is_neg()
    ):  # fmt: skip
        return None
    offset = int(fake.storage_offset() - held.storage_offset())
    last = offset + sum(step * (extent - 1) for extent, step in zip(fake.shape, fake.stride(), strict=True) if extent)
    return (base, View(tuple(fake.shape), tuple(fake.stride()), offset)) if 0 <= offset <= last < held.numel() else None


def _is_static(tensor: torch.Tensor) -> bool:
    numbers = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    return all(isinstance(number, int) for number in numbers)
