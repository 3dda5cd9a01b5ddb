"""The disk cache's entries: who may make and change them, and that work is done once."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.threads import in_threads
from torch_max_backend.runtime.caches import cache

FACTS = {"graph": "one"}


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    path = tmp_path / "cache"
    monkeypatch.setenv("TORCH_MAX_BACKEND_CACHE_DIR", str(path))
    return path


def _store(content: bytes = b"artifact") -> Path:
    path = cache.store("graphs", FACTS, "model.mef", lambda file: file.write_bytes(content) and None)
    assert path is not None
    return path


def _lookup() -> Path | None:
    return cache.lookup("graphs", FACTS, "model.mef")


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_cache_is_private_whatever_the_umask(directory: Path) -> None:
    before = os.umask(0)
    try:
        path = _store()
    finally:
        os.umask(before)
    assert [_mode(each) for each in (directory, directory / "graphs", path.parent)] == [0o700] * 3
    assert [_mode(each) for each in path.parent.iterdir()] == [0o600] * 2
    assert _lookup() == path


@pytest.mark.parametrize("level", ["cache", "graphs", "entry", "artifact", "record"])
def test_what_others_may_write_is_refused_with_the_reason(level: str, caplog: pytest.LogCaptureFixture) -> None:
    artifact = _store()
    entry = artifact.parent
    chosen = {
        "cache": entry.parent.parent,
        "graphs": entry.parent,
        "entry": entry,
        "artifact": artifact,
        "record": entry / "entry.json",
    }[level]
    chosen.chmod(_mode(chosen) | stat.S_IWGRP)
    with caplog.at_level(logging.WARNING):
        assert _lookup() is None
    assert f"other users may write {chosen}" in caplog.text
    chosen.exists() and chosen.chmod(_mode(chosen) & ~stat.S_IWGRP)
    assert _store().read_bytes() == b"artifact" and _lookup() == artifact, "made anew"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_what_another_user_owns_is_refused_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    artifact = _store()
    os.chown(artifact.parent, 12345, -1)
    with caplog.at_level(logging.WARNING):
        assert _lookup() is None
    assert "belongs to another user (uid 12345)" in caplog.text
    assert artifact.exists(), "it is not ours to remove"


def test_a_link_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    artifact = _store()
    elsewhere = tmp_path / "elsewhere"
    artifact.rename(elsewhere)
    artifact.symlink_to(elsewhere)
    with caplog.at_level(logging.WARNING):
        assert _lookup() is None
    assert "symbolic link" in caplog.text and elsewhere.exists()


def test_a_cache_directory_that_the_user_chose_keeps_its_mode(directory: Path) -> None:
    directory.mkdir(mode=0o755)
    directory.chmod(0o755)
    assert _store() == _lookup() and _mode(directory) == 0o755


MAKER = """
import sys, time
from torch_max_backend.runtime.caches import cache
facts = {"graph": "one"}
with cache.claim("graphs", facts):
    print("CLAIMED", flush=True)
    sys.stdin.readline()
    cache.store("graphs", facts, "model.mef", lambda file: file.write_bytes(b"theirs") and None)
