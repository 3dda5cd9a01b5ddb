"""The timers of threads that a process's first execution starts."""

from __future__ import annotations

import ctypes
import sys
import threading
from typing import Any, cast

import pytest
from max.engine import Model

from torch_max_backend.runtime.engine import execution

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="timer slack is Linux's")


def _slack() -> int:
    return ctypes.CDLL(None).prctl(execution._PR_GET_TIMERSLACK, 0, 0, 0, 0)


class _Starting:
    """Stands for a model whose execution starts a thread; it returns that thread's timer slack."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure = failure

    def _execute_device_tensors(self, buffers: list[Any]) -> list[int]:
        slack: list[int] = []
        thread = threading.Thread(target=lambda: slack.append(_slack()))
        thread.start()
        thread.join()
        if self.failure is not None:
            raise self.failure
        return [*slack, *buffers]


def _run(model: _Starting) -> list[int]:
    return cast(list[int], execution.execute(cast(Model, model), [7]))  # type: ignore[list-item]


def test_only_what_the_first_execution_starts_has_lax_timers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "_executed", False)
    before = _slack()
    assert before != execution.TIMER_SLACK
    assert _run(_Starting()) == [execution.TIMER_SLACK, 7]
    assert _slack() == before
    assert _run(_Starting()) == [before, 7]


def test_a_first_execution_that_fails_is_not_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "_executed", False)
    before = _slack()
    with pytest.raises(ValueError, match="no"):
        _run(_Starting(ValueError("no")))
    assert _slack() == before
    assert _run(_Starting()) == [execution.TIMER_SLACK, 7]
