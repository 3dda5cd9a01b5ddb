"""Reads assignments to a part of a tensor, ``scores[:, :, 1:, 1:] += bias``, and their gradients, in a graph.

Functionalization makes a copy of the whole tensor of each, which hides that the tensor has only been added to. Here
such assignments become additions, and what writes back the elements that were there goes.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from torch_max_backend.graph.written_attention.attention_writer import Writer
from torch_max_backend.graph.written_attention.matrices import Size, argument_of, is_tensor, keeps_order, shape_of

aten = torch.ops.aten


def simplify_assignments(gm: GraphModule) -> None:
    """Simplifies what assignments left in a joint or an inference graph; ``gm`` is changed."""
    _drop_copies(gm)
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or not is_tensor(node):
            continue
        if node.target is aten.slice_scatter.default:
            _simplify_assignment(node)
        elif node.target is aten.add.Tensor and not node.kwargs:
            for assigned, rest in (node.args, node.args[::-1]):
                whole = _with_zeros_refilled(assigned, rest)
                if whole is not None:
                    _replace(node, whole)
                    break
    gm.graph.eliminate_dead_code()


def _drop_copies(gm: GraphModule) -> None:
    """Drops copies over a whole tensor, and additions of the zeros that are the gradient of its old elements."""
    zeros: set[Node] = set()
    for node in gm.graph.nodes:
        if node.op != "call_function" or not is_tensor(node):
            continue
        a, b = (*node.args, None, None)[:2]
        if node.target in _FILLED and b == 0:
            zeros.add(node)
        elif node.target is aten.copy.default and not node.kwargs and _alike(node, b):
            node.replace_all_uses_with(b)
        elif keeps_order(node) and a in zeros:
            zeros.add(node)
        elif node.target is aten.add.Tensor and not node.kwargs:
            rest = b if a in zeros else a if b in zeros else None
            if rest is not None and _alike(node, rest):
                node.replace_all_uses_with(rest)
    gm.graph.eliminate_dead_code()


_FILLED = (aten.full_like.default, aten.full.default)


def _alike(node: Node, other: object) -> bool:
    """Whether the other node has this one's shape, strides, dtype and device."""
    if not isinstance(other, Node) or not is_tensor(other):
        return False
    a, b = node.meta["val"], other.meta["val"]
    facts = ((x.shape, x.stride(), x.dtype, x.device) for x in (a, b))
    return operator.eq(*facts)


@dataclass(frozen=True)
class _Part:
    """Elements of a tensor from ``starts`` to ``ends``, which has the elements of ``root`` in a shape ``whole``."""

    root: Node
    whole: tuple[int, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]

    def slice(self, dim: int, start: int, end: int) -> _Part:
        """A part of this part."""
        first = self.starts[dim]
        starts, ends = list(self.starts), list(self.ends)
        starts[dim], ends[dim] = first + start, first + end
        return replace(self, starts=tuple(starts), ends=tuple(ends))


def _part(node: Node) -> _Part | None:
    """The part of another node that the node is, through slices and views; None where a size is symbolic."""
    shape = shape_of(node)
    if not all(isinstance(size, int) for size in shape):
        return None
    sizes = tuple(map(int, shape))
    if node.target is aten.slice.Tensor:
        bounds = _bounds(node.args[1:], shape_of(argument_of(node)))
        part = _part(argument_of(node))
        if bounds is not None and part is not None:
            return part.slice(*bounds)
    elif node.op == "call_function" and keeps_order(node):
        part = _part(argument_of(node))
        if part is not None and shape_of(argument_of(node)) == shape:
            return part
        if part is not None and part.starts == (0,) * len(part.whole) and part.ends == part.whole:
            return _Part(part.root, sizes, (0,) * len(sizes), sizes)
    return _Part(node, sizes, (0,) * len(sizes), sizes)


def _bounds(given: Sequence[Any], shape: Sequence[Size]) -> tuple[int, int, int] | None:
    """Dimension, start and end of a slice without steps, of ``dim, start, end, step``."""
    missing: tuple[Any, ...] = (0, None, None, 1)
    dim, start, end, step = (*given, *missing[len(given) :])
    size = shape[dim]
    if step != 1 or not all(isinstance(number, int) for number in (size, start or 0, end or 0)):
        return None
    begin, stop, _ = slice(start, end).indices(int(size))
    return dim % len(shape), begin, max(begin, stop)


