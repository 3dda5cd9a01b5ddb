"""The disk cache: compiled graphs and the precompiled kernel library, kept across processes.

An entry is a directory named after the digest of everything that the artifact depends on. It holds the artifact
and ``entry.json`` with the artifact's SHA-256 and the facts that went into the digest; an entry that does not
match its own record is dropped with a warning and made anew.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from mojo.run import subprocess_run_mojo

from torch_max_backend.mojo_ops import KERNELS_PATH

log = logging.getLogger(__name__)

_RECORD = "entry.json"


def cache_directory() -> Path:
    """Where artifacts are kept: ``TORCH_MAX_BACKEND_CACHE_DIR``, else the user's cache directory."""
    chosen = os.environ.get("TORCH_MAX_BACKEND_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "torch_max_backend"


def digest(facts: Mapping[str, str]) -> str:
    """The name of the entry that depends on exactly these facts."""
    text = json.dumps(dict(facts), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@functools.cache
def versions() -> dict[str, str]:
    """Versions that an artifact depends on, the kernels' by content."""
    return {
        "max": importlib.metadata.version("max"),
        "mojo": _version_of("mojo", "mojo-compiler"),
        "backend": _version_of("torch-max-backend"),
        "kernels": kernels_digest(),
        "machine": f"{platform.system()}-{platform.machine()}",
    }


def _version_of(*distributions: str) -> str:
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "uninstalled"


@functools.cache
def kernels_digest() -> str:
    """SHA-256 over the Mojo sources, names and contents."""
    state = hashlib.sha256()
    for path in sorted(KERNELS_PATH.rglob("*.mojo")):
        state.update(str(path.relative_to(KERNELS_PATH)).encode())
        state.update(path.read_bytes())
    return state.hexdigest()


def lookup(kind: str, facts: Mapping[str, str], filename: str) -> Path | None:
    """The artifact of an intact entry, None where there is none; a damaged entry is removed."""
    entry = cache_directory() / kind / digest(facts)
    artifact = entry / filename
    if not entry.is_dir():
        return None
    try:
        record = json.loads((entry / _RECORD).read_text())
        intact = record["facts"] == dict(facts) and record["sha256"] == _sha256(artifact)
    except (OSError, ValueError, KeyError, TypeError):
        intact = False
    if intact:
        return artifact
    discard(kind, facts, "its content does not match its record")
    return None


def discard(kind: str, facts: Mapping[str, str], reason: str) -> None:
    """Removes an entry that cannot be trusted, saying so."""
    entry = cache_directory() / kind / digest(facts)
    log.warning("dropping the cache entry %s: %s", entry, reason)
    shutil.rmtree(entry, ignore_errors=True)


def store(kind: str, facts: Mapping[str, str], filename: str, write: Callable[[Path], None]) -> Path | None:
    """Makes an entry whole or not at all: ``write(path)`` fills a private directory that is then renamed.

    Returns the artifact's path, None where the cache directory cannot be written (said once, as a warning).
    """
    parent = cache_directory() / kind
    entry = parent / digest(facts)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=parent, prefix=".new-") as scratch:
            fresh = Path(scratch) / "entry"
            fresh.mkdir()
            write(fresh / filename)
            record = {"facts": dict(facts), "sha256": _sha256(fresh / filename)}
            (fresh / _RECORD).write_text(json.dumps(record, indent=1))
            try:
                fresh.rename(entry)
            except OSError:
                # Another process was first: its entry is as good, unless it is damaged.
                if lookup(kind, facts, filename) is None:
                    fresh.rename(entry)
    except OSError as error:
        log.warning("the cache at %s cannot be written: %s", parent, error)
        return None
    return entry / filename


def _sha256(path: Path) -> str:
    state = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            state.update(chunk)
    return state.hexdigest()


@functools.cache
def kernel_library_path() -> Path:
    """The Mojo kernels as a precompiled package; the source folder where no cache can be written.

    Loading the source folder would package it anew in every process (3 s on 2 cores).
    """
    facts = {key: versions()[key] for key in ("max", "mojo", "kernels", "machine")}
    filename = "torch_max_kernels.mojoc"
    found = lookup("kernels", facts, filename)
    if found is None:

        def precompile(path: Path) -> None:
            result = subprocess_run_mojo(
                ["precompile", str(KERNELS_PATH), "-o", str(path)], capture_output=True, text=True
            )
            if result.returncode:
                raise RuntimeError(f"the Mojo kernels do not compile:\n{result.stderr}")

        found = store("kernels", facts, filename, precompile)
    return found or KERNELS_PATH
