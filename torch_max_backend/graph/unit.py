"""Compilation units: the MAX graphs that are compiled together."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from max.driver import is_virtual_device_mode
from max.engine import Model
from max.graph import Module
from torch.fx import GraphModule

from torch_max_backend.dtypes import device_ref
from torch_max_backend.graph.builder import GraphBuilder, graph_device
from torch_max_backend.launches import LaunchList
from torch_max_backend.max_compat import in_mlir_context
from torch_max_backend.mojo_ops.functions import noted, require, require_function
from torch_max_backend.options import Options
from torch_max_backend.runtime import background, session, tasks
from torch_max_backend.runtime.background import Job
from torch_max_backend.runtime.capture import Capture, refusal
from torch_max_backend.runtime.executable import Executable, ExecutableSpec
from torch_max_backend.runtime.interface import BuiltGraph
from torch_max_backend.runtime.launch_capture import TensorMemory
from torch_max_backend.runtime.packs import Packing, pack_results, take_from_packs
from torch_max_backend.runtime.streams import stream_order
from torch_max_backend.runtime.tasks import ListTask, Task

log = logging.getLogger("torch_max_backend")


class CompilationUnit:
    """Collects graphs, then compiles them in as few or as many MAX modules as is soonest done.

    Building a graph is quick and happens at once; ``compile`` does the slow part for all of them together, since
    MAX charges much of its time for each module, not for each graph, and compiles a module on one core.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self.compiled = False
        self.graphs: list[BuiltGraph] = []
        self._pending: dict[torch.device, list[Executable]] = {}
        self._lock = threading.Lock()

    @in_mlir_context
    def add(
        self,
        gm: GraphModule,
        name: str,
        *,
        free_outputs: frozenset[int] = frozenset(),
        options: Options | None = None,
        packable: frozenset[int] = frozenset(),
        packing: Packing | None = None,
    ) -> Executable:
        """Builds ``gm`` and returns its executable, runnable after ``compile``.

        With the option ``capture`` it is replayed as a device graph where that is possible. Of the outputs ``packable``
        many leave in packs (``Executable.packing``) where it is a launch list; it takes the packs of ``packing`` where
        ``Executable.takes_packs``.

        Raises:
            NodesCannotLower: lowerings refused nodes; the unit is unchanged.
            DeviceUnavailableError: the graph's device is not there.
        """
        options = options or Options()
        device = graph_device(list(gm.graph.nodes))
        session.max_device(device)
        with noted() as functions:
            built = _built(gm, name, free_outputs, options)
        orders = tuple(spec.order if spec.index >= 0 else None for spec in built.outputs)
        listing = built.listing if options.run == "launches" and isinstance(built.listing, LaunchList) else None
        made, taking = None, None
        if listing is not None:
            if packable:
                first = min(free_outputs)
                built, made = pack_results(built, range(first, len(built.outputs)), packable)
                free_outputs = frozenset(range(first, len(built.outputs)))
            taking = None if packing is None else take_from_packs(built, packing)
            built = taking or built
            listing = cast(LaunchList, built.listing)
        # Gradients are dropped before the next step; users keep results of a forward graph longer.
        backward = name.startswith("backward")
        kept = frozenset[int]() if backward else frozenset(range(len(built.outputs))) - free_outputs
        called = tuple(dict.fromkeys(functions))
        spec = ExecutableSpec(built, device, free_outputs, kept, orders, listing, made, taking is not None, called)
        return self.adopt(spec, options)

    def adopt(self, spec: ExecutableSpec, options: Options) -> Executable:
        """An executable made from ``spec``, runnable after ``compile``; see ``add``."""
        for function in spec.functions:
            require_function(function)
        built, listing = spec.built, spec.listing
        captured = None
        if options.capture:
            reason = refusal([each.device.type for each in built.inputs], any(s.shape is None for s in built.inputs))
            if reason is None and not is_virtual_device_mode():
                # Two calls more for each graph whose results this one may take.
                memory = None if listing is None else TensorMemory(stream_order(spec.device))
                captured = Capture(built.name, 3 + 2 * len(self.graphs), memory)
            else:
                log.info("%s is not captured: %s", built.name, reason or "its device is not there")
        walk = "" if listing is None else require("launches", "walk", device_ref(spec.device), ())
        executable = Executable(spec, captured, walk)
        self.graphs.append(built)
        self._pending.setdefault(spec.device, []).append(executable)
        return executable

    def discard(self, executable: Executable) -> None:
        """Takes back a graph that was added and not yet compiled."""
        self._pending[executable.device].remove(executable)
        self.graphs.remove(executable.built)

    def compile(self) -> None:
        """Compiles every graph that was added since the last call."""
        with self._lock:
            lists = self._lists()
            tasks.compile_all(self._tasks(), lists)
            self.compiled = True

    def compile_in_background(self) -> Job | None:
        """As ``compile``, but only what the disk cache has is ready at once; the job makes the rest, None where there
        is no rest."""
        with self._lock:
            lists = self._lists()
            chosen = self._tasks()
            self.compiled = True
        return background.start(chosen, lists)

    def _lists(self) -> list[ListTask]:
        """The pending graphs that need no compiler; they are pending no more."""
        found = []
        for device, executables in self._pending.items():
            listed = [executable for executable in executables if executable.listing is not None]
            if listed:
                names = tuple(executable.name for executable in listed)
                ops = sum(executable.op_count for executable in listed)
                found.append(ListTask(device, names, ops, functools.partial(_bind_lists, listed)))
                executables[:] = [executable for executable in executables if executable.listing is None]
        return found

    @in_mlir_context
    def _tasks(self) -> list[Task]:
        """The pending graphs, dealt out into modules; they are pending no more."""
        found = []
        for device, executables in self._pending.items():
            if not executables:
                continue
            modules = [_module(executable.built) for executable in executables]
            for lot, facts in tasks.deal(modules, [executable.op_count for executable in executables], device):
                chosen = [executables[number] for number in lot]
                names = tuple(executable.name for executable in chosen)
                ops = sum(executable.op_count for executable in chosen)
                module = tasks.joined([modules[number] for number in lot])
                bind = functools.partial(_bind, chosen)
                found.append(Task(module, device, names, ops, self.label, facts, bind))
        self._pending.clear()
        return found


def _built(gm: GraphModule, name: str, free_outputs: frozenset[int], options: Options) -> BuiltGraph:
    """``gm`` as a graph of library calls where the options ask for that and it can be one, else as one for MAX."""
    library = session.library_to_build_with()
    chosen = functools.partial(GraphBuilder, around_convolutions=options.fusion)
    listed = options.run == "launches"
    built = chosen(gm, name, Module(), library, free_outputs, listed=listed).build()
    if listed and not isinstance(built.listing, LaunchList):
        # Once more, with calls that MAX can compile.
        built = chosen(gm, name, Module(), library, free_outputs).build()
    return built


def _module(built: BuiltGraph) -> Module:
    assert built.graph is not None
    return built.graph.module


def _bind(executables: Sequence[Executable], models: Mapping[str, Model]) -> None:
    for executable in executables:
        executable.bind(models[executable.name])


def _bind_lists(executables: Sequence[Executable]) -> None:
    for executable in executables:
        executable.bind_launches()
