"""Compiled graphs on disk: what a process needs to run graphs that another one traced and lowered.

AOTAutograd's cache finds an entry by the graph that Dynamo captured. An entry has AOTAutograd's own account of the
graph, and of each of our compiled graphs the launch lists and how tensors enter and leave them. Graphs of symbolic
sizes and graphs that MAX compiles are not kept.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from torch_max_backend.graph.compiled import CompiledGraph
from torch_max_backend.graph.compiler import runner_of
from torch_max_backend.graph.memory import Kept
from torch_max_backend.graph.partition import Refusal
from torch_max_backend.graph.sized import SizedGraph
from torch_max_backend.graph.unit import CompilationUnit
from torch_max_backend.options import Options
from torch_max_backend.runtime.executable import Executable, ExecutableSpec
from torch_max_backend.runtime.memory.packs import Packing
from torch_max_backend.torch_compat import BypassAOTAutogradCache, OpOverload, OutputCode

loader: ContextVar[Callable[[bytes], CompiledGraph]] = ContextVar("loader")
"""Makes the compiled graph of what ``dumped`` returned, for the compilation at hand."""


class StorableGraph(OutputCode):
    """A compiled graph as AOTAutograd's cache takes it.

    Args:
        graph: what is called.
        nanoseconds: that it took to make.
    """

    def __init__(self, graph: CompiledGraph | SizedGraph, nanoseconds: int) -> None:
        super().__init__()
        self._time_taken_ns = nanoseconds
        self._graph: CompiledGraph | SizedGraph | None = graph
        self._content = b""
        # An attribute of the instance: wrappers copy these.
        self._boxed_call = True

    def __call__(self, inputs: Any) -> Any:
        assert self._graph is not None
        return self._graph(inputs)

    def prepare_for_serialization(self) -> None:
        """Makes this object, a copy, one that can be pickled.

        Raises:
            BypassAOTAutogradCache: the graph cannot be kept.
        """
        if not isinstance(self._graph, CompiledGraph):
            raise BypassAOTAutogradCache("sizes are symbolic")
        self._content, self._graph = dumped(self._graph), None

    def post_compile(self, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        """Makes what was unpickled ready to run."""
        self._graph, self._content = loader.get()(self._content), b""


@dataclass(frozen=True)
class _NodeReference:
    """Stands for a node in the arguments of another one."""

    name: str


@dataclass(frozen=True)
class _Step:
    """A node of a graph that is cut; ``target`` is the number of an executable where it calls one."""

    op: str
    name: str
    target: Any
    args: Any
    kwargs: Any


@dataclass(frozen=True)
class _Stored:
    """A ``CompiledGraph``; ``steps`` are None where it is one executable."""

    name: str
    executables: tuple[ExecutableSpec, ...]
    steps: tuple[_Step, ...] | None
    unpacks: Packing | None
    packing: Packing | None
    refusals: list[Refusal]
    host_ops: list[str]
    kept: Kept | None
    first_saved: int
    altered: frozenset[int]


def dumped(compiled: CompiledGraph) -> bytes:
    """``compiled`` as bytes that ``loaded`` takes.

    Raises:
        BypassAOTAutogradCache: it holds something that cannot be kept.
    """
    for executable in compiled.executables:
        if executable.listing is None:
            raise BypassAOTAutogradCache(f"{executable.name} is no launch list")
    stored = _Stored(
        compiled.name,
        tuple(_alone(executable.spec) for executable in compiled.executables),
        None if compiled.cut_graph is None else tuple(_steps(compiled.cut_graph, compiled.executables)),
        compiled.unpacks,
        compiled.packing,
        compiled.refusals,
        compiled.host_ops,
        compiled.kept,
        compiled.first_saved,
        compiled.altered,
    )
    content = io.BytesIO()
    try:
        _Pickler(content, pickle.HIGHEST_PROTOCOL).dump(stored)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise BypassAOTAutogradCache(str(error)) from error
    return content.getvalue()


def loaded(content: bytes, unit: CompilationUnit, options: Options) -> CompiledGraph:
    """The compiled graph of what ``dumped`` returned, ready once ``unit`` is compiled."""
    stored: _Stored = pickle.loads(content)
    executables = [unit.adopt(spec, options) for spec in stored.executables]
    cut_graph = None if stored.steps is None else _cut_graph(stored.steps, executables)
    return CompiledGraph(
        stored.name,
        runner_of(executables, cut_graph, stored.unpacks),
        executables,
        stored.refusals,
        stored.host_ops,
        packing=stored.packing,
        cut_graph=cut_graph,
        unpacks=stored.unpacks,
        kept=stored.kept,
        first_saved=stored.first_saved,
        altered=stored.altered,
    )


def _alone(spec: ExecutableSpec) -> ExecutableSpec:
    """Without the graphs, which a launch list does not need."""
    return dataclasses.replace(spec, built=dataclasses.replace(spec.built, graph=None, typed=None))


def _steps(cut_graph: GraphModule, executables: Sequence[Executable]) -> list[_Step]:
    numbers = {id(executable): number for number, executable in enumerate(executables)}
    steps = []
    for node in cut_graph.graph.nodes:
        target = node.target
        if node.op == "call_module":
            target = numbers.get(id(getattr(cut_graph, str(target))))
        if target is None or node.op in ("get_attr", "call_method"):
            raise BypassAOTAutogradCache(f"{node.op} {node.target}")
        args, kwargs = (map_aggregate(given, _reference) for given in (node.args, node.kwargs))
        steps.append(_Step(node.op, node.name, target, args, kwargs))
    return steps


def _reference(value: Any) -> Any:
    return _NodeReference(value.name) if isinstance(value, Node) else value


def _cut_graph(steps: Sequence[_Step], executables: Sequence[Executable]) -> GraphModule:
    graph, nodes = Graph(), dict[str, Node]()

    def node_of(value: Any) -> Any:
        return nodes[value.name] if isinstance(value, _NodeReference) else value

    for step in steps:
        args, kwargs = map_aggregate(step.args, node_of), map_aggregate(step.kwargs, node_of)
        target = f"executable_{step.target}" if step.op == "call_module" else step.target
        nodes[step.name] = graph.create_node(step.op, target, args, kwargs, step.name)
    modules: Mapping[str, Any] = {f"executable_{number}": each for number, each in enumerate(executables)}
    return GraphModule(dict(modules), graph)


class _Pickler(pickle.Pickler):
    """Pickles operators by their names."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, OpOverload):
            return _op, (str(value),)
        return NotImplemented


def _op(name: str) -> Any:
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)
