"""Concatenations that begin as an earlier one does, as each layer's of a dense block.

One of few parts is no copy: programs read the parts. One of more is a copy, and copies of all layers would move bytes
that grow with the square of the depth. Here it is made once, and those that continue it read it and what is new: of
every eight or so, one is a copy.
"""

from __future__ import annotations

from torch_max_backend.fusion.movement import concatenation
from torch_max_backend.fusion.terms import MAX_GUARDS, in_memory, is_fusible, readers_of
from torch_max_backend.typed_graph import TypedGraph
from torch_max_backend.typed_graph.operations import Concat, Value

_Parts = tuple[Value, ...]


def share_prefixes(graph: TypedGraph) -> None:
    """Lets concatenations read copies of their first parts, where programs alone read them."""
    copies: dict[tuple[int, _Parts], Value] = {}
    made: dict[Value, Value] = {}
    kept = {in_memory(value) for value in graph.results}
    for operation in list(graph.operations):
        whole = concatenation(operation)
        if whole is None or not isinstance(operation, Concat):
            continue
        result, axis, parts = whole.result, operation.axis, tuple(whole.parts)
        for_programs = result not in kept and all(map(is_fusible, readers_of(result)))
        counts = range(len(parts) - 1, MAX_GUARDS, -1) if for_programs else ()
        longest = next((count for count in counts if (axis, parts[:count]) in copies), 0)
        if longest:
            left = copies[axis, parts[:longest]], *parts[longest:]
            shorter = Concat(left, (result.like(),), axis, node=operation.node, op=operation.op)
            is_read_in_parts = is_fusible(shorter)
            if is_read_in_parts or concatenation(shorter) is not None:
                made[result] = graph.add(shorter).results[0]
            if is_read_in_parts:
                continue
        copies[axis, parts] = result
    if made:
        graph.settle(made)
