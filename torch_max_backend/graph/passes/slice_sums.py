"""Slices of two tensors that are added one by one: the tensors are added, and the sums are slices.

Autograd adds up the gradients of a concatenation's parts so. In a dense block, whose every layer reads all results
before it, that is a sum for each pair of layers. Behind this pass a layer's gradient with respect to all that it reads
is added to what later layers have made of the same parts, and stored with that: no bytes more, and no sums of parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from torch_max_backend.graph.calls import add_call
from torch_max_backend.graph.views import sees_memory

aten = torch.ops.aten

_LEAST = 2
"""Sums of a pair that are added again: others are as fast by themselves, and need no copy of a slice."""


@dataclass(frozen=True)
class _Slice:
    """A whole tensor's elements from ``start`` up to ``end`` along a dimension."""

    part: Node
    whole: Node
    dim: int
    start: int
    end: int


@dataclass(frozen=True)
class _Sum:
    node: Node
    first: _Slice
    second: _Slice

    @property
    def alike(self) -> tuple[Node, Node, int, int]:
        """What sums have in common that can be one."""
        return self.first.whole, self.second.whole, self.first.dim, self.second.start - self.first.start


def add_before_slicing(joint: GraphModule) -> GraphModule:
    """Puts one ``aten.add`` in the place of those of neighbouring slices of the same two tensors, where several of the
    sums are added again; returns ``joint``. Every element is a sum of the same two numbers as before."""
    changed = False
    for node in joint.graph.find_nodes(op="call_function", target=aten.add.Tensor):
        # Those that were joined before have become slices.
        found = _sum(node) if node.users else None
        run = [] if found is None else _run(found)
        if sum(any(user.target is aten.add.Tensor for user in each.node.users) for each in run) >= _LEAST:
            _join(node, run)
            changed = True
    if changed:
        joint.graph.eliminate_dead_code()
        joint.recompile()
    return joint


def _sum(node: Node) -> _Sum | None:
    """``node`` as a sum of two slices; None if it is none."""
    if node.target is not aten.add.Tensor or node.kwargs:
        return None
    first, second = _slice(node.args[0]), _slice(node.args[1])
    if first is None or second is None or first.dim != second.dim:
        return None
    one, other = first.part.meta["val"], second.part.meta["val"]
    return _Sum(node, first, second) if one.shape == other.shape and one.dtype == other.dtype else None


def _slice(part: object) -> _Slice | None:
    """``part`` as neighbouring elements of a tensor along a dimension of known size; None if it is none."""
    if not isinstance(part, Node) or part.target is not aten.slice.Tensor or part.kwargs:
        return None
    arguments: tuple[Any, ...] = part.args
    whole, dim, start, end, step = arguments + (0, 0, 2**63 - 1, 1)[len(arguments) - 1 :]
    extent = whole.meta["val"].shape[dim]
    if step != 1 or not all(isinstance(each, int) for each in (start, end, extent)):
        return None
    start, end, _ = slice(start, end).indices(extent)
    return _Slice(part, whole, dim % whole.meta["val"].dim(), start, end) if start < end else None


def _run(of: _Sum) -> list[_Sum]:
    """The sums, this one among them, whose slices follow each other, of the same two tensors at the same distance."""
    by_start: dict[int, _Sum] = {}
    by_end: dict[int, _Sum] = {}
    for part in of.first.whole.users:
        for user in part.users if part.target is aten.slice.Tensor else ():
            other = _sum(user)
            # A result must not be a part of what is larger.
            if other is not None and other.alike == of.alike and not any(map(sees_memory, user.users)):
                by_start.setdefault(other.first.start, other)
                by_end.setdefault(other.first.end, other)
    if by_start.get(of.first.start) != of:
        return []
    run = [of]
    while run[0].first.start in by_end:
        run.insert(0, by_end.pop(run[0].first.start))
    while run[-1].first.end in by_start:
        run.append(by_start.pop(run[-1].first.end))
    return run


def _join(at: Node, run: Sequence[_Sum]) -> None:
    """Adds the two tensors' slices together, before ``at``, the first one of the sums."""
    start, end = run[0].first.start, run[-1].first.end
    with at.graph.inserting_before(at):
        wholes = [
            _part(at, each.whole, each.dim, each.start, each.start + end - start)
            for each in (run[0].first, run[0].second)
        ]
        total = add_call(at, aten.add.Tensor, *wholes)
        for each in run:
            part = _part(each.node, total, each.first.dim, each.first.start - start, each.first.end - start)
            each.node.replace_all_uses_with(part)


def _part(like: Node, whole: Node, dim: int, start: int, end: int) -> Node:
    if (start, end) == (0, whole.meta["val"].shape[dim]):
        return whole
    return add_call(like, aten.slice.Tensor, whole, dim, start, end)
