"""How long each library call of a launch list takes."""

from __future__ import annotations

import contextlib
import itertools
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from torch_max_backend.fusion.program import Program
from torch_max_backend.fusion.rows import RowsFunction
from torch_max_backend.launch_list import Launch, LaunchList, Place
from torch_max_backend.mojo_ops.functions import LibraryFunction, required
from torch_max_backend.runtime.engine.streams import stream_sync
from torch_max_backend.torch_compat import occupy_gpu

_KERNEL = re.compile(r"^torch_max_|_(cpu|gpu)_[0-9a-f]+$")
_HEAD = 3
"""Words of a call before its operands: the function's address, where it reports an index outside its dimension, and how
many operands' words follow."""


@dataclass(frozen=True)
class LaunchTime:
    """One launch of a list, over all runs of the list.

    Attributes:
        entry: the kind of kernel, such as "conv_fprop" or "pointwise".
        ops: the aten ops that it computes, joined by underscores.
        name: the library function's; a generated program's is what profilers show of its kernels on a GPU.
        sizes: the extents of its operands, or how many elements a program computes.
        seconds: median of the time between call and return; on a GPU of the time that its kernels take.
        cpu_seconds: median of all threads' time on the processor meanwhile.
        runs: how many were timed.
    """

    entry: str
    ops: str
    name: str
    sizes: str
    seconds: float
    cpu_seconds: float
    runs: int


@dataclass
class LaunchTimes:
    """The times that ``launch_times`` recorded; printed, a table with the longest calls on top."""

    _samples: dict[tuple[int, int], list[tuple[float, float]]] = field(default_factory=dict)
    _lists: dict[int, LaunchList] = field(default_factory=dict)

    def note(self, listing: LaunchList, number: int, seconds: float, cpu_seconds: float) -> None:
        """Adds one run of one launch."""
        self._lists[id(listing)] = listing
        self._samples.setdefault((id(listing), number), []).append((seconds, cpu_seconds))

    @property
    def launches(self) -> list[LaunchTime]:
        """Every launch, in the order in which they first ran."""
        found = []
        for (owner, number), samples in self._samples.items():
            listing = self._lists[owner]
            launch = listing.launches[number]
            entry, name, sizes = _described(launch)
            wall, cpu = (statistics.median(column) for column in zip(*samples, strict=True))
            found.append(LaunchTime(entry, launch.ops, name, sizes, wall, cpu, len(samples)))
        return found

    def __str__(self) -> str:
        rows: dict[tuple[str, str, str], list[float]] = {}
        for each in self.launches:
            row = rows.setdefault((each.ops, each.name, each.sizes), [0, 0.0, 0.0])
            row[:] = row[0] + 1, row[1] + each.seconds, row[2] + each.cpu_seconds
        total = sum(row[1] for row in rows.values())
        table = Table(
            "aten ops",
            "kernel",
            "sizes",
            "calls",
            "ms",
            "share",
            "cores busy",
            title=f"{total * 1e3:.2f} ms in launches",
        )
        for (ops, name, sizes), (count, seconds, cpu) in sorted(rows.items(), key=lambda row: -row[1][1]):
            share, busy = seconds / max(total, 1e-12), cpu / max(seconds, 1e-12)
            table.add_row(ops, name, sizes, f"{count:.0f}", f"{seconds * 1e3:.3f}", f"{share:.1%}", f"{busy:.1f}")
        console = Console(width=180)
        with console.capture() as text:
            console.print(table)
        return text.get()


_watching: list[LaunchTimes] = []


@contextlib.contextmanager
def launch_times() -> Iterator[LaunchTimes]:
    """Times each library call of the compiled graphs that run inside the context.

    Calls are made one by one. On a GPU they are queued some at a time behind a kernel that waits, so that the host is
    ahead and the times between events are those of the kernels; their sum is a little more than what a step takes. A
    graph that MAX's compiler runs, or that is replayed as a device graph, is not seen.

    Returns:
        A context manager whose value collects the times; printing it shows a table.
    """
    times = LaunchTimes()
    _watching.append(times)
    try:
        yield times
    finally:
        _watching.remove(times)


