"""How long each library call of a launch list takes."""

from __future__ import annotations

import contextlib
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from torch_max_backend.fusion.program import Program
from torch_max_backend.launches import Kind, Launch, LaunchList, Place
from torch_max_backend.mojo_ops.convolution import GEOMETRY_LENGTH
from torch_max_backend.mojo_ops.functions import required

_KERNEL = re.compile(r"^torch_max_|_(cpu|gpu)_[0-9a-f]+$")
_READ = re.compile(r"= a\.(\w+)\[DType")
_HEAD = 2
"""Words of a call before its operands: the function's address, and how many operands' words follow."""


@dataclass(frozen=True)
class LaunchTime:
    """One launch of a list, over all runs of the list.

    Attributes:
        name: the kernel's, or the operations of a generated program.
        sizes: the extents of its operands, or how many elements a program computes.
        seconds: median of the time between call and return; on a GPU until its work is done.
        cpu_seconds: median of all threads' time on the processor meanwhile.
        runs: how many were timed.
    """

    name: str
    sizes: str
    seconds: float
    cpu_seconds: float
    runs: int


@dataclass
class LaunchTimes:
    """What ``launch_times`` has seen; its text is a table with the longest calls on top."""

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
            name, sizes = _described(listing.launches[number], listing)
            wall, cpu = (statistics.median(column) for column in zip(*samples, strict=True))
            found.append(LaunchTime(name, sizes, wall, cpu, len(samples)))
        return found

    def __str__(self) -> str:
        rows: dict[tuple[str, str], list[float]] = {}
        for each in self.launches:
            row = rows.setdefault((each.name, each.sizes), [0, 0.0, 0.0])
            row[:] = row[0] + 1, row[1] + each.seconds, row[2] + each.cpu_seconds
        total = sum(row[1] for row in rows.values())
        table = Table(
            "launch", "sizes", "calls", "ms", "share", "cores busy", title=f"{total * 1e3:.2f} ms in launches"
        )
        for (name, sizes), (count, seconds, cpu) in sorted(rows.items(), key=lambda row: -row[1][1]):
            share, busy = seconds / max(total, 1e-12), cpu / max(seconds, 1e-12)
            table.add_row(name, sizes, f"{count:.0f}", f"{seconds * 1e3:.3f}", f"{share:.1%}", f"{busy:.1f}")
        console = Console(width=180)
        with console.capture() as text:
            console.print(table)
        return text.get()


_watching: list[LaunchTimes] = []


@contextlib.contextmanager
def launch_times() -> Iterator[LaunchTimes]:
    """Times each library call of the compiled graphs that run meanwhile.

    Calls are made one by one, and on a GPU each is waited for: the times are those of the kernels, while their sum is
    more than what a step takes. A graph that MAX's compiler runs, or that is replayed as a device graph, is not seen.

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
    """Whether somebody times launches."""
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
        words: operands of ``walk`` (kernels/launches/entries.mojo): address and extent of the code, then of the
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
        for number in range(len(listing.launches)):
            length = _HEAD + int(code[place + 1])
            words[:2] = code.ctypes.data + place * code.itemsize, length
            _wait(device)
            begun, computed = time.perf_counter(), time.process_time()
            failed = call()
            _wait(device)
            seconds, cpu_seconds = time.perf_counter() - begun, time.process_time() - computed
            if failed:
                break
            most = max(most, int(needed[0]))
            for times in _watching:
                times.note(listing, number, seconds, cpu_seconds)
            place += length
    finally:
        words[:4] = whole
    needed[0] = most
    return failed


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _described(launch: Launch, listing: LaunchList) -> tuple[str, str]:
    """Name and sizes."""
    function = next((each for each in required() if each.symbol == launch.function), None)
    if isinstance(function, Program):
        return _program(function), _extents_of_program(launch, listing)
    return _KERNEL.sub("", launch.function), " ".join(_extents(launch.words))


def _extents(words: Sequence[int | Place]) -> Iterator[str]:
    """The extents behind each address; those behind the last one may be arguments of another kind."""
    extents: list[str] = []
    for word in words:
        if isinstance(word, Place):
            yield from ["x".join(extents)] if extents else []
            extents = []
        else:
            extents.append(str(word))
    yield from ["x".join(extents)] if extents else []


def _extents_of_program(launch: Launch, listing: LaunchList) -> str:
    first = launch.words[0]
    if not (isinstance(first, Place) and first.kind is Kind.CONSTANT):
        return str(launch.words[0])
    geometry = np.frombuffer(listing.constants[first.number].content, np.int64)
    if "conv_pointwise" in launch.function:
        # Result, source and filter.
        shapes = geometry[GEOMETRY_LENGTH : GEOMETRY_LENGTH + 15].reshape(3, 5)
        return " ".join("x".join(map(str, shape)) for shape in shapes)
    return "x".join(map(str, geometry[: 3 if "reduction" in launch.function else 1]))


def _program(function: Program) -> str:
    """What a generated program reads and how often, what it writes, and how many operations stand between."""
    lines = function.body.splitlines()
    reads = Counter(way for line in lines for way in _READ.findall(line))
    inputs = ", ".join(f"{count} {way}" for way, count in reads.items())
    operations = len(lines) - sum(reads.values())
    return f"{function.entry} {function.symbol.split('_')[-3][:6]}: {inputs}; {operations} lines"
