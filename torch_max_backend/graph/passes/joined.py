"""Gradients of parts that were taken one by one: they are put together, not added up.

Autograd makes of each part's gradient a tensor of the whole with zeros around it, and adds these up: three of them
behind ``q, k, v = qkv[0], qkv[1], qkv[2]``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

aten = torch.ops.aten


def stack_parts(joint: GraphModule) -> GraphModule:
    """Puts ``aten.cat`` in the place of sums of ``aten.select_backward`` which have a part for every index; returns
    ``joint``."""
    found = False
    for node in reversed(list(joint.graph.find_nodes(op="call_function", target=aten.add.Tensor))):
        parts = _parts(node)
        if parts is None:
            continue
        arguments: tuple[Any, ...] = parts[0].args
        shape, dim = arguments[1], arguments[2] % len(arguments[1])
        by_index = dict(_part(part, shape[dim]) for part in parts)
        if len(by_index) != len(parts) or sorted(by_index) != list(range(shape[dim])):
            continue
        rows: list[Node] = []
        with joint.graph.inserting_before(node):
            for n in sorted(by_index):
                rows.append(joint.graph.call_function(aten.unsqueeze.default, (by_index[n], dim)))
                rows[-1].meta = {**node.meta, "val": by_index[n].meta["val"].unsqueeze(dim)}
            stacked = joint.graph.call_function(aten.cat.default, (rows, dim))
        stacked.meta = dict(node.meta)
        node.replace_all_uses_with(stacked)
        found = True
    if found:
        joint.graph.eliminate_dead_code()
        joint.recompile()
    return joint


def _part(gradient: Node, count: int) -> tuple[int, Node]:
    """The number of the part, of so many, and its own gradient."""
    arguments: tuple[Any, ...] = gradient.args
    return arguments[3] % count, arguments[0]


def _parts(total: Node) -> list[Node] | None:
    """The gradients of parts of one tensor, along one dimension of known size, that a sum adds up."""
    parts: list[Node] = []
    waiting: list[object] = list(total.args)
    while waiting:
        node = waiting.pop()
        if not isinstance(node, Node) or node.kwargs or len(node.users) != 1:
            return None
        if node.target is aten.add.Tensor:
            waiting += node.args
        elif node.target is aten.select_backward.default:
            parts.append(node)
        else:
            return None
    alike = {(str(part.args[1]), part.args[2]) for part in parts}
    sizes, dim = parts[0].args[1:3]
    known = isinstance(sizes, (list, tuple)) and isinstance(dim, int) and isinstance(sizes[dim], int)
    same = len({part.args[0].meta["val"].dtype for part in parts if isinstance(part.args[0], Node)}) == 1
    return parts if len(alike) == 1 and known and same and not total.kwargs else None
