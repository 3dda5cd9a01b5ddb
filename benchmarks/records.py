"""Result files: what was measured, on what, when; one row in one line."""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import typer

from torch_max_backend.bench.memory import cache_bytes
from torch_max_backend.checked import beartype
from torch_max_backend.runtime.caches import cache
from torch_max_backend.torch_compat import takes_tile_registers


@beartype
def provenance(device: torch.device) -> dict[str, Any]:
    """Facts that every result file has about its run: date (UTC), hardware, versions (the kernels' by their digest)."""
    return {"date": date(), "hardware": hardware(device), "versions": versions(device)}


@beartype
def hardware(device: torch.device) -> dict[str, Any]:
    """The machine, in words and numbers that a reader can compare."""
    record: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "cpu_capability": torch.backends.cpu.get_cpu_capability() + (", AMX" if takes_tile_registers() else ""),
        "cache_bytes": cache_bytes(device),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        record["gpu"] = properties.name
        record["gpu_memory_bytes"] = properties.total_memory
        record["multiprocessors"] = properties.multi_processor_count
        record["compute_capability"] = f"{properties.major}.{properties.minor}"
    return record


@beartype
def versions(device: torch.device) -> dict[str, Any]:
    """Versions of everything that a figure depends on, the kernels' by content."""
    record: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{key: value for key, value in cache.versions().items() if key != "machine"},
    }
    if device.type == "cuda":
        record["cuda"] = torch.version.cuda
        record["cudnn"] = torch.backends.cudnn.version()
        record["tf32"] = torch.backends.cudnn.allow_tf32
    return record


@beartype
def date() -> str:
    """Now, UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


@beartype
def cpu_seconds() -> float:
    """CPU time of this process and of those that it started and that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@beartype
def write(path: Path, content: Mapping[str, Any] | list[Any]) -> None:
    """Writes a result file, and the folder for it. A run that is stopped while it writes leaves the file as it was.

    Raises:
        ValueError: a figure is infinite or not a number.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(compact(content))
    fresh.replace(path)


@beartype
class Results:
    """The result file of a run that can be stopped and goes on later: rows, each written as soon as it is there.

    Several processes may add rows to one file at a time.

    Args:
        path: of the file. The rows that it has are taken over.
        settings: what all rows have in common.
        key: the fields that tell rows apart.
        order: the fields that the file's rows are sorted by.
        retry: leave out the file's rows of failures, which have an ``error``.

    Attributes:
        facts: what else the file says, such as ``provenance``.
        rows: by the values of their key fields.

    Raises:
        typer.BadParameter: the file has results of other settings.
    """

    def __init__(
        self, path: Path, settings: Mapping[str, Any], *, key: Sequence[str], order: Sequence[str], retry: bool = False
    ) -> None:
        self.path, self.settings = path, dict(settings)
        self.facts: dict[str, Any] = {}
        self.rows: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._key, self._order, self._retry = tuple(key), tuple(order), retry
        if path.exists():
            document = json.loads(path.read_text())
            other = {name for name, value in self.settings.items() if document.get(name) != value}
            if other:
                raise typer.BadParameter(f"--output {path} has results with another {', '.join(sorted(other))}")
            self.rows = self._written()
            self.facts = {name: value for name, value in document.items() if name not in (*self.settings, "rows")}

    def get(self, row: Mapping[str, Any]) -> dict[str, Any] | None:
        """The row with these key fields, if there is one."""
        return self.rows.get(self._key_of(row))

    def add(self, row: Mapping[str, Any]) -> None:
        """Writes a row, beside those that other processes have written meanwhile."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            self.rows = self._written() | self.rows | {self._key_of(row): dict(row)}
            rows = sorted(self.rows.values(), key=lambda row: [row[name] for name in self._order])
            write(self.path, {**self.settings, **self.facts, "rows": rows})
        finally:
            os.close(folder)

    def _written(self) -> dict[tuple[Any, ...], dict[str, Any]]:
        rows = json.loads(self.path.read_text())["rows"] if self.path.exists() else []
        return {self._key_of(row): row for row in rows if not (self._retry and "error" in row)}

    def _key_of(self, row: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in self._key)


@beartype
def compact(content: Mapping[str, Any] | list[Any]) -> str:
    """JSON in which every row of a table is one line.

    A row is an element of a list of objects, or an entry of an object of objects below the file's own; what holds
    rows is spread over lines.
    """
    return _text(content, 0) + "\n"


def _text(value: Any, depth: int) -> str:
    if not _spread(value, depth):
        return json.dumps(value, allow_nan=False)
    pad = " " * (depth + 1)
    if isinstance(value, Mapping):
        lines = [f"{pad}{json.dumps(key)}: {_text(item, depth + 1)}" for key, item in value.items()]
        opening, closing = "{", "}"
    else:
        lines = [pad + _text(item, depth + 1) for item in value]
        opening, closing = "[", "]"
    return opening + "\n" + ",\n".join(lines) + "\n" + " " * depth + closing


def _spread(value: Any, depth: int) -> bool:
    if not value or not isinstance(value, (Mapping, list, tuple)):
        return False
    if depth == 0:
        return True
    if isinstance(value, Mapping):
        rows = any(isinstance(item, list) and _spread(item, depth + 1) for item in value.values())
        return rows or (depth == 1 and all(isinstance(item, Mapping) for item in value.values()))
    return any(isinstance(item, Mapping) or _spread(item, depth + 1) for item in value)
