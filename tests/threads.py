"""Several threads that call one function at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def in_threads(work: Callable[[int], None], count: int) -> None:
    """Calls ``work`` with 0 to ``count - 1``, each in a thread of its own; raises what one of them has raised."""
    together = threading.Barrier(count)

    def begin(number: int) -> None:
        together.wait()
        work(number)

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(begin, range(count)))
