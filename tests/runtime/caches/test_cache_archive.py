"""`torch-max-backend cache`: archives travel, and what is not an archive of a cache changes nothing."""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from torch_max_backend.cli import app
from torch_max_backend.graph.traces import cache as graph_cache
from torch_max_backend.runtime.building import libraries
from torch_max_backend.runtime.caches import cache, cache_archive
from torch_max_backend.runtime.engine import session

Members = dict[str, bytes | tarfile.TarInfo]


def _invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["cache", *map(str, arguments)])


def _facts(graph: str, **others: str) -> dict[str, str]:
    return {**cache.versions(), "device": "cpu", "graph": graph, **others}


def _store(facts: dict[str, str]) -> Path:
    path = cache.store("graphs", facts, "model.mef", lambda file: file.write_bytes(facts["graph"].encode()) and None)
    assert path is not None
    return path


@pytest.fixture
def use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Makes a folder of that name the cache."""

    def chosen(name: str) -> Path:
        monkeypatch.setenv("TORCH_MAX_BACKEND_CACHE_DIR", str(tmp_path / name))
        return tmp_path / name

    chosen("here")
    return chosen


@pytest.mark.parametrize("name", ["archive.tar", "archive.tar.gz"])
def test_a_cache_travels(use: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    for graph in ("one", "two"):
        _store(_facts(graph))
    _store(_facts("old", max="0.1"))
    _store(_facts("damaged")).write_bytes(b"other")
    file = tmp_path / name
    result = _invoke("export", file)
    assert result.exit_code == 0 and result.output.startswith("2 entries")
    there = use("there")
    for _ in range(2):
        result = _invoke("import", file)
        assert result.exit_code == 0 and result.output.startswith(f"2 entries imported to {there}"), result.output
    for graph in ("one", "two"):
        path = cache.lookup("graphs", _facts(graph), "model.mef")
        assert path is not None and path.read_bytes() == graph.encode() and there in path.parents
    assert len(cache_archive.entries()) == 2 and not list(there.glob("**/.new-*"))


def test_every_kind_of_entry_travels(use: Callable[[str], Path], tmp_path: Path) -> None:
    stored = {
        session.GRAPHS: session.ARTIFACT,
        libraries.LIBRARIES: libraries.FILENAME,
        graph_cache.TRACES: graph_cache.FILENAME,
    }
    for kind, file in stored.items():
        cache.store(kind, _facts("one"), file, lambda path: path.write_bytes(b"content") and None)
    assert _invoke("export", tmp_path / "archive.tar").output.startswith("3 entries")
    use("there")
    assert _invoke("import", tmp_path / "archive.tar").exit_code == 0
    for kind, file in stored.items():
        path = cache.lookup(kind, _facts("one"), file)
        assert path is not None and path.read_bytes() == b"content"


def test_info_counts_by_target_and_clear_removes_entries_alone(use: Callable[[str], Path]) -> None:
    directory = use("here")
    for facts in (_facts("a"), _facts("b"), _facts("c", device="cuda:sm_90a"), _facts("d", max="0.1")):
        _store(facts)
    bystander = directory / "mine.txt"
    bystander.write_text("not the cache's")
    output = re.sub(r"[\d.]+ MiB", "SIZE", _invoke("info").output)
    assert output.splitlines() == [
        f"{directory}: SIZE in 4 entries",
        "  1 graphs for cpu: SIZE, of other versions or damaged",
        "  2 graphs for cpu: SIZE",
        "  1 graphs for cuda:sm_90a: SIZE",
    ]
    assert _invoke("clear", "--stale").output.startswith("1 entries removed")
    assert len(cache_archive.entries()) == 3
    assert _invoke("clear").output.startswith("3 entries removed")
    assert cache_archive.entries() == [] and bystander.exists()


def test_entries_of_other_versions_are_left_out(
    use: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _store(_facts("one"))
    file = tmp_path / "archive.tar"
    assert _invoke("export", file).exit_code == 0
    use("there")
    monkeypatch.setattr(cache, "versions", lambda: {"max": "99"})
    result = _invoke("import", file)
    assert result.exit_code == 0 and "0 entries imported" in result.output and "1 entries of other" in result.output
    assert cache_archive.entries() == []


def _read(file: Path) -> Members:
    with tarfile.open(file) as archive:
        return {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]


def _write(file: Path, members: Members) -> None:
    with tarfile.open(file, "w") as archive:
        for name, content in members.items():
            info = content if isinstance(content, tarfile.TarInfo) else tarfile.TarInfo(name)
            data = content if isinstance(content, bytes) else b""
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def _listed(members: Members, name: str, content: bytes) -> None:
    """Adds a file to the archive and to its manifest."""
    members[name] = content
    manifest = json.loads(members["manifest.json"])  # type: ignore[arg-type]
    manifest["files"][name] = {"bytes": len(content), "sha256": cache.hashlib.sha256(content).hexdigest()}
    members["manifest.json"] = json.dumps(manifest).encode()


def _artifact(members: Members) -> str:
    return next(name for name in members if name.endswith(".mef"))


def _link(members: Members, kind: bytes) -> None:
    member = tarfile.TarInfo(_artifact(members))
    member.type, member.linkname = kind, "/etc/passwd"
    members[member.name] = member


def _edit_record(members: Members) -> None:
    name = next(name for name in members if name.endswith("entry.json"))
    record = json.loads(members[name])  # type: ignore[arg-type]
    _listed(members, name, json.dumps({**record, "facts": {**record["facts"], "graph": "another"}}).encode())


BAD: dict[str, tuple[Callable[[Members], object], str]] = {
    "another artifact": (lambda m: m.update({_artifact(m): b"eno"}), "its SHA-256 is not that of the manifest"),
    "longer artifact": (lambda m: m.update({_artifact(m): b"more than one"}), "is not what its manifest.json says"),
    "missing file": (lambda m: m.pop(_artifact(m)), "is missing"),
    "missing manifest": (lambda m: m.pop("manifest.json"), "it does not begin with manifest.json"),
    "manifest of another format": (lambda m: m.update({"manifest.json": b'{"format": 7, "files": {}}'}), "format is 7"),
    "manifest that is no JSON": (lambda m: m.update({"manifest.json": b"{"}), "manifest.json cannot be read"),
    "path upwards": (lambda m: _listed(m, "graphs/../../evil", b"x"), "'graphs/../../evil', which is no file of"),
    "absolute path": (lambda m: _listed(m, "/tmp/evil", b"x"), "'/tmp/evil', which is no file of"),
    "another kind": (lambda m: _listed(m, f"other/{'0' * 32}/model.mef", b"x"), "which is no file of a cache entry"),
    "another file": (lambda m: _listed(m, f"graphs/{'0' * 32}/run.sh", b"x"), "which is no file of a cache entry"),
    "entry without a record": (lambda m: _listed(m, f"graphs/{'0' * 32}/model.mef", b"x"), "a file is missing"),
    "symbolic link": (lambda m: _link(m, tarfile.SYMTYPE), "which is no file of a cache entry"),
    "hard link": (lambda m: _link(m, tarfile.LNKTYPE), "which is no file of a cache entry"),
    "record of another graph": (_edit_record, "its record speaks of another artifact"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_archive_is_refused_whole(use: Callable[[str], Path], tmp_path: Path, what: str) -> None:
    for graph in ("one", "two"):
        _store(_facts(graph))
    file = tmp_path / "archive.tar"
    assert _invoke("export", file).exit_code == 0
    members = _read(file)
    change, message = BAD[what]
    change(members)
    _write(file, members)
    there = use("there")
    result = _invoke("import", file)
    assert result.exit_code == 2 and message in result.output, result.output
    assert cache_archive.entries() == [] and not [path for path in there.glob("**/*") if path.is_file()]
    assert not (tmp_path / "evil").exists()


def test_what_is_no_archive_is_refused(use: Callable[[str], Path], tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("no archive")
    result = _invoke("import", file)
    assert result.exit_code == 2 and "no archive of a cache" in result.output
    assert _invoke("import", tmp_path / "absent").exit_code == 2
    assert _invoke("export", tmp_path / "absent" / "file.tar").exit_code == 2
