"""A typed graph as a list of library calls over places in memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from max.graph import DeviceRef

from torch_max_backend.launch_list.memory import (
    TORCH_ALIGNMENT,
    Content,
    Lease,
    Span,
    Spare,
    fullest,
    planned,
    rounded_up,
)
from torch_max_backend.launch_list.schedule import launch_order
from torch_max_backend.mojo_ops.functions import Facts
from torch_max_backend.typed_graph import TypedGraph
from torch_max_backend.typed_graph.operations import (
    Broadcast,
    Call,
    Constant,
    Operand,
    Operation,
    Reshape,
    Transfer,
    Transpose,
    Value,
    Word,
)

MIN_REUSED = 2**16
"""The fewest bytes of an argument whose memory is used again: each call has to check who else may see it."""


class Kind(Enum):
    """The owner of the memory that a place lies in."""

    ARGUMENT = "argument"
    RESULT = "result"
    WORKSPACE = "workspace"
    CONSTANT = "constant"
    REUSED = "reused"


@dataclass(frozen=True)
class Place:
    """The place where a value begins.

    Attributes:
        kind: whose memory it is; ``REUSED`` is an argument's, for values that replace it.
        number: of the graph's argument, its result or its constant; 0 for the workspace.
        offset: bytes from the beginning.
    """

    kind: Kind
    number: int
    offset: int = 0


@dataclass(frozen=True)
class ConstantBytes:
    """Known values, of any dtype.

    Attributes:
        content: their bytes.
    """

    content: bytes


@dataclass(frozen=True)
class Indexing:
    """The facts that an error reports about a launch that met an index outside its dimension.

    Attributes:
        line: of the user's code, "" where it is not known.
        facts: of the call.
    """

    line: str = ""
    facts: Facts = field(default_factory=Facts)


@dataclass(frozen=True)
class Launch:
    """One call.

    Attributes:
        function: the symbol of the library's function.
        words: what it gets, as ``kernels/common/library.mojo`` says; an address is a place.
        ops: the aten ops that it computes, joined by underscores.
        indexing: of one that reports an index outside its dimension.
    """

    function: str
    words: tuple[int | Place, ...]
    ops: str = ""
    indexing: Indexing | None = None


@dataclass(frozen=True)
class LaunchList:
    """A graph as calls.

    Attributes:
        launches: in their order.
        arguments: how many the graph has.
        results: where each result is made; its own place, or another one that it has to be copied from.
        constants: what launches read beside arguments and each other's results.
        workspace: bytes for the values in between.
        moved: arguments, by number, that are numbers of the host and are wanted on the device.
        updates: results that may be written over arguments whose new values they are, by their numbers.
        reused: arguments that are written over when they are read no more, with the bytes that are needed there; any
            other memory does for it, too.
        fullest: the launch at which the values in the workspace have the most bytes; -1 without any.
        leases: the values in the workspace.
    """

    launches: tuple[Launch, ...]
    arguments: int
    results: tuple[Place, ...]
    constants: tuple[ConstantBytes, ...]
    workspace: int
    moved: frozenset[int] = frozenset()
    updates: Mapping[int, int] = field(default_factory=dict)
    reused: Mapping[int, int] = field(default_factory=dict)
    fullest: int = -1
    leases: tuple[Lease, ...] = ()

    def uses(self, kind: Kind, number: int) -> tuple[int, int]:
        """The first and the last launch that read or write an argument or a result; behind all of them where there is
        none."""
        found = [at for at, launch in enumerate(self.launches) if any(_is(word, kind, number) for word in launch.words)]
        return (found[0], found[-1]) if found else (len(self.launches), len(self.launches))


def _is(word: int | Place, kind: Kind, number: int) -> bool:
    return isinstance(word, Place) and (word.kind, word.number) == (kind, number)


class NotListed(Exception):
    """Operations of the graph are no library calls: ``refused`` has the reasons."""

    def __init__(self, refused: Mapping[Operation, str]) -> None:
        super().__init__("; ".join(refused.values()))
        self.refused = dict(refused)


def launch_list(
    graph: TypedGraph,
    device: DeviceRef,
    updates: Mapping[int, int] | None = None,
    reusable: Collection[int] = frozenset(),
    packed: Mapping[int, tuple[int, int]] | None = None,
    hosts: Collection[int] = frozenset(),
) -> LaunchList:
    """The calls that compute a graph's results.

    Args:
        graph: whose pointwise operations are programs already (``fusion.fuse``).
        device: that it computes on.
        updates: results that are new values of arguments and lie in memory as these do, by their numbers.
        reusable: arguments, dense and with memory of their own or in a pack, that may be written over.
        packed: of arguments that lie in packs the pack's number and the offset there.
        hosts: results in whose memory other values may lie before they are made.

    Raises:
        NotListed: the graph has operations without a library function; all of them are named.
    """
    lister = _Lister(graph.arguments, device)
    refused = dict[Operation, str]()
    for operation in graph.operations:
        try:
            lister.take(operation)
        except NotListed as error:
            refused |= error.refused
    if refused:
        raise NotListed(refused)
    return lister.finish(graph.results, updates or {}, reusable, packed or {}, hosts)


class _Lister:
    """Collects calls, then decides where values lie."""

    def __init__(self, arguments: Sequence[Value], device: DeviceRef) -> None:
        self.places = {value: Place(Kind.ARGUMENT, number) for number, value in enumerate(arguments)}
        self._arguments = arguments
        self._device = device
        self._constants: dict[ConstantBytes, int] = {}
        self._calls: list[Call] = []
        self._made: dict[Value, int] = {}
        self._moved: set[int] = set()

    def take(self, operation: Operation) -> None:
        """Takes one operation in."""
        if isinstance(operation, Call):
            for value in (*operation.results, *operation.operands):
                if value.shape is None:
                    raise NotListed({operation: f"{operation.name} has a size that is not known"})
            self._made.update(dict.fromkeys(operation.results, len(self._calls)))
            self._calls.append(operation)
        elif isinstance(operation, Transfer):
            source = self.places.get(operation.operands[0])
            if source is None or source.kind is not Kind.ARGUMENT or operation.results[0].device != self._device:
                raise NotListed({operation: "a copy between devices of what is computed in the graph"})
            self._moved.add(source.number)
            self.places[operation.results[0]] = source
        elif not (
            isinstance(operation, (Constant, Reshape))
            or _moves_nothing(operation)
            or not any(map(_may_have_elements, operation.results))
        ):
            raise NotListed({operation: f"{operation} has no library function"})

    def finish(
        self,
        results: Sequence[Value],
        updates: Mapping[int, int],
        reusable: Collection[int],
        packed: Mapping[int, tuple[int, int]],
        hosts: Collection[int],
    ) -> LaunchList:
        """The list of what was taken in."""
        homes = [home_of(value) for value in results]
        taken: dict[Value, int] = {}
        for number, home in enumerate(homes):
            if home in self._made:
                taken.setdefault(home, number)
        spare = [
            number for number in sorted(reusable)
            if self._arguments[number] not in homes and number not in self._moved and number not in updates.values()
            and (number in packed or self._arguments[number].bytes >= MIN_REUSED)
        ]  # fmt: skip
        self._reorder(taken, {homes[result] for result in updates})
        uses = self._uses(self._arguments)
        in_place = {
            result: number
            for result, number in updates.items()
            if taken.get(homes[result]) == result
            and self._arguments[number] not in homes
            and number not in self._moved
            and self._may_replace(homes[result], self._arguments[number], uses)
        }
        for value, number in taken.items():
            self.places[value] = Place(Kind.RESULT, number)
        free = {number: value for value, number in taken.items() if number in hosts and number not in updates}
        workspace, reused, leases = self._place_the_rest(spare, packed, uses, free)
        launches = tuple(
            Launch(call.function.symbol, tuple(self._placed(call, word) for word in call.words), call.op,
                   Indexing(call.line, call.facts or Facts()) if call.reports else None)
            for call in self._calls
        )  # fmt: skip
        made = tuple(self._place(home) for home in homes)
        return LaunchList(
            launches, len(self._arguments), made, tuple(self._constants), workspace, frozenset(self._moved), in_place,
            reused, fullest(leases), leases,
        )  # fmt: skip

    def _reorder(self, results: Collection[Value], updates: Collection[Value]) -> None:
        """Puts launches that free memory as early as they can run."""
        reads = [{home_of(value) for value in call.operands} for call in self._calls]
        makes = [list(call.results) for call in self._calls]
        sizes = {value: value.bytes for value in self._made if value not in results}
        # Moved forward, they might no longer stand behind all that reads the arguments that they replace.
        fixed = {self._made[value] for value in updates if value in self._made}
        # A call with unused results is an assertion: these raise in their order.
        read = {value for value in self._made if value.readers or value in results}
        fixed |= {number for number, call in enumerate(self._calls) if read.isdisjoint(call.results)}
        schedule = launch_order(reads, makes, sizes, fixed)
        places = {number: place for place, number in enumerate(schedule)}
        self._calls = [self._calls[number] for number in schedule]
        self._made = {value: places[number] for value, number in self._made.items()}

    def _uses(self, values: Iterable[Value]) -> dict[Value, list[tuple[int, int]]]:
        """For each value the calls that read it, and as which operand."""
        found: dict[Value, list[tuple[int, int]]] = {value: [] for value in values}
        for number, call in enumerate(self._calls):
            for at, operand in enumerate(call.operands):
                home = home_of(operand)
                if home in found:
                    found[home].append((number, at))
        return found

    def _may_replace(self, value: Value, argument: Value, uses: Mapping[Value, Sequence[tuple[int, int]]]) -> bool:
        """Whether ``value`` may be written over ``argument``: nothing reads the argument later, and the call that makes
        the value reads an element of it for the element at its place alone."""
        made = self._made[value]
        call = self._calls[made]
        allowed = call.in_order.get(call.results.index(value), frozenset())
        return all(number < made or (number == made and at in allowed) for number, at in uses[argument])

    def _place_the_rest(
        self,
        spare: Sequence[int],
        packed: Mapping[int, tuple[int, int]],
        uses: Mapping[Value, Sequence[tuple[int, int]]],
        hosts: Mapping[int, Value],
    ) -> tuple[int, dict[int, int], tuple[Lease, ...]]:
        """Places what lives between two launches in the memory of arguments ``spare`` or of results ``hosts``, else in
        the workspace; returns the workspace's size, the bytes that are needed of those arguments, and what lies in the
        workspace."""
        last: dict[Value, int] = {}
        for number, call in enumerate(self._calls):
            last.update(dict.fromkeys(call.results, number))
            last.update((home_of(operand), number) for operand in call.operands)
        inner = [value for value in self._made if value not in self.places]
        memories = _memories(self._arguments, spare, packed)
        spares = [
            Spare(each.size, tuple(
                Content(offset, size, _FOREVER if part is None else last.get(self._arguments[part], -1))
                for part, offset, size in each.parts
            ))
            for each in memories
        ]  # fmt: skip
        spares += [
            Spare(value.bytes, (Content(0, value.bytes, _FOREVER, self._made[value]),)) for value in hosts.values()
        ]
        results = list(hosts)
        dying: dict[int, list[tuple[int, int, int]]] = {}
        for place, memory in enumerate(memories):
            for part, offset, _ in memory.parts:
                if part is not None:
                    end = last.get(self._arguments[part], -1)
                    dying.setdefault(end, []).append((place, offset, part))

        def replaces(value: Value) -> frozenset[tuple[int, int]]:
            arguments = [(at, self._arguments[number]) for *at, number in dying.get(self._made[value], ())]
            return frozenset(
                (place, offset) for (place, offset), argument in arguments
                if (argument.size, argument.bytes) == (value.size, value.bytes)
                and self._may_replace(value, argument, uses)
            )  # fmt: skip

        numbers = {value: number for number, value in enumerate(inner)}
        inner_uses = self._uses(inner)

        def takes(value: Value) -> frozenset[int]:
            operands = {home_of(operand) for operand in self._calls[self._made[value]].operands}
            return frozenset(
                numbers[operand] for operand in operands
                if operand in numbers and last[operand] == self._made[value]
                and (operand.size, operand.bytes) == (value.size, value.bytes)
                and self._may_replace(value, operand, inner_uses)
            )  # fmt: skip

        # An unused result is written all the same.
        spans = [Span(value.bytes, self._made[value], last[value], replaces(value), takes(value)) for value in inner]
        rooms, size = planned(spans, spares)
        reused: dict[int, int] = {}
        for value, room in zip(inner, rooms, strict=True):
            if room.spare is None:
                self.places[value] = Place(Kind.WORKSPACE, 0, room.offset)
                continue
            if room.spare >= len(memories):
                self.places[value] = Place(Kind.RESULT, results[room.spare - len(memories)], room.offset)
                continue
            number = memories[room.spare].anchor
            self.places[value] = Place(Kind.REUSED, number, room.offset)
            reused[number] = max(reused.get(number, 0), room.offset + value.bytes)
        leases = (
            Lease(room.offset, span.size, span.first, span.last)
            for span, room in zip(spans, rooms, strict=True)
            if room.spare is None
        )
        return size, reused, tuple(leases)

    def _placed(self, call: Call, word: Word) -> int | Place:
        if isinstance(word, int):
            return word
        values = call.operands if isinstance(word, Operand) else call.results
        place = self._place(values[word.number])
        return replace(place, offset=place.offset + word.offset) if word.offset else place

    def _place(self, value: Value) -> Place:
        home = home_of(value)
        if home not in self.places:
            self.places[home] = self._constant(home)
        return self.places[home]

    def _constant(self, value: Value) -> Place:
        content = value.maker.content if isinstance(value.maker, Constant) else None
        if not _may_have_elements(value):
            content = b""
        if content is None:
            assert value.maker is not None
            raise NotListed({value.maker: f"a constant of {value.dtype}"})
        constant = ConstantBytes(content)
        return Place(Kind.CONSTANT, self._constants.setdefault(constant, len(self._constants)))


_FOREVER = 2**62
"""Behind every launch."""


@dataclass(frozen=True)
class _Memory:
    """An argument that may be written over, or several that lie in one pack.

    Attributes:
        anchor: the argument at its beginning.
        size: bytes.
        parts: arguments with their offsets and sizes; None for arguments that this list does not read.
    """

    anchor: int
    size: int
    parts: tuple[tuple[int | None, int, int], ...]


def _memories(arguments: Sequence[Value], spare: Sequence[int], packed: Mapping[int, tuple[int, int]]) -> list[_Memory]:
    """The memory of arguments ``spare``, that of a pack's members in one."""
    found = [_Memory(each, arguments[each].bytes, ((each, 0, arguments[each].bytes),)) for each in spare
             if each not in packed]  # fmt: skip
    members: dict[int, list[tuple[int, int]]] = {}
    for number in spare:
        if number in packed:
            pack, offset = packed[number]
            members.setdefault(pack, []).append((offset, number))
    for each in members.values():
        (first, anchor), *_ = ordered = sorted(each)
        parts: list[tuple[int | None, int, int]] = []
        end = first
        for offset, number in ordered:
            if offset > end:
                parts.append((None, end - first, offset - end))
            parts.append((number, offset - first, arguments[number].bytes))
            end = offset + rounded_up(arguments[number].bytes, TORCH_ALIGNMENT)
        offset, number = ordered[-1]
        found.append(_Memory(anchor, offset - first + arguments[number].bytes, tuple(parts)))
    return found


def home_of(value: Value) -> Value:
    """The value whose memory this one is."""
    while value.maker is not None and (isinstance(value.maker, Reshape) or _moves_nothing(value.maker)):
        value = value.maker.operands[0]
    return value


def _moves_nothing(operation: Operation) -> bool:
    """Whether the result's elements stand in memory as the operand's do."""
    if not isinstance(operation, (Broadcast, Transpose)):
        return False
    source, result = operation.operands[0], operation.results[0]
    if source.shape is None or result.shape is None or source.device != result.device:
        return False
    if isinstance(operation, Broadcast):
        return source.size == result.size
    moved = [axis for axis in operation.axes if source.shape[axis] != 1]
    return moved == sorted(moved)


def _may_have_elements(value: Value) -> bool:
    return value.shape is None or value.size > 0
