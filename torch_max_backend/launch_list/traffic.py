"""Counts the bytes that a launch list's kernels read and write in memory, and those that its dependencies require.

A kernel reads each operand once and writes each result once. Repeated reads from a cache, constants, and a
convolution's own workspace do not count. A value that is broadcast counts with its own bytes.

The *level* of a value is the number of reductions and kernels with operands in memory that must end before it can be
computed. The required traffic is

- one read of an operand by each convolution, product, pooling or attention (a *kernel of operands*),
- one read at each level whose programs or reductions use a value of an earlier level: all of a level could read it
  together, and those of the value's own level could take it from its producer,
- one write of every value that is read in this way, and of the graph's results.

This is no strict lower bound, since values could be recomputed instead of kept.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch_max_backend.fusion.convolutions import is_suitable
from torch_max_backend.fusion.program import Program
from torch_max_backend.launch_list.listing import home_of
from torch_max_backend.mojo_ops.functions import Function, LibraryFunction
from torch_max_backend.mojo_ops.fused_convolution import STORED_SUMS
from torch_max_backend.typed_graph import TypedGraph
from torch_max_backend.typed_graph.operations import Call, Constant, Operation, Value

PROGRAMS, REDUCTIONS, NORM_SUMS, MOVES, OPERANDS = "programs", "reductions", "norm sums", "moves", "of operands"
_NORM_SUMS = tuple(STORED_SUMS)


@dataclass(eq=False)
class Kernel:
    """One launch.

    Attributes:
        number: its place in the list.
        entry: of the kernel libraries.
        kind: programs, reductions, norm sums, moves, or kernels of operands.
        text: what it computes, for people: of a program its operations.
        inputs: bytes that it reads of each value.
        outputs: bytes that it writes of each value.
        needed: bytes of these that have to move.
    """

    number: int
    entry: str
    kind: str
    text: str
    inputs: Mapping[Value, int]
    outputs: Mapping[Value, int]
    needed: int = 0

    @property
    def moved(self) -> int:
        """Bytes read and written."""
        return sum(self.inputs.values()) + sum(self.outputs.values())


@dataclass(frozen=True)
class Avoidable:
    """Bytes that are read or written although no dependency requires it.

    Attributes:
        producer: what makes the value, None where it is an argument.
        consumer: the kernel that reads it.
        bytes: read, and written, if no other kernel needs the value in memory.
        shape: of the value.
        dtype: of the value.
        reason: why it is not read together with others, or not taken from who makes it.
    """

    producer: Kernel | None
    consumer: Kernel
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    reason: str


@dataclass(frozen=True)
class Traffic:
    """A graph's kernels and what could be avoided, the most bytes first."""

    kernels: list[Kernel]
    avoidable: list[Avoidable] = field(default_factory=list)

    @property
    def moved(self) -> int:
        """Bytes read and written by all."""
        return sum(kernel.moved for kernel in self.kernels)

    @property
    def needed(self) -> int:
        """Needed bytes."""
        return sum(kernel.needed for kernel in self.kernels)


def traffic(graph: TypedGraph) -> Traffic:
    """The traffic of a graph that runs as a launch list."""
    calls = [operation for operation in graph.operations if isinstance(operation, Call)]
    kernels: dict[Operation, Kernel] = {call: _kernel(number, call) for number, call in enumerate(calls)}
    results = {home_of(value) for value in graph.results}
    return Traffic(list(kernels.values()), _judged(graph.operations, kernels, results))


def _kernel(number: int, operation: Call) -> Kernel:
    function = operation.function
    elements = None
    if isinstance(function, Program) and function.entry in ("pointwise", "reduction"):
        (sizes,) = function.extents(operation.numbers)
        elements = math.prod(sizes)
    inputs: dict[Value, int] = {}
    for operand in operation.operands:
        home = home_of(operand)
        if not isinstance(home.maker, Constant):
            # Of what is sliced a program reads a part.
            part = home.bytes if elements is None else elements * home.dtype.size_in_bytes
            inputs[home] = min(home.bytes, part)
    outputs = {value: value.bytes for value in operation.results}
    rest = function.rest if isinstance(function, LibraryFunction) else None
    return Kernel(number, (rest or function).entry, _kind(function), _text(function), inputs, outputs)


def _kind(function: Function) -> str:
    if isinstance(function, LibraryFunction):
        return (
            MOVES if function.family == "movement" else NORM_SUMS if function.entry.startswith(_NORM_SUMS) else OPERANDS
        )
    if function.entry.startswith("conv"):
        return OPERANDS
    return REDUCTIONS if function.entry.startswith("reduction") else PROGRAMS


