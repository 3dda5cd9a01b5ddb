"""Work in daemon threads, for which the process's exit does not wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def started(make: Callable[[], T], name: str) -> Future[T]:
    """Calls ``make`` in a thread of its own, called ``name``, which does not keep the process from ending.

    A pool's threads would: the interpreter joins them.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(make())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=f"torch_max_backend {name}", daemon=True).start()
    return future
