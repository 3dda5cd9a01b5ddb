"""The hardware that machine code is compiled for, as a part of a cache entry's key."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
from collections.abc import Mapping
from pathlib import Path

import torch
from max.driver import Accelerator

from torch_max_backend.errors import OptionError
from torch_max_backend.torch_compat import has_bfloat16_pairs, takes_tile_registers

_LEVEL = "TORCH_MAX_BACKEND_CPU_LEVEL"


def target_facts(device: torch.device) -> dict[str, str]:
    """The hardware that a graph on ``device`` is compiled for, in words that are the same in every process on it."""
    if device.type == "cpu":
        return {"device": "cpu", "cpu": _chosen_level() or cpu_name()}
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


_V3 = frozenset({"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"})
LEVELS = {"x86-64-v4": _V3 | {f"avx512{part}" for part in ("f", "bw", "cd", "dq", "vl")}, "x86-64-v3": _V3}
"""LLVM's names for levels of CPUs, the highest first, and the instruction sets of each, as Linux calls them."""


def cpu_level() -> str | None:
    """The level of CPUs that a wheel's kernels are taken of: the chosen one, or the highest that the CPU reaches.

    Code for it is as fast as code for this very CPU; code for the level below has vectors half as wide.
    """
    return _chosen_level() or next((level for level, sets in LEVELS.items() if sets <= _flags()), None)


def _chosen_level() -> str | None:
    """``TORCH_MAX_BACKEND_CPU_LEVEL``: the level that kernels are built for instead of the CPU at hand.

    Raises:
        OptionError: the variable is no level, or one that this CPU does not reach.
    """
    chosen = os.environ.get(_LEVEL)
    if not chosen:
        return None
    reached = [level for level, sets in LEVELS.items() if sets <= _flags()]
    if chosen not in reached:
        raise OptionError(f"{_LEVEL}={chosen!r}: expected a level that this CPU reaches, of {reached}")
    return chosen


def _flags() -> frozenset[str]:
    """The CPU's instruction sets."""
    fields = _cpuinfo()
    return frozenset((fields.get("flags") or fields.get("Features") or "").split())


@functools.cache
def _cpuinfo() -> Mapping[str, str]:
    """Linux's description of the first core; empty on other systems."""
    cpuinfo = Path("/proc/cpuinfo")
    fields: dict[str, str] = {}
    for line in cpuinfo.read_text().splitlines() if cpuinfo.is_file() else ():
        key, colon, value = line.partition(":")
        if not colon:
            break
        fields[key.strip()] = value.strip()
    return fields


@functools.cache
def cpu_features() -> tuple[str, ...]:
    """Instruction sets of bfloat16 for the CPU at hand, as LLVM's options: a compiler that tells a CPU by its model
    alone misses some of a virtual machine, and does not know what the system permits."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ()
    sign = {True: "+", False: "-"}
    tiles = sign[takes_tile_registers()]
    return f"{sign[has_bfloat16_pairs()]}avx512bf16", f"{tiles}amx-tile", f"{tiles}amx-bf16"


@functools.cache
def cpu_name() -> str:
    """The CPU that host code is compiled for: its model, a digest of its instruction sets, and `cpu_features`."""
    fields = _cpuinfo()
    if not fields:
        return platform.processor() or platform.machine()
    flags = sorted(_flags())
    names = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")
    model = "-".join(fields[name] for name in names if name in fields)
    return f"{model}:{hashlib.sha256(' '.join([*flags, *cpu_features()]).encode()).hexdigest()[:16]}"
