"""Batch normalization's gradient sums as reductions that compute the gradient on the way.

The sums' kernel reads the gradient from memory: what computes it there, such as an activation's gradient, is a launch
of its own that writes it, and both the kernel and the program that normalizes the gradient read it again. A generated
reduction computes it from what it depends on, and so does the program. That is done where it moves fewer bytes; a
convolution whose store takes the sums in (``column_sums.py``) keeps them.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from max.graph import DeviceRef

from torch_max_backend.fusion.convolutions import is_suitable, takes_part
from torch_max_backend.fusion.groups import values_in_memory
from torch_max_backend.fusion.terms import Terms, in_memory, readers_of
from torch_max_backend.typed_graph import TypedGraph
from torch_max_backend.typed_graph.operations import Call, Operation, Pointwise, Reduction, Reshape, Value, constant

_GRADIENT_SUMS = "batch_norm_gradient_sums"
_SMALL = 16
"""An operand this many times smaller than the gradient, such as one number for each channel, stays in caches."""


def write_sums(graph: TypedGraph, device: DeviceRef) -> None:
    """Replaces sums by generated reductions where that saves bytes.

    Args:
        graph: which is changed.
        device: that it computes on.
    """
    sums = [each for each in graph.operations if _is_sum(each) and each.operands[0].shape is not None]
    if not sums:
        return
    found, fusible = values_in_memory(graph.operations, set(graph.results), device)
    chosen = [each for each in sums if _saves(each, found, fusible, graph.results, device)]
    made: dict[Value, Value] = {}
    for operation in chosen:
        made.update(zip(operation.results, _written(graph, operation, device), strict=True))
    graph.settle(made, chosen)


def _is_sum(operation: Operation) -> bool:
    return isinstance(operation, Call) and operation.kernel == _GRADIENT_SUMS


def _saves(
    operation: Operation,
    found: dict[Value, Terms],
    fusible: Collection[Operation],
    kept: Collection[Value],
    device: DeviceRef,
) -> bool:
    """Whether fewer bytes move if the gradient is not stored."""
    gradient, x = (in_memory(operand) for operand in operation.operands[:2])
    terms = found.get(gradient)
    if terms is None or terms.extents is not None or any(in_memory(value) is gradient for value in kept):
        return False
    if not all(reader in fusible or _is_sum(reader) for reader in readers_of(gradient)):
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


def _written(graph: TypedGraph, operation: Operation, device: DeviceRef) -> list[Value]:
    """The sum of dy; that of dy * xhat; the first over the rows; the second over the rows times invstd."""
    dy, x, mean, invstd = operation.operands
    rows, channels = dy.shape or (0, 0)
    wide = invstd.dtype

    def pointwise(function: str, *operands: Value) -> Value:
        shape = max((each.shape or () for each in operands), key=len)
        return graph.add(Pointwise(operands, (Value(wide, shape, dy.device),), function)).results[0]

    def widened(value: Value) -> Value:
        return value if value.dtype == wide else pointwise("cast", value)

    def total(value: Value) -> Value:
        summed = graph.add(Reduction((value,), (value.like((1, channels)),), "add", 0)).results[0]
        return graph.add(Reshape((summed,), (value.like((channels,)),))).results[0]

    gradient, centered = widened(dy), pointwise("sub", widened(x), mean)
    share = graph.add(constant(np.array(1 / rows, wide.to_numpy()), device)).results[0]
    sum_dy = total(gradient)
    projected = total(pointwise("mul", gradient, pointwise("mul", centered, invstd)))
    means = pointwise("mul", sum_dy, share)
    return [sum_dy, projected, means, pointwise("mul", pointwise("mul", projected, invstd), share)]
