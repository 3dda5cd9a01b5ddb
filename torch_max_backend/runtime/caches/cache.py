"""The disk cache: kernel libraries and compiled graphs, kept across processes.

A cache entry is a directory named by the digest of everything that the artifact depends on. It holds the artifact and
``entry.json``, with the artifact's SHA-256 and the inputs of the digest. An entry that does not match its own record is
dropped with a warning and built again.

Artifacts are machine code that the process will run, so the cache belongs to one user: it is created with mode 0700,
and an entry that another user owns or may write is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from mojo.run import subprocess_run_mojo

import torch_max_backend
from torch_max_backend.mojo_ops import KERNELS_PATH
from torch_max_backend.mojo_ops.registrations import package
from torch_max_backend.version import __version__

log = logging.getLogger(__name__)

_CHOSEN = "TORCH_MAX_BACKEND_CACHE_DIR"
RECORD = "entry.json"
"""The file of an entry that says what it is."""
_NEW = ".new-"
_ABANDONED, _ABANDONED_WITHOUT_LOCKS = 600.0, 86400.0
"""Seconds after which what a killed writer left is removed, and where no lock can tell whether the writer lives."""


def cache_directory() -> Path:
    """The directory of artifacts: ``TORCH_MAX_BACKEND_CACHE_DIR``, else the user's cache directory."""
    chosen = os.environ.get(_CHOSEN)
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
        "backend": __version__,
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
    return _files_digest(KERNELS_PATH, "*.mojo")


@functools.cache
def package_digest() -> str:
    """SHA-256 over the package's Python sources, names and contents."""
    return _files_digest(Path(torch_max_backend.__file__).parent, "*.py")


def _files_digest(root: Path, pattern: str) -> str:
    state = hashlib.sha256()
    for path in sorted(root.rglob(pattern)):
        state.update(str(path.relative_to(root)).encode())
        state.update(path.read_bytes())
    return state.hexdigest()


def has(kind: str, facts: Mapping[str, str]) -> bool:
    """Whether there is an entry; only ``lookup`` says whether it is intact."""
    return (cache_directory() / kind / digest(facts)).is_dir()


def lookup(kind: str, facts: Mapping[str, str], filename: str) -> Path | None:
    """The artifact of an intact entry, None where there is none; a damaged entry is removed."""
    entry = cache_directory() / kind / digest(facts)
    artifact = entry / filename
    if not entry.is_dir():
        return None
    for path in (cache_directory().resolve(), entry.parent, entry, artifact, entry / RECORD):
        reason = untrusted(path)
        if reason is not None:
            log.warning("the cache entry %s is not used: %s", entry, reason)
            if entry.lstat().st_uid == os.geteuid():
                shutil.rmtree(entry, ignore_errors=True)
            return None
    try:
        record = json.loads((entry / RECORD).read_text())
        intact = record["facts"] == dict(facts) and record["sha256"] == sha256(artifact)
    except (OSError, ValueError, KeyError, TypeError):
        intact = False
    if intact:
        return artifact
    discard(kind, facts, "its content does not match its record")
    return None


def untrusted(path: Path) -> str | None:
    """Why code below ``path`` must not be run: another user could have put it there. None where none could, and
    where there is no such file."""
    try:
        status = path.lstat()
    except OSError:
        return None
    if stat.S_ISLNK(status.st_mode):
        return f"{path} is a symbolic link"
    # Whoever is root may do as they please anyway, and owns the files of a container's image.
    if status.st_uid not in (0, os.geteuid()):
        return f"{path} belongs to another user (uid {status.st_uid})"
    others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    # In a sticky directory (/tmp) nobody moves what belongs to others.
    if others and not (stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX):
        return f"other users may write {path} (mode {stat.S_IMODE(status.st_mode):04o}); see chmod go-w"
    return None


def discard(kind: str, facts: Mapping[str, str], reason: str) -> None:
    """Removes an entry that cannot be used, saying so."""
    entry = cache_directory() / kind / digest(facts)
    log.warning("dropping the cache entry %s: %s", entry, reason)
    shutil.rmtree(entry, ignore_errors=True)


