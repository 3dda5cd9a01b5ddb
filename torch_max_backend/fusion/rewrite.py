"""Replaces a graph's pointwise operations and reductions by generated programs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from max.graph import DeviceRef

from torch_max_backend.fusion.attention import strided_attention
from torch_max_backend.fusion.batches import Group
from torch_max_backend.fusion.bias_sums import join_bias_sums
from torch_max_backend.fusion.column_sums import with_sums
from torch_max_backend.fusion.convolutions import FusedConvolution, absorbed
from torch_max_backend.fusion.dependencies import Dependencies
from torch_max_backend.fusion.groups import Grouped, grouped
from torch_max_backend.fusion.loop_nest import loop_nest_of
from torch_max_backend.fusion.movement import Concatenation, transposition
from torch_max_backend.fusion.narrow_sums import narrow_sums
from torch_max_backend.fusion.prefixes import share_prefixes
from torch_max_backend.fusion.products import strided_products
from torch_max_backend.fusion.program import (
    generate_many,
    numbers_of,
    numbers_of_many,
    ops_of,
    padded,
    program_of,
    sizes_of,
    ways_of_many,
)
from torch_max_backend.fusion.rows import TARGETS, Rows, rows, rows_function
from torch_max_backend.fusion.written_sums import write_sums
from torch_max_backend.mojo_ops.functions import Function, require_function, target_of
from torch_max_backend.mojo_ops.movement import movement_function, movement_signature
from torch_max_backend.typed_graph import TypedGraph
from torch_max_backend.typed_graph.operations import (
    Call,
    Operand,
    Operation,
    Result,
    Value,
    Word,
    constant,
    words_of,
)

PROGRAM, BATCH, ROWS, CONCATENATE = "program", "programs", "rows", "concatenate"
"""Names of calls: of a program over one tensor, of one over many, of several over the same rows, and of the kernel that
puts many tensors one behind the other."""


def fuse(graph: TypedGraph, device: DeviceRef) -> None:
    """Computes what is pointwise in ``graph``, and sums, by library functions.

    A program is compiled once for a machine, for all sizes.

    Args:
        graph: which is changed.
        device: that it computes on.
    """
    write_sums(graph, device)
    narrow_sums(graph)
    share_prefixes(graph)
    join_bias_sums(graph, device)
    strided_products(graph, device)
    strided_attention(graph)
    chosen = grouped(graph.operations, set(graph.results), device)
    made: dict[Value, Value] = {}
    gone: set[Operation] = set()
    found = {group: absorbed(group, chosen.groups, graph.results, device) for group in chosen.groups}
    taken = {group: each for group, each in found.items() if each is not None}
    taken, alone = with_sums(graph.operations, chosen.groups, taken, device)
    calls = _Calls(graph, device)
    left = [group for group in chosen.groups if group not in taken]
    chains = rows(left, _dependencies(chosen, taken, alone)) if target_of(device) in TARGETS else []
    chained = {group for chain in chains for group in chain.groups}
    for group in chosen.groups:
        if group not in taken and group not in chained:
            made.update(zip(group.roots, calls.of_group(group), strict=True))
    for chain in chains:
        made.update(zip(chain.roots, calls.of_rows(chain), strict=True))
    stored = [(group.roots[0], absorber) for group, absorber in taken.items()]
    stored += [(absorber.convolution.results[0], absorber) for absorber in alone]
    for value, absorber in stored:
        made.update(calls.of_absorbed(absorber, value))
        gone.update(each for each in (absorber.convolution, absorber.sums) if each is not None)
    for batch in chosen.batches:
        made.update(zip([root for group in batch for root in group.roots], calls.of_batch(batch), strict=True))
    for each in chosen.concatenations:
        made[each.result] = calls.of_concatenation(each)
    graph.settle(made, gone)


def _dependencies(
    chosen: Grouped, taken: Mapping[Group, FusedConvolution], alone: Iterable[FusedConvolution]
) -> Dependencies:
    """The dependencies of the launches that are decided."""
    dependencies = Dependencies(chosen.groups, taken)
    for batch in chosen.batches:
        together = tuple(batch)
        for group in batch:
            dependencies.add_group(together, group)
    for each in alone:
        dependencies.add_convolution(each.convolution, each)
    return dependencies


class _Calls:
    """Adds calls to a graph; what they make takes the place of other values later."""

    def __init__(self, graph: TypedGraph, device: DeviceRef) -> None:
        self._graph = graph
        self._device = device

    def of_group(self, group: Group) -> tuple[Value, ...]:
        """The roots of a program."""
        terms = group.terms
        loops = loop_nest_of(terms)
        assert loops is not None
        moved = transposition(terms, loops)
        read = [leaf.value for leaf in terms.leaves]
        read = read or [self._graph.add(constant(np.zeros((), np.float32), self._device)).results[0]]
        if moved is not None:
            function: Function = movement_function("transpose", target_of(self._device), group.roots[0].dtype)
            words = words_of(movement_signature("transpose"), moved)
        else:
            function = program = program_of(terms, loops, target_of(self._device))
            # What stands behind the inputs is not read.
            inputs = [min(number, len(read) - 1) for number in range(padded(len(read)))]
            words = words_of(program.signature, [*sizes_of(terms), *numbers_of(terms, loops)], inputs)
        require_function(function)
        results = tuple(root.like() for root in group.roots)
        in_order = dict.fromkeys(range(len(results)), _ordered(group))
        ops = ops_of(terms) or "clone"
        return self._graph.add(Call(tuple(read), results, function, words, PROGRAM, in_order=in_order, op=ops)).results

    def of_rows(self, chain: Rows) -> tuple[Value, ...]:
        """The roots of programs over the same rows: how many rows there are, their elements, the vector in which
        they are added up, and the words of each program."""
        function = rows_function(chain, target_of(self._device))
        require_function(function)
        words: list[Word] = [chain.outer, chain.extent, function.vector]
        operands: dict[Value, int] = {}
        results = {root: number for number, root in enumerate(chain.roots)}

        def word(value: Value) -> Word:
            if value in results:
                return Result(results[value])
            return Operand(operands.setdefault(value, len(operands)))

        for group, program in zip(chain.groups, function.programs, strict=True):
            loops = loop_nest_of(group.terms)
            assert loops is not None
            inputs = [leaf.value for leaf in group.terms.leaves]
            inputs += inputs[-1:] * (padded(len(inputs)) - len(inputs))
            places = [(word(value), ()) for value in (*group.roots, *inputs)]
            words += program.in_rows.words(numbers_of(group.terms, loops), places)
        made = tuple(root.like() for root in chain.roots)
        return self._graph.add(Call(tuple(operands), made, function, tuple(words), ROWS, op=function.ops)).results

    def of_absorbed(self, chosen: FusedConvolution, stored: Value) -> dict[Value, Value]:
        """The values of a fused convolution: those made from its sums, and what it stores."""
        results = [*(chosen.sums.results if chosen.sums is not None else ()), stored]
        ops = [chosen.convolution.op, chosen.program.ops, chosen.sums.op if chosen.sums is not None else ""]
        require_function(chosen.program)
        made, in_order = tuple(result.like() for result in results), dict(enumerate(chosen.in_order))
        inputs, words = tuple(chosen.inputs), chosen.words
        self._graph.add(Call(inputs, made, chosen.program, words, PROGRAM, in_order=in_order, op=_joined(ops)))
        return dict(zip(results, made, strict=True))

    def of_concatenation(self, chosen: Concatenation) -> Value:
        """Many tensors one behind the other."""
        function = movement_function("concatenate", target_of(self._device), chosen.result.dtype)
        require_function(function)
        words = words_of(movement_signature("concatenate", len(chosen.parts)), chosen.extents)
        call = Call(tuple(chosen.parts), (chosen.result.like(),), function, words, CONCATENATE, op="cat")
        return self._graph.add(call).results[0]

    def of_batch(self, batch: Sequence[Group]) -> tuple[Value, ...]:
        """The roots of groups that one program computes: how many groups there are; for each its size, its results,
        its inputs and its numbers."""
        terms = batch[0].terms
        ways = ways_of_many(terms)
        assert ways is not None
        function = generate_many(terms, ways, target_of(self._device))
        require_function(function)
        words: list[Word] = [*function.signature.encoded([len(batch)])]
        operands: list[Value] = []
        results: list[Value] = []
        in_order: dict[int, frozenset[int]] = {}
        for group in batch:
            ordered = frozenset(len(operands) + number for number in _ordered(group))
            tensors: list[Word] = []
            for root in group.roots:
                in_order[len(results)] = ordered
                tensors.append(Result(len(results)))
                results.append(root.like())
            for leaf in group.terms.leaves:
                tensors.append(Operand(len(operands), leaf.map.start * leaf.value.dtype.size_in_bytes))
                operands.append(leaf.value)
            tensors += [word for _, word in numbers_of_many(group.terms)]
            words += function.of_tensor.words([group.terms.size], [(each, ()) for each in tensors])
        ops = ops_of(terms)
        call = Call(tuple(operands), tuple(results), function, tuple(words), BATCH, in_order=in_order, op=ops)
        return self._graph.add(call).results


def _joined(ops: Iterable[str]) -> str:
    """The ops of several operations that one call computes."""
    return "_".join(dict.fromkeys(op for op in ops if op))


def _ordered(group: Group) -> frozenset[int]:
    """The inputs of which an element is read for the element at its own place alone."""
    terms = group.terms
    if terms.extents is not None:
        return frozenset()
    return frozenset(
        number
        for number, leaf in enumerate(terms.leaves)
        if leaf.map == terms.identity and leaf.value.size == terms.size
    )
