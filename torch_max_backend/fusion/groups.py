"""Decides which program computes which values of a graph.

A value that something other than a program reads must be in memory: it is a root, and so is a reduction's result.
Programs read and write roots; values in between stay in registers and are computed again in every program that needs
them. Roots of one size that are read in the same way are computed by one launch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from max.dtype import DType
from max.graph import DeviceRef

from torch_max_backend.fusion.batches import Group, batches
from torch_max_backend.fusion.convolutions import absorbed, is_suitable, takes_part
from torch_max_backend.fusion.long_sums import joined_sum, partial_sum
from torch_max_backend.fusion.loop_nest import loop_nest_of
from torch_max_backend.fusion.movement import Concatenation, concatenation, transposition
from torch_max_backend.fusion.program import MAX_INPUTS
from torch_max_backend.fusion.shared_values import shared_values
from torch_max_backend.fusion.terms import (
    MAX_GUARDS,
    CutAt,
    Leaf,
    NotOneProgram,
    Terms,
    in_memory,
    is_fusible,
    is_reduction,
    is_view,
    readers_of,
)
from torch_max_backend.typed_graph.operations import Operation, Pad, Pointwise, Reduction, Value

MAX_RESULTS = 3
_COSTS = {
    **dict.fromkeys(("exp", "log", "log1p", "tanh", "erf", "sin", "cos"), 16),
    **dict.fromkeys(("div", "sqrt", "rsqrt"), 4),
}
"""The cost of an operation on numbers, in additions."""
_MAX_COST = 16
"""The cost from which a number is computed once, not by every vector."""


@dataclass
class Grouped:
    """The operations of a graph that each launch computes.

    Attributes:
        groups: programs of several results or inputs.
        batches: programs that run one expression over many tensors.
        concatenations: of more tensors than a program takes.
    """

    groups: list[Group]
    batches: list[list[Group]]
    concatenations: list[Concatenation]


def grouped(operations: Sequence[Operation], kept: Collection[Value], device: DeviceRef) -> Grouped:
    """Chooses the programs of a graph.

    Args:
        operations: of the graph, in their order.
        kept: the graph's results.
        device: that the graph computes on.
    """
    shared: list[Value] = []
    while True:
        joined, fusible = _joined(operations, kept, device, shared)
        found = shared_values(joined, kept, fusible, lambda value: takes_part(device) and is_suitable(value))
        new = [value for value in found if value not in shared]
        if not new:
            break
        shared += new
    chosen = batches(joined, operations, fusible, kept)
    single = {group for batch in chosen for group in batch}
    joined = [group for group in joined if group not in single]
    moved = [each for each in map(concatenation, operations) if each is not None and each.result.device == device]
    return Grouped(joined, chosen, moved)


def _joined(
    operations: Sequence[Operation], kept: Collection[Value], device: DeviceRef, shared: Collection[Value]
) -> tuple[list[Group], set[Operation]]:
    """The programs of a graph that stores ``shared``, too, and the operations that programs can compute."""
    parts: set[Value] = set()
    terms, fusible = values_in_memory(operations, kept, device, parts, shared)
    roots = list(terms)
    groups = [Group(terms[root]) for root in roots]
    # A partial sum that waits for the whole would free nothing. What a convolution can store stays apart, too: together
    # with a program that reads it, the convolution's own result would have to be written and read.
    alone = [
        group for group, root in zip(groups, roots, strict=True)
        if root in parts or transposition(group.terms, loop_nest_of(group.terms)) is not None
        or absorbed(group, groups, kept, device) is not None
    ]  # fmt: skip
    return _Joiner(groups, alone, roots, fusible).join(), fusible


def values_in_memory(
    operations: Sequence[Operation],
    kept: Collection[Value],
    device: DeviceRef,
    parts: set[Value] | None = None,
    shared: Collection[Value] = (),
) -> tuple[dict[Value, Terms], set[Operation]]:
    """The values that must lie in memory, or are to (``shared``), each with the program that computes it, and all
    operations that programs can compute. Partial sums are added to ``parts``."""
    fusible = {each for each in operations if is_fusible(each) and each.results[0].device == device}

    def joins(value: Value) -> bool:
        # Gradients alone: that several results of forward passes wait for a sum is rare.
        return (
            takes_part(device) and is_suitable(value) and value.maker is not None and value.maker.name != "conv_fprop"
        )

    return _roots(operations, fusible, [*kept, *shared], set() if parts is None else parts, joins), fusible


def _roots(
    operations: Sequence[Operation],
    fusible: Collection[Operation],
    kept: Collection[Value],
    parts: set[Value],
    joins: Callable[[Value], bool],
) -> dict[Value, Terms]:
    """The values that have to lie in memory and that a program computes, in the operations' order."""
    demanded = [in_memory(value) for value in kept]
    for operation in operations:
        # What a reduction reads is computed with the reduction.
        if operation not in fusible and not is_view(operation) and not isinstance(operation, Reduction):
            demanded += map(in_memory, operation.operands)
    # In an order of their own: it decides where an expression is cut, and graphs that are alike share programs.
    reductions = [operation.results[0] for operation in operations if is_reduction(operation)]
    roots = dict.fromkeys([*(value for value in demanded if value.maker in fusible), *reductions])
    waiting = sorted(roots, key=_position, reverse=True)
    while waiting:
        root = waiting.pop()
        try:
            found = Terms([root], roots, fusible)
            cut = found.best_cut(MAX_INPUTS) if len(found.leaves) > MAX_INPUTS else _costly_number(found)
            if cut is None and loop_nest_of(found) is None:
                cut = _operand_to_store(root, roots, fusible)
            if cut is None:
                cut = joined_sum(found, roots, fusible, joins) or partial_sum(found, roots, fusible)
                parts.update([] if cut is None else [cut])
        except CutAt as error:
            cut = _sum_of_padded(error.value, roots, fusible)
        if cut is not None and cut not in roots and cut.maker in fusible:
            roots[cut] = None
            waiting += [cut, root]
    # Once more: what was found first did not know of the roots that came later.
    terms = {root: Terms([root], roots, fusible) for root in sorted(roots, key=_position)}
    return {root: each for root, each in terms.items() if _fits(each)}


