"""Counts what a compiled graph keeps for its backward graph, and the memory that a call of it takes."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from torch_max_backend.graph.builder import tensors_of
from torch_max_backend.graph.compiled import CompiledGraph, outputs_of
from torch_max_backend.graph.lines import user_line
from torch_max_backend.graph.memory import Allocations, GraphMemory, Kept, SavedTensor
from torch_max_backend.graph.partition import op_name, unpacked
from torch_max_backend.graph.random import draw, drawn_after
from torch_max_backend.launch_list import Kind, Place
from torch_max_backend.launch_list.memory import Span
from torch_max_backend.runtime.executable import Executable
from torch_max_backend.runtime.memory.packs import Packing


def graph_memory(
    gm: GraphModule,
    compiled: CompiledGraph,
    label: str,
    saved: frozenset[int],
    state: Iterable[int],
    packing: Packing | None,
) -> GraphMemory:
    """The memory of a graph that was compiled.

    Args:
        gm: the graph as it was compiled.
        compiled: what was made of it.
        label: of the Dynamo graph.
        saved: the outputs that are kept for a backward graph.
        state: the arguments, by number, that are parameters and buffers.
        packing: of the values that a backward graph gets.
    """
    arguments = gm.graph.find_nodes(op="placeholder")
    known = frozenset(state)
    backward = compiled.name == "backward"
    counted = [node for node in arguments if node.name.startswith("tangents")] if backward else arguments
    sizes = {number: bytes_of(node.meta.get("val")) for number, node in enumerate(counted)}
    own = _made(gm)
    found = _saved_nodes(own, saved)
    first = min(saved, default=0)
    return GraphMemory(
        label,
        sum(size for number, size in sizes.items() if number in known),
        sum(size for number, size in sizes.items() if number not in known),
        sum(bytes_of(node.meta.get("val")) for node, number in own.items() if number not in saved),
        tuple(map(_saved, found)),
        _written_over(compiled, packing),
        tuple(own[node] - first for node in found),
    )


NAMED = 5
"""Saved tensors that an error names."""


def kept_by(gm: GraphModule, saved: frozenset[int]) -> Kept | None:
    """What the outputs ``saved`` of a forward graph keep alive; None if that is nothing."""
    found = _saved_nodes(_made(gm), saved)
    total = sum(bytes_of(node.meta["val"]) for node in found)
    return Kept(total, tuple(map(_saved, found[:NAMED]))) if found else None


def _made(gm: GraphModule) -> dict[Node, int]:
    """The nodes that the graph computes and returns, with the numbers that they have first."""
    made: dict[Node, int] = {}
    for number, node in enumerate(outputs_of(gm)):
        if isinstance(node, Node) and node.op == "call_function" and not _is_update(node):
            made.setdefault(node, number)
    return made


def _saved_nodes(made: Mapping[Node, int], saved: frozenset[int]) -> list[Node]:
    """The tensors among outputs ``saved``, the largest first."""
    tensors = [node for node, number in made.items() if number in saved and _is_tensor(node)]
    return sorted(tensors, key=lambda node: -bytes_of(node.meta["val"]))


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _is_update(node: Node) -> bool:
    """Whether the output is an argument that was updated."""
    return node.target is torch.ops.aten.copy_.default


def _saved(node: Node) -> SavedTensor:
    fake = node.meta["val"]
    maker = unpacked(node) if node.target is operator.getitem else node
    # A draw has the op that it draws for as its first argument.
    op = str(node.args[0]) if node.target in (draw, drawn_after) else op_name(maker)
    return SavedTensor(bytes_of(fake), tuple(map(_extent, fake.shape)), fake.dtype, op, node.name, user_line(node))


def bytes_of(value: Any) -> int:
    """Bytes of the tensors in a node's value, of the traced sizes where they are symbolic."""
    return sum(math.prod(map(_extent, each.shape)) * each.dtype.itemsize for each in tensors_of(value))


def _extent(size: int | torch.SymInt) -> int:
    return size if isinstance(size, int) else int(size.node.hint or 1)


