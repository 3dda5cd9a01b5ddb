"""Reads a MAX graph as a list of library calls."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TypeAlias

from max.graph import DeviceRef, Graph, TensorValue

from torch_max_backend.fusion.products import STRIDED
from torch_max_backend.fusion.rewrite import BATCH, CONCATENATE, PROGRAM
from torch_max_backend.fusion.terms import BROADCAST, RESHAPE, TRANSPOSE, axes_of
from torch_max_backend.fusion.values import Operation, Value, read
from torch_max_backend.launches.memory import Span, planned
from torch_max_backend.launches.order import early
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
        offset: bytes from the beginning.
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
        updates: results that may be written over arguments whose new values they are, by their numbers.
    """

    launches: tuple[Launch, ...]
    arguments: int
    results: tuple[Place, ...]
    constants: tuple[Constant, ...]
    workspace: int
    moved: frozenset[int] = frozenset()
    updates: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """What lies in a value from some byte on."""

    value: Value
    offset: int


class NotListed(Exception):
    """Operations of the graph are no library calls: ``refused`` has the reasons."""

    def __init__(self, refused: Mapping[Operation, str]) -> None:
        super().__init__("; ".join(refused.values()))
        self.refused = dict(refused)


def launch_list(
    graph: Graph, results: Sequence[TensorValue], device: DeviceRef, updates: Mapping[int, int] | None = None
) -> LaunchList:
    """The calls that compute ``results``.

    Args:
        graph: whose elementwise operations are programs already (``fusion.fuse``).
        results: that the graph returns.
        device: that it computes on.
        updates: results that are new values of arguments and lie in memory as these do, by their numbers.

    Raises:
        NotListed: the graph has operations without a library function; all of them are named.
    """
    operations, values = read(graph)
    reader = _Reader(device)
    for number, value in enumerate(value for value in values.values() if value.maker is None):
        reader.places[value] = Place(Kind.ARGUMENT, number)
    refused = dict[Operation, str]()
    for operation in operations:
        try:
            reader.read(operation)
        except NotListed as error:
            refused |= error.refused
    if refused:
        raise NotListed(refused)
    return reader.finish([values[handle_of(result)] for result in results], updates or {})


Word: TypeAlias = int | Value | Part
"""Of a call: a number, or an address."""
TRANSFER = "rmo.mo.transfer"
_FUNCTION = re.compile(r'function = "(\w+)"')
#: What computes nothing of its own.
_SILENT = frozenset({"mo.chain.create", "mo.constant", RESHAPE})


