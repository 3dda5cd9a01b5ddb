"""One MAX module for the kernels' tests: what several files test is compiled once, with symbolic sizes.

MAX charges a third of a minute for a compilation before it has seen a kernel. A run compiles only what the files that
it selected use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from max.engine import Model
from max.graph import Module

from torch_max_backend.runtime import session

#: Builds graphs for a device into the module; returns their names in order.
Add = Callable[[Module, torch.device], Sequence[str]]


@dataclass(frozen=True)
class _Part:
    files: frozenset[str]
    add: Add


_parts: list[_Part] = []
_models: dict[torch.device, dict[str, Model]] = {}
#: The files of the tests that this run selected; conftest.py fills it.
selected: set[str] = set()


def part(*files: str) -> Callable[[Add], Add]:
    """Registers graphs that the tests in ``files`` (paths from the root) run."""

    def register(add: Add) -> Add:
        _parts.append(_Part(frozenset(files), add))
        return add

    return register


def models(device: str) -> dict[str, Model]:
    """Every compiled graph by its name."""
    place = torch.device(device)
    if place not in _models:
        module, names = Module(), []
        for each in _parts:
            if each.files & selected:
                names += each.add(module, place)
        _models[place] = session.compile_module(module, place, names, len(names), "the kernels' tests")
    return _models[place]
