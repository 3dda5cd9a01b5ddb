"""What a user who waits is told: on a terminal, in Jupyter and elsewhere."""

from __future__ import annotations

import io
import os
import pty
import sys
import time
from collections import Counter

import pytest
from max.dtype import DType

from torch_max_backend.fusion.program import Program
from torch_max_backend.mojo_ops import normalization
from torch_max_backend.mojo_ops.convolution import Grouping, convolution_function
from torch_max_backend.mojo_ops.functions import function_of
from torch_max_backend.runtime.building import progress
from torch_max_backend.runtime.building.libraries import uses
from torch_max_backend.runtime.building.progress import Work, kernels_in_words, progress_line, state, works


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


def _written(monkeypatch: pytest.MonkeyPatch, patience: float, seconds: float) -> str:
    """What is written where there is no terminal."""
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    with progress_line("compiling", patience):
        time.sleep(seconds)
    return stderr.getvalue()


def test_without_a_terminal_there_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_EVERY", 0.05)
    lines = _written(monkeypatch, 0.0, 0.4).splitlines()
    assert len(lines) >= 3 and set(lines) == {"torch_max_backend: compiling (0 s)"}


def test_short_work_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _written(monkeypatch, 600.0, 0.05) == ""


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_MAX_BACKEND_PROGRESS", "0")
    assert _written(monkeypatch, 0.0, 0.1) == ""


def test_in_jupyter_a_line_moves_and_is_wiped_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    monkeypatch.setattr(progress, "_IN_JUPYTER", 0.02)
    written = _written(monkeypatch, 0.0, 0.2)
    assert written.count("\rcompiling (0 s)") >= 2 and "\n" not in written
    assert written.endswith("\r" + " " * len("compiling (0 s)") + "\r")


def test_what_is_inside_goes_on_in_the_same_line(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(progress, "_EVERY", 0.02)
    with progress_line("tracing", 0.0):
        with progress_line("compiling", 0.0):
            time.sleep(0.2)
        time.sleep(0.2)
    told = [line.split()[1] for line in stderr.getvalue().splitlines()]
    inside = told.count("compiling")
    assert inside >= 2 and told[-1] == "tracing" and len(told) < 50


def test_the_line_tells_what_is_built_and_how_long_it_takes() -> None:
    first = Work(Counter(convolution=4), 20.4)
    second = Work(Counter(convolution=1, sorting=1), 8.0, begun=time.monotonic())
    assert state() == ""
    with works([first, second]):
        assert state() == "building 5 kernels for convolution, 1 for sorting: 0 of 2 libraries, about 20 s left"
        first.done = True
        assert state() == "building 1 kernel for convolution, 1 for sorting: 1 of 2 libraries, about 8 s left"
        second.begun = time.monotonic() - 60
        assert state() == "building 1 kernel for convolution, 1 for sorting: 1 of 2 libraries"
    assert state() == ""


def test_kernels_are_told_of_by_their_use() -> None:
    kernels = [convolution_function(op, "cpu", DType.float32, Grouping.ONE) for op in ("conv_fprop", "conv_dgrad")]
    programs = [
        Program("pointwise", "cpu", "", 2, 1, 8),
        Program("conv_pointwise", "cpu", "", 2, 1, 8, convolution="DType.float32"),
    ]
    norm = function_of(normalization.FAMILY, "batch_norm_statistics", "cpu", (DType.float32,))
    assert kernels_in_words(uses([norm])) == "1 kernel for normalization"
    told = kernels_in_words(uses([*kernels, *programs, norm]))
    assert told == "3 kernels for convolution, 1 for elementwise work, 1 for normalization"