def _assigned(node: Node) -> tuple[Node, Node, _Part, tuple[int, int, int]] | None:
    """The operands of a ``slice_scatter``: the tensor, what is written, the part that is written to, and its bounds."""
    into, value = node.args[:2]
    assert isinstance(into, Node) and isinstance(value, Node)
    bounds, part = _bounds(node.args[2:], shape_of(into)), _part(into)
    if bounds is None or part is None or node.kwargs:
        return None
    return into, value, part.slice(*bounds), bounds


def _source(node: Node) -> Node:
    """The source of a node that copies without a cast; None for other nodes."""
    while node.target is aten.copy.default:
        source = node.args[1]
        if not isinstance(source, Node) or not _has_type_of(source, node) or shape_of(source) != shape_of(node):
            break
        node = source
    return node


def _simplify_assignment(node: Node) -> None:
    """x with x[part] = x[part] is x; with x[part] += y it is x + y, where y is padded with zeros."""
    found = _assigned(node)
    if found is None:
        return
    into, value, written, (dim, start, end) = found
    value = _source(value)
    if _part(value) == written:
        _replace(node, into)
        return
    term = _added(value, written)
    if term is not None and _has_type_of(term, node):
        after = len(shape_of(node)) - 1 - dim
        new = Writer(node, (0, 0))
        borders = [*[0] * (2 * after), start, shape_of(into)[dim] - end]
        padded = new.call(aten.constant_pad_nd.default, term, borders, 0.0)
        _replace(node, new.call(aten.add.Tensor, into, padded))


def _added(value: Node, part: _Part) -> Node | None:
    """The addend of a node that adds to a part of a tensor, in the part's shape."""
    while keeps_order(value) and shape_of(argument_of(value)) == shape_of(value):
        value = argument_of(value)
    if value.target is not aten.add.Tensor or value.kwargs:
        return None
    for old, term in (value.args, value.args[::-1]):
        if not isinstance(old, Node) or not isinstance(term, Node) or not (is_tensor(old) and is_tensor(term)):
            continue
        if _part(old) == part and shape_of(term) == shape_of(value):
            return term
    return None


def _has_type_of(node: Node, other: Node) -> bool:
    return bool(node.meta["val"].dtype == other.meta["val"].dtype)


def _with_zeros_refilled(assigned: object, rest: object) -> Node | None:
    """x, where x with zeros in a part of it is added to that part with zeros around."""
    if not isinstance(assigned, Node) or not isinstance(rest, Node) or not (is_tensor(assigned) and is_tensor(rest)):
        return None
    while keeps_order(assigned):
        assigned = argument_of(assigned)
    while keeps_order(rest):
        rest = argument_of(rest)
    cleared, kept = _cleared(assigned), _kept(rest)
    if cleared is None or cleared[1] != kept:
        return None
    return cleared[0]


def _cleared(node: Node) -> tuple[Node, _Part] | None:
    """x and the part of it that zeros are written to."""
    found = _assigned(node) if node.target is aten.slice_scatter.default else None
    if found is None:
        return None
    into, value, written, _ = found
    value = _source(value)
    while keeps_order(value):
        value = argument_of(value)
    if value.target in _FILLED and value.args[1] == 0:
        return into, written
    inner = _cleared(value)
    if inner is None or _part(inner[0]) != written:
        return None
    return into, inner[1]


def _kept(node: Node) -> _Part | None:
    """The part of another tensor that a node has, in its place, with zeros around."""
    bounds: list[tuple[int, int, int]] = []
    sizes = shape_of(node)
    while node.target is aten.slice_backward.default and not node.kwargs:
        found = _bounds(node.args[2:], shape_of(node))
        if found is None:
            return None
        bounds.append(found)
        node = argument_of(node)
    part = _part(node)
    if not bounds or part is None or part.whole != tuple(sizes):
        return None
    place = _Part(part.root, part.whole, (0,) * len(part.whole), part.whole)
    for each in bounds:
        place = place.slice(*each)
    return part if part == place else None


def _replace(node: Node, other: Node) -> None:
    """Puts a node with the same elements in the place of another."""
    new = Writer(node, (0, 0))
    fake = node.meta["val"]
    if not _has_type_of(node, other):
        return
    node.replace_all_uses_with(new.restrided(new.view(other, fake.shape), fake))
