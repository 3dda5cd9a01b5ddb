"""Facts about a MAX graph's values that the graph itself does not hold, noted when lowerings make them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from max.graph import Graph, TensorValue

from torch_max_backend.max_compat import handle_of, last_operation


@dataclass(frozen=True)
class Origin:
    """An FX node.

    Attributes:
        node: its name.
        op: the aten op that the user's code called, of which a decomposition may have made the node.
    """

    node: str = ""
    op: str = ""


NOWHERE = Origin()


class Notes:
    """The notes of one graph.

    Attributes:
        known: the values of constants, and of broadcasts and views of constants; halves as float32.
        derived: those of ``known`` that are views of a constant, not one of their own.
        reshaped: by what a reshape made, the tensor before the first reshape.
        spread: by what a broadcast of the same rank made, what was broadcast.
        calls: by the first result of a custom op, the call of a library function (``mojo_ops.functions.NotedCall``).
    """

    def __init__(self) -> None:
        self.known: dict[Any, np.ndarray] = {}
        self.derived: set[Any] = set()
        self.reshaped: dict[Any, TensorValue] = {}
        self.spread: dict[Any, TensorValue] = {}
        self.calls: dict[Any, Any] = {}
        self._begun: dict[Any, Origin] = {}

    def begin(self, origin: Origin) -> None:
        """Attributes operations that are added from now on to that FX node."""
        self._begun[last_operation(Graph.current)] = origin

    def origins(self, operations: Iterable[Any]) -> Iterator[Origin]:
        """The node that each of the graph's operations was made for."""
        node = self._begun.get(None, NOWHERE)
        for operation in operations:
            yield node
            node = self._begun.get(operation, node)


_notes: WeakKeyDictionary[Graph, Notes] = WeakKeyDictionary()


def notes_of(graph: Graph) -> Notes:
    """The notes of ``graph``, which may still be empty."""
    found = _notes.get(graph)
    if found is None:
        found = _notes[graph] = Notes()
    return found


def notes() -> Notes:
    """The notes of the graph that is being built."""
    return notes_of(Graph.current)


def key_of(value: TensorValue) -> Any:
    """The key of a value in notes; all Python objects that stand for the value have the same."""
    return handle_of(value)
