"""Executes a MAX model on buffers that are already on its devices."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator

from max.driver import Buffer
from max.engine import Model

from torch_max_backend.max_compat import execute as execute_on_devices

TIMER_SLACK = 50_000_000
"""Nanoseconds by which a timer of a thread that MAX starts with its first execution may ring late."""

# prctl(2), <linux/prctl.h>.
_PR_SET_TIMERSLACK = 29
_PR_GET_TIMERSLACK = 30

_executed = False


def execute(model: Model, buffers: list[Buffer]) -> list[Buffer]:
    """The outputs of ``model`` for ``buffers``, which lie on the devices that it was compiled for.

    MAX starts its logger's thread with a process's first execution. That thread waits with a time-out of 100 us and so
    wakes thousands of times a second for as long as the process lives, taking turns on a core with the threads that
    compute (or that feed a GPU). Threads inherit their creator's timer slack: a generous one lets the kernel wake
    it with other interrupts of the core.
    """
    global _executed
    if _executed:
        return execute_on_devices(model, buffers)
    with _timer_slack(TIMER_SLACK):
        results = execute_on_devices(model, buffers)
    _executed = True
    return results


@contextlib.contextmanager
def _timer_slack(nanoseconds: int) -> Iterator[None]:
    """The calling thread's timer slack, which new threads inherit; nothing where there is no Linux."""
    if sys.platform != "linux":
        yield
        return
    prctl = ctypes.CDLL(None).prctl
    prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    before = prctl(_PR_GET_TIMERSLACK, 0, 0, 0, 0)
    prctl(_PR_SET_TIMERSLACK, nanoseconds, 0, 0, 0)
    try:
        yield
    finally:
        # 0 asks for the slack that the thread began with: for one that does not fit prctl's result, or was refused.
        prctl(_PR_SET_TIMERSLACK, max(before, 0), 0, 0, 0)
