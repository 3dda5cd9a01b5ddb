"""Compilation units: the graphs that are compiled together."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from max.driver import is_virtual_device_mode
from max.engine import Model
from max.graph import Module
from torch.fx import GraphModule

from torch_max_backend.dtypes import device_ref
from torch_max_backend.graph.builder import GraphBuilder, graph_device, updates_of
from torch_max_backend.graph.random import Draw
from torch_max_backend.launch_list import launch_list
from torch_max_backend.max_compat import erase, in_mlir_context
from torch_max_backend.mojo_ops.functions import noted, require_entry, require_function
from torch_max_backend.options import Options
from torch_max_backend.runtime.building import background, pending
from torch_max_backend.runtime.building.background import Job
from torch_max_backend.runtime.building.pending import PendingLists
from torch_max_backend.runtime.device_graphs.capture import Capture, refusal
from torch_max_backend.runtime.engine import session
from torch_max_backend.runtime.executable import Executable, ExecutableSpec
from torch_max_backend.runtime.memory.packs import Packing, alone, pack_results, take_from_packs
from torch_max_backend.runtime.tensors.interface import BuiltGraph

log = logging.getLogger("torch_max_backend")


class CompilationUnit:
    """Collects graphs, then builds the libraries that their launch lists lack.

    Building a graph is quick and happens at once; ``compile`` does the slow part for all of them together. Graphs for
    MAX's compiler (``options={"run": "graph"}``) are compiled then, as one module for each device.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self.compiled = False
        self.graphs: list[BuiltGraph] = []
        self._pending: dict[torch.device, list[Executable]] = {}
        self._modules: dict[torch.device, Module] = {}
        self._lock = threading.Lock()

    @in_mlir_context
    def add(
        self,
        gm: GraphModule,
        name: str,
        *,
        free_outputs: frozenset[int] = frozenset(),
        shown_outputs: frozenset[int] = frozenset(),
        options: Options | None = None,
        packable: frozenset[int] = frozenset(),
        packing: Packing | None = None,
        draws: tuple[Draw, ...] = (),
        reusable: frozenset[int] = frozenset(),
    ) -> Executable:
        """Builds ``gm`` and returns its executable, runnable after ``compile``.

        With the option ``capture`` it is replayed as a device graph where that is possible. Of the outputs ``packable``
        many leave in packs (``Executable.packing``) where it is a launch list; it takes the packs of ``packing`` where
        ``Executable.takes_packs``. Its last arguments are what ``draws`` make. The memory of arguments ``reusable`` may
        serve as its workspace.

        Raises:
            NodesCannotLower: nodes cannot be lowered, or have no library function; the unit is unchanged.
            DeviceUnavailableError: the graph's device is not there.
        """
        options = options or Options()
        device = graph_device(list(gm.graph.nodes))
        session.max_device(device)
        listed = options.run == "launches"
        module = Module() if listed else self._modules.setdefault(device, Module())
        with noted() as functions:
            library = session.library_to_build_with()
            built = GraphBuilder(
                gm,
                name,
                module,
                library,
                free_outputs,
                shown_outputs,
                listed=listed,
                reusable=reusable,
                packing=packing,
            ).build()
        orders = tuple(spec.order if spec.index >= 0 else None for spec in built.outputs)
        made, taking, own = None, None, frozenset[int]()
        if listed:
            if packable:
                first = min(free_outputs)
                numbers = alone(built, packable)
                own = frozenset(number - first for number in numbers)
                built, made = pack_results(built, range(first, len(built.outputs)), numbers)
                free_outputs = frozenset(range(first, len(built.outputs)))
            taking = None if packing is None else take_from_packs(built, packing)
            if packing is not None and taking is None and built.typed is not None:
                # Views of packs are written over by nobody.
                updates = updates_of(built.inputs, built.writes)
                built = replace(built, listing=launch_list(built.typed, device_ref(device), updates))
            built = taking or built
        # Gradients are dropped before the next step; users keep results of a forward graph longer.
        backward = name.startswith("backward")
        kept = frozenset[int]() if backward else frozenset(range(len(built.outputs))) - free_outputs
        called = tuple(dict.fromkeys(functions))
        return self.adopt(
            ExecutableSpec(built, device, free_outputs, kept, orders, made, taking is not None, called, draws, own),
            options,
        )

    def adopt(self, spec: ExecutableSpec, options: Options) -> Executable:
        """An executable made from ``spec``, runnable after ``compile``; see ``add``."""
        for function in spec.functions:
            require_function(function)
        built = spec.built
        captured = None
        if options.capture:
            # Numbers of the host are read before the replay.
            numbers = frozenset[int]() if built.listing is None else built.listing.moved
            devices = {each.device.type for number, each in enumerate(built.inputs) if number not in numbers}
            recordable = all(draw.recordable for draw in spec.draws)
            reason = refusal(devices, listed=built.listing is not None, recordable=recordable)
            if reason is None and not is_virtual_device_mode():
                drawn = {number for number, each in enumerate(built.inputs) if each.drawn and not spec.draws}
                # Two calls more for each graph whose results this one may take.
                captured = Capture(built.name, 3 + 2 * len(self.graphs), drawn | numbers)
            else:
                log.info("%s is not captured: %s", built.name, reason or "its device is not there")
        walk = "" if built.listing is None else require_entry("runner", "walk", device_ref(spec.device), ())
        executable = Executable(spec, captured, walk, waits=options.check_indices == "sync")
        self.graphs.append(built)
        self._pending.setdefault(spec.device, []).append(executable)
        return executable

    def discard(self, executable: Executable) -> None:
        """Removes a graph that was added and is not compiled yet."""
        self._pending[executable.device].remove(executable)
        self.graphs.remove(executable.built)
        if executable.listing is None and executable.built.graph is not None:
            erase(executable.built.graph)

    def compile(self) -> None:
        """Compiles every graph that was added since the last call."""
        with self._lock:
            pending.make_ready(self._lists())
            self._compile_modules()
            self.compiled = True

    def compile_in_background(self) -> Job | None:
        """As ``compile``, of launch lists alone: those that lack no library are ready at once; the job builds what the
        others lack, None where that is nothing."""
        with self._lock:
            lists = self._lists()
            self.compiled = True
        return background.start(lists)

    def _lists(self) -> list[PendingLists]:
        """Removes and returns the pending launch lists."""
        found = []
        for device, executables in self._pending.items():
            listed = [executable for executable in executables if executable.listing is not None]
            if listed:
                bind = functools.partial(_bind_lists, listed)
                found.append(PendingLists(device, _names(listed), _op_count(listed), bind))
                executables[:] = [executable for executable in executables if executable.listing is None]
        return found

    def _compile_modules(self) -> None:
        """Removes the pending graphs and has MAX compile them."""
        for device, module in self._modules.items():
            executables = self._pending.pop(device, [])
            if executables:
                names, ops = _names(executables), _op_count(executables)
                _bind(executables, session.compile_module(module, device, names, ops, self.label))
        self._modules.clear()


def _names(executables: Sequence[Executable]) -> tuple[str, ...]:
    return tuple(executable.name for executable in executables)


def _op_count(executables: Sequence[Executable]) -> int:
    return sum(executable.op_count for executable in executables)


def _bind(executables: Sequence[Executable], models: Mapping[str, Model]) -> None:
    for executable in executables:
        executable.bind(models[executable.name])


def _bind_lists(executables: Sequence[Executable]) -> None:
    for executable in executables:
        executable.bind_runner()
