"""How long MAX's threads spin before they sleep.

A thread without work spins for 200 us, in case more arrives. Where operations take microseconds, threads spin nearly
all the time. On a machine without an accelerator this takes cores from threads that compute: MAX's own, PyTorch's, and
those of other programs.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

VARIABLES = ("MODULAR_THREAD_BUSY_WAIT_US", "MODULAR_RUNTIME_THREAD_BUSY_WAIT_TIME_US")
"""What MAX reads it from, in microseconds: its driver the first, its engine the second; they have to agree."""

_ACCELERATORS = ("nvidia[0-9]*", "kfd", "dxg")
_THREAD = "🔥 Thread"


def settle(environment: MutableMapping[str, str], accelerator: bool, started: bool) -> None:
    """Sets ``VARIABLES`` in ``environment``: no busy waiting on a machine without an accelerator.

    What is set already stays. If that is one of the two, the other takes its value: MAX would abort the process.

    Args:
        environment: in which MAX will start.
        accelerator: whether the machine has one. Who launches its kernels is left waiting as MAX has it.
        started: whether MAX's threads run already. MAX would abort if it found another value later: nothing is set.
    """
    chosen = next((environment[name] for name in VARIABLES if name in environment), None)
    if started or (chosen is None and accelerator):
        return
    for name in VARIABLES:
        environment.setdefault(name, chosen if chosen is not None else "0")


def settle_process() -> None:
    """``settle`` for this process and those that it starts."""
    settle(os.environ, _accelerator_attached(), _threads_started())


def _accelerator_attached() -> bool:
    """Whether there is a device node of one; asking its driver would open it."""
    return any(next(Path("/dev").glob(pattern), None) is not None for pattern in _ACCELERATORS)


def _threads_started() -> bool:
    """Whether a thread of MAX's pool is in this process."""
    for task in Path("/proc/self/task").glob("*/comm"):
        try:
            name = task.read_text(errors="replace")
        except OSError:
            continue  # it has ended meanwhile
        if name.startswith(_THREAD):
            return True
    return False
