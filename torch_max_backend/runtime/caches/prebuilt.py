"""Kernel libraries that came with the package: a second place beside the disk cache, which is only read.

``torch_max_backend.wheel`` makes them while a wheel is built. A folder has a folder for each target, with libraries
and ``index.json``, which says of every function what its library depends on, in the words of the cache's keys.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch_max_backend
from torch_max_backend.runtime.caches import cache
from torch_max_backend.runtime.caches.target import cpu_level

log = logging.getLogger(__name__)

INDEX = "index.json"
_CHOSEN = "TORCH_MAX_BACKEND_PREBUILT"


@dataclass(frozen=True)
class Prebuilt:
    """A library.

    Attributes:
        path: its file.
        functions: the facts of each function in it.
    """

    path: Path
    functions: tuple[Mapping[str, str], ...]

    @property
    def target(self) -> str:
        """The target of its code: a GPU's architecture, or a level of CPUs."""
        facts = self.functions[0]
        return facts["cpu"] if facts["device"] == "cpu" else facts["device"]


def folder() -> Path | None:
    """Where they lie: ``TORCH_MAX_BACKEND_PREBUILT``, else inside the package; None if the variable is empty."""
    chosen = os.environ.get(_CHOSEN)
    if chosen is None:
        return Path(torch_max_backend.__file__).parent / "prebuilt"
    return Path(chosen) if chosen else None


def libraries() -> tuple[Prebuilt, ...]:
    """All prebuilt libraries, for every target and from whatever versions."""
    place = folder()
    return () if place is None else _read(place)


def lookup(facts: Mapping[str, str]) -> Path | None:
    """The library of a function that the cache would look for by ``facts``; None where there is none.

    For a function on the CPU it is that of the CPU's level. Whoever installed the package trusts its files, and the
    installer has compared them with their digests.
    """
    place = folder()
    known = {} if place is None else _by_digest(place)
    cpu = cpu_level() if facts["device"] == "cpu" else facts["cpu"]
    return known.get(cache.digest({**facts, "cpu": cpu})) if known and cpu else None


@functools.cache
def _by_digest(place: Path) -> Mapping[str, Path]:
    return {cache.digest(facts): library.path for library in _read(place) for facts in library.functions}


@functools.cache
def _read(place: Path) -> tuple[Prebuilt, ...]:
    found: list[Prebuilt] = []
    for index in sorted(place.glob(f"*/{INDEX}")):
        try:
            content = json.loads(index.read_text())
            found += [Prebuilt(index.parent / name, tuple(functions)) for name, functions in content.items()]
        except (OSError, ValueError, AttributeError, TypeError) as error:
            log.warning("the libraries in %s are not used: %s", index.parent, error)
    return tuple(library for library in found if library.functions and library.path.is_file())
