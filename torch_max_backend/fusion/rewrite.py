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
"""Calls of a program over many tensors and of one over one, which launch lists alone have: they say for each input
whether an element of it is read for the element at its own place alone."""
_OP_INPUTS = (4, 12, 48)
"""Numbers of inputs that the ops of kernels/pointwise/ops.mojo have."""


def fuse(
    graph: Graph,
    results: Sequence[TensorValue],
    device: DeviceRef,
    *,
    listed: bool = False,
    around_convolutions: bool = True,
) -> list[TensorValue]:
    """Computes what is elementwise in ``graph`` by programs of a library instead of operations of MAX.

    MAX compiles every elementwise expression anew for each shape of each graph. A program is compiled once for a
    machine, for all sizes.

    Args:
        graph: which is being built, in its context, and has no output yet.
        results: that it will return.
        device: that it computes on.
        listed: the graph is to be a launch list: it gets calls that MAX could not compile.
        around_convolutions: convolutions take in programs and reductions of what they store.

    Returns:
        the results, of the same shapes and dtypes.
    """
    if listed:
        results = narrow_sums(graph, write_sums(graph, results, device))
        # What they add stands at the end, behind its readers.
        _sort(graph)
        results, replaced = strided_products(graph, results, device)
        _erase_unused(graph, {handle_of(result) for result in results}, replaced)
        _sort(graph)
    operations, values = read(graph)
    kept = [values[handle_of(result)] for result in results]
    chosen = plan(operations, set(kept), device, listed=listed)
    made: dict[Value, TensorValue] = {}
    gone: set[Any] = set()
    taken, alone = dict[Group, Absorbed](), list[Absorbed]()
    if around_convolutions:
        found = {group: absorbed(group, chosen.groups, kept, device) for group in chosen.groups}
        taken = {group: each for group, each in found.items() if each is not None}
        taken, alone = with_sums(operations, chosen.groups, taken, device)
    for group in chosen.groups:
        if group not in taken:
            made.update(zip(group.roots, _call(group, device, listed), strict=True))
    stored = [(group.roots[0], absorber) for group, absorber in taken.items()]
    stored += [(absorber.convolution.results[0], absorber) for absorber in alone]
    for value, absorber in stored:
        made.update(_call_absorbed(absorber, value, device, listed))
        gone.update(absorber.convolution.handle.results)
        gone.update(absorber.sums.handle.results if absorber.sums is not None else ())
    for batch in chosen.batches:
        call = _call_batch if listed else _call_pairs
        made.update(zip([root for group in batch for root in group.roots], call(batch, device), strict=True))
    for each in chosen.concatenations:
        made[each.result] = _call_concatenation(each, device)
    for value, tensor in made.items():
        value.handle.replace_all_uses_with(handle_of(tensor))
    final = [made.get(value, result) for value, result in zip(kept, results, strict=True)]
    if made or listed:
        # Even where no program is made: a broadcast whose reader got a constant instead is in a launch list's way.
        _erase_unused(graph, {handle_of(result) for result in final}, gone)
    if made:
        _sort(graph)
    return final


def _call(group: Group, device: DeviceRef, listed: bool) -> list[TensorValue]:
    terms = group.terms
    layout = layout_of(terms)
    assert layout is not None
    inputs = [leaf.value for leaf in terms.leaves]
    types = [root.tensor.type for root in group.roots]
    moved = transposition(terms, layout)
    if moved is not None:
        function = require("movement", "transpose", device, (word_of(group.roots[0].dtype),))
        return _add(function, moved, inputs, types, device)
    make = generate if terms.extents is None else generate_reduction
    function = require_function(make(terms, layout, target_of(device)))
    ordered = "" if terms.extents is not None or not listed else _ordered(group)
    return _add(function, geometry(terms, layout), inputs, types, device, ordered)


def _ordered(group: Group) -> str:
    """For each input whether an element of it is read for the element at its own place alone."""
    terms = group.terms
    found = (
        terms.extents is None and leaf.map == terms.identity and leaf.value.size == terms.size for leaf in terms.leaves
    )
    return " ".join(str(int(each)) for each in found)


def _call_absorbed(chosen: Absorbed, stored: Value, device: DeviceRef, listed: bool) -> dict[Value, TensorValue]:
    """What a convolution stores, and before it what is made of its sums."""
    function = require_function(chosen.program)
    results = [*(chosen.sums.results if chosen.sums is not None else ()), stored]
    types = [value.tensor.type for value in results]
    ordered = chosen.ordered if listed else ""
    return dict(zip(results, _add(function, chosen.geometry, chosen.inputs, types, device, ordered), strict=True))


def _call_concatenation(chosen: Concatenation, device: DeviceRef) -> TensorValue:
    function = require("movement", "concatenate", device, (word_of(chosen.result.dtype),))
    parts = [ops.reshape(part.tensor, [part.size]) for part in chosen.parts]
    host = ops.constant(np.array(chosen.geometry, np.int64), DType.int64, DeviceRef.CPU())
    (result,) = ops.custom(
        "concatenate", device, [host, *parts], [chosen.result.tensor.type], {"function": function}
    )  # fmt: skip
    return result.tensor


def _add(
    function: str,
    values: Sequence[int],
    inputs: Sequence[Value],
    types: Sequence[TensorType],
    device: DeviceRef,
    ordered: str = "",
) -> list[TensorValue]:
    """The op with the geometry ``values`` that calls ``function``; with ``ordered`` one for launch lists alone."""
    count = padded(max(1, len(inputs)))
    tensors = [value.tensor for value in inputs] or [ops.constant(0.0, DType.float32, device)]
    room = next(number for number in _OP_INPUTS if number >= count)
    tensors += [tensors[-1]] * (room - len(tensors))
    host = ops.constant(np.array(values, np.int64), DType.int64, DeviceRef.CPU())
    if ordered:
        told = {"function": function, "inputs": count, "ordered": ordered}
        return add_call(Graph.current, PROGRAM, device, [host, *tensors[:count]], types, told)
    name, parameters = f"pointwise_{len(types)}_{room}", {"function": function, "inputs": count}
    return [result.tensor for result in ops.custom(name, device, [host, *tensors], types, parameters)]


def _call_batch(batch: Sequence[Group], device: DeviceRef) -> list[TensorValue]:
    """The call that a launch list runs; see ``launches/listing.py``."""
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


def _call_pairs(batch: Sequence[Group], device: DeviceRef) -> list[TensorValue]:
    terms = batch[0].terms
    function = require_function(generate_many(terms, ["linear"], target_of(device)))
    roots = [group.roots[0] for group in batch]
    inputs = [ops.reshape(group.terms.leaves[0].value.tensor, [group.terms.size]) for group in batch]
    types = [TensorType(root.dtype, [root.size], device) for root in roots]
    results = ops.custom("pointwise_many", device, inputs, types, {"function": function})
    return [
        ops.reshape(result.tensor, list(root.tensor.shape)) for result, root in zip(results, roots, strict=True)
    ]  # fmt: skip


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
