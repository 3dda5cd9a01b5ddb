"""``options={"compile": "background"}``: eager first, then MAX; each case in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

Start = Callable[[str, Path], "subprocess.Popen[str]"]

TRAIN = """
import copy, logging, sys, time, torch
from torch_max_backend import MaxBackendError, backend
from torch_max_backend.runtime import background

logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="LOG %(message)s")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3))
twin = copy.deepcopy(model)
run = torch.compile(model, backend="max", options={"compile": "background", "fallback": "error"})
optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin)]
executed = []

def step(number):
    '''The same step by both; whether losses and gradients are equal, and close.'''
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
    outcomes = []
    for function, optimizer in zip((run, twin), optimizers):
        torch.manual_seed(number)
        optimizer.zero_grad()
        loss = function(x).square().mean()
        loss.backward()
        optimizer.step()
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        outcomes.append([loss.detach(), *grads])
    pairs = list(zip(*outcomes))
    return all(torch.equal(a, b) for a, b in pairs), all(torch.allclose(a, b, 1e-4, 1e-5) for a, b in pairs)
"""

TO_THE_END = """
equal = [step(number) for number in range(3)]
assert not background._jobs[0].finished.is_set(), "three steps went while MAX compiled"
assert all(same for same, _ in equal), "eager's numbers"
pending = run(torch.ones(4, 6)).sum()
assert background._jobs[0].finished.wait(600) and background._jobs[0].error is None, background._jobs[0].error
# A forward pass of eager PyTorch has its own backward pass, whenever that comes.
model.zero_grad()
pending.backward()
print("CLOSE", [close for _, close in map(step, range(3, 6))])
print("BUSY", len(background._processes))
"""


@pytest.fixture
def start(kernels_only: Callable[[Path], dict[str, str]]) -> Start:
    """Starts the training program with an addition."""
    return lambda script, directory: subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", TRAIN + script],
        env={**os.environ, **kernels_only(directory)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_training_moves_from_eager_to_max(start: Start, tmp_path: Path) -> None:
    process = start(TO_THE_END, tmp_path)
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    lines = output.splitlines()
    moves = [line for line in lines if "runs in MAX from now on" in line]
    assert moves == ["LOG max_0 runs in MAX from now on, after 4 calls in eager PyTorch"]
    assert sum(line.startswith("LOG compiled forward") for line in lines) == 1
    assert "CLOSE [True, True, True]" in lines and "BUSY 0" in lines
    # Another process finds the graphs in the cache and has nothing to wait for.
    process = start("print(step(0)[1], background._jobs)", tmp_path)
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    assert output.splitlines()[-1] == "True []" and "LOG loaded from the cache forward" in output


FAILING = """
from torch_max_backend.runtime import worker
import pathlib
path = pathlib.Path(sys.argv[1])
path.write_text("raise SystemExit('the compiler says no')")
worker.__file__ = str(path)
step(0)
background._jobs[0].finished.wait(600)
try:
    step(1)
except MaxBackendError as error:
    print("RAISED", error)
print(*[step(number)[0] for number in range(2, 5)])
"""


def test_an_error_of_the_compiler_is_raised_once(start: Start, tmp_path: Path) -> None:
    script = FAILING.replace("sys.argv[1]", repr(str(tmp_path / "worker.py")))
    process = start(script, tmp_path / "cache")
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    lines = output.splitlines()
    (raised,) = (line for line in lines if line.startswith("RAISED"))
    assert "max_0 stays in eager PyTorch: MAX could not compile max_0 (status 1): the compiler says no" in raised
    assert lines[-1] == "True True True", "eager's numbers from then on"


WORKING = """
step(0)
while not background._processes:
    time.sleep(0.01)
print(*[process.pid for process in background._processes], flush=True)
"""
ENDS = {
    "normal": ("", None, 0),
    "interrupt": ("time.sleep(600)", signal.SIGINT, -signal.SIGINT),
    "killed": ("time.sleep(600)", signal.SIGKILL, -signal.SIGKILL),
}


@pytest.mark.parametrize("how", ENDS)
def test_nothing_stays_behind_when_the_program_ends(start: Start, how: str, tmp_path: Path) -> None:
    script, sent, status = ENDS[how]
    process = start(WORKING + script, tmp_path)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    while not psutil.Process(pid).num_threads():
        time.sleep(0.01)
    if sent is not None:
        process.send_signal(sent)
    process.communicate(timeout=60)
    assert process.returncode == status
    deadline = time.monotonic() + 30
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the compiling process goes on"
        time.sleep(0.05)