@contextlib.contextmanager
def claim(kind: str, facts: Mapping[str, str], cancelled: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Makes the caller the only one, in all processes and threads, who makes this entry.

    Look for the entry again inside: another process may just have made it. The claim is a lock of the operating system
    on a file beside the entry, which ends with its process however that ends. Where no lock can be had (a directory
    that cannot be written, a file system without locks) nothing is locked: work may be done twice, without harm.

    Args:
        cancelled: asked while another process holds the claim; True gives up waiting.

    Raises:
        TimeoutError: ``cancelled`` said so.
    """
    path = cache_directory() / kind / f".{digest(facts)}.lock"
    file = _locked(path, cancelled)
    try:
        yield
    finally:
        if file is not None:
            with contextlib.suppress(OSError):
                path.unlink()
            # Explicitly: a child that was forked meanwhile has the file open too.
            fcntl.flock(file, fcntl.LOCK_UN)
            os.close(file)


def _locked(path: Path, cancelled: Callable[[], bool]) -> int | None:
    waiting = False
    while True:
        try:
            make_private(path.parent)
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError:
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            if cancelled():
                raise TimeoutError(f"gave up waiting for {path}") from None
            if not waiting:
                waiting = True
                log.info("waiting for another process that compiles the same")
            time.sleep(0.1)
            continue
        except OSError:
            os.close(file)
            return None
        try:
            # Its last holder may have removed the file that this lock is on.
            if os.path.samestat(os.fstat(file), os.stat(path)):
                return file
        except FileNotFoundError:
            pass
        os.close(file)


def make_private(directory: Path) -> None:
    """Makes the directory and the cache's own above it for this user alone; a cache directory that the user chose
    stays as it is."""
    root = cache_directory()
    root.parent.mkdir(parents=True, exist_ok=True)
    for path in (root, directory):
        path.mkdir(mode=0o700, exist_ok=True)
        ours = path != root or not os.environ.get(_CHOSEN)
        if ours and path.stat().st_uid == os.geteuid() and stat.S_IMODE(path.stat().st_mode) != 0o700:
            path.chmod(0o700)


@contextlib.contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """A new directory in ``parent``, which goes at the end. Until then, or until this process ends, it is locked."""
    with tempfile.TemporaryDirectory(dir=parent, prefix=_NEW) as name:
        file = os.open(name, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield Path(name)
        finally:
            os.close(file)


def remove_abandoned(parent: Path, age: float = _ABANDONED) -> None:
    """Removes what killed processes left of ``scratch`` in ``parent``, if it is older than ``age`` seconds."""
    for path in parent.glob(f"{_NEW}*"):
        try:
            file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            passed, least = time.time() - os.fstat(file).st_mtime, age
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            except OSError:
                least = max(age, _ABANDONED_WITHOUT_LOCKS)
            if passed >= least:
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(file)


@functools.cache
def _tidy(parent: Path) -> None:
    """Once in a process."""
    remove_abandoned(parent)


def store(kind: str, facts: Mapping[str, str], filename: str, write: Callable[[Path], None]) -> Path | None:
    """Makes an entry whole or not at all: ``write(path)`` fills a private directory that is then renamed.

    Returns the artifact's path, None where the cache directory cannot be written (said once, as a warning).
    """
    parent = cache_directory() / kind
    entry = parent / digest(facts)
    try:
        make_private(parent)
        _tidy(parent)
        with scratch(parent) as folder:
            fresh = folder / "entry"
            fresh.mkdir(mode=0o700)
            write(fresh / filename)
            # Whatever the user's umask is.
            (fresh / filename).chmod(0o600)
            record = {"facts": dict(facts), "sha256": sha256(fresh / filename)}
            (fresh / RECORD).write_text(json.dumps(record, indent=1))
            (fresh / RECORD).chmod(0o600)
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


def sha256(path: Path) -> str:
    """The SHA-256 of the file's content, in hexadecimal digits."""
    state = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            state.update(chunk)
    return state.hexdigest()


_PACKAGE = "torch_max_ops.mojoc"


@functools.cache
def kernel_library_path() -> Path:
    """The ops that call kernels in MAX's graphs as a precompiled Mojo package; its sources where no cache can be
    written."""
    facts = _package_facts()
    found = lookup("ops", facts, _PACKAGE)
    if found is None:
        with claim("ops", facts):
            found = lookup("ops", facts, _PACKAGE) or store("ops", facts, _PACKAGE, _precompile)
    return found or _written(Path(tempfile.mkdtemp(prefix="torch-max-ops-")))


def ops_digest() -> str:
    """SHA-256 over the sources of the ops that call kernels."""
    state = hashlib.sha256()
    for name, text in package().items():
        state.update(name.encode())
        state.update(text.encode())
    return state.hexdigest()


def _package_facts() -> dict[str, str]:
    return {**{key: versions()[key] for key in ("max", "mojo", "machine")}, "ops": ops_digest()}


def _written(parent: Path) -> Path:
    folder = parent / Path(_PACKAGE).stem
    folder.mkdir()
    for name, text in package().items():
        (folder / name).write_text(text)
    return folder


def _precompile(path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="torch-max-ops-") as parent:
        command = ["precompile", str(_written(Path(parent))), "-o", str(path)]
        result = subprocess_run_mojo(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"the ops that call kernels do not compile:\n{result.stderr}")
