"""Tells a user who waits what is done and about how long it takes.

From the third second on: a line that moves on a terminal and in Jupyter, and a line every ten seconds elsewhere (a log
file, a cluster). ``TORCH_MAX_BACKEND_PROGRESS=0`` turns it off.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

PATIENCE = 3.0
"""Seconds in which nothing is told."""
_EVERY, _IN_JUPYTER = 10.0, 0.5
"""Seconds between two lines, and between two states of the moving one in Jupyter."""


@dataclass(eq=False)
class Work:
    """A library that a process builds.

    Attributes:
        uses: how many kernels it has for each use, such as "convolution".
        seconds: that it takes, about, from its begin.
        begun: when, by ``time.monotonic``; None while it waits.
        done: whether it is built.
    """

    uses: Counter[str]
    seconds: float
    begun: float | None = None
    done: bool = False

    @property
    def left(self) -> float:
        """Seconds until it is done, about."""
        if self.done:
            return 0.0
        return self.seconds if self.begun is None else max(0.0, self.begun + self.seconds - time.monotonic())


@dataclass
class _Lines:
    """The activities that the line reports: contexts of ``progress_line``, the innermost last, and of ``works``."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    active: list[str] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)


_lines = _Lines()


@contextlib.contextmanager
def works(several: list[Work]) -> Iterator[None]:
    """A context in which they are told of; they are built at the same time."""
    with _lines.lock:
        _lines.works += several
    try:
        yield
    finally:
        with _lines.lock:
            _lines.works = [work for work in _lines.works if work not in several]


def kernels_in_words(uses: Counter[str]) -> str:
    """The number of kernels for each use, such as "14 kernels for convolution, 3 for normalization"."""
    texts = [f"{count} for {use}" for use, count in sorted(uses.items(), key=lambda item: (-item[1], item[0]))]
    if texts:
        texts[0] = texts[0].replace(" for", " kernel for" if max(uses.values()) == 1 else " kernels for", 1)
    return ", ".join(texts)


def state() -> str:
    """A report of what is being built, how much of it is done, and about how long the rest takes; "" if nothing is."""
    with _lines.lock:
        known = list(_lines.works)
    if not known:
        return ""
    now = kernels_in_words(sum((work.uses for work in known if not work.done), Counter()))
    left = max(work.left for work in known)
    rest = f", about {left:.0f} s left" if left >= 1 else ""
    return f"building {now or 'kernels'}: {sum(work.done for work in known)} of {len(known)} libraries{rest}"


@contextlib.contextmanager
def progress_line(what: str, patience: float = PATIENCE) -> Iterator[None]:
    """Tells on standard error ``what`` goes on and ``state()``, after ``patience`` seconds until the context closes.

    A context inside another one, in any thread, goes on in that one's line.
    """
    with _lines.lock:
        first = not _lines.active
        _lines.active.append(what)
    over = threading.Event()
    silent = not first or os.environ.get("TORCH_MAX_BACKEND_PROGRESS") == "0"
    tell = _on_terminal if sys.stderr.isatty() else _in_jupyter if _is_jupyter() else _in_lines
    teller = threading.Thread(target=tell, args=(patience, over), name="torch_max_backend tells", daemon=True)
    if not silent:
        teller.start()
    try:
        yield
    finally:
        with _lines.lock:
            _lines.active.remove(what)
        over.set()
        if not silent:
            teller.join()


def _is_jupyter() -> bool:
    return "ipykernel" in sys.modules


def _told() -> str:
    with _lines.lock:
        what = _lines.active[-1:]
    return "; ".join(filter(None, (*what, state())))


def _on_terminal(patience: float, over: threading.Event) -> None:
    if over.wait(patience):
        return
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        TimeElapsedColumn(),
        console=Console(file=sys.stderr),
        transient=True,
        # What others print meanwhile stays where they print it.
        redirect_stdout=False,
        redirect_stderr=False,
    )
    with progress:
        task = progress.add_task(_told(), total=None)
        while not over.wait(0.25):
            progress.update(task, description=_told())


def _in_jupyter(patience: float, over: threading.Event) -> None:
    """Its output knows how to return to a line's begin, and no more."""
    start, width = time.monotonic(), 0
    if over.wait(patience):
        return
    while True:
        line = f"{_told()} ({time.monotonic() - start:.0f} s)"
        width = max(width, len(line))
        sys.stderr.write("\r" + line.ljust(width))
        sys.stderr.flush()
        if over.wait(_IN_JUPYTER):
            break
    sys.stderr.write("\r" + " " * width + "\r")
    sys.stderr.flush()


def _in_lines(patience: float, over: threading.Event) -> None:
    start, pause = time.monotonic(), patience
    while not over.wait(pause):
        print(f"torch_max_backend: {_told()} ({time.monotonic() - start:.0f} s)", file=sys.stderr, flush=True)
        pause = _EVERY
