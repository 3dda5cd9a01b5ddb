"""Concatenations that begin as an earlier one does, as each layer's of a dense block.

One of few parts is no copy: programs read the parts. One of more is a copy, and copies of all layers would move bytes
that grow with the square of the depth. Here it is made once, and those that continue it read it and what is new: of
every eight or so, one is a copy.
"""

from __future__ import annotations

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
        if not isinstance(operation, Concat):
            continue
        (result,), axis = operation.results, operation.axis
        parts = tuple(part for part in operation.operands if part.size)
        if len(parts) <= MAX_GUARDS or result.shape is None:
            continue
        left = parts
        if result not in kept and all(map(is_fusible, readers_of(result))):
            counts = range(len(parts) - 1, MAX_GUARDS, -1)
            longest = next((count for count in counts if (axis, parts[:count]) in copies), 0)
            shorter = (copies[axis, parts[:longest]], *parts[longest:]) if longest else parts
            joined = Concat(shorter, (result.like(),), axis, node=operation.node, op=operation.op)
            if longest and (len(shorter) > MAX_GUARDS or is_fusible(joined)):
                left = shorter
                made[result] = graph.add(joined).results[0]
        if len(left) > MAX_GUARDS:
            copies[axis, parts] = result
    if made:
        graph.settle(made)
