"""Graphs with symbolic sizes: one graph for each set of sizes that they are called with.

A launch list has fixed sizes. It takes milliseconds to seconds to build, and a machine's libraries serve all sizes, so
a graph with symbolic sizes is built anew for the sizes of a call.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.node import map_arg

from torch_max_backend.graph.compiled import CompiledGraph
from torch_max_backend.graph.constants import attribute_of
from torch_max_backend.torch_compat import FakeTensorMode, disable_current_modes, no_autocast

log = logging.getLogger("torch_max_backend")

MAX_GRAPHS = 64
"""Sets of sizes whose graphs are kept; the oldest goes first."""


def is_sized(gm: GraphModule) -> bool:
    """Whether the arguments determine all sizes of ``gm``, and some are symbolic."""
    if not is_symbolic(gm):
        return False
    for node in gm.graph.nodes:
        value = attribute_of(node) if node.op == "get_attr" else node.meta.get("val")
        if isinstance(value, GraphModule) or free_unbacked_symbols(value):
            return False
        if isinstance(value, _NUMBERS) and not all(symbol.is_integer for symbol in value.node.expr.free_symbols):
            # A rate or a factor that the model hands over, another one in every call.
            return False
    return True


def is_symbolic(gm: GraphModule) -> bool:
    """Whether a size or a number among the arguments of ``gm`` is symbolic."""
    return any(_is_symbolic(node.meta.get("val")) for node in gm.graph.find_nodes(op="placeholder"))


#: Sizes, and what a model computes from them: a scale, a condition that it asserts.
_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not all(isinstance(extent, int) for extent in (*value.shape, *value.stride()))
    return isinstance(value, _NUMBERS)


class SizedGraph:
    """As a ``CompiledGraph``, for ``gm`` at any sizes.

    Args:
        gm: the graph; ``is_sized`` holds for it.
        make: makes a graph without symbolic sizes ready to run.
        first: what ``make`` has made, or will have, of ``at_hints(gm)``.
    """

    _boxed_call = True

    def __init__(self, gm: GraphModule, make: Callable[[GraphModule], CompiledGraph], first: CompiledGraph) -> None:
        self._gm, self._make = gm, make
        values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
        self._telling = [number for number, value in enumerate(values) if _is_symbolic(value)]
        self._graphs = {self._sizes([_at_hint(value) for value in values]): first}
        self._met = 1
        self._lock = threading.Lock()

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        sizes = self._sizes(args)
        graph = self._graphs.get(sizes)
        if graph is None:
            with self._lock:
                graph = self._graphs.get(sizes) or self._add(sizes, args)
        return graph(args)

    def _sizes(self, args: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(
            (*args[number].shape, *args[number].stride()) if isinstance(args[number], torch.Tensor) else args[number]
            for number in self._telling
        )

    def _add(self, sizes: tuple[Any, ...], args: Sequence[Any]) -> CompiledGraph:
        self._met += 1
        if self._met == MAX_GRAPHS + 1:
            log.warning(
                "a graph has met %d sets of sizes, and is made anew for each: pad its arguments to fewer sizes",
                MAX_GRAPHS,
            )
        while len(self._graphs) >= MAX_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        graph = self._graphs[sizes] = self._make(at(self._gm, args))
        return graph


def at_hints(gm: GraphModule) -> GraphModule:
    """``gm`` at the sizes that it was traced with."""
    return at(gm, [_at_hint(node.meta["val"]) for node in gm.graph.find_nodes(op="placeholder")])


def at(gm: GraphModule, args: Sequence[Any]) -> GraphModule:
    """``gm`` at the sizes of ``args``: no node is a number, no size is symbolic.

    Args:
        gm: a functional aten graph.
        args: for its placeholders; of tensors only what they are, not their values.
    """
    graph, values, copies = Graph(), dict[Node, Any](), dict[Node, Any]()
    placeholders = iter(args)
    with disable_current_modes(), torch.no_grad(), no_autocast():
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        for node in gm.graph.nodes:
            if node.op == "output":
                graph.output(map_arg(node.args[0], copies.__getitem__))
                continue
            if node.op == "placeholder":
                value = _fake(mode, next(placeholders))
            elif node.op == "get_attr":
                value = _fake(mode, attribute_of(node))
            else:
                # What a forward graph saved has its own memory order, which may leave no view of that shape.
                aten = torch.ops.aten
                target = aten.reshape.default if node.target is aten.view.default else node.target
                with mode:
                    value = target(*map_arg(node.args, values.__getitem__), **map_arg(node.kwargs, values.__getitem__))
            values[node] = value
            if node.target is torch.ops.aten._assert_scalar.default:
                # It has been evaluated: of sizes alone, it holds for the graph that is made.
                continue
            if node.op == "call_function" and isinstance(value, (int, float)):
                copies[node] = value
                continue
            copy = graph.node_copy(node, copies.__getitem__)
            copy.meta["val"] = value
            # A number among the arguments is one of the sizes that the graph is made for.
            copies[node] = value if isinstance(value, (int, float)) else copy
    return GraphModule(gm, graph)


def _fake(mode: FakeTensorMode, value: Any) -> Any:
    return mode.from_tensor(value, static_shapes=True) if isinstance(value, torch.Tensor) else value


def _at_hint(value: Any) -> Any:
    """A symbolic size or number, or a tensor of such sizes, as it was traced."""
    if isinstance(value, torch.Tensor):
        shape, strides = ([_at_hint(extent) for extent in extents] for extents in (value.shape, value.stride()))
        with FakeTensorMode():
            return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)
    return value.node.hint if isinstance(value, _NUMBERS) else value
