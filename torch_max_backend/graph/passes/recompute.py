"""Splits batch normalization for the partitioner into statistics, which are saved, and elementwise work, which is not.

To the min-cut partitioner batch normalization is one operator, whose result would be saved beside its input. Written as
elementwise work, the result can be recomputed in the backward graph, and so can an activation's result, from the input,
which batch normalization's gradient reads in any case. Operands of a convolution's gradient stay saved.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from torch_max_backend.graph.calls import add_call

aten, prims = torch.ops.aten, torch.ops.prims
_FUNCTIONAL = aten._native_batch_norm_legit_functional.default
_TRAIN = 5


def normalize_elementwise(joint: GraphModule) -> GraphModule:
    """Computes the results of training batch norms from their statistics by elementwise operations; returns ``joint``.

    The arithmetic is that of ``lowering/normalization.py``: in float32, float64 for float64, rounded once. Where the
    statistics leave in a coarser dtype, as on a CPU in bfloat16, the op stays as it is.
    """
    for node in joint.graph.find_nodes(op="call_function", target=_FUNCTIONAL):
        if node.args[_TRAIN] is True:
            _write_out(node)
    joint.recompile()
    return joint


def _write_out(node: Node) -> None:
    """One batch norm."""
    arguments: tuple[Any, ...] = node.args[:3]
    x, weight, bias = arguments
    fake = x.meta["val"]
    wide = torch.float64 if fake.dtype == torch.float64 else torch.float32
    readers = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    if not {0, 1, 2} <= readers.keys() or node.meta["val"][1].dtype != wide or isinstance(fake.shape[1], torch.SymInt):
        return
    old, mean, invstd = (readers[number] for number in range(3))
    place = node.next
    while place.target is operator.getitem and place.args[0] is node:
        place = place.next
    shape = [fake.shape[1], *[1] * (fake.dim() - 2)]

    def call(target: Callable[..., Any], *args: Any) -> Node:
        return add_call(old, target, *args)

    def cast(value: Node, dtype: torch.dtype) -> Node:
        same = value.meta["val"].dtype == dtype
        return value if same else call(prims.convert_element_type.default, value, dtype)

    def of_channels(value: Node) -> Node:
        return call(aten.view.default, cast(value, wide), shape)

    with node.graph.inserting_before(place):
        scale = of_channels(invstd)
        if weight is not None:
            scale = call(aten.mul.Tensor, scale, of_channels(weight))
        value = call(aten.mul.Tensor, call(aten.sub.Tensor, cast(x, wide), of_channels(mean)), scale)
        if bias is not None:
            value = call(aten.add.Tensor, value, of_channels(bias))
        value = cast(value, old.meta["val"].dtype)
    old.replace_all_uses_with(value)
    node.graph.erase_node(old)