class _Reader:
    """Collects launches, then decides where values lie."""

    def __init__(self, device: DeviceRef) -> None:
        self.places: dict[Value, Place] = {}
        self._device = device
        self._constants: dict[Constant, int] = {}
        self._calls: list[tuple[str, list[Word]]] = []
        self._made: dict[Value, int] = {}
        self._moved: set[int] = set()
        self._in_order: dict[Value, set[int]] = {}

    def read(self, operation: Operation) -> None:
        """Takes one operation in."""
        if operation.name in _SILENT or _moves_nothing(operation) or _makes_nothing(operation):
            return
        if operation.name == TRANSFER:
            source = self.places.get(operation.operands[0])
            if source is None or source.kind is not Kind.ARGUMENT or operation.results[0].device != self._device:
                raise NotListed({operation: "a copy between devices of what is computed in the graph"})
            self._moved.add(source.number)
            self.places[operation.results[0]] = source
            return
        function = function_of(operation)
        if function is None:
            raise NotListed({operation: f"{_described(operation)} has no library function"})
        for value in (*operation.results, *operation.operands):
            if value.shape is None:
                raise NotListed({operation: f"{operation.name} has a size that is not known"})
        for value in operation.results:
            self._made[value] = len(self._calls)
        symbol = str(operation.handle.attributes["symbol"]).strip('"')
        self._in_order.update(_in_order(symbol, operation))
        self._calls.append((function, _words(symbol, operation)))

    def finish(self, results: Sequence[Value], updates: Mapping[int, int]) -> LaunchList:
        """The list of what was read."""
        homes = [home_of(value) for value in results]
        taken: dict[Value, int] = {}
        for number, home in enumerate(homes):
            if home in self._made:
                taken.setdefault(home, number)
        self._reorder(taken, {homes[result] for result in updates})
        arguments = {place.number: value for value, place in self.places.items() if value.maker is None}
        uses = self._uses(arguments.values())
        in_place = {
            result: number
            for result, number in updates.items()
            if taken.get(homes[result]) == result
            and arguments[number] not in homes
            and number not in self._moved
            and self._may_replace(homes[result], arguments[number], uses)
        }
        for value, number in taken.items():
            self.places[value] = Place(Kind.RESULT, number)
        workspace = self._place_the_rest()
        launches = tuple(
            Launch(function, tuple(word if isinstance(word, int) else self._found(word) for word in words))
            for function, words in self._calls
        )
        made = tuple(self._place(home) for home in homes)
        return LaunchList(
            launches, len(arguments), made, tuple(self._constants), workspace, frozenset(self._moved), in_place
        )  # fmt: skip

    def _reorder(self, results: Collection[Value], updates: Collection[Value]) -> None:
        """Puts launches that free memory as early as they can run."""
        reads = [{home_of(_value_of(word)) for word in words if not isinstance(word, int)} for _, words in self._calls]
        makes: list[list[Value]] = [[] for _ in self._calls]
        for value, number in self._made.items():
            makes[number].append(value)
            reads[number].discard(value)
        sizes = {value: value.bytes for value in self._made if value not in results}
        # Moved forward, they might no longer stand behind all that reads the arguments that they replace.
        fixed = {self._made[value] for value in updates if value in self._made}
        order = early(reads, makes, sizes, fixed)
        places = {number: place for place, number in enumerate(order)}
        self._calls = [self._calls[number] for number in order]
        self._made = {value: places[number] for value, number in self._made.items()}

    def _uses(self, values: Iterable[Value]) -> dict[Value, list[tuple[int, int]]]:
        """Of each value the calls that read it, and which word of the call that is."""
        found: dict[Value, list[tuple[int, int]]] = {value: [] for value in values}
        for number, (_, words) in enumerate(self._calls):
            for at, word in enumerate(words):
                home = None if isinstance(word, int) else home_of(_value_of(word))
                if home in found:
                    found[home].append((number, at))
        return found

    def _may_replace(self, value: Value, argument: Value, uses: Mapping[Value, Sequence[tuple[int, int]]]) -> bool:
        """Whether ``value`` may be written over ``argument``: nothing reads the argument later, and who makes the value
        reads an element of it for the element at its place alone."""
        made, allowed = self._made[value], self._in_order.get(value, ())
        return all(number < made or (number == made and at in allowed) for number, at in uses[argument])

    def _place_the_rest(self) -> int:
        """Places what lives between two launches in the workspace; returns its size."""
        last: dict[Value, int] = {}
        for number, (_, words) in enumerate(self._calls):
            for word in words:
                if not isinstance(word, int):
                    last[home_of(_value_of(word))] = number
        inner = [value for value in self._made if value not in self.places]
        # What nobody reads is written all the same.
        spans = [Span(value.bytes, self._made[value], last.get(value, self._made[value])) for value in inner]
        offsets, size = planned(spans)
        for value, offset in zip(inner, offsets, strict=True):
            self.places[value] = Place(Kind.WORKSPACE, 0, offset)
        return size

    def _found(self, word: Value | Part) -> Place:
        place = self._place(_value_of(word))
        return replace(place, offset=place.offset + word.offset) if isinstance(word, Part) else place

    def _place(self, value: Value) -> Place:
        home = home_of(value)
        if home not in self.places:
            self.places[home] = self._constant(home)
        return self.places[home]

    def _constant(self, value: Value) -> Place:
        content = value.maker.content() if value.maker is not None else None
        if not _may_have_elements(value):
            content = b""
        if content is None:
            assert value.maker is not None
            raise NotListed({value.maker: f"a constant of {value.dtype}"})
        constant = Constant(content, not value.device.is_gpu() and self._device.is_gpu())
        return Place(Kind.CONSTANT, self._constants.setdefault(constant, len(self._constants)))


