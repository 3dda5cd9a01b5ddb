"""The memory that a device has for operands, and the size of its cache."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from torch_max_backend.checked import beartype

_SYSTEM_CPU = Path("/sys/devices/system/cpu")


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
