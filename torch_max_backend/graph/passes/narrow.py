"""Interpolates in 16 bits what autocast has interpolated in float32 between 16 bits and 16 bits.

Autocast casts the operand of an interpolation to float32, and everything that is concatenated with its result; the next
convolution casts back. Kernels add in float32 whatever they read and write. So a result that is read in 16 bits alone,
of an operand that had 16 bits, is computed in these: the same sums, rounded once, of half the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from torch_max_backend.custom_ops.interpolation import BACKWARD, FORWARD
from torch_max_backend.graph.calls import add_call

aten, prims = torch.ops.aten, torch.ops.prims
_CASTS = (aten._to_copy.default, prims.convert_element_type.default)
_MOVES = frozenset({
    aten.view.default, aten._unsafe_view.default, aten.slice.Tensor, aten.permute.default, aten.transpose.int,
    aten.select.int, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.expand.default,
    aten.clone.default,
})  # fmt: skip
"""They move the elements of their first argument, whatever these are."""
_INTERPOLATIONS = frozenset({*FORWARD, *BACKWARD})
_NARROW = (torch.bfloat16, torch.float16)


def narrow_interpolations(joint: GraphModule) -> GraphModule:
    """Interpolates in the dtype that operand and results have before and behind; returns ``joint``."""
    chosen: dict[Node, torch.dtype] = {}
    behind: dict[Node, torch.dtype | None] = {}
    for node in reversed(joint.graph.nodes):
        dtype = behind[node] = _narrow_readers(node, behind)
        if dtype is not None and node.target in _INTERPOLATIONS and _is_exact(node.args[0], dtype):
            chosen[node] = dtype
    narrowed = _Narrowed(joint, dict(reversed(chosen.items())))
    if narrowed.apply():
        joint.graph.eliminate_dead_code()
        joint.recompile()
    return joint


def _dtype(node: Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None


def _cast_from(node: Any) -> Node | None:
    """The node that this one copies to another dtype, with the same strides, so that views of both are alike."""
    if not isinstance(node, Node) or node.target not in _CASTS:
        return None
    source = node.all_input_nodes[0]
    facts = [(each.device, each.layout, *map(str, each.stride())) for each in (node.meta["val"], source.meta["val"])]
    return source if facts[0] == facts[1] else None


def _narrow_readers(node: Node, behind: Mapping[Node, torch.dtype | None]) -> torch.dtype | None:
    """The 16-bit dtype in which alone a float32 value is read, be it moved or concatenated before; None for others.

    Args:
        node: the value.
        behind: the same of its readers.
    """
    if _dtype(node) != torch.float32 or not node.users:
        return None
    found: set[torch.dtype | None] = set()
    for user in node.users:
        if _cast_from(user) is not None:
            found.add(_dtype(user))
        elif user.target is aten.cat.default or user.target in _MOVES:
            found.add(behind[user])
        else:
            return None
    (dtype, *others) = found
    return dtype if not others and dtype in _NARROW else None


def _is_exact(node: Any, dtype: torch.dtype) -> bool:
    """Whether the elements of a float32 value are copies of elements of ``dtype``."""
    source = _cast_from(node)
    if source is not None:
        return _dtype(source) == dtype
    return isinstance(node, Node) and node.target in _MOVES and _is_exact(node.args[0], dtype)


class _Narrowed:
    """Values and what stands for them in 16 bits.

    Args:
        joint: the graph.
        chosen: interpolations in the graph's order, with the dtype that each is wanted in.
    """

    def __init__(self, joint: GraphModule, chosen: Mapping[Node, torch.dtype]) -> None:
        self._chosen = chosen
        self._made: dict[Node, Node] = {}
        # What is wanted, and what is moved or concatenated from it.
        self._derived = dict.fromkeys(chosen)
        for node in joint.graph.nodes:
            passes_on = node.target is aten.cat.default or node.target in _MOVES
            if passes_on and not self._derived.keys().isdisjoint(node.all_input_nodes):
                self._derived[node] = None

    def apply(self) -> bool:
        """Makes the readers of what is wanted read that; whether there is any."""
        casts = {cast: source for source in self._derived for cast in source.users if _cast_from(cast) is source}
        for cast, source in casts.items():
            made = _dtype(cast)
            assert made is not None
            cast.replace_all_uses_with(self._of(source, made, cast))
        return bool(self._chosen)

    def _of(self, node: Node, dtype: torch.dtype, reader: Node) -> Node:
        """``node`` in ``dtype``, for ``reader``."""
        if node in self._made:
            return self._made[node]
        source = _cast_from(node)
        if source is not None and _dtype(source) == dtype:
            return source
        if node.target is aten.cat.default:
            parts: Any = node.args[0]
            made = _call(node, node.target, [self._of(each, dtype, node) for each in parts], *node.args[1:])
        elif node in self._chosen or (node.target in _MOVES and (_is_exact(node, dtype) or node in self._derived)):
            made = _call(node, node.target, self._of(node.all_input_nodes[0], dtype, node), *node.args[1:])
        else:
            # It may have other readers, which want it as it is.
            return _call(reader, prims.convert_element_type.default, node, dtype)
        self._made[node] = made
        return made


def _call(place: Node, target: Callable[..., Any] | str, *args: Any) -> Node:
    """A call before ``place``, whose notes it gets, with the keywords that belong to the same op."""
    assert callable(target)
    named = place.kwargs if place.target is target else {}
    with place.graph.inserting_before(place):
        return add_call(place, target, *args, **named)
