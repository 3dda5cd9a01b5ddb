"""Puts programs in the place of a graph's elementwise operations."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType, TensorValue

from torch_max_backend.fusion.batches import Group
from torch_max_backend.fusion.column_sums import with_sums
from torch_max_backend.fusion.convolutions import Absorbed, absorbed
from torch_max_backend.fusion.movement import Concatenation, transposition, word_of
from torch_max_backend.fusion.narrow_sums import narrow_sums
from torch_max_backend.fusion.plan import plan
from torch_max_backend.fusion.products import strided_products
from torch_max_backend.fusion.program import (
    generate,
    generate_many,
    generate_reduction,
    geometry,
    layout_of,
    padded,
    ways_of_many,
)
from torch_max_backend.fusion.scalars import is_elementwise
from torch_max_backend.fusion.terms import MOVES, REDUCTIONS, RESHAPE
from torch_max_backend.fusion.values import Value, read
from torch_max_backend.fusion.written_sums import write_sums
from torch_max_backend.ir import ops
from torch_max_backend.max_compat import add_call, block_of, handle_of
from torch_max_backend.mojo_ops.functions import require, require_function, target_of

BATCH, PROGRAM = "pointwise_batch", "pointwise_program"
"""Calls of a program over many tensors and of one over one. They say for each input whether an element of it is read
for the element at its own place alone."""
CONCATENATE = "concatenate"
"""The call of the kernel that puts many tensors one behind the other."""


def fuse(graph: Graph, results: Sequence[TensorValue], device: DeviceRef) -> list[TensorValue]:
    """Computes what is elementwise in ``graph``, and sums, by library calls instead of operations of MAX.

    A program is compiled once for a machine, for all sizes. MAX cannot compile the calls: they are for a launch list.

    Args:
        graph: which is being built, in its context, and has no output yet.
        results: that it will return.
        device: that it computes on.

    Returns:
        the results, of the same shapes and dtypes.
    """
    results = narrow_sums(graph, write_sums(graph, results, device))
    # What they add stands at the end, behind its readers.
    _sort(graph)
    results, replaced = strided_products(graph, results, device)
    _erase_unused(graph, {handle_of(result) for result in results}, replaced)
    _sort(graph)
    operations, values = read(graph)
    kept = [values[handle_of(result)] for result in results]
    chosen = plan(operations, set(kept), device)
    made: dict[Value, TensorValue] = {}
    gone: set[Any] = set()
    found = {group: absorbed(group, chosen.groups, kept, device) for group in chosen.groups}
    taken = {group: each for group, each in found.items() if each is not None}
    taken, alone = with_sums(operations, chosen.groups, taken, device)
    for group in chosen.groups:
        if group not in taken:
            made.update(zip(group.roots, _call(group, device), strict=True))
    stored = [(group.roots[0], absorber) for group, absorber in taken.items()]
    stored += [(absorber.convolution.results[0], absorber) for absorber in alone]
    for value, absorber in stored:
        made.update(_call_absorbed(absorber, value, device))
        gone.update(absorber.convolution.handle.results)
        gone.update(absorber.sums.handle.results if absorber.sums is not None else ())
    for batch in chosen.batches:
        made.update(zip([root for group in batch for root in group.roots], _call_batch(batch, device), strict=True))
    for each in chosen.concatenations:
        made[each.result] = _call_concatenation(each, device)
    for value, tensor in made.items():
        value.handle.replace_all_uses_with(handle_of(tensor))
    final = [made.get(value, result) for value, result in zip(kept, results, strict=True)]
    # Even where no program is made: a broadcast whose reader got a constant instead is in a launch list's way.
    _erase_unused(graph, {handle_of(result) for result in final}, gone)
    _sort(graph)
    return final


def _call(group: Group, device: DeviceRef) -> list[TensorValue]:
    terms = group.terms
    layout = layout_of(terms)
    assert layout is not None
    facts = [leaf.value for leaf in terms.leaves], [root.tensor.type for root in group.roots], device, _ordered(group)
    moved = transposition(terms, layout)
    if moved is not None:
        function = require("movement", "transpose", device, (word_of(group.roots[0].dtype),))
        return _add(function, moved, *facts)
    make = generate if terms.extents is None else generate_reduction
    function = require_function(make(terms, layout, target_of(device)))
    return _add(function, geometry(terms, layout), *facts)


def _ordered(group: Group) -> str:
    """For each input whether an element of it is read for the element at its own place alone."""
    terms = group.terms
    found = (
        terms.extents is None and leaf.map == terms.identity and leaf.value.size == terms.size for leaf in terms.leaves
    )
    return " ".join(str(int(each)) for each in found)


def _call_absorbed(chosen: Absorbed, stored: Value, device: DeviceRef) -> dict[Value, TensorValue]:
    """What a convolution stores, and before it what is made of its sums."""
    function = require_function(chosen.program)
    results = [*(chosen.sums.results if chosen.sums is not None else ()), stored]
    types = [value.tensor.type for value in results]
    made = _add(function, chosen.geometry, chosen.inputs, types, device, chosen.ordered)
    return dict(zip(results, made, strict=True))


def _call_concatenation(chosen: Concatenation, device: DeviceRef) -> TensorValue:
    function = require("movement", "concatenate", device, (word_of(chosen.result.dtype),))
    parts = [part.tensor for part in chosen.parts]
    host = ops.constant(np.array(chosen.geometry, np.int64), DType.int64, DeviceRef.CPU())
    types = [chosen.result.tensor.type]
    (result,) = add_call(Graph.current, CONCATENATE, device, [host, *parts], types, {"function": function})
    return result


def _add(
    function: str,
    values: Sequence[int],
    inputs: Sequence[Value],
    types: Sequence[TensorType],
    device: DeviceRef,
    ordered: str,
) -> list[TensorValue]:
    """The call of ``function`` with the geometry ``values``."""
    count = padded(max(1, len(inputs)))
    tensors = [value.tensor for value in inputs] or [ops.constant(0.0, DType.float32, device)]
    tensors += [tensors[-1]] * (count - len(tensors))
    host = ops.constant(np.array(values, np.int64), DType.int64, DeviceRef.CPU())
    told = {"function": function, "ordered": ordered}
    return add_call(Graph.current, PROGRAM, device, [host, *tensors], types, told)


def _call_batch(batch: Sequence[Group], device: DeviceRef) -> list[TensorValue]:
    terms = batch[0].terms
    ways = ways_of_many(terms)
    assert ways is not None
    starts = [str(leaf.map.start) for group in batch for leaf in group.terms.leaves]
    parameters = {
        "function": require_function(generate_many(terms, ways, target_of(device))),
        "tensors": len(batch),
        "ordered": " ".join(_ordered(group) for group in batch),
        "starts": " ".join(starts),
        "sizes": " ".join(str(group.terms.size) for group in batch),
    }
    inputs = [leaf.value.tensor for group in batch for leaf in group.terms.leaves]
    types = [root.tensor.type for group in batch for root in group.roots]
    return add_call(Graph.current, BATCH, device, inputs, types, parameters)


def _erase_unused(graph: Graph, kept: set[Any], absorbed_results: set[Any]) -> None:
    operations, _ = read(graph)
    for operation in reversed(operations):
        pure = operation.name in (*MOVES, RESHAPE, "mo.constant", *REDUCTIONS) or (
            len(operation.results) == 1
            and is_elementwise(
                operation.name, [operand.dtype for operand in operation.operands], operation.results[0].dtype
            )
        )
        handles = list(operation.handle.results)
        pure = pure or any(handle in absorbed_results for handle in handles)
        if pure and not any(handle in kept or next(iter(handle.uses), None) is not None for handle in handles):
            operation.handle.erase()


def _sort(graph: Graph) -> None:
    """Every operation behind what it reads; apart from that the order stays, new operations come when they are read."""
    handles = list(block_of(graph))
    maker = {result: number for number, handle in enumerate(handles) for result in handle.results}
    done = [False] * len(handles)
    entered = [False] * len(handles)
    order: list[int] = []
    for first in range(len(handles)):
        waiting = [first]
        while waiting:
            number = waiting[-1]
            if done[number]:
                waiting.pop()
                continue
            before = [
                maker[operand]
                for operand in handles[number].operands
                if operand in maker and not done[maker[operand]]
            ]  # fmt: skip
            if before:
                if entered[number]:
                    raise AssertionError(f"operations wait for each other: {handles[number]}")
                entered[number] = True
                waiting += before
                continue
            done[number] = True
            order.append(number)
            waiting.pop()
    for earlier, number in itertools.pairwise(order):
        handles[number].move_after(handles[earlier])
