"""Compilation units: the MAX graphs that are compiled together."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Mapping, Sequence

import torch
from max.engine import Model
from max.graph import Module
from torch.fx import GraphModule

from torch_max_backend.graph.builder import BuiltGraph, GraphBuilder, graph_device
from torch_max_backend.runtime import background, session
from torch_max_backend.runtime.background import Job
from torch_max_backend.runtime.capture import Capture, refusal
from torch_max_backend.runtime.executable import Executable
from torch_max_backend.runtime.mlir import in_mlir_context

log = logging.getLogger("torch_max_backend")


class CompilationUnit:
    """Collects graphs, then compiles them as one MAX module, a module for each device.

    Building a graph is quick and happens at once; ``compile`` does the slow part for all of them together, since
    MAX charges most of its time for each compilation, not for each graph.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self.compiled = False
        self.graphs: list[BuiltGraph] = []
        self._modules: dict[torch.device, Module] = {}
        self._pending: dict[torch.device, list[Executable]] = {}
        self._lock = threading.Lock()

    @in_mlir_context
    def add(
        self,
        gm: GraphModule,
        name: str,
        *,
        free_outputs: frozenset[int] = frozenset(),
        capture: bool = False,
    ) -> Executable:
        """Builds ``gm`` and returns its executable, runnable after ``compile``.

        With ``capture`` it is replayed as a device graph where that is possible.

        Raises:
            NodeCannotLower: a lowering refused a node; the unit is unchanged.
            DeviceUnavailableError: the graph's device is not there.
        """
        device = graph_device(list(gm.graph.nodes))
        session.max_device(device)
        module = self._modules.setdefault(device, Module())
        built = GraphBuilder(gm, name, module, session.kernel_library(), free_outputs).build()
        captured, kept = None, frozenset[int]()
        if capture:
            reason = refusal([spec.device.type for spec in built.inputs], any(s.shape is None for s in built.inputs))
            if reason is None:
                # Two calls more for each graph whose results this one may take.
                captured = Capture(name, 3 + 2 * len(self.graphs))
                # Gradients are dropped before the next step; users keep results of a forward graph longer.
                if not name.startswith("backward"):
                    kept = frozenset(range(len(built.outputs))) - free_outputs
            else:
                log.info("%s is not captured: %s", name, reason)
        executable = Executable(built, device, captured, kept)
        self.graphs.append(built)
        self._pending.setdefault(device, []).append(executable)
        return executable

    @in_mlir_context
    def discard(self, executable: Executable) -> None:
        """Takes back a graph that was added and not yet compiled."""
        executable.built.graph._mlir_op.erase()
        self._pending[executable.device].remove(executable)
        self.graphs.remove(executable.built)

    @in_mlir_context
    def compile(self) -> None:
        """Compiles every graph that was added since the last call."""
        with self._lock:
            for device, executables in self._pending.items():
                ops = sum(executable.op_count for executable in executables)
                names = [executable.name for executable in executables]
                models = session.compile_module(self._modules[device], device, names, ops, self.label)
                _bind(executables, models)
            self._end()

    @in_mlir_context
    def compile_in_background(self) -> Job | None:
        """As ``compile``, but only what the disk cache has is ready at once; the job makes the rest, None where there
        is no rest."""
        with self._lock:
            tasks = []
            for device, executables in self._pending.items():
                ops = sum(executable.op_count for executable in executables)
                names = [executable.name for executable in executables]
                bind = functools.partial(_bind, executables)
                tasks.append(background.task_of(self._modules[device], device, names, ops, self.label, bind))
            self._end()
        return background.start(tasks)

    def _end(self) -> None:
        self._pending.clear()
        self._modules.clear()
        self.compiled = True


def _bind(executables: Sequence[Executable], models: Mapping[str, Model]) -> None:
    for executable in executables:
        executable.bind(models[executable.name])