def _sum_of_padded(value: Value, roots: Collection[Value], fusible: Collection[Operation]) -> Value:
    """The sum that a padded value is a part of, where all others are padded, too: as large, and stored once. Such sums
    are gradients of several slices of a tensor. Any other value itself, and what is part of a root."""
    while _is_padded(value):
        readers = [reader for reader in readers_of(value) if reader in fusible]
        reader = readers[0] if len(readers) == 1 else None
        if not _is_sum(reader) or not all(_is_padded(in_memory(operand)) for operand in reader.operands):
            break
        if reader.results[0] in roots:
            break
        value = reader.results[0]
    return value


def _is_padded(value: Value) -> bool:
    """Whether the value, or each part of a sum, is padded; of no more parts than one program can ask for."""
    waiting, parts = [value], 0
    while waiting:
        maker = waiting.pop().maker
        if _is_sum(maker):
            waiting += map(in_memory, maker.operands)
        elif not isinstance(maker, Pad):
            return False
        else:
            parts += 1
        if parts + len(waiting) > MAX_GUARDS:
            return False
    return True


def _is_sum(operation: Operation | None) -> TypeGuard[Pointwise]:
    return isinstance(operation, Pointwise) and operation.name == "add"


def _costly_number(terms: Terms) -> Value | None:
    """A number that would be computed again for every vector, at some cost: the last one of those."""
    if terms.size == 1:
        return None
    costs: list[int] = []
    found = None
    for step in terms.steps:
        operands = () if isinstance(step, Leaf) else step.operands
        cost = sum(costs[operand] for operand in operands)
        if operands and step.value.size == 1:
            wide = 2 if step.value.dtype == DType.float64 else 1
            cost += wide * _COSTS.get(step.name, 1)
            if cost >= _MAX_COST and step.value not in terms.roots:
                found = step.value
        costs.append(cost if step.value.size == 1 else 0)
    return found


