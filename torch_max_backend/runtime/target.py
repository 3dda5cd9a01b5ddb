"""The hardware that machine code is compiled for, as a part of a cache entry's key."""

from __future__ import annotations

import functools
import hashlib
import platform
from pathlib import Path

import torch
from max.driver import Accelerator


def target_facts(device: torch.device) -> dict[str, str]:
    """The hardware that a graph on ``device`` is compiled for, in words that are the same in every process on it."""
    if device.type == "cpu":
        return {"device": "cpu", "cpu": cpu_name()}
    return {"device": ":".join(accelerator_of(device)), "cpu": cpu_target(device)}


def accelerator_of(device: torch.device) -> tuple[str, str]:
    """API and architecture of a GPU, such as ("cuda", "sm_90a"); empty for the CPU."""
    if device.type == "cpu":
        return "", ""
    accelerator = Accelerator(device.index or 0)
    return accelerator.api, canonical_architecture(accelerator.architecture_name)


def cpu_target(device: torch.device) -> str:
    """LLVM's name for the CPU that the host code of a graph on ``device`` is compiled for; empty for the CPU at hand.

    What runs on the host of a GPU graph launches kernels: any CPU of the last ten years is as good for that, and so a
    graph that one machine compiled runs on another with the same GPU.
    """
    if device.type == "cpu":
        return ""
    return "x86-64-v3" if platform.machine() in ("x86_64", "AMD64") else "generic"


def canonical_architecture(name: str) -> str:
    """``name`` with the suffix of NVIDIA's architecture-specific features, which from Hopper on belongs to it."""
    return f"{name}a" if name in ("sm_90", "sm_100", "sm_103", "sm_120") else name


@functools.cache
def cpu_name() -> str:
    """The CPU that MAX compiles host code for: its model and a digest of its instruction sets."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return platform.processor() or platform.machine()
    fields: dict[str, str] = {}
    for line in cpuinfo.read_text().splitlines():
        key, colon, value = line.partition(":")
        if not colon:
            # Of the first core only.
            break
        fields[key.strip()] = value.strip()
    flags = sorted((fields.get("flags") or fields.get("Features") or "").split())
    names = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")
    model = "-".join(fields[name] for name in names if name in fields)
    return f"{model}:{hashlib.sha256(' '.join(flags).encode()).hexdigest()[:16]}"
