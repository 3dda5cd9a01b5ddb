"""Batch normalization's gradient sums as reductions that compute the gradient on the way.

The sums' kernel reads the gradient from memory: what computes it there, such as an activation's gradient, is a launch
of its own that writes it, and both the kernel and the program that normalizes the gradient read it again. A generated
reduction computes it from what it depends on, and so does the program. That is done where it moves fewer bytes; a
convolution whose store takes the sums in (``column_sums.py``) keeps them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from max.graph import DeviceRef, Graph, TensorValue

from torch_max_backend.fusion.convolutions import is_suitable, symbol_of, takes_part
from torch_max_backend.fusion.plan import memory_of, readers_of
from torch_max_backend.fusion.terms import Terms, in_memory
from torch_max_backend.fusion.values import Operation, Value, read
from torch_max_backend.ir import ops
from torch_max_backend.max_compat import handle_of

SUMS = "batch_norm_gradient_sums"
_SMALL = 16
"""What is as many times smaller than the gradient, such as a channel's numbers, stays in caches."""


def write_sums(graph: Graph, results: Sequence[TensorValue], device: DeviceRef) -> list[TensorValue]:
    """Writes sums out where that saves bytes; the results, some of which are new then.

    New operations stand at the end: an operation may come before what it reads.

    Args:
        graph: which is being built.
        results: that it will return.
        device: that it computes on.
    """
    operations, values = read(graph)
    sums = [each for each in operations if symbol_of(each) == SUMS and each.operands[0].shape is not None]
    if not sums:
        return list(results)
    kept = [values[handle_of(result)] for result in results]
    found, fusible = memory_of(operations, set(kept), device)
    chosen = [each for each in sums if _saves(each, found, fusible, kept, device)]
    made: dict[Value, TensorValue] = {}
    for operation in chosen:
        made.update(zip(operation.results, _written(operation, device), strict=True))
    for old, new in made.items():
        old.handle.replace_all_uses_with(handle_of(new))
    final = [made.get(value, result) for value, result in zip(kept, results, strict=True)]
    for operation in chosen:
        operation.handle.erase()
    return final


def _saves(
    operation: Operation,
    found: dict[Value, Terms],
    fusible: Collection[Operation],
    kept: Collection[Value],
    device: DeviceRef,
) -> bool:
    """Whether fewer bytes move if nobody has the gradient in memory."""
    gradient, x = (in_memory(operand) for operand in operation.operands[:2])
    terms = found.get(gradient)
    if terms is None or terms.extents is not None or any(in_memory(value) is gradient for value in kept):
        return False
    if not all(reader in fusible or symbol_of(reader) == SUMS for reader in readers_of(gradient)):
        return False
    leaves = {leaf.value for leaf in terms.leaves}
    others = [{leaf.value for leaf in each.leaves} for root, each in found.items() if root is not gradient]
    if takes_part(device) and any(is_suitable(leaf) and not any(leaf in each for each in others) for leaf in leaves):
        return False
    readers = [{x}, *(each for each in others if gradient in each)]
    large = {leaf for leaf in leaves if leaf.size * _SMALL > gradient.size}
    kept_there = _bytes(large) + _bytes([gradient]) * (1 + len(readers))
    return sum(_bytes(large - read_values) for read_values in readers) < kept_there


def _bytes(values: Collection[Value]) -> int:
    return sum(value.bytes for value in values)


def _written(operation: Operation, device: DeviceRef) -> list[TensorValue]:
    """The sum of dy; that of dy * xhat; the first over the rows; the second over the rows times invstd."""
    dy, x, mean, invstd = (operand.tensor for operand in operation.operands)
    rows, channels = operation.operands[0].shape or (0, 0)
    wide = invstd.dtype

    def total(value: TensorValue) -> TensorValue:
        return ops.reshape(ops.sum(value, axis=0), [channels])

    gradient = dy if dy.dtype == wide else ops.cast(dy, wide)
    centered = (x if x.dtype == wide else ops.cast(x, wide)) - mean
    share = ops.constant(1 / rows, wide, device)
    sum_dy, projected = total(gradient), total(gradient * (centered * invstd))
    return [sum_dy, projected, sum_dy * share, projected * invstd * share]
