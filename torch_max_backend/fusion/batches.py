"""Equal programs over many tensors as one launch: an optimizer's step, running statistics, conversions of weights.

The programs of a batch must not depend on each other, and running them earlier or later must not keep memory alive: a
batch reads arguments, scalars and small tensors, and writes results of the graph or small tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch_max_backend.fusion.program import many_signature, ways_of_many
from torch_max_backend.fusion.terms import Terms, in_memory, is_view
from torch_max_backend.typed_graph.operations import Constant, Operation, Value

MAX_AT_ONCE = 1 << 24
"""Larger arguments are not all converted at the graph's start: their copies would live through it."""
_LITTLE = 1 << 16
"""Elements of a tensor that may live longer than it has to."""
_WAITING = 1 << 20
"""Elements of a gradient that waits for the others to be converted with them: a launch of its own costs a larger one
little, and its memory is free at once."""


@dataclass(frozen=True, eq=False)
class Group:
    """Roots of one program."""

    terms: Terms

    @property
    def roots(self) -> tuple[Value, ...]:
        """The values that it computes."""
        return self.terms.roots


Node: TypeAlias = Group | Operation


def batches(
    groups: Sequence[Group],
    operations: Sequence[Operation],
    fusible: Collection[Operation],
    kept: Collection[Value],
) -> list[list[Group]]:
    """Groups that one launch computes, two at least in each.

    Args:
        groups: of the graph.
        operations: of the graph, in their order.
        fusible: those that programs compute.
        kept: the graph's results.
    """
    results = {in_memory(value) for value in kept}
    keys = {group: _key(group) for group in groups}
    # What reads arguments alone waits for nothing.
    found = _equal((keys[group], group) for group in groups if _reads_arguments(group) and _is_early(group, results))
    single = {group for batch in found for group in batch}
    later = [group for group in groups if group not in single and keys[group] and _is_late(group, results)]
    if len({keys[group] for group in later}) < len(later):
        # Of groups that as many launches have to wait for, none waits for another.
        heights = _heights(operations, fusible, groups, found)
        found += _equal((keys[group] and (keys[group], heights[group]), group) for group in later)
    return found


def _equal(keyed: Iterable[tuple[object, Group]]) -> list[list[Group]]:
    """Groups of one key, where there are several."""
    found: dict[object, list[Group]] = defaultdict(list)
    for key, group in keyed:
        if key is not None:
            found[key].append(group)
    return [batch for batch in found.values() if len(batch) > 1]


def _key(group: Group) -> tuple[object, ...] | None:
    """Equal for groups that one program over many tensors computes; None for those of no such program."""
    ways = ways_of_many(group.terms)
    if ways is None or "linear" not in ways:
        return None
    dtypes = tuple(root.dtype for root in group.roots)
    return many_signature(group.terms, ways), ways, dtypes


def _reads_arguments(group: Group) -> bool:
    return all(_is_argument(leaf.value) for leaf in group.terms.leaves)


def _is_argument(value: Value) -> bool:
    """Whether the value is in memory before the first launch."""
    maker = value.maker
    return maker is None or isinstance(maker, Constant)


def _is_early(group: Group, results: Collection[Value]) -> bool:
    """Whether a group that reads arguments may run first."""
    if all(root in results or root.size <= _LITTLE for root in group.roots):
        return True
    return len(group.terms.leaves) == 1 and group.terms.size <= MAX_AT_ONCE


def _is_late(group: Group, results: Collection[Value]) -> bool:
    """Whether a group may run as late as it can."""
    leaves = group.terms.leaves
    if not all(root in results or root.size <= _LITTLE for root in group.roots):
        return False
    if all(_is_argument(leaf.value) or leaf.value in results or leaf.value.size <= _LITTLE for leaf in leaves):
        return True
    # A gradient waits for the step that uses it, and for its conversion.
    updates = any(_is_argument(leaf.value) and leaf.value.size == group.terms.size for leaf in leaves)
    converts = len(leaves) == 1 and group.terms.size <= _WAITING
    return (updates or converts) and all(root in results for root in group.roots)


def _heights(
    operations: Sequence[Operation],
    fusible: Collection[Operation],
    groups: Sequence[Group],
    made: Sequence[Sequence[Group]],
) -> dict[Node, int]:
    """For each group and each other operation, the length of the longest chain that depends on it.

    Args:
        operations: of the graph.
        fusible: those that programs compute.
        groups: that take the place of some.
        made: groups that run at once.
    """
    together: dict[Node, Node] = {group: batch[0] for batch in made for group in batch}
    node_of: dict[Operation, Node] = {}
    for group in groups:
        for root in group.roots:
            if root.maker is not None:
                node_of[root.maker] = together.get(group, group)
    before: dict[Node, set[Node]] = {}

    def needed(node: Node, values: Iterable[Value]) -> None:
        waiting, seen = [value.maker for value in values], set()
        own = before.setdefault(node, set())
        while waiting:
            maker = waiting.pop()
            if maker is None or maker in seen:
                continue
            seen.add(maker)
            if maker in node_of:
                own.add(node_of[maker])
            elif maker in fusible or is_view(maker):
                waiting += [operand.maker for operand in maker.operands]
            else:
                own.add(maker)

    for group in groups:
        needed(together.get(group, group), (leaf.value for leaf in group.terms.leaves))
    for operation in operations:
        if operation not in node_of and operation not in fusible and not is_view(operation):
            needed(operation, operation.operands)
    waiting = dict.fromkeys(before, 0)
    for nodes in before.values():
        for node in nodes:
            waiting[node] += 1
    heights = dict.fromkeys(before, 0)
    ready = [node for node, count in waiting.items() if not count]
    while ready:
        node = ready.pop()
        for earlier in before[node]:
            heights[earlier] = max(heights[earlier], heights[node] + 1)
            waiting[earlier] -= 1
            if not waiting[earlier]:
                ready.append(earlier)
    heights.update({group: heights[first] for group, first in together.items()})
    return heights
