"""What a result was measured on: hardware, versions, date; and how much fits."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import torch

from torch_max_backend.checked import beartype
from torch_max_backend.runtime import cache

_SYSTEM_CPU = Path("/sys/devices/system/cpu")


@beartype
def hardware(device: torch.device) -> dict[str, Any]:
    """The machine, in words and numbers that a reader can compare."""
    record: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
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


@beartype
def cache_bytes(device: torch.device) -> int:
    """Size of the last cache before memory: a GPU's L2, a CPU's L3 as one core sees it."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = [_size(path.read_text()) for path in _SYSTEM_CPU.glob("cpu0/cache/index*/size")]
    return max(sizes, default=32 * 2**20)


@beartype
def available_bytes(device: torch.device) -> int:
    """Memory that operands may take on the device now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _size(text: str) -> int:
    text = text.strip()
    scale = {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1:], 1)
    return int(text.rstrip("KMG")) * scale


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


@beartype
def distribution_version(name: str) -> str:
    """The installed version of a distribution, or 'not installed'."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
