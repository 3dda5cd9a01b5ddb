"""Sums of narrow floats that nobody wants in float32.

A sum of bfloat16 or float16 is taken in float32 and rounded afterwards, which the graph says by two conversions. The
generated reduction accumulates in float32 anyway: where the wide sum has no other reader, it is a sum of narrow floats,
without a launch for the conversion. Sums that share a launch with others, whose results are float32, stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

from max.dtype import DType
from max.graph import Graph, TensorValue

from torch_max_backend.fusion.plan import readers_of
from torch_max_backend.fusion.terms import axis_of, in_memory
from torch_max_backend.fusion.values import Operation, Value, read
from torch_max_backend.ir import ops
from torch_max_backend.max_compat import handle_of

ADD, CAST = "rmo.mo.reduce.add", "mo.cast"
_NARROW = (DType.bfloat16, DType.float16)
_FAR = 4
"""Operations between a value and a sum that could share a launch with another sum of it."""


def narrow_sums(graph: Graph, results: Sequence[TensorValue]) -> list[TensorValue]:
    """Takes the conversions around sums out; the results, some of which are new then.

    New operations stand at the end: an operation may come before what it reads.

    Args:
        graph: which is being built, to be a launch list.
        results: that it will return.
    """
    operations, values = read(graph)
    kept = [values[handle_of(result)] for result in results]
    made: dict[Value, TensorValue] = {}
    for operation in operations:
        total = _sum_before(operation, kept)
        if total is None:
            continue
        read_there, rounded = total.operands[0], operation.results[0]
        narrow = _narrow(read_there, rounded.dtype)
        if narrow is None or read_there.shape is None or rounded.shape is None or _sums_of(narrow) != {total}:
            continue
        flat = ops.reshape(narrow.tensor, list(read_there.shape))
        summed = ops.sum(flat, axis=axis_of(total, len(read_there.shape)))
        made[rounded] = ops.reshape(summed, list(rounded.shape))
    for old, new in made.items():
        old.handle.replace_all_uses_with(handle_of(new))
    return [made.get(value, result) for value, result in zip(kept, results, strict=True)]


def _sum_before(operation: Operation, kept: Sequence[Value]) -> Operation | None:
    """The sum in float32 that ``operation`` alone reads and rounds."""
    if operation.name != CAST or not operation.operands or operation.results[0].dtype not in _NARROW:
        return None
    wide = in_memory(operation.operands[0])
    total = wide.maker
    if total is None or total.name != ADD or wide.dtype != DType.float32:
        return None
    if list(readers_of(wide)) != [operation] or any(in_memory(value) is wide for value in kept):
        return None
    return total


def _narrow(value: Value, dtype: DType) -> Value | None:
    """What is converted from ``dtype`` to ``value``, a view perhaps."""
    maker = in_memory(value).maker
    if maker is None or maker.name != CAST or not maker.operands or maker.operands[0].dtype != dtype:
        return None
    return maker.operands[0]


def _sums_of(value: Value) -> set[Operation]:
    """The sums that read ``value`` or what is computed from it right away."""
    found: set[Operation] = set()
    waiting = [value]
    for _ in range(_FAR):
        readers = [reader for each in waiting for reader in readers_of(each)]
        found.update(reader for reader in readers if reader.name == ADD)
        waiting = [result for reader in readers if reader.name != ADD for result in reader.results]
    return found
