"""Reads a MAX graph as a list of library calls."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from max.graph import DeviceRef, Graph, TensorValue

from torch_max_backend.dtypes import MAX_TO_TORCH
from torch_max_backend.fusion.terms import BROADCAST, RESHAPE, TRANSPOSE, axes_of
from torch_max_backend.fusion.values import Operation, Value, read
from torch_max_backend.launches.memory import Span, planned
from torch_max_backend.max_compat import handle_of


class Kind(Enum):
    """Whose memory a place lies in."""

    ARGUMENT = "argument"
    RESULT = "result"
    WORKSPACE = "workspace"
    CONSTANT = "constant"


@dataclass(frozen=True)
class Place:
    """Where a value begins.

    Attributes:
        kind: whose memory it is.
        number: of the graph's argument, its result or its constant; 0 for the workspace.
        offset: bytes from the beginning, which only a workspace's places have.
    """

    kind: Kind
    number: int
    offset: int = 0


@dataclass(frozen=True)
class Constant:
    """Known values, of any dtype.

    Attributes:
        content: their bytes.
        on_host: whether they are read by who launches, not by the kernel.
    """

    content: bytes
    on_host: bool


@dataclass(frozen=True)
class Launch:
    """One call.

    Attributes:
        function: the symbol of the library's function.
        words: what it gets, as ``kernels/library.mojo`` says; an address is a place.
    """

    function: str
    words: tuple[int | Place, ...]


@dataclass(frozen=True)
class LaunchList:
    """A graph as calls.

    Attributes:
        launches: in their order.
        arguments: how many the graph has.
        results: where each result is made; its own place, or another one that it has to be copied from.
        constants: what launches read beside arguments and each other's results.
        workspace: bytes for the values in between.
        moved: numbers of arguments that lie on the host and are wanted on the device.
    """

    launches: tuple[Launch, ...]
    arguments: int
    results: tuple[Place, ...]
    constants: tuple[Constant, ...]
    workspace: int
    moved: frozenset[int] = frozenset()


class NotListed(Exception):
    """An operation of the graph is no library call."""


def launch_list(graph: Graph, results: Sequence[TensorValue], device: DeviceRef) -> LaunchList:
    """The calls that compute ``results``.

    Args:
        graph: whose elementwise operations are programs already (``fusion.fuse``).
        results: that the graph returns.
        device: that it computes on.

    Raises:
        NotListed: the graph has an operation that only MAX can run, or a size that is not known.
    """
    operations, values = read(graph)
    reader = _Reader(device)
    for number, value in enumerate(value for value in values.values() if value.maker is None):
        reader.places[value] = Place(Kind.ARGUMENT, number)
    for operation in operations:
        reader.read(operation)
    return reader.finish([values[handle_of(result)] for result in results])


TRANSFER = "rmo.mo.transfer"
_FUNCTION = re.compile(r'function = "(\w+)"')
_INPUTS = re.compile(r"inputs = (\d+)")
#: What computes nothing of its own.
_SILENT = frozenset({"mo.chain.create", "mo.constant", RESHAPE})


class _Reader:
    """Collects launches, then decides where values lie."""

    def __init__(self, device: DeviceRef) -> None:
        self.places: dict[Value, Place] = {}
        self._device = device
        self._constants: dict[Constant, int] = {}
        self._calls: list[tuple[str, list[int | Value]]] = []
        self._made: dict[Value, int] = {}
        self._moved: set[int] = set()

    def read(self, operation: Operation) -> None:
        """Takes one operation in."""
        if operation.name in _SILENT or _moves_nothing(operation):
            return
        if operation.name == TRANSFER:
            source = self.places.get(operation.operands[0])
            if source is None or source.kind is not Kind.ARGUMENT or operation.results[0].device != self._device:
                raise NotListed(operation.name)
            self._moved.add(source.number)
            self.places[operation.results[0]] = source
            return
        match = _FUNCTION.search(str(operation.handle.attributes["parameters"])) if _is_call(operation) else None
        if match is None:
            raise NotListed(operation.name)
        for value in (*operation.results, *operation.operands):
            if value.shape is None:
                raise NotListed(f"{operation.name} of a size that is not known")
        for value in operation.results:
            self._made[value] = len(self._calls)
        symbol = str(operation.handle.attributes["symbol"]).strip('"')
        self._calls.append((match[1], _words(symbol, operation)))

    def finish(self, results: Sequence[Value]) -> LaunchList:
        """The list of what was read."""
        homes = [self._home(value) for value in results]
        taken: dict[Value, int] = {}
        for number, home in enumerate(homes):
            if home in self._made:
                taken.setdefault(home, number)
        for value, number in taken.items():
            self.places[value] = Place(Kind.RESULT, number)
        workspace = self._place_the_rest()
        launches = tuple(
            Launch(function, tuple(self._place(word) if isinstance(word, Value) else word for word in words))
            for function, words in self._calls
        )
        arguments = len({place.number for place in self.places.values() if place.kind is Kind.ARGUMENT})
        made = tuple(self._place(home) for home in homes)
        return LaunchList(launches, arguments, made, tuple(self._constants), workspace, frozenset(self._moved))

    def _place_the_rest(self) -> int:
        """Places what lives between two launches in the workspace; returns its size."""
        last: dict[Value, int] = {}
        for number, (_, words) in enumerate(self._calls):
            for word in words:
                if isinstance(word, Value):
                    last[self._home(word)] = number
        inner = [value for value in self._made if value not in self.places]
        # What nobody reads is written all the same.
        spans = [Span(_bytes(value), self._made[value], last.get(value, self._made[value])) for value in inner]
        offsets, size = planned(spans)
        for value, offset in zip(inner, offsets, strict=True):
            self.places[value] = Place(Kind.WORKSPACE, 0, offset)
        return size

    def _place(self, value: Value) -> Place:
        home = self._home(value)
        if home not in self.places:
            self.places[home] = self._constant(home)
        return self.places[home]

    def _home(self, value: Value) -> Value:
        """The value whose memory this one is."""
        while value.maker is not None and (value.maker.name == RESHAPE or _moves_nothing(value.maker)):
            value = value.maker.operands[0]
        return value

    def _constant(self, value: Value) -> Place:
        content = value.maker.content() if value.maker is not None else None
        if content is None:
            raise NotListed(f"a constant of {value.dtype}")
        constant = Constant(content, not value.device.is_gpu() and self._device.is_gpu())
        return Place(Kind.CONSTANT, self._constants.setdefault(constant, len(self._constants)))


def _is_call(operation: Operation) -> bool:
    return operation.name == "mo.custom" and "parameters" in operation.handle.attributes


def _moves_nothing(operation: Operation) -> bool:
    """Whether the result's elements stand in memory as the operand's do."""
    if operation.name not in (BROADCAST, TRANSPOSE) or len(operation.results) != 1:
        return False
    source, result = operation.operands[0], operation.results[0]
    if source.shape is None or result.shape is None or source.device != result.device:
        return False
    if operation.name == BROADCAST:
        return source.size == result.size
    axes = axes_of(operation)
    if axes is None:
        return False
    moved = [axis for axis in axes if source.shape[axis] != 1]
    return moved == sorted(moved)


def _bytes(value: Value) -> int:
    return value.size * MAX_TO_TORCH[value.dtype].itemsize


def _words(symbol: str, operation: Operation) -> list[int | Value]:
    """What the thin op ``symbol`` hands over, see kernels/FAMILY/ops.mojo."""
    make = _whole
    if symbol == "pointwise_many":
        make = _pairs
    elif symbol == "concatenate":
        make = _parts
    elif symbol.startswith("pointwise_"):
        make = _of_program
    return make(operation)


def _shaped(value: Value) -> list[int | Value]:
    return [value, *(value.shape or ())]


def _whole(operation: Operation) -> list[int | Value]:
    """Results, then operands, each with its extents. What a function does not take stands behind what it takes."""
    return [word for value in (*operation.results, *operation.operands) for word in _shaped(value)]


def _of_program(operation: Operation) -> list[int | Value]:
    """The geometry with its extent, and the addresses of results and inputs."""
    geometry, *inputs = operation.operands
    wanted = _INPUTS.search(str(operation.handle.attributes["parameters"]))
    assert wanted is not None
    return [*_shaped(geometry), *operation.results, *inputs[: int(wanted[1])]]


def _pairs(operation: Operation) -> list[int | Value]:
    """How many pairs; for each the result, the input and its size."""
    words: list[int | Value] = [len(operation.results)]
    for result, source in zip(operation.results, operation.operands, strict=True):
        words += [result, source, source.size]
    return words


def _parts(operation: Operation) -> list[int | Value]:
    """The geometry with its extent, the result, and what it is put together from."""
    geometry, *parts = operation.operands
    return [*_shaped(geometry), *operation.results, *parts]
