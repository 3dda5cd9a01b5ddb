"""Listing the disk cache, and moving it to another machine in one file.

An archive is a tar file: ``manifest.json`` with the size and SHA-256 of every file, then the files of the entries.
Artifacts are machine code. The checksums detect damage; they are no signature.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import re
import shutil
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from torch_max_backend.checked import beartype
from torch_max_backend.runtime.caches import cache

#: Kinds of cache entries, and the artifact's file name in each.
KINDS = {
    "graphs": "model.mef",
    "libraries": "library.so",
    "ops": "torch_max_ops.mojoc",
    "traces": "trace.pickle",
}
_MANIFEST = "manifest.json"
_FORMAT = 1
_MAX_MANIFEST_BYTES = 1 << 26
_NAME = re.compile(r"(?P<kind>[a-z]+)/(?P<entry>[0-9a-f]{32})/(?P<file>[A-Za-z0-9_.]+)")


class ArchiveError(Exception):
    """A file that is no archive of a cache, or a damaged one."""


@dataclass(frozen=True)
class CacheEntry:
    """One cache entry, as it says of itself.

    Attributes:
        kind: a key of ``KINDS``.
        path: its directory.
        facts: what its artifact depends on; empty where it cannot be read.
        bytes: of all its files.
    """

    kind: str
    path: Path
    facts: Mapping[str, str]
    bytes: int

    @property
    def usable(self) -> bool:
        """Whether the installed versions would look for it."""
        return bool(self.facts) and is_current(self.facts)

    @property
    def target(self) -> str:
        """The target of its code."""
        return self.facts.get("device", "any") if self.facts else "unknown"


@beartype
def is_current(facts: Mapping[str, str]) -> bool:
    """Whether the installed versions are those that an entry was made with."""
    return all(facts.get(name) == value for name, value in cache.versions().items() if name in facts)


@beartype
def entries() -> list[CacheEntry]:
    """Everything in the cache."""
    found = []
    for kind in KINDS:
        folder = cache.cache_directory() / kind
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if not re.fullmatch("[0-9a-f]{32}", path.name):
                continue
            facts: dict[str, str] = {}
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                facts = _facts(json.loads((path / cache.RECORD).read_text()))
            found.append(CacheEntry(kind, path, facts, sum(f.lstat().st_size for f in path.rglob("*") if f.is_file())))
    return found


def _facts(record: Any) -> dict[str, str]:
    """The facts of an entry's record.

    Raises:
        KeyError, TypeError, ValueError: it is no record.
    """
    facts = record["facts"]
    if not isinstance(facts, dict) or not all(isinstance(text, str) for item in facts.items() for text in item):
        raise ValueError("the facts are no texts")
    return facts


@beartype
def clear(stale: bool = False) -> tuple[int, int]:
    """Removes all entries, or with ``stale`` those that the installed versions would not look for.

    Returns:
        How many entries went, and how many bytes.
    """
    gone = [entry for entry in entries() if not (stale and entry.usable)]
    for entry in gone:
        shutil.rmtree(entry.path, ignore_errors=True)
    gone = [entry for entry in gone if not entry.path.exists()]
    directory = cache.cache_directory()
    for folder in (directory, *filter(Path.is_dir, directory.glob("*"))):
        cache.remove_abandoned(folder, 0.0)
    return len(gone), sum(entry.bytes for entry in gone)


@beartype
def export_cache(file: Path) -> tuple[int, int]:
    """Writes the entries that the installed versions use to ``file``, a tar file (compressed if it ends in .gz).

    Returns:
        How many entries it holds, and how many bytes they have.

    Raises:
        OSError: it cannot be written.
    """
    members: dict[str, Path] = {}
    count = 0
    for entry in entries():
        artifact = cache.lookup(entry.kind, entry.facts, KINDS[entry.kind]) if entry.usable else None
        if artifact is None or artifact.parent != entry.path:
            continue
        count += 1
        for path in (artifact, entry.path / cache.RECORD):
            members[f"{entry.kind}/{entry.path.name}/{path.name}"] = path
    sizes = {name: path.stat().st_size for name, path in sorted(members.items())}
    files = {name: {"bytes": size, "sha256": cache.sha256(members[name])} for name, size in sizes.items()}
    manifest = json.dumps({"format": _FORMAT, "versions": cache.versions(), "files": files}, indent=1).encode()
    with _new_file(file) as fresh, tarfile.open(fresh, "w:gz" if file.suffix == ".gz" else "w") as archive:
        _add(archive, _MANIFEST, len(manifest), io.BytesIO(manifest))
        for name, size in sizes.items():
            with members[name].open("rb") as content:
                _add(archive, name, size, content)
    return count, sum(sizes.values())


@contextlib.contextmanager
def _new_file(path: Path) -> Iterator[Path]:
    """A path beside ``path`` to write to, which takes its place when all went well."""
    fresh = path.with_name(f".{path.name}.new")
    try:
        yield fresh
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def _add(archive: tarfile.TarFile, name: str, size: int, content: IO[bytes]) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o600
    archive.addfile(member, content)


@beartype
def import_cache(file: Path) -> tuple[int, int]:
    """Takes the entries of an archive into the cache: all that the installed versions use, or none.

    Import only files from a sender whose programs you would run.

    Returns:
        How many entries came, and how many of other versions were left out.

    Raises:
        ArchiveError: the file is no archive, is damaged, or holds something that belongs in none; nothing has changed.
        OSError: a file or the cache cannot be read or written.
    """
    parent = cache.cache_directory()
    cache.make_private(parent)
    with cache.scratch(parent) as scratch:
        try:
            with tarfile.open(file, "r:*") as archive:
                names = _unpack(archive, scratch)
        except (tarfile.TarError, EOFError) as error:
            raise ArchiveError(f"{file} is no archive of a cache: {error}") from error
        checked: dict[str, dict[str, str]] = {}
        for name in sorted({name.rpartition("/")[0] for name in names}):
            kind, _, digest = name.partition("/")
            checked[name] = _checked(scratch / name, kind, digest, names)
        taken = 0
        for name, facts in checked.items():
            kind = name.split("/")[0]
            if not is_current(facts):
                continue
            source = scratch / name / KINDS[kind]
            if cache.lookup(kind, facts, KINDS[kind]) is None:
                made = cache.store(kind, facts, KINDS[kind], functools.partial(_copy, source))
                if made is None:
                    raise OSError(f"the cache at {parent} cannot be written")
            taken += 1
    return taken, len(checked) - taken


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)


def _unpack(archive: tarfile.TarFile, scratch: Path) -> set[str]:
    """Writes what the manifest lists below ``scratch``, compared with the manifest; the names."""
    first = archive.next()
    if first is None or first.name != _MANIFEST or not first.isreg() or first.size > _MAX_MANIFEST_BYTES:
        raise ArchiveError(f"it does not begin with {_MANIFEST}")
    try:
        manifest = json.loads(_content(archive, first).read())
        known, files = manifest["format"], manifest["files"]
        listed = {name: (int(record["bytes"]), str(record["sha256"])) for name, record in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArchiveError(f"its {_MANIFEST} cannot be read: {error!r}") from error
    if known != _FORMAT:
        raise ArchiveError(f"its format is {known!r}; this version reads {_FORMAT}")
    seen: set[str] = set()
    while (member := archive.next()) is not None:
        name = member.name
        parts = _NAME.fullmatch(name)
        if not member.isreg() or parts is None:
            raise ArchiveError(f"it holds {name!r}, which is no file of a cache entry")
        if parts["kind"] not in KINDS or parts["file"] not in (KINDS[parts["kind"]], cache.RECORD):
            raise ArchiveError(f"it holds {name!r}, which is no file of a cache entry")
        if name not in listed or name in seen or member.size != listed[name][0]:
            raise ArchiveError(f"{name} is not what its {_MANIFEST} says")
        seen.add(name)
        path = scratch / name
        path.parent.mkdir(parents=True, exist_ok=True)
        state = hashlib.sha256()
        with path.open("wb") as target:
            content = _content(archive, member)
            while chunk := content.read(1 << 20):
                state.update(chunk)
                target.write(chunk)
        if state.hexdigest() != listed[name][1]:
            raise ArchiveError(f"{name} is damaged: its SHA-256 is not that of the {_MANIFEST}")
    if seen != set(listed):
        raise ArchiveError(f"{sorted(set(listed) - seen)[0]} is missing")
    return seen


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    content = archive.extractfile(member)
    assert content is not None
    return content


def _checked(path: Path, kind: str, name: str, names: set[str]) -> dict[str, str]:
    """The facts of an unpacked entry, which must be one of this name."""
    artifact = f"{kind}/{name}/{KINDS[kind]}"
    record = f"{kind}/{name}/{cache.RECORD}"
    try:
        if not {artifact, record} <= names:
            raise ValueError("a file is missing")
        content = json.loads((path / cache.RECORD).read_text())
        facts = _facts(content)
        if cache.digest(facts) != name or content["sha256"] != cache.sha256(path / KINDS[kind]):
            raise ValueError("its record speaks of another artifact")
    except (ValueError, KeyError, TypeError) as error:
        raise ArchiveError(f"the entry {kind}/{name} is damaged: {error}") from error
    return facts
