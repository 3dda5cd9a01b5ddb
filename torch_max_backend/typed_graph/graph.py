"""A graph as a list of operations, which passes change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

from torch_max_backend.typed_graph.operations import Call, Operation, Transfer, Unlisted, Value

_Made = TypeVar("_Made", bound=Operation)


class TypedGraph:
    """Operations in an order in which they can run, and what enters and leaves.

    A pass adds operations, says what replaces which value, and ``settle`` brings the rest in order.

    Attributes:
        arguments: the values that enter.
        operations: in their order.
        results: the values that leave.
    """

    def __init__(self, arguments: Sequence[Value], operations: Sequence[Operation], results: Sequence[Value]) -> None:
        self.arguments = tuple(arguments)
        self.operations = list(operations)
        self.results = tuple(results)
        self._number()

    def add(self, operation: _Made) -> _Made:
        """Appends an operation; ``settle`` puts it where its results are read."""
        self.operations.append(operation)
        return operation

    def settle(self, replaced: Mapping[Value, Value] | None = None, gone: Collection[Operation] = ()) -> None:
        """Puts values in the place of others, drops unused operations, and orders the rest.

        Args:
            replaced: old values, and the new ones.
            gone: calls that are dropped, now that their results are unused; other calls always stay.

        Raises:
            ValueError: operations wait for each other.
        """
        new = replaced or {}
        if new:
            for operation in self.operations:
                if any(operand in new for operand in operation.operands):
                    _set(operation, operands=tuple(new.get(operand, operand) for operand in operation.operands))
            self.results = tuple(new.get(result, result) for result in self.results)
        self._drop_unread(set(gone))
        self._sort()
        self._number()

    def _number(self) -> None:
        for operation in self.operations:
            for result in operation.results:
                result.readers = []
        for argument in self.arguments:
            argument.readers = []
        for position, operation in enumerate(self.operations):
            _set(operation, position=position)
            for operand in operation.operands:
                operand.readers.append(operation)

    def _drop_unread(self, gone: Collection[Operation]) -> None:
        uses = Counter(operand for operation in self.operations for operand in operation.operands)
        uses.update(self.results)
        kept: list[Operation] = []
        for operation in reversed(self.operations):
            lasting = isinstance(operation, (Call, Transfer, Unlisted)) and operation not in gone
            if lasting or any(uses[result] for result in operation.results):
                kept.append(operation)
            else:
                uses.subtract(operation.operands)
        self.operations = kept[::-1]

    def _sort(self) -> None:
        """Every operation behind what it reads; apart from that the order stays, new operations come when they are
        read."""
        maker = {result: number for number, each in enumerate(self.operations) for result in each.results}
        done = [False] * len(self.operations)
        entered = [False] * len(self.operations)
        order: list[Operation] = []
        for first in range(len(self.operations)):
            waiting = [first]
            while waiting:
                number = waiting[-1]
                operation = self.operations[number]
                if done[number]:
                    waiting.pop()
                    continue
                before = [maker[each] for each in operation.operands if each in maker and not done[maker[each]]]
                if before:
                    if entered[number]:
                        raise ValueError(f"operations wait for each other: {operation}")
                    entered[number] = True
                    waiting += before
                    continue
                done[number] = True
                order.append(operation)
                waiting.pop()
        self.operations = order


def _set(operation: Operation, **attributes: object) -> None:
    """Changes what the graph keeps of an operation, which is immutable to passes: others hold the operation itself."""
    for name, value in attributes.items():
        object.__setattr__(operation, name, value)
