"""Expressions of results in terms of values in memory, as one list of steps."""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from torch_max_backend.fusion import index_map
from torch_max_backend.fusion.index_map import Guard, IndexMap, ReadsOnlyPadding
from torch_max_backend.typed_graph.operations import (
    Broadcast,
    Concat,
    Constant,
    Operation,
    Pad,
    Pointwise,
    Reduction,
    Reshape,
    Slice,
    Transpose,
    Value,
    values_of,
)
from torch_max_backend.typed_graph.scalars import DTYPES, NUMBERS, is_elementwise

REDUCTIONS = {"add": 0, "mul": 1, "max": 2, "min": 3}
"""The numbers of the kinds of reductions in kernels/reduction/values.mojo."""
MOVES = (Broadcast, Transpose, Slice, Pad, Concat)
"""Operations whose results are read elsewhere, not computed."""
COMMUTATIVE = frozenset({"add", "mul"})
"""Operations whose operands are put in an order of their own."""
PAD, CONCAT = "pad", "concat"
"""Names of steps that choose between operands, and a number."""
MAX_ELEMENTS = 2**31 - 1
"""Offsets are 32 bits wide."""
MAX_STEPS, MAX_DEPTH = 320, 96
"""Expressions of more operations, or of more upon each other, are cut."""
MAX_GUARDS = 8
"""So are those that would check more often whether a place is inside a padded or concatenated value."""


class NotOneProgram(Exception):
    """The expressions cannot be one program."""


class CutAt(Exception):
    """An expression has to be cut: ``value`` has to lie in memory."""

    def __init__(self, value: Value) -> None:
        super().__init__(value)
        self.value = value


@dataclass(frozen=True)
class Extents:
    """How a reduction's operand is read, in memory order."""

    outer: int
    reduced: int
    inner: int


@dataclass(frozen=True)
class Leaf:
    """A value that is read from memory."""

    value: Value
    map: IndexMap


@dataclass(frozen=True)
class Step:
    """One operation; operands are the numbers of steps before.

    Attributes:
        name: the function's, "constant", "pad" or "concat".
        operands: by their numbers.
        value: what is computed.
        number: of a constant, or around a padded operand.
        inside: of a padded operand and of concatenated ones: what holds where the operand is read.
    """

    name: str
    operands: tuple[int, ...]
    value: Value
    number: np.generic | None = None
    inside: tuple[tuple[Guard, ...], ...] = ()


def is_fusible(operation: Operation) -> bool:
    """Whether a program can compute the operation's result."""
    if not isinstance(operation, (Pointwise, *MOVES)):
        return False
    (result,) = operation.results
    if any(value.shape is None for value in (result, *operation.operands)):
        return False
    if not 0 < max(value.size for value in (result, *operation.operands)) <= MAX_ELEMENTS or not result.size:
        return False
    if isinstance(operation, Concat) and sum(operand.size > 0 for operand in operation.operands) > MAX_GUARDS:
        return False
    if isinstance(operation, Pad) and not operation.operands[0].size:
        return False
    if isinstance(operation, MOVES):
        return result.dtype in DTYPES
    if any(value.device != result.device for value in operation.operands):
        return False
    return is_elementwise(operation.name, [value.dtype for value in operation.operands], result.dtype)


def is_reduction(operation: Operation | None) -> bool:
    """Whether a program can compute the operation, which reduces what other programs could compute."""
    if not isinstance(operation, Reduction):
        return False
    (result,), (operand,) = operation.results, operation.operands
    return operand.shape is not None and 0 < operand.size <= MAX_ELEMENTS and result.dtype in NUMBERS


def extents_of(value: Value) -> Extents | None:
    """The extents of the operand that ``value`` is reduced from; None if it is no result of a reduction."""
    maker = value.maker
    if not isinstance(maker, Reduction) or not is_reduction(maker):
        return None
    shape, axis = maker.operands[0].shape, maker.axis
    assert shape is not None
    return Extents(math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :]))


def is_view(operation: Operation | None) -> bool:
    """Whether the operation hands on the memory that it gets."""
    return (
        isinstance(operation, Reshape)
        and operation.results[0].shape is not None
        and operation.operands[0].shape is not None
    )


def in_memory(value: Value) -> Value:
    """The value whose memory this one is."""
    while value.maker is not None and is_view(value.maker):
        value = value.maker.operands[0]
    return value


