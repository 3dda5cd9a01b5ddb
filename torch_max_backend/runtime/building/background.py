"""Builds libraries in other processes while the model runs in eager PyTorch."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Sequence

from torch_max_backend.runtime.building import libraries
from torch_max_backend.runtime.building.pending import PendingLists, make_ready


def start(pending: Sequence[PendingLists]) -> Job | None:
    """Loads what the disk cache has libraries for; returns a job for the rest, None if there is none."""
    rest = [each for each in pending if not each.is_built()]
    make_ready([each for each in pending if each not in rest])
    return Job(rest) if rest else None


_NICENESS = 10
"""How much the training process goes before, as of ``os.nice``."""
_lock, _turn = threading.Lock(), threading.Lock()
_jobs: list[Job] = []


class Job:
    """Launch lists whose libraries are built in a thread; jobs run one after the other.

    Attributes:
        finished: set when all is bound, or a build failed.
        error: what failed.
    """

    def __init__(self, pending: Sequence[PendingLists]) -> None:
        self.finished = threading.Event()
        self.error: Exception | None = None
        self._pending = pending
        # The process does not wait for a daemon at its end; `_end_all` ends it then.
        self._thread = threading.Thread(target=self._run, name="torch_max_backend compiles", daemon=True)
        with _lock:
            if not _jobs:
                atexit.register(_end_all, os.getpid())
            _jobs.append(self)
        self._thread.start()

    def _run(self) -> None:
        # Of this thread alone, and of what it starts.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            with _turn:
                make_ready(self._pending, told=False)
        except Exception as error:
            self.error = error
        finally:
            self._pending = ()
            self.finished.set()


def _end_all(pid: int) -> None:
    """Ends all processes and threads when this process ends."""
    if os.getpid() != pid:
        # A fork, which has none of them.
        return
    libraries.give_up()
    for job in _jobs:
        job._thread.join()
