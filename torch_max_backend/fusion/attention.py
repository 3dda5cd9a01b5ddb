"""Attention whose queries, keys and values, and their gradients, lie in larger tensors.

A linear layer makes queries, keys and values of all heads in one tensor, and autograd puts their gradients together in
one for its backward pass. Between that tensor and a call of attention lie slices and transposes, which are copies. If
they place batches, heads and rows at fixed steps, the call reads and writes the larger tensor itself.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from torch_max_backend.fusion import index_map
from torch_max_backend.fusion.index_map import IndexMap
from torch_max_backend.fusion.products import digits_by_extent, sources_of, stores_of
from torch_max_backend.fusion.terms import is_fusible, is_view
from torch_max_backend.mojo_ops.attention import axes_of, with_steps
from torch_max_backend.typed_graph import TypedGraph
from torch_max_backend.typed_graph.operations import Call, Concat, Operand, Operation, Result, Value, Word

_PIECE = 8
"""Elements at whose multiples rows begin: 16 bytes of the narrowest dtype, as the kernels of tensor cores copy them."""
_FORWARD, _BACKWARD = "attention_fprop", "attention_dgrad"


@dataclass(frozen=True)
class _Part:
    """Where a tensor of a call lies in a larger one.

    Attributes:
        whole: the larger one.
        start: elements before the first.
        steps: elements from batch to batch, from head to head, and from row to row.
    """

    whole: Value
    start: int
    steps: tuple[int, ...]


def strided_attention(graph: TypedGraph) -> None:
    """Has calls of attention read and write larger tensors in place of copies.

    Args:
        graph: which is changed.
    """
    kept = set(graph.results)
    made: dict[Value, Value] = {}
    gone: set[Call] = set()
    for call in list(graph.operations):
        if not _is_attention(call):
            continue
        read = _read_parts(call, kept)
        written = _written_parts(call, kept) if _is_backward(call) else {}
        if read or written:
            _replace(graph, call, read, written, made)
            gone.add(call)
    if gone:
        graph.settle(made, gone)


def _is_attention(operation: Operation) -> TypeGuard[Call]:
    return isinstance(operation, Call) and operation.kernel.startswith((_FORWARD, _BACKWARD))


def _is_backward(call: Call) -> bool:
    return call.kernel.startswith(_BACKWARD)


def _replace(
    graph: TypedGraph, call: Call, read: dict[int, _Part], written: dict[int, _Part], made: dict[Value, Value]
) -> None:
    """Adds the call on parts of larger tensors, by the numbers of operands and of results."""
    parts = {number - _first_read(call): part for number, part in read.items()}
    parts |= {3 + number: part for number, part in written.items()}
    words = with_steps(call.words, {tensor: part.steps for tensor, part in parts.items()})
    results: dict[Value, int] = {}
    places: dict[int, Result] = {}
    for number, result in enumerate(call.results):
        own = written.get(number)
        whole = result if own is None else own.whole
        offset = 0 if own is None else own.start * result.dtype.size_in_bytes
        places[number] = Result(results.setdefault(whole, len(results)), offset)
    operands = tuple(read[number].whole if number in read else value for number, value in enumerate(call.operands))

    def placed(word: Word) -> Word:
        if isinstance(word, Operand) and word.number in read:
            return Operand(word.number, read[word.number].start * operands[word.number].dtype.size_in_bytes)
        return places[word.number] if isinstance(word, Result) else word

    new = {whole: whole.like() for whole in results}
    graph.add(
        Call(
            operands, tuple(new.values()), call.function, tuple(map(placed, words)), call.kernel,
            facts=call.facts, node=call.node, op=call.op, line=call.line,
        )
    )  # fmt: skip
    made.update(new)


def _first_read(call: Call) -> int:
    """The query's number among the operands: a gradient stands before it."""
    return int(_is_backward(call))


def _read_parts(call: Call, kept: Collection[Value]) -> dict[int, _Part]:
    """The operands that lie in larger tensors, by their numbers. A program's result is read in place only where all of
    it is read: otherwise the rest would be computed needlessly."""
    found: dict[int, _Part] = {}
    for tensor in range(3):
        number = _first_read(call) + tensor
        value = call.operands[number]
        if value.shape is None or _is_needed(value, kept):
            continue
        for whole, at in sources_of(value)[:0:-1]:
            part = _part(whole, at, value.shape, axes_of(call.numbers, tensor))
            if part is not None:
                found[number] = part
                break
    for whole in {part.whole for part in found.values()}:
        readers = [number for number, part in found.items() if part.whole is whole]
        computed = whole.maker is not None and is_fusible(whole.maker)
        if computed and sum(call.operands[number].size for number in readers) < whole.size:
            for number in readers:
                del found[number]
    return found


def _is_needed(value: Value, kept: Collection[Value]) -> bool:
    """Whether anything but attention reads the value, or what it is a view of."""
    while True:
        if value in kept or any(not is_view(reader) and not _is_attention(reader) for reader in value.readers):
            return True
        if not is_view(value.maker):
            return False
        assert value.maker is not None
        value = value.maker.operands[0]


def _written_parts(call: Call, kept: Collection[Value]) -> dict[int, _Part]:
    """The gradients that are put together in one tensor, by their numbers, each with its part of that."""
    joined: dict[Concat, dict[int, IndexMap]] = {}
    for number, result in enumerate(call.results[:3]):
        found = _joined(result, kept)
        if found is not None:
            joined.setdefault(found[0], {})[number] = found[1]
    parts: dict[int, _Part] = {}
    for concat, maps in joined.items():
        if len(concat.operands) != len(maps):
            continue
        for whole, onwards in stores_of(concat.results[0], kept)[::-1]:
            own: dict[int, _Part] = {}
            for number, at in maps.items():
                through, shape = at.then(onwards), call.results[number].shape
                assert shape is not None
                part = None if through is None else _part(whole, through, shape, axes_of(call.numbers, number))
                if part is not None:
                    own[number] = part
            if len(own) == len(maps):
                parts.update(own)
                break
    return parts


def _joined(value: Value, kept: Collection[Value]) -> tuple[Concat, IndexMap] | None:
    """The concatenation that alone reads the value, through views and transposes, and where in its result it lies."""
    for end, at in reversed(stores_of(value, kept)):
        if end in kept or len(end.readers) != 1:
            continue
        (reader,) = end.readers
        if isinstance(reader, Concat) and is_fusible(reader) and reader.operands.count(end) == 1:
            before = reader.operands[: reader.operands.index(end)]
            (result,) = reader.results
            assert result.shape is not None and end.shape is not None
            starts = [0] * len(result.shape)
            starts[reader.axis] = sum(operand.shape[reader.axis] for operand in before if operand.shape is not None)
            place = index_map.part(result.shape, starts, [1] * len(starts), end.shape)
            through = at.then(place)
            return None if through is None else (reader, through)
    return None


def _part(whole: Value, at: IndexMap, shape: Sequence[int], axes: Sequence[int]) -> _Part | None:
    """The part of ``whole`` that a tensor of this shape in memory is; None where its steps are not fixed, or its rows
    apart or not aligned, and where it is one row: steps of 0 alone say that a tensor lies by itself."""
    digits = digits_by_extent(at.digits, shape)
    if digits is None or any(len(each) > 1 for each in digits):
        return None
    *outer, inner = [each[0][1] if each else 0 for each in digits]
    if (inner != 1 and shape[-1] != 1) or any(number % _PIECE for number in (at.start, *outer)) or not any(outer):
        return None
    return _Part(whole, at.start, tuple(outer[axis] for axis in axes))