def watched() -> bool:
    """Whether launches are being timed."""
    return bool(_watching)


def timed_walk(
    listing: LaunchList,
    call: Callable[[], int],
    words: np.ndarray,
    code: np.ndarray,
    needed: np.ndarray,
    device: torch.device,
) -> int:
    """Makes the calls of a list one after the other; what the last ``call`` returned.

    Args:
        listing: the calls.
        call: runs what ``words`` says.
        words: operands of ``walk`` (kernels/runner/entries.mojo): address and extent of the code, then of the
            addresses that are filled in.
        code: the list's.
        needed: receives the most bytes of scratch memory that a call asked for.
        device: that the calls compute on.
    """
    whole = words[:4].copy()
    most, place, failed = 0, 0, 0
    try:
        words[1] = 0  # addresses are filled in, nothing is called
        failed = call()
        words[3] = 0
        timer = _EventTimer(device) if device.type == "cuda" else _WallTimer()
        for _ in listing.launches:
            length = _HEAD + int(code[place + _HEAD - 1])
            words[:2] = code.ctypes.data + place * code.itemsize, length
            with timer.timed():
                failed = call()
            if failed:
                break
            most = max(most, int(needed[0]))
            place += length
        for number, (seconds, cpu_seconds) in enumerate(timer.samples()):
            for times in _watching:
                times.note(listing, number, seconds, cpu_seconds)
    finally:
        words[:4] = whole
    needed[0] = most
    return failed


class _WallTimer:
    """Times between call and return, and all threads' time on the processor meanwhile."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, float]] = []

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """One call."""
        begun, computed = time.perf_counter(), time.process_time()
        yield
        self._samples.append((time.perf_counter() - begun, time.process_time() - computed))

    def samples(self) -> list[tuple[float, float]]:
        """The samples of all calls, in order."""
        return self._samples


class _EventTimer(_WallTimer):
    """Times between events around the calls in a GPU's queue."""

    _TOGETHER = 8
    """Calls that are queued behind a kernel that waits for longer than queueing them takes."""
    _CYCLES = 400_000

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._queue = stream_sync(device).queue
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """One call."""
        if len(self._events) % self._TOGETHER == 0:
            torch.cuda.synchronize(self._device)
            with torch.cuda.stream(self._queue):
                occupy_gpu(self._CYCLES)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record(self._queue)
        with super().timed():
            yield
        end.record(self._queue)
        self._events.append((begin, end))

    def samples(self) -> list[tuple[float, float]]:
        """The samples of all calls, in order."""
        torch.cuda.synchronize(self._device)
        seconds = [begin.elapsed_time(end) / 1e3 for begin, end in self._events]
        return [(own, cpu) for own, (_, cpu) in zip(seconds, self._samples, strict=True)]


def _described(launch: Launch) -> tuple[str, str, str]:
    """Entry, name and sizes."""
    function = next((each for each in required() if each.symbol == launch.function), None)
    if isinstance(function, Program | RowsFunction):
        numbers = [word for word in launch.words if isinstance(word, int)]
        shapes = function.extents(numbers)
        return function.entry, function.name, " ".join("x".join(map(str, shape)) for shape in shapes)
    name = _KERNEL.sub("", launch.function)
    entry = (function.rest or function).entry if isinstance(function, LibraryFunction) else name
    return entry, name, " ".join(_extents(launch.words))


def _extents(words: Sequence[int | Place]) -> Iterator[str]:
    """The extents behind each address."""
    extents: list[str] = []
    for word in itertools.dropwhile(lambda word: not isinstance(word, Place), words):
        if isinstance(word, Place):
            yield from ["x".join(extents)] if extents else []
            extents = []
        else:
            extents.append(str(word))
    yield from ["x".join(extents)] if extents else []