def _fits(terms: Terms) -> bool:
    """Whether one program can compute it."""
    return len(terms.leaves) <= MAX_INPUTS and len(terms.roots) <= MAX_RESULTS and loop_nest_of(terms) is not None


def _operand_to_store(root: Value, roots: Collection[Value], fusible: Collection[Operation]) -> Value | None:
    """An operand of ``root`` that a program could store first; None where all lie in memory."""
    assert root.maker is not None
    operands = map(in_memory, root.maker.operands)
    return next((each for each in operands if each.maker in fusible and each not in roots and each.size > 1), None)


def _position(value: Value) -> int:
    assert value.maker is not None
    return value.maker.position


class _Joiner:
    """Joins groups as long as no group then depends on itself."""

    def __init__(
        self,
        groups: Sequence[Group],
        alone: Collection[Group],
        roots: Sequence[Value],
        fusible: Collection[Operation],
    ) -> None:
        self._groups = list(groups)
        self._alone = alone
        self._fusible = fusible
        self._stored = set(roots)
        self._group_of = {root.maker: group for group in groups for root in group.roots}
        #: Where the first and the last root of each union are.
        self._spans: dict[Group, tuple[int, int]] = {}

    def join(self) -> list[Group]:
        """The remaining groups."""
        reading: dict[Value, list[Group]] = defaultdict(list)
        for group in list(self._groups):
            if group in self._alone:
                continue
            (root,) = group.roots
            joined = group
            near = [root, *(leaf.value for leaf in group.terms.leaves)]
            candidates = {each: None for value in near for each in reading[value]}
            for other in candidates:
                if other in self._groups and other.terms.size == group.terms.size:
                    union = self._union(other, group)
                    if union is not None:
                        joined = union
                        break
            for value in (*joined.roots, *(leaf.value for leaf in joined.terms.leaves)):
                reading[value].append(joined)
        return self._groups

    def _union(self, first: Group, second: Group) -> Group | None:
        roots = (*first.roots, *second.roots)
        if len(roots) > MAX_RESULTS or first.terms.extents != second.terms.extents:
            return None
        if first.terms.extents is not None and first.roots[0].dtype != second.roots[0].dtype:
            return None
        try:
            terms = Terms(roots, self._stored, self._fusible)
        except (NotOneProgram, CutAt):
            return None
        if not _fits(terms) or self._waits_for_itself(terms):
            return None
        union = Group(terms)
        for part in (first, second):
            self._spans.pop(part, None)
        positions = [_position(root) for root in roots]
        self._spans[union] = (min(positions), max(positions))
        self._groups[self._groups.index(first)] = union
        self._groups.remove(second)
        for root in roots:
            self._group_of[root.maker] = union
        return union

    def _waits_for_itself(self, terms: Terms) -> bool:
        own = {root.maker for root in terms.roots}
        first = self._first_behind(min(_position(root) for root in terms.roots))
        waiting = [leaf.value.maker for leaf in terms.leaves]
        seen: set[object] = set()
        while waiting:
            operation = waiting.pop()
            if operation is None or operation in seen:
                continue
            seen.add(operation)
            if operation in own:
                return True
            group = self._group_of.get(operation)
            if group is None:
                if operation.position >= first:
                    waiting += [operand.maker for operand in operation.operands]
            elif group not in seen:
                seen.add(group)
                seen.update(root.maker for root in group.roots)
                if own & {root.maker for root in group.roots}:
                    return True
                if max(_position(root) for root in group.roots) >= first:
                    waiting += [leaf.value.maker for leaf in group.terms.leaves]
        return False

    def _first_behind(self, position: int) -> int:
        """A position before which nothing waits for what stands at ``position`` or later: what reads one root of a
        union waits for all its roots."""
        while True:
            across = [first for first, last in self._spans.values() if first < position <= last]
            if not across:
                return position
            position = min(across)
