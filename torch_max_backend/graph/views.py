"""Results that are views: they leave as views of what they look at, with the strides that eager PyTorch gives them."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Iterable

import torch
from torch.fx import Node

from torch_max_backend.ir.layout import dense_order
from torch_max_backend.runtime.tensors.interface import View
from torch_max_backend.torch_compat import OpOverload


def whole_of(node: Node) -> Node:
    """The value that ``node`` is a view of in the end; ``node`` itself if it is none."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def is_view(node: Node) -> bool:
    """Whether ``node`` is a view of its operand in eager PyTorch, or one of several."""
    if node.target is operator.getitem:
        return is_view(node.all_input_nodes[0])
    return isinstance(node.target, OpOverload) and node.target.is_view


def sees_memory(user: Node) -> bool:
    """Whether this is the graph's result, an op that counts in memory, or a view that gets there."""
    ends = user.op == "output" or user.target is torch.ops.aten.as_strided.default
    return ends or (is_view(user) and any(map(sees_memory, user.users)))


def looked_at_twice(results: Iterable[object]) -> frozenset[Node]:
    """The computed values whose memory more than one of ``results`` has in eager PyTorch."""
    wholes = Counter(whole_of(node) for node in set(results) if isinstance(node, Node))
    return frozenset(node for node, count in wholes.items() if count > 1 and node.op == "call_function")


def viewed(node: Node, updated: Collection[Node], shared: Collection[Node] = ()) -> tuple[Node, View] | None:
    """The dense value that ``node`` is a view of, and the view; None if ``node`` is dense itself and shares
    its memory with no other value, or is a view of nothing that does.

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
    while is_view(base):
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