def _written_over(compiled: CompiledGraph, packing: Packing | None) -> frozenset[int]:
    if compiled.cut_graph is not None or not compiled.executables:
        return frozenset()
    executable = compiled.executables[0]
    listing, inputs = executable.listing, executable.built.inputs
    if listing is None or not listing.reused:
        return frozenset()
    words = (word for launch in listing.launches for word in launch.words)
    places = {word for word in words if isinstance(word, Place) and word.kind is Kind.REUSED}
    found: set[int] = set()
    for place in places:
        position = inputs[place.number].position
        if packing is None or not executable.takes_packs:
            found.add(position)
        elif position >= len(packing.sizes):
            found.add(packing.others[position - len(packing.sizes)])
        else:
            members = (value for value in packing.values if value.pack == position)
            found.update(each.number for each in members if each.offset <= place.offset < each.offset + each.bytes)
    return frozenset(found)


def needed(compiled: CompiledGraph) -> Allocations:
    """The allocations of a call of a graph."""
    if compiled.cut_graph is not None:
        return _needed_by_cut_graph(compiled, compiled.cut_graph)
    executable = compiled.executables[0]
    listing = executable.listing
    results = _results(executable) + _drawn(executable)
    if listing is None:
        return Allocations(results, 0, None, 0)
    moment = ""
    if listing.fullest >= 0:
        ops = listing.launches[listing.fullest].ops
        moment = f"launch {listing.fullest + 1} of {len(listing.launches)}" + (f", {ops}" if ops else "")
    return Allocations(results, listing.workspace, _scratch(executable), sum(listing.reused.values()), moment)


def _results(executable: Executable) -> int:
    """Bytes of the results that are not written over arguments."""
    updates = executable.listing.updates if executable.listing is not None else {}
    facts = enumerate(executable.outputs.leaving.facts)
    return sum(math.prod(fact.shape or ()) * fact.dtype.itemsize for number, fact in facts if number not in updates)


def _drawn(executable: Executable) -> int:
    specs = [spec for spec in executable.built.inputs if spec.drawn] if executable.spec.draws else []
    return sum(math.prod(spec.shape or ()) * spec.dtype.itemsize for spec in specs)


def _scratch(executable: Executable) -> int | None:
    return None if executable.runner is None else executable.runner.scratch


def _needed_by_cut_graph(compiled: CompiledGraph, cut_graph: GraphModule) -> Allocations:
    """As ``needed``, of a graph that is cut: a value lives from the node that makes it to its last reader."""
    nodes = list(cut_graph.graph.nodes)
    homes: dict[Node, Node] = {}
    spans: dict[Node, Span] = {}
    for number, node in enumerate(nodes):
        for home in {homes[source] for source in node.all_input_nodes if source in homes}:
            spans[home] = replace(spans[home], last=number)
        fake = node.meta.get("val")
        if node.op not in ("call_function", "call_module") or not isinstance(fake, torch.Tensor):
            continue
        source = node.all_input_nodes[0] if node.all_input_nodes else node
        if getattr(node.target, "is_view", False):
            homes |= {node: homes[source]} if source in homes else {}
            continue
        homes[node] = node
        first = nodes.index(source) if node.target is operator.getitem else number
        spans[node] = Span(bytes_of(fake), first, number)
    last = len(nodes) - 1
    left = sum(span.size for span in spans.values() if span.last == last)
    most, moment = left, ""
    for number, node in enumerate(nodes):
        called = getattr(cut_graph, str(node.target), None) if node.op == "call_module" else None
        inner = called.listing.workspace if isinstance(called, Executable) and called.listing is not None else 0
        live = inner + sum(span.size for span in spans.values() if span.first <= number <= span.last)
        if live > most:
            most, moment = live, called.name if isinstance(called, Executable) else op_name(node)
    scratch = [each for each in map(_scratch, compiled.executables) if each is not None]
    return Allocations(left, most - left, max(scratch, default=None), 0, moment)
