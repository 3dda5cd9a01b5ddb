"""Progress of long work: listeners learn what is being compiled, and how long it took."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

log = logging.getLogger("torch_max_backend")


@dataclass(frozen=True)
class CompileEvent:
    """One compilation, told when it starts (``seconds`` None) and when it ends.

    Attributes:
        graphs: names of the MAX graphs that are compiled together.
        ops: how many aten ops they hold.
        cached: whether they came from the disk cache; None while that is not known.
        seconds: how long it took.
    """

    graphs: tuple[str, ...]
    ops: int
    cached: bool | None = None
    seconds: float | None = None


_listeners: list[Callable[[CompileEvent], None]] = []
_lock = threading.Lock()


@contextlib.contextmanager
def listen(listener: Callable[[CompileEvent], None]) -> Iterator[None]:
    """Calls ``listener`` with every CompileEvent while the context is open."""
    with _lock:
        _listeners.append(listener)
    try:
        yield
    finally:
        with _lock:
            _listeners.remove(listener)


def compilation_in_words(names: Sequence[str], op_count: int) -> str:
    """A description of what is being compiled."""
    return f"compiling {', '.join(names[:4])}{' ...' if len(names) > 4 else ''}: {op_count} aten ops"


@contextlib.contextmanager
def compiling(graphs: tuple[str, ...], ops: int) -> Iterator[Callable[[bool], None]]:
    """Reports one compilation; the yielded function records whether the cache had it."""
    event = CompileEvent(graphs, ops)
    _tell(event)
    start = time.perf_counter()
    cached: list[bool] = []
    yield cached.append
    done = replace(event, cached=bool(cached and cached[-1]), seconds=time.perf_counter() - start)
    log.info(
        "%s %s: %d aten ops, %.1f s",
        "loaded from the cache" if done.cached else "compiled",
        ", ".join(done.graphs),
        done.ops,
        done.seconds,
    )
    _tell(done)


def _tell(event: CompileEvent) -> None:
    with _lock:
        listeners = list(_listeners)
    for listener in listeners:
        listener(event)
