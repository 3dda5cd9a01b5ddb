"""Compiles an FX graph, whole or cut, to a callable over tensors."""

from __future__ import annotations

import functools
import operator
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node

from torch_max_backend.errors import UnsupportedOpError
from torch_max_backend.graph.builder import NodesCannotLower
from torch_max_backend.graph.compiled import CompiledGraph, outputs_of
from torch_max_backend.graph.constants import describe_attributes, is_constant
from torch_max_backend.graph.partition import Refusal, cut, is_host_node, leave_assertions, refusals, unknown_sizes
from torch_max_backend.graph.random import DRAWN, ORIGIN, hoist_draws, is_draw, take_draws
from torch_max_backend.graph.sized import SizedGraph, at_hints, is_symbolic
from torch_max_backend.graph.storage import read_whole_storages
from torch_max_backend.graph.unit import CompilationUnit
from torch_max_backend.max_compat import in_mlir_context
from torch_max_backend.mojo_ops.functions import noted, require_function
from torch_max_backend.options import Options
from torch_max_backend.runtime.executable import Executable
from torch_max_backend.runtime.memory.packs import Packing, unpacking
from torch_max_backend.torch_compat import boxed_code


class FallbackWarnings:
    """One warning in a process for each op that stays in PyTorch."""

    def __init__(self) -> None:
        self._given: set[str] = set()
        self._lock = threading.Lock()

    def warn(self, refusal: Refusal) -> None:
        """Warns about the op, once."""
        with self._lock:
            if refusal.op in self._given:
                return
            self._given.add(refusal.op)
        at = f" (at {refusal.user_line})" if refusal.user_line else ""
        message = f"{refusal.op}({refusal.arguments}) runs in PyTorch, not in MAX: {refusal.reason}{at}"
        warnings.warn(message, UserWarning, stacklevel=3)

    def forget(self) -> None:
        """Later fallbacks warn anew."""
        with self._lock:
            self._given.clear()


fallback_warnings = FallbackWarnings()


@in_mlir_context
def compile_graph(
    gm: GraphModule,
    unit: CompilationUnit,
    options: Options,
    name: str,
    *,
    free_outputs: frozenset[int] = frozenset(),
    packable: frozenset[int] = frozenset(),
    packing: Packing | None = None,
    reusable: frozenset[int] = frozenset(),
) -> CompiledGraph:
    """Puts ``gm`` into ``unit`` and returns its callable, which runs once the unit is compiled.

    Args:
        gm: a functional aten graph with fake values in ``meta["val"]``.
        unit: receives the MAX graphs.
        options: the user's options.
        name: names the MAX graphs, unique in the process.
        free_outputs: outputs whose strides may be chosen freely.
        packable: those of them, its last ones, that may leave in packs; ``CompiledGraph.packing`` says which do.
        packing: of the packs that are the first arguments.
        reusable: arguments, by number, whose memory may be written over when they are no longer needed.

    Raises:
        UnsupportedOpError: an op cannot run in MAX and the options forbid the fallback.
        DeviceUnavailableError: MAX does not have the graph's device.
    """
    describe_attributes(gm)
    read_whole_storages(gm)
    gm = hoist_draws(gm)
    leave_assertions(gm, listed=options.run == "launches")
    host_ops = [str(node.target) for node in gm.graph.nodes if node.op == "call_function" and is_host_node(node)]
    refused: dict[str, str] = {}
    while True:
        found = refusals(gm, refused, listed=options.run == "launches")
        _report(found, options)
        added: list[Executable] = []
        sized: list[CompiledGraph] = []
        try:
            with noted() as functions:
                cut_graph, sources = _assemble(
                    gm, unit, name, found, added, sized, free_outputs, options, packable, packing, reusable
                )
        except NodesCannotLower as error:
            for executable in added:
                unit.discard(executable)
            new = {node.meta.get(ORIGIN, node.name): reason for node, reason in error.refused.items()}
            if new.keys() <= refused.keys():
                raise
            refused |= new
            continue
        for function in functions:
            require_function(function)
        unpacks = None if added and added[0].takes_packs else packing
        made = added[0].packing if added else None
        return CompiledGraph(
            name,
            runner_of(added, cut_graph, unpacks),
            added,
            [*found.values(), *(refusal for graph in sized for refusal in graph.refusals)],
            host_ops,
            sources,
            made,
            cut_graph,
            unpacks,
        )


def runner_of(
    executables: Sequence[Executable],
    cut_graph: GraphModule | None,
    unpacks: Packing | None,
) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """The function that runs a graph; see ``CompiledGraph`` for the arguments."""
    if cut_graph is None:
        runner: Callable[[Sequence[Any]], Sequence[Any]] = executables[0].run
    elif boxed_code is not None:
        # The generated code drops an argument behind its last use; the caller has let go of it.
        cut_graph.graph.set_codegen(boxed_code())
        cut_graph.recompile()
        runner = cut_graph
    else:
        cut_graph.recompile()
        runner = functools.partial(_spread, cut_graph)
    return runner if unpacks is None else unpacking(runner, unpacks)


def _spread(cut_graph: GraphModule, args: Sequence[Any]) -> Sequence[Any]:
    return cut_graph(*args)


def _report(found: dict[str, Refusal], options: Options) -> None:
    for refusal in found.values():
        if options.fallback == "error":
            raise UnsupportedOpError(refusal.op, refusal.arguments, refusal.reason, refusal.user_line)
        fallback_warnings.warn(refusal)


