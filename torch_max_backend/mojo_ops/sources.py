"""Finds the Mojo sources that a library depends on, so that changes to other kernels leave it in the cache."""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from torch_max_backend.mojo_ops import KERNELS_PATH

DIGITS = 8
"""The number of digits of the sources' digest in a symbol."""
_IMPORT = re.compile(r"^[ \t]*from[ \t]+(\.+)([\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n]*)", re.MULTILINE)
_NAME = re.compile(r"(\w+)(?:\s+as\s+\w+)?")


@functools.cache
def sources_digest(modules: frozenset[str]) -> str:
    """SHA-256 over the modules of the kernels' package and all that they import from it, names and contents.

    Args:
        modules: with their path in the package, such as "pooling.entries".
    """
    state = hashlib.sha256()
    for path in sorted(sources_of(modules)):
        state.update(str(path.relative_to(KERNELS_PATH)).encode())
        state.update(path.read_bytes())
    return state.hexdigest()


def symbol_of(name: str, modules: Iterable[str]) -> str:
    """The symbol of a library function that is called ``name`` and made of ``modules``.

    It tells which version of the sources the function was built from: a library of older ones may be in the process
    too, for a function whose own sources have not changed.
    """
    return f"{name}_{sources_digest(frozenset({'common.library', *modules}))[:DIGITS]}"


def forget() -> None:
    """Reads the sources anew: they have changed."""
    sources_digest.cache_clear()
    _imported.cache_clear()


def sources_of(modules: Iterable[str]) -> set[Path]:
    """The files of ``modules`` and of what they import from the kernels' package."""
    found: set[Path] = set()
    waiting = [file for module in modules for file in _files(KERNELS_PATH.joinpath(*module.split(".")))]
    while waiting:
        file = waiting.pop()
        if file not in found:
            found.add(file)
            waiting += _imported(file)
    return found


@functools.cache
def _imported(file: Path) -> tuple[Path, ...]:
    found: list[Path] = []
    for dots, module, names in _IMPORT.findall(file.read_text()):
        base = file.parents[len(dots) - 1]
        base = base.joinpath(*module.split(".")) if module else base
        found += _files(base)
        # A name may be a module of the package.
        found += [file for name in _NAME.findall(names) for file in _files(base / name)]
    return tuple(found)


def _files(path: Path) -> list[Path]:
    """The file of the module at ``path``, with those of the packages around it; nothing where there is none."""
    file = path / "__init__.mojo" if path.is_dir() else path.with_suffix(".mojo")
    if not file.is_file():
        return []
    around = [parent / "__init__.mojo" for parent in file.parents if parent.is_relative_to(KERNELS_PATH)]
    return [file, *(each for each in around if each.is_file())]
