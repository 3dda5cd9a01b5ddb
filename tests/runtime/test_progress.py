"""The progress line: on a terminal, after a while, and gone at the end."""

from __future__ import annotations

import io
import os
import pty
import sys
import time

import pytest

from torch_max_backend.runtime.progress import progress_line


def _shown(monkeypatch: pytest.MonkeyPatch, patience: float, until: bytes) -> bytes:
    """What a terminal receives while work goes on until it has received ``until``, and at its end."""
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = pty.openpty()
    received = b""
    with os.fdopen(ours, "rb", buffering=0) as screen, os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with progress_line("compiling [forward]", patience):
            while until not in received:
                received += screen.read(4096)
        terminal.write("end")
        terminal.flush()
        while b"end" not in received:
            received += screen.read(4096)
    return received


def test_work_that_lasts_is_shown_and_wiped_away(monkeypatch: pytest.MonkeyPatch) -> None:
    received = _shown(monkeypatch, 0.0, b"0:00:0")
    line, _, after = received.rpartition(b"0:00:0")
    assert b"compiling [forward]" in line and b"\x1b[2K" in after, "shown, then erased"


def test_short_work_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _shown(monkeypatch, 600.0, b"").strip() == b"end"


def test_nothing_is_shown_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress_line("compiling", 0.0):
        time.sleep(0.1)
    assert stderr.getvalue() == ""
