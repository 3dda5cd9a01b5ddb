"""Modules to compile: side by side, one in this process and the others in processes of their own."""

from __future__ import annotations

import contextlib
import functools
import io
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path

import torch
from max.driver import is_virtual_device_mode
from max.engine import Model
from max.graph import Module

from torch_max_backend.max_compat import in_mlir_context, write_bytecode
from torch_max_backend.runtime import cache, dealing, events, futures, libraries, session
from torch_max_backend.runtime.progress import progress_line
from torch_max_backend.runtime.workers import Workers


@dataclass(frozen=True, eq=False)
class Task:
    """Graphs that are compiled as one module.

    Attributes:
        module: of the graphs.
        device: that they compute on.
        names: of the graphs, in their order.
        op_count: how many aten ops they hold.
        label: of the unit, for messages.
        facts: what their cache entry is found by.
        bind: receives the compiled graphs.
    """

    module: Module
    device: torch.device
    names: tuple[str, ...]
    op_count: int
    label: str
    facts: Mapping[str, str]
    bind: Callable[[Mapping[str, Model]], None]


@dataclass(frozen=True, eq=False)
class ListTask:
    """Launch lists, which are ready once the libraries of their device are.

    Attributes:
        device: that they compute on.
        names: of the graphs.
        op_count: how many aten ops they hold.
        bind: makes them ready; the libraries are loaded.
    """

    device: torch.device
    names: tuple[str, ...]
    op_count: int
    bind: Callable[[], None]

    def is_built(self) -> bool:
        """Whether the cache has all libraries."""
        return not libraries.unbuilt(self.device)


@in_mlir_context
def deal(
    modules: Sequence[Module], sizes: Sequence[int], device: torch.device
) -> list[tuple[list[int], dict[str, str]]]:
    """Which graphs, by number, are compiled together, and what each lot's cache entry is found by.

    The cache is asked for every way in which another process may have dealt them; ``dealing.best`` is the answer where
    it has none of them.

    Args:
        modules: one for each graph.
        sizes: how many aten ops each graph holds.
        device: that they compute on.
    """
    digests = [session.content_digest(module) for module in modules]

    def lots(way: dealing.Way) -> list[tuple[list[int], dict[str, str]]]:
        return [(lot, session.facts_of([digests[number] for number in lot], device)) for lot in way]

    for way in dealing.ways(sizes):
        found = lots(way)
        if all(cache.has(session.GRAPHS, facts) for _, facts in found):
            return found
    beside = libraries.seconds(libraries.unbuilt(device))
    return lots(dealing.best(sizes, dealing.cores(), beside))


def joined(modules: Sequence[Module]) -> Module:
    """One module of all graphs, in their order; they are gone from the others."""
    first, *others = modules
    last = list(first.mlir_module.body)[-1]
    for other in others:
        for graph in list(other.mlir_module.body):
            graph.move_after(last)
            last = graph
    return first


@in_mlir_context
def compile_all(tasks: Sequence[Task], lists: Sequence[ListTask] = ()) -> None:
    """Compiles and binds all: the longest here, those that the cache has not in processes beside it.

    Raises:
        MaxBackendError: the graph compiler refused one; the others are given up.
    """
    if not tasks and not lists:
        return
    everything: list[Task | ListTask] = [*tasks, *lists]
    names = [name for task in everything for name in task.names]
    what = session.describe(names, sum(task.op_count for task in everything))
    for task in tasks:
        session.require_threads(task.device)
    absent = [task for task in tasks if not cache.has(session.GRAPHS, task.facts)]
    absent.sort(key=lambda task: -task.op_count)
    here = absent[:1] + [task for task in tasks if task not in absent]
    with progress_line(what), listed(lists), libraries_of(everything), apart(absent[1:], Workers()) as artifacts:
        for task in here:
            task.bind(
                session.compile_here(task.module, task.facts, task.device, task.names, task.op_count, task.label)
            )  # fmt: skip
        for task, artifact in artifacts:
            task.bind(session.load(artifact.result(), task.device, task.names))


@contextlib.contextmanager
def listed(lists: Sequence[ListTask]) -> Iterator[None]:
    """Binds launch lists when the context ends without an error; inside it their libraries are made."""
    with contextlib.ExitStack() as stack:
        for task in lists:
            stack.enter_context(events.compiling(task.names, task.op_count))(task.is_built())
        yield
        for task in lists:
            if not is_virtual_device_mode() or task.device.type == "cpu":
                task.bind()


@contextlib.contextmanager
def libraries_of(tasks: Sequence[Task | ListTask]) -> Iterator[None]:
    """Inside the context the libraries of the tasks' devices are built, at its end they are loaded."""
    # What is compiled for another machine is all that it may need.
    whole = {task.device: is_virtual_device_mode() for task in tasks}
    whole |= {task.device: True for task in tasks if isinstance(task, Task)}
    with contextlib.ExitStack() as stack:
        for device, everything in whole.items():
            stack.enter_context(libraries.ready(device, everything))
        yield


@contextlib.contextmanager
def apart(tasks: Sequence[Task], workers: Workers) -> Iterator[list[tuple[Task, Future[Path]]]]:
    """The artifacts of ``tasks``, each from the cache or made by one of ``workers``, side by side.

    They lie there until the context ends. If it ends by an error, so do the workers. The caller is in MLIR's context.
    """
    if not tasks:
        yield []
        return
    with tempfile.TemporaryDirectory(prefix="torch_max_backend-") as scratch:
        started: list[tuple[Task, Future[Path]]] = []
        try:
            for number, task in enumerate(tasks):
                folder = Path(scratch) / str(number)
                folder.mkdir()
                make = functools.partial(_artifact, task, _bytecode(task.module), workers, folder)
                started.append((task, futures.started(make, "waits for a worker")))
            yield started
        except BaseException:
            workers.end()
            raise
        finally:
            wait([future for _, future in started])


def _bytecode(module: Module) -> bytes:
    content = io.BytesIO()
    write_bytecode(module, content)
    return content.getvalue()


def _artifact(task: Task, bytecode: bytes, workers: Workers, folder: Path) -> Path:
    with (
        events.compiling(task.names, task.op_count) as cached,
        cache.claim(session.GRAPHS, task.facts, workers.ended.is_set),
    ):
        artifact = cache.lookup(session.GRAPHS, task.facts, session.ARTIFACT)
        cached(artifact is not None)
        if artifact is None:
            fresh = workers.compile(bytecode, task.device, task.label, folder)
            artifact = session.keep(task.facts, lambda path: _copy(fresh, path)) or fresh
        return artifact


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