def _assemble(
    gm: GraphModule,
    unit: CompilationUnit,
    name: str,
    found: dict[str, Refusal],
    added: list[Executable],
    sized: list[CompiledGraph],
    free_outputs: frozenset[int],
    options: Options,
    packable: frozenset[int],
    packing: Packing | None,
    reusable: frozenset[int],
) -> tuple[GraphModule | None, list[tuple[Executable, int] | None]]:
    """The graph that calls what is ``added``, None where that is one executable which is all; and for each output the
    executable that makes it with the number it has there. Partitions with symbolic sizes are ``sized``."""
    listed = options.run == "launches"
    calls = [node for node in gm.graph.nodes if node.op in ("call_function", "call_module", "get_attr")]
    built = [node for node in calls if not (is_draw(node) and not node.all_input_nodes)]
    if not found and built and all(_is_built(node) for node in built) and not (listed and is_symbolic(gm)):
        if not listed:
            _know_all_sizes(gm)
        whole, draws = take_draws(gm) if len(built) < len(calls) else (gm, ())
        executable = unit.add(
            whole,
            name,
            free_outputs=free_outputs,
            shown_outputs=_shown(gm, name, free_outputs),
            options=options,
            packable=packable,
            packing=packing,
            draws=draws,
            reusable=reusable,
        )
        added.append(executable)
        return None, [(executable, number) for number in range(len(outputs_of(gm)))]
    cut_graph = cut(gm, found)
    refused: dict[Node, str] = {}
    for node in cut_graph.graph.nodes:
        if node.op != "call_module":
            continue
        partition = getattr(cut_graph, str(node.target))
        if not isinstance(partition, GraphModule):
            continue
        for placeholder, given in zip(partition.graph.find_nodes(op="placeholder"), node.args, strict=True):
            placeholder.meta[DRAWN] = isinstance(given, Node) and is_draw(given)
        if listed and is_symbolic(partition):
            called = _sized_partition(partition, unit, options, f"{name}_{len(added)}", added, sized)
            setattr(cut_graph, str(node.target), called)
            continue
        try:
            if not listed:
                _know_all_sizes(partition)
            executable = unit.add(
                partition,
                f"{name}_{len(added)}",
                free_outputs=_alone_in_partition(node, cut_graph, free_outputs),
                shown_outputs=_alone_in_partition(node, cut_graph, _shown(gm, name, free_outputs)),
                options=options,
            )
        except NodesCannotLower as error:
            refused |= error.refused
            continue
        added.append(executable)
        setattr(cut_graph, str(node.target), executable)
    if refused:
        raise NodesCannotLower(refused)
    return cut_graph, [_source(node, cut_graph) for node in outputs_of(cut_graph)]


class _SizedPartition(torch.nn.Module):
    """A partition with symbolic sizes, as a cut graph calls it."""

    def __init__(self, graph: SizedGraph, bare: bool) -> None:
        super().__init__()
        self._graph, self._bare = graph, bare

    def forward(self, *args: Any) -> Any:
        """The partition's result: a value, or a tuple of them."""
        results = self._graph(list(args))
        return results[0] if self._bare else tuple(results)


def _sized_partition(
    partition: GraphModule,
    unit: CompilationUnit,
    options: Options,
    name: str,
    added: list[Executable],
    sized: list[CompiledGraph],
) -> _SizedPartition:
    output = partition.graph.output_node()
    bare = isinstance(output.args[0], Node)
    if bare:
        output.args = (output.args,)
    first = compile_graph(at_hints(partition), unit, options, name)
    added += first.executables
    sized.append(first)
    make = functools.partial(compile_at_once, options=options, name=name, label=unit.label)
    return _SizedPartition(SizedGraph(partition, make, first), bare)


def compile_at_once(
    gm: GraphModule, *, options: Options, name: str, label: str, free_outputs: frozenset[int] = frozenset()
) -> CompiledGraph:
    """As ``compile_graph``, in a unit of its own that is compiled while the caller waits."""
    unit = CompilationUnit(label)
    compiled = compile_graph(gm, unit, options, name, free_outputs=free_outputs)
    unit.compile()
    return compiled


def _know_all_sizes(gm: GraphModule) -> None:
    """Raises NodesCannotLower where MAX could not know a size."""
    found = unknown_sizes(gm)
    if found:
        raise NodesCannotLower(found)


def _is_built(node: Node) -> bool:
    """Whether the builder makes the node, or takes it as a constant."""
    return is_constant(node) or (node.op == "call_function" and not is_host_node(node))


def _source(node: Any, cut_graph: GraphModule) -> tuple[Executable, int] | None:
    """The executable that makes an output of the whole, and the output's number there."""
    number: Any = 0
    if isinstance(node, Node) and node.target is operator.getitem:
        node, number = node.args
    if not isinstance(node, Node) or node.op != "call_module":
        return None
    executable = getattr(cut_graph, str(node.target))
    return (executable, number) if isinstance(executable, Executable) else None


def _shown(gm: GraphModule, name: str, free_outputs: frozenset[int]) -> frozenset[int]:
    """Outputs that users see. Gradients are not among them: PyTorch adds them up, and promises no strides."""
    return frozenset() if name.startswith("backward") else frozenset(range(len(outputs_of(gm)))) - free_outputs


def _alone_in_partition(call: Node, cut_graph: GraphModule, outputs: frozenset[int]) -> frozenset[int]:
    """Outputs of a partition that go to these outputs of the whole and nowhere else."""
    leaving = outputs_of(cut_graph)

    def is_alone(node: Node) -> bool:
        return all(
            user.op == "output" and all(number in outputs for number, value in enumerate(leaving) if value is node)
            for user in node.users
        )

    readers = [user for user in call.users if user.target is operator.getitem]
    if len(readers) == len(call.users) and readers:
        return frozenset(cast(int, user.args[1]) for user in readers if is_alone(user))
    return frozenset({0}) if is_alone(call) else frozenset()
