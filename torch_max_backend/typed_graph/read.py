"""The one door: MAX's graph, as lowerings made it, read as a ``TypedGraph``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from max.graph import Dim, Graph, StaticDim, TensorValue

from torch_max_backend.dtypes import MAX_TO_TORCH
from torch_max_backend.ir.notes import Notes, key_of, notes_of
from torch_max_backend.max_compat import block_of, mo, value_of
from torch_max_backend.mojo_ops.functions import NotedCall
from torch_max_backend.typed_graph.graph import TypedGraph
from torch_max_backend.typed_graph.operations import (
    Broadcast,
    Call,
    Concat,
    Constant,
    Operand,
    Operation,
    Pad,
    Pointwise,
    Reduction,
    Reshape,
    Result,
    Slice,
    Transfer,
    Transpose,
    Unlisted,
    Value,
    Word,
    values_of,
)
from torch_max_backend.typed_graph.scalars import FUNCTIONS

_REDUCTIONS = {f"reduce.{kind}": kind for kind in ("add", "mul", "max", "min")}


def read(graph: Graph, results: Sequence[TensorValue], line_of: Callable[[str], str] = lambda node: "") -> TypedGraph:
    """What ``graph``, which has no output yet, computes to return ``results``.

    Args:
        graph: with the notes that lowerings left.
        results: its values that leave.
        line_of: the line of the user's code that an FX node of this name was made for, "" if it is not known.
    """
    return _Reader(graph, line_of).read(results)


class _Reader:
    def __init__(self, graph: Graph, line_of: Callable[[str], str]) -> None:
        self._line_of = line_of
        self._block = block_of(graph)
        self._notes: Notes = notes_of(graph)
        self._values: dict[Any, Value] = {}

    def read(self, results: Sequence[TensorValue]) -> TypedGraph:
        arguments = [value for handle in self._block.arguments if (value := self._value(handle)) is not None]
        operations = []
        for handle, origin in zip(self._block, self._notes.origins(self._block), strict=True):
            operation = self._operation(handle)
            if operation is not None:
                operation = replace(operation, node=origin.node, op=origin.op)
                if isinstance(operation, Call) and operation.reports:
                    operation = replace(operation, line=self._line_of(origin.node))
                operations.append(operation)
        return TypedGraph(arguments, operations, [self._values[key_of(result)] for result in results])

    def _value(self, handle: Any) -> Value | None:
        """A tensor; None for the chains that order effects."""
        core = value_of(handle)
        if not isinstance(core.type, mo.TensorType):
            return None
        tensor = TensorValue(core)
        known = all(isinstance(dim, StaticDim) for dim in tensor.shape)
        shape = tuple(int(dim) for dim in tensor.shape) if known else None
        self._values[handle] = Value(tensor.dtype, shape, tensor.device)
        return self._values[handle]

    def _operation(self, handle: Any) -> Operation | None:
        """None for what makes no tensor."""
        operands = tuple(self._values[operand] for operand in handle.operands if operand in self._values)
        results = tuple(value for result in handle.results if (value := self._value(result)) is not None)
        if not results:
            return None
        name = handle.name.removeprefix("rmo.").removeprefix("mo.")
        found: Operation | None = None
        if name == "constant":
            found = Constant((), results, _content(handle, results[0]))
        elif name == "custom":
            call = self._notes.calls.get(handle.results[0])
            if call is not None and call.numbers is not None:
                found = _called(call, operands, results)
        elif name == "transfer":
            # Its first operand is a chain.
            found = Transfer(operands, results)
        elif len(operands) == len(handle.operands):
            found = _typed(name, handle, operands, results)
        return found or Unlisted(operands, results, handle.name)


def _called(call: NotedCall, operands: tuple[Value, ...], results: tuple[Value, ...]) -> Call:
    """The call that a custom op makes; its numbers are no operand."""
    signature, numbers, read = call.signature, call.numbers or (), operands[call.signature.takes_numbers :]
    declared = read[: len(signature.operands)]
    places: list[tuple[Word, tuple[int, ...] | None]]
    places = [(Result(number), value.shape) for number, value in enumerate(results)]
    places += [(Operand(number), value.shape) for number, value in enumerate(declared)]
    known = [(place, shape) for place, shape in places if shape is not None]
    # No launch list takes a call whose sizes are not known.
    words = tuple(signature.words(numbers, known)) if len(known) == len(places) else ()
    return Call(read, results, call.function, words, signature.name, call.facts, signature.in_order,
                signature.reports)  # fmt: skip


def _typed(name: str, handle: Any, operands: tuple[Value, ...], results: tuple[Value, ...]) -> Operation | None:
    """None where an attribute is not known yet."""
    if name == "reshape":
        return Reshape(operands, results)
    if name == "broadcast_to":
        return Broadcast(operands, results)
    if name in FUNCTIONS:
        return Pointwise(operands, results, name)
    rank = None if operands[0].shape is None else len(operands[0].shape)
    if name == "transpose":
        axes = values_of(operands[1])
        return None if axes is None else Transpose(operands[:1], results, tuple(map(int, axes)))
    if name == "pad.constant":
        paddings, filler = map(values_of, operands[1:])
        if paddings is None or filler is None:
            return None
        return Pad(operands[:1], results, tuple(map(int, paddings)), filler[0])
    if name == "slice":
        owner = value_of(handle.results[0]).owner
        starts, steps = _extents(owner.starts), _extents(owner.steps)
        if starts is None or steps is None or min(steps, default=1) < 1:
            return None
        return Slice(operands, results, starts, steps)
    if rank is not None and name == "concat":
        return Concat(operands, results, handle.attributes["axis"].value % rank)
    if rank is not None and name in _REDUCTIONS:
        return Reduction(operands, results, _REDUCTIONS[name], handle.attributes["axis"].value % rank)
    return None


def _extents(attribute: Any) -> tuple[int, ...] | None:
    """The numbers of a shape attribute; None where one is symbolic."""
    dims = [Dim.from_mlir(value) for value in attribute.values]
    return tuple(map(int, dims)) if all(isinstance(dim, StaticDim) for dim in dims) else None


def _content(handle: Any, value: Value) -> bytes | None:
    """The bytes of a constant that stands in the graph; None for one that MAX keeps elsewhere."""
    data = getattr(getattr(value_of(handle.results[0]).owner.value, "data", None), "data", None)
    if data is None or value.shape is None or value.dtype not in MAX_TO_TORCH:
        return None
    content = bytes(data)
    return content if len(content) == value.size * MAX_TO_TORCH[value.dtype].itemsize else None
