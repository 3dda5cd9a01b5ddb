"""Which graphs are compiled together: MAX compiles a module on one core, and charges for every module anew."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from torch_max_backend.errors import OptionError

MODULE, OP = 13.0, 0.3
"""CPU-seconds that MAX takes for a module, and for each aten op in it (both measured; ops differ much)."""
START = 3.0
"""Seconds from the start of a worker process until MAX begins to compile in it."""
MOST = 16
"""Modules that one device's graphs are dealt out into at most."""

_CORES = "TORCH_MAX_BACKEND_COMPILE_CORES"

Way = list[list[int]]
"""Graphs, by number, in modules; every graph is in one."""


def cores() -> int:
    """How many cores a compilation may use: ``TORCH_MAX_BACKEND_COMPILE_CORES``, else those this process runs on.

    Raises:
        OptionError: the variable is no number of at least 1.
    """
    chosen = os.environ.get(_CORES)
    if not chosen:
        return len(os.sched_getaffinity(0))
    if not chosen.isdecimal() or int(chosen) < 1:
        raise OptionError(f"{_CORES}={chosen!r}: expected a number of at least 1")
    return int(chosen)


def ways(sizes: Sequence[int]) -> Iterator[Way]:
    """The ways in which graphs of these ``sizes`` (aten ops) are ever dealt out: into one module, into two, ...

    Every process deals alike, whatever its cores: what one has compiled another finds.
    """
    longest_first = sorted(range(len(sizes)), key=lambda number: -sizes[number])
    for count in range(1, min(len(sizes), MOST) + 1):
        modules: Way = [[] for _ in range(count)]
        for number in longest_first:
            min(modules, key=lambda module: sum(sizes[each] for each in module)).append(number)
        yield [sorted(module) for module in modules]


def best(sizes: Sequence[int], cores: int, beside: float = 0.0) -> Way:
    """The way of ``ways`` that is compiled soonest, the one of fewest modules where several are.

    Args:
        sizes: aten ops of each graph.
        cores: that there are.
        beside: CPU-seconds of other work that goes on at the same time on these cores.
    """
    return min(ways(sizes), key=lambda way: _seconds(way, sizes, cores, beside))


def _seconds(way: Way, sizes: Sequence[int], cores: int, beside: float) -> float:
    """An upper bound of how long it takes: Graham's for a list of jobs, or all work dealt out to all cores.

    Graham (1969), Bounds on multiprocessing timing anomalies: the jobs' sum over the cores, and what the longest adds.
    """
    # This process compiles the first module, the longest as a rule; workers the others.
    jobs = [MODULE + OP * sum(sizes[number] for number in lot) + (START if lot is not way[0] else 0) for lot in way]
    return max(sum(jobs) / cores + max(jobs) * (1 - 1 / cores), (sum(jobs) + beside) / cores)