def _text(function: Function) -> str:
    """The operations of a program; reads and writes are left out."""
    if not isinstance(function, Program):
        return function.entry
    lines = [line.partition("= ")[2] for line in function.body.splitlines() if "= " in line]
    return f"{function.entry}: {len([line for line in lines if not line.startswith('a.')])} operations"


def _levels(operations: Sequence[Operation], kernels: Mapping[Operation, Kernel]) -> dict[Value, int]:
    """The level of each value that a kernel makes; arguments are at level 0."""
    levels: dict[Value, int] = {}
    for operation in operations:
        kernel = kernels.get(operation)
        if kernel is None:
            continue
        before = max((levels.get(value, 0) for value in kernel.inputs), default=0)
        own = before if kernel.kind in (PROGRAMS, MOVES) else before + 1
        levels.update(dict.fromkeys(operation.results, own))
        if kernel.entry == "conv_pointwise_sums":
            # The sums come after what is stored.
            levels.update(dict.fromkeys(operation.results[:-1], own + 1))
    return levels


def _judged(
    operations: Sequence[Operation], kernels: Mapping[Operation, Kernel], results: set[Value]
) -> list[Avoidable]:
    """Notes what each kernel needs; returns the rest."""
    levels = _levels(operations, kernels)
    readers: dict[Value, list[tuple[Kernel, int]]] = defaultdict(list)
    makers: dict[Value, Kernel] = {}
    at: dict[Kernel, int] = {}
    for operation, kernel in kernels.items():
        at[kernel] = max((levels.get(value, 0) for value in kernel.inputs), default=0)
        makers.update(dict.fromkeys(operation.results, kernel))
        for value in kernel.inputs:
            readers[value].append((kernel, at[kernel]))
    found: list[Avoidable] = []
    for value in dict.fromkeys([*readers, *makers]):
        maker = makers.get(value)
        made = levels[value] if maker is not None else -1
        if maker is not None and (maker.kind in (REDUCTIONS, NORM_SUMS) or made > levels[list(maker.outputs)[-1]]):
            # A sum is complete only after its kernel has ended.
            made -= 1
        first: dict[int, Kernel] = {}
        needed = value in results
        rest: list[tuple[Kernel, str]] = []
        for kernel, level in sorted(readers[value], key=lambda each: each[0].number):
            if kernel.kind == OPERANDS:
                kernel.needed += kernel.inputs[value]
                needed = True
            elif level > made and level not in first:
                first[level] = kernel
                kernel.needed += kernel.inputs[value]
                needed = True
            elif level > made:
                rest.append((kernel, f"apart from {first[level].entry} {first[level].number}, which reads it too"))
            else:
                rest.append((kernel, _why(value, kernel, maker, len(readers[value]), value in results)))
        if maker is not None and needed:
            maker.needed += maker.outputs[value]
        shape, dtype = value.shape or (), value.dtype.name
        for number, (kernel, reason) in enumerate(rest):
            written = maker.outputs[value] if maker is not None and not needed and number == 0 else 0
            found.append(Avoidable(maker, kernel, kernel.inputs[value] + written, shape, dtype, reason))
    return sorted(found, key=lambda each: -each.bytes)


def _why(value: Value, reader: Kernel, maker: Kernel | None, readers: int, kept: bool) -> str:
    """Why a reader does not get ``value`` from its producer in registers."""
    if maker is None:
        return "an argument"
    if reader.kind == MOVES:
        return "a copy in another order"
    if maker.entry.startswith("conv_") and not is_suitable(value) and not maker.entry.startswith("conv_pointwise"):
        return "the convolution's store takes nothing in: grouped, over three axes, or narrow rows"
    if maker.kind == OPERANDS and not maker.entry.startswith("conv_"):
        return f"{maker.entry} computes nothing besides"
    if maker.kind == OPERANDS and reader.kind != PROGRAMS:
        return f"{maker.entry} adds nothing up"
    if len(reader.outputs) > 1 and maker.kind == OPERANDS:
        return f"a store has one result, the program {len(reader.outputs)}"
    if kept:
        return "a result"
    return f"read by {readers} launches" if readers > 1 else "another size or order"


def kernels_by_entry(kernels: Sequence[Kernel]) -> dict[str, list[Kernel]]:
    """Kernels by entry, those that move most first."""
    found: dict[str, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        found[kernel.entry].append(kernel)
    return dict(sorted(found.items(), key=lambda item: -sum(each.moved for each in item[1])))
