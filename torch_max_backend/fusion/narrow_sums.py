"""Sums of 16-bit floats whose result is rounded to 16 bits.

A sum of bfloat16 or float16 is computed in float32 and then rounded, which a graph expresses by two conversions. A
generated reduction accumulates in float32 anyway: if the float32 sum has no other reader, the reduction writes 16 bits,
without a launch for the conversion. Sums that share a launch with others, whose results are float32, stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

from max.dtype import DType

from torch_max_backend.dtypes import NARROW_FLOATS
from torch_max_backend.fusion.terms import in_memory, readers_of
from torch_max_backend.typed_graph import TypedGraph
from torch_max_backend.typed_graph.operations import Call, Operation, Pointwise, Reduction, Reshape, Value

_FAR = 4
"""Operations between a value and a sum that could share a launch with another sum of it."""


def narrow_sums(graph: TypedGraph) -> None:
    """Removes the conversions around sums."""
    made: dict[Value, Value] = {}
    for operation in list(graph.operations):
        total = _sum_before(operation, graph.results)
        if total is None:
            continue
        source, rounded = total.operands[0], operation.results[0]
        narrow = _narrow(source, rounded.dtype)
        if narrow is None or source.shape is None or rounded.shape is None or _sums_of(narrow) != {total}:
            continue
        flat, summed, result = narrow.like(source.shape), total.results[0].like(dtype=rounded.dtype), rounded.like()
        graph.add(Reshape((narrow,), (flat,)))
        graph.add(Reduction((flat,), (summed,), total.kind, total.axis))
        graph.add(Reshape((summed,), (result,)))
        made[rounded] = result
    if made:
        graph.settle(made)


def _is_cast(operation: Operation | None) -> bool:
    return isinstance(operation, Pointwise) and operation.function == "cast"


def _is_sum(operation: Operation | None) -> bool:
    return isinstance(operation, Reduction) and operation.kind == "add"


def _sum_before(operation: Operation, kept: Sequence[Value]) -> Reduction | None:
    """The sum in float32 that ``operation`` alone reads and rounds."""
    if not _is_cast(operation) or operation.results[0].dtype not in NARROW_FLOATS:
        return None
    wide = in_memory(operation.operands[0])
    total = wide.maker
    if not isinstance(total, Reduction) or total.kind != "add" or wide.dtype != DType.float32:
        return None
    if list(readers_of(wide)) != [operation] or any(in_memory(value) is wide for value in kept):
        return None
    return total


def _narrow(value: Value, dtype: DType) -> Value | None:
    """The value that is converted from ``dtype`` to ``value``, perhaps through a view."""
    maker = in_memory(value).maker
    if maker is None or not _is_cast(maker) or maker.operands[0].dtype != dtype:
        return None
    return maker.operands[0]


def _sums_of(value: Value) -> set[Operation]:
    """The sums that read ``value`` or what is computed from it right away."""
    found: set[Operation] = set()
    waiting = [value]
    for _ in range(_FAR):
        readers = [reader for each in waiting for reader in readers_of(each)]
        found.update(reader for reader in readers if _is_sum(reader))
        # A library's function ends what could share a launch.
        waiting = [
            result for reader in readers if not isinstance(reader, (Reduction, Call)) for result in reader.results
        ]
    return found
