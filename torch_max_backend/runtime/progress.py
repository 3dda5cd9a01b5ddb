"""A progress line on the terminal while something takes long."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextlib.contextmanager
def progress_line(what: str, patience: float = 2.0) -> Iterator[None]:
    """Shows ``what`` and the time on standard error after ``patience`` seconds, until the context closes.

    Where standard error is no terminal nothing is shown.
    """
    if not sys.stderr.isatty():
        yield
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
    progress.add_task(what, total=None)
    over = False
    lock = threading.Lock()

    def show() -> None:
        with lock:
            if not over:
                progress.start()

    timer = threading.Timer(patience, show)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        with lock:
            over = True
            progress.stop()