def home_of(value: Value) -> Value:
    """The value whose memory this one is."""
    while value.maker is not None and (value.maker.name == RESHAPE or _moves_nothing(value.maker)):
        value = value.maker.operands[0]
    return value


def _described(operation: Operation) -> str:
    """The operation with its operands' dtypes and shapes."""
    operands = (
        f"{value.dtype.name}[{', '.join(map(str, value.shape)) if value.shape is not None else '...'}]"
        for value in operation.operands
    )
    return f"{operation.name}({', '.join(operands)})"


def function_of(operation: Operation) -> str | None:
    """The symbol of the library's function that the operation calls; None for what is no call."""
    match = _FUNCTION.search(str(operation.handle.attributes["parameters"])) if _is_call(operation) else None
    return None if match is None else match[1]


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


def _makes_nothing(operation: Operation) -> bool:
    """Whether the operation's results have no elements."""
    return not _is_call(operation) and bool(operation.results) and not any(map(_may_have_elements, operation.results))


def _may_have_elements(value: Value) -> bool:
    return value.shape is None or value.size > 0


def _in_order(symbol: str, operation: Operation) -> dict[Value, set[int]]:
    """For each result of a call the words that are inputs read element for element; see ``_words``."""
    if symbol == "batch_norm_statistics":
        # Of the running statistics, whose new values are the last results.
        words = _whole(operation)
        pairs = zip(operation.results[2:], operation.operands[1:3], strict=True)
        return {result: {at for at, word in enumerate(words) if word is old} for result, old in pairs}
    if symbol not in (BATCH, PROGRAM):
        return {}
    ordered = [each == "1" for each in _attribute(operation, "ordered").split()]
    tensors = int(_attribute(operation, "tensors")) if symbol == BATCH else 1
    results, inputs = len(operation.results) // tensors, len(ordered) // tensors
    found: dict[Value, set[int]] = {}
    for number in range(tensors):
        # The geometry, or the number of tensors and each one's size, come first.
        first = results + (2 if symbol == PROGRAM else 2 + number * (1 + results + inputs))
        own = {first + k for k in range(inputs) if ordered[number * inputs + k]}
        if symbol == PROGRAM:
            # What stands behind the inputs is not read.
            own.update(range(first + inputs, 2 + results + len(operation.operands) - 1))
        found.update(dict.fromkeys(operation.results[number * results : (number + 1) * results], own))
    return found


def _value_of(word: Value | Part) -> Value:
    return word.value if isinstance(word, Part) else word


def _words(symbol: str, operation: Operation) -> list[Word]:
    """What the thin op ``symbol`` hands over, see kernels/FAMILY/ops.mojo."""
    make = _whole
    if symbol in (CONCATENATE, PROGRAM, STRIDED):
        make = _behind_geometry
    elif symbol == BATCH:
        make = _batch
    return make(operation)


def _shaped(value: Value) -> list[Word]:
    return [value, *(value.shape or ())]


def _whole(operation: Operation) -> list[Word]:
    """Results, then operands, each with its extents. What a function does not take stands behind what it takes."""
    return [word for value in (*operation.results, *operation.operands) for word in _shaped(value)]


def _batch(operation: Operation) -> list[Word]:
    """How many tensors; for each its size, its results and its inputs."""
    tensors = int(_attribute(operation, "tensors"))
    starts, sizes = ([int(each) for each in _attribute(operation, name).split()] for name in ("starts", "sizes"))
    results, inputs = len(operation.results) // tensors, len(operation.operands) // tensors
    words: list[Word] = [tensors]
    for number in range(tensors):
        own = operation.results[number * results : (number + 1) * results]
        words += [sizes[number], *own]
        for at in range(number * inputs, (number + 1) * inputs):
            value = operation.operands[at]
            words.append(Part(value, starts[at] * value.dtype.size_in_bytes))
    return words


def _attribute(operation: Operation, name: str) -> str:
    """A parameter of the call."""
    found = re.search(rf'\b{name} = "?([\d ]*)', str(operation.handle.attributes["parameters"]))
    assert found is not None
    return found[1]


def _behind_geometry(operation: Operation) -> list[Word]:
    """The geometry with its extent, and the addresses of results and inputs."""
    geometry, *inputs = operation.operands
    return [*_shaped(geometry), *operation.results, *inputs]
