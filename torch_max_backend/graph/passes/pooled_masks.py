"""Masks of gradients in front of max pooling's gradient, where they are smaller.

A ReLU before max pooling masks what comes out of the pooling's gradient by its own result, of which a mask would be
kept: the pooling itself keeps offsets alone. A gradient lands where the maximum was. So the maximum tells as much, and
it is kept for what comes behind the pooling in any case.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from torch_max_backend.graph.calls import add_call

aten = torch.ops.aten
_FORWARD = torch.ops.torch_max_backend.max_pool_offsets.default
_BACKWARD = torch.ops.torch_max_backend.max_pool_offsets_backward.default


def mask_before_pooling(joint: GraphModule) -> GraphModule:
    """Masks max pooling's gradients by its results instead of its arguments, before they are spread; returns ``joint``.

    It takes poolings that ``keep_small_offsets`` has rewritten, none of whose windows is empty. Every element of a
    gradient is a sum of the same numbers as before, or 0.
    """
    changed = False
    for spread in joint.graph.find_nodes(op="call_function", target=_BACKWARD):
        masked = _masked(spread)
        if masked is not None:
            _move(spread, masked)
            changed = True
    if changed:
        joint.graph.eliminate_dead_code()
        joint.recompile()
    return joint


def _masked(spread: Node) -> Node | None:
    """The only reader of a pooling's gradient, if it puts 0 where the pooling's argument is not above 0."""
    readers = list(spread.users)
    if len(readers) != 1 or readers[0].target is not aten.where.self or readers[0].args[2] is not spread:
        return None
    mask, zero = readers[0].args[:2]
    if not isinstance(mask, Node) or mask.target is not aten.le.Scalar or mask.args[1] != 0 or not _is_zero(zero):
        return None
    pooling = _pooling(spread)
    # Else nothing has read the pooling's result.
    is_read = any(user.target is operator.getitem and user.args[1] == 0 for user in pooling.users)
    return readers[0] if is_read and _bare(mask.args[0]) is _bare(pooling.args[0]) else None


def _is_zero(value: Any) -> bool:
    return isinstance(value, Node) and value.target is aten.scalar_tensor.default and value.args == (0,)


def _bare(value: Any) -> Any:
    while isinstance(value, Node) and value.target is aten.alias.default:
        value = value.args[0]
    return value


def _pooling(spread: Node) -> Node:
    offsets: Any = spread.args[-1]
    pooling = offsets.args[0]
    assert pooling.target is _FORWARD
    return pooling


def _move(spread: Node, masked: Node) -> None:
    pooling = _pooling(spread)
    gradient, zero = spread.args[0], masked.args[1]
    assert isinstance(gradient, Node)
    assert isinstance(zero, Node)
    result = next(user for user in pooling.users if user.target is operator.getitem and user.args[1] == 0)
    with spread.graph.inserting_before(spread):
        # The old zero may stand behind the pooling's gradient.
        zero = add_call(zero, aten.scalar_tensor.default, *zero.args, **zero.kwargs)
        mask = add_call(masked, aten.le.Scalar, result, 0)
        spread.args = (add_call(masked, aten.where.self, mask, zero, gradient), *spread.args[1:])
    masked.replace_all_uses_with(spread)
