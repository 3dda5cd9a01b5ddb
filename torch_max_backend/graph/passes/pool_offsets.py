"""Max pooling saves one byte for each output instead of an int64 index.

If only the pooling's own backward reads the indices and the window has at most 255 taps, the joint graph is rewritten
to a pair of operators that pass the position of the maximum *within its window* (``custom_ops/pool_offsets.py``). The
argument itself, of which the gradient needs the shape alone, is not kept either.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from torch_max_backend.custom_ops.pool_offsets import problem_of

aten = torch.ops.aten

_PAIRS = {
    aten.max_pool2d_with_indices.default: aten.max_pool2d_with_indices_backward.default,
    aten.max_pool3d_with_indices.default: aten.max_pool3d_with_indices_backward.default,
}


def keep_small_offsets(joint: GraphModule) -> GraphModule:
    """Rewrites every pooling of a joint graph whose indices only its own backward reads; ``joint`` is returned."""
    for node in list(joint.graph.nodes):
        backward = _PAIRS.get(node.target)
        if backward is not None and node.meta.get("val") is not None:
            _rewrite(node, backward)
    joint.graph.eliminate_dead_code()
    joint.recompile()
    return joint


def _rewrite(node: Node, backward: object) -> None:
    x = node.args[0]
    fake = x.meta["val"]
    results = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    if len(results) != len(node.users) or 1 not in results or any(isinstance(s, torch.SymInt) for s in fake.shape):
        return
    readers = list(results[1].users)
    if not readers or any(reader.target is not backward or reader.args[7] is not results[1] for reader in readers):
        return
    window, ceil_mode = _window(node)
    problem = problem_of(fake.shape, window, ceil_mode)
    if problem.has_empty_windows or not problem.has_byte_offsets:
        return
    graph = node.graph
    with graph.inserting_before(node):
        fresh = graph.call_function(torch.ops.torch_max_backend.max_pool_offsets.default, (x, *window, ceil_mode))
    y, index = node.meta["val"]
    small = index.to(torch.uint8)
    fresh.meta = {**node.meta, "val": (y, small)}
    node.replace_all_uses_with(fresh)
    results[1].meta = {**results[1].meta, "val": small}
    for reader in readers:
        with graph.inserting_before(reader):
            call = graph.call_function(
                torch.ops.torch_max_backend.max_pool_offsets_backward.default,
                (reader.args[0], list(fake.shape), *window, ceil_mode, results[1]),
            )
        call.meta = dict(reader.meta)
        reader.replace_all_uses_with(call)
        graph.erase_node(reader)
    graph.erase_node(node)


def _window(node: Node) -> tuple[tuple[list[int], ...], bool]:
    """Window, stride, padding and dilation in full, and ceil_mode, of aten's call with its defaults."""
    rank = 2 if "2d" in str(node.target) else 3
    given = [*node.args[1:], *[None] * (6 - len(node.args))]

    def spread(value: Any, default: list[int]) -> list[int]:
        if value is None or value == []:
            return default
        values = [value] if isinstance(value, int) else list(value)
        return values * rank if len(values) == 1 else values

    window = spread(given[0], [])
    parts = (window, spread(given[1], window), spread(given[2], [0] * rank), spread(given[3], [1] * rank))
    return parts, bool(given[4])
