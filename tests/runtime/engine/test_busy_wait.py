"""What the package sets in the environment for MAX's threads."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from torch_max_backend.runtime.engine.busy_wait import VARIABLES, settle

DRIVER, ENGINE = VARIABLES

_START = """
import os, time
{first}
import torch_max_backend
from torch_max_backend.runtime.engine import busy_wait, session
import torch
session.session(torch.device("cpu"))
while not busy_wait._threads_started():  # a thread names itself
    time.sleep(0.01)
print([os.environ.get(name) for name in busy_wait.VARIABLES])
"""


@pytest.mark.parametrize(
    ("given", "accelerator", "started", "expected"),
    [
        ({}, False, False, {DRIVER: "0", ENGINE: "0"}),
        ({}, True, False, {}),
        ({}, False, True, {}),
        ({DRIVER: "50"}, False, False, {DRIVER: "50", ENGINE: "50"}),
        ({ENGINE: "50"}, True, False, {DRIVER: "50", ENGINE: "50"}),
        ({DRIVER: "1", ENGINE: "2"}, False, False, {DRIVER: "1", ENGINE: "2"}),
        ({DRIVER: "50"}, False, True, {DRIVER: "50"}),
    ],
)
def test_settle(given: dict[str, str], accelerator: bool, started: bool, expected: dict[str, str]) -> None:
    environment = dict(given)
    settle(environment, accelerator, started)
    assert environment == expected


@pytest.mark.parametrize(
    ("given", "first", "expected"),
    [
        ({DRIVER: "7"}, "", "['7', '7']"),
        ({ENGINE: "7"}, "", "['7', '7']"),
        # MAX has started with its own value before the package was imported.
        ({}, "from max.engine import InferenceSession; InferenceSession()", "[None, None]"),
    ],
)
def test_max_starts(given: dict[str, str], first: str, expected: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", _START.format(first=first)],
        capture_output=True, text=True, env={**environment, **given}, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == expected