"""


def _maker() -> subprocess.Popen[str]:
    """Another process that holds the claim until a line is sent to it."""
    process = subprocess.Popen([sys.executable, "-c", MAKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "CLAIMED\n"
    return process


def test_a_claim_waits_for_the_other_process_and_finds_its_entry(directory: Path) -> None:
    process = _maker()
    waited = threading.Event()

    def asked() -> bool:
        if not waited.is_set():
            assert _lookup() is None
            waited.set()
            process.communicate("go\n")
        return False

    with cache.claim("graphs", FACTS, asked):
        assert waited.is_set(), "the other process held the claim"
        path = _lookup()
        assert path is not None and path.read_bytes() == b"theirs"
    assert not list(directory.glob("**/*.lock"))


def test_a_claim_ends_with_its_process_and_waiting_can_be_given_up() -> None:
    process = _maker()
    with pytest.raises(TimeoutError), cache.claim("graphs", FACTS, lambda: True):
        pass
    process.send_signal(signal.SIGKILL)
    process.wait()
    with cache.claim("graphs", FACTS, lambda: True):
        assert _lookup() is None


def test_threads_claim_one_after_the_other() -> None:
    inside: list[int] = []
    most: list[int] = []

    def work(number: int) -> None:
        with cache.claim("graphs", FACTS):
            inside.append(number)
            most.append(len(inside))
            inside.remove(number)

    in_threads(work, 8)
    assert most == [1] * 8


def test_a_foreign_record_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    path = _store()
    record = path.parent / "entry.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "facts": {"graph": "another"}}))
    with caplog.at_level(logging.WARNING):
        assert _lookup() is None
    assert "dropping the cache entry" in caplog.text and not path.exists()


def _stored_by_a_child(how: str) -> int:
    """How a forked process ends that stores an entry: it is killed meanwhile, or the disk is full."""

    def write(file: Path) -> None:
        with file.open("wb") as out:
            out.write(bytes(1 << 16))
            out.flush()
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            out.write(bytes(1 << 20))

    child = os.fork()
    if child == 0:
        try:
            if how == "full":
                # As on a full disk, a write fails behind some bytes.
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 17, 1 << 17))
            # `store` warns, and makes nothing.
            os._exit(0 if cache.store("graphs", FACTS, "model.mef", write) is None else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize(("how", "ends"), [("killed", -signal.SIGKILL), ("full", 0)])
def test_an_entry_is_whole_or_not_there(directory: Path, how: str, ends: int) -> None:
    assert _stored_by_a_child(how) == ends
    assert _lookup() is None and not cache.has("graphs", FACTS)
    if how == "full":
        assert not list(directory.glob("graphs/*"))
    assert _store().read_bytes() == b"artifact" and _lookup() is not None


def test_what_a_killed_writer_left_goes_when_it_is_old(directory: Path) -> None:
    """At another process's first entry; what a writer that lives has made stays."""
    _stored_by_a_child("killed")
    (left,) = directory.glob("graphs/.new-*")
    cache._tidy.cache_clear()
    _store()
    assert left.exists(), "its writer might have made it just now"
    with cache.scratch(directory / "graphs") as living:
        for each in (left, living):
            os.utime(each, (each.stat().st_atime - 601,) * 2)
        cache._tidy.cache_clear()
        assert cache.store("graphs", {"graph": "another"}, "model.mef", lambda file: file.write_bytes(b"it") and None)
        assert living.exists() and not left.exists()
    assert not list(directory.glob("graphs/.new-*"))


def test_a_clock_that_runs_backwards_changes_nothing(directory: Path) -> None:
    path = _store()
    lock = directory / "graphs" / f".{cache.digest(FACTS)}.lock"
    lock.touch()
    century = 100 * 365 * 86400
    for each in (directory, path.parent.parent, path.parent, path, path.parent / cache.RECORD, lock):
        os.utime(each, (each.stat().st_atime + century,) * 2)
    with cache.claim("graphs", FACTS, lambda: True):
        found = _lookup()
    assert found == path and not lock.exists()


def test_another_version_has_entries_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def facts() -> dict[str, str]:
        return {"graph": "one", **cache.versions()}

    mine = facts()
    assert cache.store("graphs", mine, "model.mef", lambda file: file.write_bytes(b"mine") and None)
    for name in ("max", "mojo", "backend", "kernels", "machine"):
        monkeypatch.setattr(cache, "versions", lambda name=name: {**mine, name: "another"})
        assert cache.lookup("graphs", facts(), "model.mef") is None
    path = cache.lookup("graphs", mine, "model.mef")
    assert path is not None and path.read_bytes() == b"mine"