def readers_of(value: Value) -> Iterable[Operation]:
    """The operations that read the value or a view of it."""
    for reader in value.readers:
        if is_view(reader):
            yield from readers_of(reader.results[0])
        else:
            yield reader


def moved_map(operation: Operation) -> IndexMap | None:
    """Where a broadcast, a transpose or a slice that ``is_fusible`` reads its operand; None of any other operation."""
    if not isinstance(operation, (Broadcast, Transpose, Slice)):
        return None
    shape, result = operation.operands[0].shape, operation.results[0].shape
    assert shape is not None and result is not None
    if isinstance(operation, Broadcast):
        return index_map.broadcast(shape, result)
    if isinstance(operation, Transpose):
        return index_map.permutation(shape, operation.axes)
    starts = [start % extent for start, extent in zip(operation.starts, shape, strict=True)]
    return index_map.part(shape, starts, operation.steps, result)


def _operand(value: Value) -> Value:
    """The operand that a reduction reads for ``value``."""
    assert value.maker is not None
    return value.maker.operands[0]


class Terms:
    """The terms of a program for ``roots``: its leaves, its steps, and the step that each root is, or is reduced from.

    Args:
        roots: results of one size, each counted in its own memory order; or results of reductions whose operands are
            read alike, and whose elements are then what is counted.
        stored: values that lie in memory: they are read there, but for the roots.
        fusible: the operations that a program can compute.
    """

    def __init__(self, roots: Sequence[Value], stored: Collection[Value], fusible: Collection[Operation]) -> None:
        self.roots = tuple(roots)
        self.extents = extents_of(roots[0])
        self.size = roots[0].size if self.extents is None else _operand(roots[0]).size
        self.leaves: list[Leaf] = []
        self.guards: list[Guard] = []
        self.steps: list[Step | Leaf] = []
        self.identity = index_map.identity(self.size)
        self._stored = stored
        self.fusible = fusible
        self._numbers: dict[tuple[Value, IndexMap], int] = {}
        self._kinds: dict[Value, tuple[int, int]] = {}
        self._depth = 0
        if self.extents is None:
            self.stores = [self._made(root, self.identity) for root in roots]
        else:
            self.stores = [self._term(_operand(root), self.identity) for root in roots]

    def _add(self, key: tuple[Value, IndexMap], step: Step | Leaf) -> int:
        if key not in self._numbers:
            inside = isinstance(step, Step) and step.operands and key[0] not in self.roots
            if inside and len(self.steps) >= MAX_STEPS:
                raise CutAt(self._longest() or key[0])
            self._numbers[key] = len(self.steps)
            self.steps.append(step)
            if isinstance(step, Leaf):
                self.leaves.append(step)
        return self._numbers[key]

    def _ask(self, value: Value, places: Sequence[IndexMap]) -> None:
        """Notes what ``value`` asks for where it reads its operands at ``places``."""
        new = {guard: None for place in places for guard in place.guards if guard not in self.guards}
        if len(self.guards) + len(new) > MAX_GUARDS and value not in self.roots:
            raise CutAt(value)
        self.guards += new

    def _term(self, value: Value, at: IndexMap) -> int:
        """The step that holds ``value`` at ``at``'s offsets."""
        value = in_memory(value)
        if (value, at) in self._numbers:
            return self._numbers[value, at]
        if value in self.roots:
            if at != self.identity or self.extents is not None:
                raise NotOneProgram
            return self._made(value, at)
        maker = value.maker
        values = values_of(value) if value.size == 1 and value.dtype in DTYPES else None
        if values is not None:
            return self._add((value, at), Step("constant", (), value, values[0]))
        if value in self._stored or maker not in self.fusible:
            return self._add((value, at), Leaf(value, at))
        return self._made(value, at)

    def _made(self, value: Value, at: IndexMap) -> int:
        """The step that computes ``value`` at ``at``'s offsets."""
        if (value, at) in self._numbers:
            return self._numbers[value, at]
        if self._depth >= MAX_DEPTH and value not in self.roots:
            raise CutAt(value)
        self._depth += 1
        number = self._computed(value, at)
        self._depth -= 1
        return number

    def _computed(self, value: Value, at: IndexMap) -> int:
        maker = value.maker
        assert maker is not None and value.shape is not None
        if isinstance(maker, Concat):
            return self._concatenated(value, maker, at)
        if isinstance(maker, MOVES):
            return self._moved(value, maker, at)
        operands = maker.operands
        if isinstance(maker, Pointwise) and maker.name in COMMUTATIVE:
            operands = tuple(sorted(operands, key=lambda each: (self._kind(each), each.shape != value.shape)))
        numbers = []
        for operand in operands:
            assert operand.shape is not None
            if operand.shape == value.shape:
                numbers.append(self._term(operand, at))
                continue
            own = index_map.broadcast(operand.shape, value.shape)
            numbers.append(self._term(operand, self._then(at, own, value)))
        return self._add((value, at), Step(maker.name, tuple(numbers), value))

    def _kind(self, value: Value, depth: int = MAX_DEPTH) -> tuple[int, int]:
        """A key of an expression, whatever its sizes: its depth in operations, negative, and a checksum of them.
        Operands that are sorted by it, the deepest first, give one program for what models write in either order.
        """
        value = in_memory(value)
        if value in self._kinds:
            return self._kinds[value]
        maker = value.maker
        height, words = 0, f"{value.dtype.name} {isinstance(maker, Constant)}"
        if depth and maker is not None and maker in self.fusible and value not in self._stored:
            below = [self._kind(operand, depth - 1) for operand in maker.operands]
            if isinstance(maker, Pointwise) and maker.name in COMMUTATIVE:
                below.sort()
            height = min((height for height, _ in below), default=0) - 1
            words += f" {maker.name if isinstance(maker, Pointwise) else type(maker).__name__} {below}"
        found = height, zlib.crc32(words.encode())
        self._kinds[value] = found
        return found

    def _moved(self, value: Value, maker: Operation, at: IndexMap) -> int:
        """The step that holds what one operand has elsewhere, and a number where it has nothing."""
        source = maker.operands[0]
        assert value.shape is not None and source.shape is not None
        if not isinstance(maker, Pad):
            own = moved_map(maker)
            assert own is not None
            number = self._term(source, self._then(at, own, value))
            self._numbers[value, at] = number
            return number
        try:
            place = self._then(at, index_map.padding(source.shape, maker.paddings[::2], value.shape), value)
        except ReadsOnlyPadding:
            return self._add((value, at), Step("constant", (), value, maker.filler))
        self._ask(value, [place])
        step = Step(PAD, (self._term(source, place),), value, maker.filler, (place.guards,))
        return self._add((value, at), step)

    def _concatenated(self, value: Value, maker: Concat, at: IndexMap) -> int:
        """The step that holds one of the operands, whichever lies there."""
        assert value.shape is not None
        before = [0] * len(value.shape)
        places: list[tuple[Value, IndexMap]] = []
        for operand in maker.operands:
            assert operand.shape is not None
            if operand.size:
                own = index_map.padding(operand.shape, before, value.shape)
                with contextlib.suppress(ReadsOnlyPadding):
                    places.append((operand, self._then(at, own, value)))
            before[maker.axis] += operand.shape[maker.axis]
        self._ask(value, [place for _, place in places])
        numbers = tuple(self._term(*each) for each in places)
        if len(numbers) == 1:
            self._numbers[value, at] = numbers[0]
            return numbers[0]
        # What is in none of the others is in the last one.
        inside = tuple(place.guards for _, place in places[:-1])
        return self._add((value, at), Step(CONCAT, numbers, value, inside=inside))

    def _longest(self) -> Value | None:
        """The value of most steps among those that are as large as the result."""
        below: list[frozenset[int]] = []
        best, count = None, MAX_STEPS // 4
        for number, step in enumerate(self.steps):
            operands = () if isinstance(step, Leaf) else step.operands
            below.append(frozenset({number}).union(*(below[operand] for operand in operands)))
            whole = operands and step.value.size == self.size and step.value not in self.roots
            if whole and len(below[-1]) > count:
                best, count = step.value, len(below[-1])
        return best

    def best_cut(self, most: int) -> Value | None:
        """The value of most leaves, at most ``most``, that would make the expression smaller if it lay in memory."""
        below: list[frozenset[int]] = []
        best, count = None, 1
        for number, step in enumerate(self.steps):
            if isinstance(step, Leaf):
                below.append(frozenset({number}))
                continue
            below.append(frozenset().union(*(below[operand] for operand in step.operands)))
            if count < len(below[-1]) <= most and step.value not in self.roots:
                best, count = step.value, len(below[-1])
        return best

    @staticmethod
    def _then(at: IndexMap, own: IndexMap, value: Value) -> IndexMap:
        found = at.then(own)
        if found is None:
            raise CutAt(value)
        return found
