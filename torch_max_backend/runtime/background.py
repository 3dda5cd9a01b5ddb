"""Compiling beside the program: modules are compiled by another process while this one goes on."""

from __future__ import annotations

import atexit
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from max import mlir
from max.engine import Model
from max.graph import Module

from torch_max_backend.errors import MaxBackendError
from torch_max_backend.runtime import cache, events, libraries, session, worker
from torch_max_backend.runtime.mlir import in_mlir_context
from torch_max_backend.runtime.target import accelerator_of, cpu_target


@dataclass(frozen=True)
class Task:
    """One module to compile, as bytes: see ``session.compile_module``."""

    bytecode: bytes
    facts: Mapping[str, str]
    device: torch.device
    names: tuple[str, ...]
    op_count: int
    label: str
    bind: Callable[[Mapping[str, Model]], None]


@in_mlir_context
def task_of(
    module: Module,
    device: torch.device,
    names: Sequence[str],
    op_count: int,
    label: str,
    bind: Callable[[Mapping[str, Model]], None],
) -> Task:
    """The task of compiling ``module``; ``bind`` receives its models in the compiling thread."""
    content = io.BytesIO()
    mlir.Operation._CAPICreate(module.mlir_module._CAPIPtr).write_bytecode(content)
    return Task(
        content.getvalue(), session.module_facts(module, device), device, tuple(names), op_count, label, bind
    )  # fmt: skip


def start(tasks: Sequence[Task]) -> Job | None:
    """Binds what the disk cache has; a job for the rest, None where there is none."""
    rest = []
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
    return Job(rest) if rest else None


_lock, _turn = threading.Lock(), threading.Lock()
_jobs: list[Job] = []
_processes: set[subprocess.Popen[bytes]] = set()
_ending = threading.Event()


class Job:
    """Tasks that are compiled one after the other; jobs follow one another too, since MAX uses all cores for each.

    Attributes:
        finished: set when all is bound, or one task failed.
        error: what failed.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.finished = threading.Event()
        self.error: Exception | None = None
        self._tasks = tasks
        # The program does not wait for a daemon at its end; `_end_all` ends it then.
        self._thread = threading.Thread(target=self._run, name="torch_max_backend compiles", daemon=True)
        with _lock:
            if not _jobs:
                atexit.register(_end_all, os.getpid())
            _jobs.append(self)
        self._thread.start()

    def _run(self) -> None:
        try:
            with _turn:
                for task in self._tasks:
                    task.bind(_models(task))
        except Exception as error:
            self.error = error
        finally:
            self._tasks = ()
            self.finished.set()


def _end_all(pid: int) -> None:
    """At the program's end: no process and no thread stays behind."""
    if os.getpid() != pid:
        # A fork, which has none of them.
        return
    _ending.set()
    with _lock:
        running = list(_processes)
    for process in running:
        process.kill()
    for job in _jobs:
        job._thread.join()


def _models(task: Task) -> Mapping[str, Model]:
    with (
        events.compiling(task.names, task.op_count) as cached,
        cache.claim(session.GRAPHS, task.facts, _ending.is_set),
        libraries.ready(task.device),
    ):
        models = session.load_cached(task.facts, task.device, task.names)
        cached(models is not None)
        if models is not None:
            return models
        with tempfile.TemporaryDirectory(prefix="torch_max_backend-") as folder:
            artifact = Path(folder) / session.ARTIFACT
            _work(task, Path(folder), artifact)
            cache.store(session.GRAPHS, task.facts, session.ARTIFACT, lambda path: _copy(artifact, path))
            return session.load(artifact, task.device, task.names)


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)


def _work(task: Task, folder: Path, artifact: Path) -> None:
    """Has a process compile the task.

    Raises:
        MaxBackendError: it failed, with what it said.
    """
    module, job, said = folder / "module.mlirbc", folder / "job.json", folder / "said"
    module.write_bytes(task.bytecode)
    api, architecture = accelerator_of(task.device)
    description = {
        "module": str(module),
        "libraries": [str(path) for path in session.kernel_library().library_paths()],
        "api": api,
        "architecture": architecture,
        "accelerators": (task.device.index or 0) + 1,
        "cpu_target": cpu_target(task.device),
        "artifact": str(artifact),
    }
    job.write_text(json.dumps(description))
    command = [sys.executable, "-P", worker.__file__, str(job)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with said.open("wb") as output, _lock:
        if _ending.is_set():
            raise MaxBackendError("the program ends")
        # Ctrl-C is this process's to hear, in a session of its own the other does not.
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
        )
        _processes.add(process)
    try:
        status = process.wait()
    finally:
        with _lock:
            _processes.discard(process)
        assert process.stdin is not None
        process.stdin.close()
    if status:
        text = said.read_text(errors="replace").strip()
        raise MaxBackendError(f"MAX could not compile {task.label} (status {status}): {text[-4000:]}")
