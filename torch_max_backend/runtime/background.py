"""Compiling beside the program: modules are compiled by other processes while this one goes on."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Sequence

from torch_max_backend.max_compat import in_mlir_context
from torch_max_backend.runtime import cache, events, libraries, session
from torch_max_backend.runtime.tasks import ListTask, Task, apart, compile_all, libraries_of, listed
from torch_max_backend.runtime.workers import Workers


def start(tasks: Sequence[Task], lists: Sequence[ListTask] = ()) -> Job | None:
    """Binds what the disk cache has; a job for the rest, None where there is none."""
    rest: list[Task] = []
    rest_of_lists: list[ListTask] = []
    for chosen in lists:
        if chosen.is_built():
            compile_all((), [chosen])
        else:
            rest_of_lists.append(chosen)
    for task in tasks:
        models = None
        if cache.lookup(session.GRAPHS, task.facts, session.ARTIFACT) is not None:
            with events.compiling(task.names, task.op_count) as cached, libraries.ready(task.device):
                models = session.load_cached(task.facts, task.device, task.names)
                cached(models is not None)
        if models is None:
            rest.append(task)
        else:
            task.bind(models)
    return Job(rest, rest_of_lists) if rest or rest_of_lists else None


_lock, _turn = threading.Lock(), threading.Lock()
_jobs: list[Job] = []


class Job:
    """Tasks that are compiled side by side; jobs follow one another.

    Attributes:
        finished: set when all is bound, or one task failed.
        error: what failed.
        workers: who compile.
    """

    def __init__(self, tasks: Sequence[Task], lists: Sequence[ListTask] = ()) -> None:
        self.finished = threading.Event()
        self.error: Exception | None = None
        # The program goes on meanwhile and needs the cores more.
        self.workers = Workers(niceness=10)
        self._tasks, self._lists = tasks, lists
        # The program does not wait for a daemon at its end; `_end_all` ends it then.
        self._thread = threading.Thread(target=self._run, name="torch_max_backend compiles", daemon=True)
        with _lock:
            if not _jobs:
                atexit.register(_end_all, os.getpid())
            _jobs.append(self)
        self._thread.start()

    @in_mlir_context
    def _run(self) -> None:
        try:
            everything: list[Task | ListTask] = [*self._tasks, *self._lists]
            with (
                _turn,
                listed(self._lists),
                libraries_of(everything),
                apart(self._tasks, self.workers) as artifacts,
            ):
                for task, artifact in artifacts:
                    task.bind(session.load(artifact.result(), task.device, task.names))
        except Exception as error:
            self.error = error
        finally:
            self._tasks = self._lists = ()
            self.finished.set()


def _end_all(pid: int) -> None:
    """At the program's end: no process and no thread stays behind."""
    if os.getpid() != pid:
        # A fork, which has none of them.
        return
    with _lock:
        for job in _jobs:
            job.workers.end()
    for job in _jobs:
        job._thread.join()
