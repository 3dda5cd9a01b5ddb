"""``options={"compile": "background"}``: eager first, then MAX; in processes of their own."""

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

from torch_max_backend.runtime.building import background

Start = Callable[[str, Path], "subprocess.Popen[str]"]

TRAIN = """
import copy, logging, sys, time, torch
from torch_max_backend import MaxBackendError, backend
from torch_max_backend.runtime.building import background, libraries

logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="LOG %(message)s")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3))
twin = copy.deepcopy(model)
run = torch.compile(model, backend="max", options={"compile": "background", "fallback": "error"})
optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin)]

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
def job():
    return background._jobs[-1]

equal = [step(number) for number in range(3)]
assert not job().finished.is_set(), "three steps went while libraries were built"
assert all(same for same, _ in equal), "eager's numbers"
pending = run(torch.ones(4, 6)).sum()
assert job().finished.wait(600) and job().error is None, job().error
# A forward pass of eager PyTorch has its own backward pass, whenever that comes.
model.zero_grad()
pending.backward()
print("CLOSE", [close for _, close in map(step, range(3, 6))])

# Another time the libraries are there, and there is nothing to wait for.
torch._dynamo.reset()
print("AGAIN", step(6)[1], len(background._jobs))

# The compiler fails.
def refuse(*_):
    raise MaxBackendError("the compiler says no")
libraries._build_one = refuse
torch._dynamo.reset()
model.append(torch.nn.Softplus())
twin.append(torch.nn.Softplus())
step(7)
assert job().finished.wait(600)
try:
    step(8)
except MaxBackendError as error:
    print("RAISED", error)
# Whatever the MAX steps' rounding did to the weights: from the same ones on, eager's numbers.
twin.load_state_dict(model.state_dict())
print("EAGER", *[step(number)[0] for number in range(9, 12)])
"""


@pytest.fixture
def start(kernels_only: Callable[[Path], dict[str, str]]) -> Start:
    """Starts the training program with an addition."""
    return lambda script, directory: subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", TRAIN + script],
        env={**os.environ, **kernels_only(directory)},
        cwd=directory,
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
    assert "CLOSE [True, True, True]" in lines and "AGAIN True 1" in lines
    kinds = [line.split(" forward")[0] for line in lines if line.startswith(("LOG compiled", "LOG loaded"))]
    assert kinds == ["LOG compiled", "LOG loaded from the cache"]
    assert "RAISED max_2 stays in eager PyTorch: the compiler says no" in lines
    assert "EAGER True True True" in lines


BUILDING = """
import psutil
step(0)
while not (found := [each for each in psutil.Process().children(recursive=True) if "mojo" in each.name()]):
    time.sleep(0.01)
print(found[0].pid, found[0].nice(), flush=True)
"""
SLEEPING = BUILDING + "time.sleep(600)"
# Whoever starts the tests in the background of a shell has them ignore interrupts.
HEEDING = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
"""
ENDS = {"interrupt": signal.SIGINT, "killed": signal.SIGKILL, "end": None}


@pytest.mark.parametrize("how", ENDS)
def test_nothing_stays_behind_when_the_program_ends(start: Start, how: str, tmp_path: Path) -> None:
    sent = ENDS[how]
    process = start(HEEDING + (BUILDING if sent is None else SLEEPING), tmp_path)
    assert process.stdout is not None
    pid, niceness = map(int, process.stdout.readline().split())
    assert niceness >= background._NICENESS
    if sent is not None:
        process.send_signal(sent)
    process.communicate(timeout=60)
    assert process.returncode == (0 if sent is None else -sent)
    deadline = time.monotonic() + 30
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the compiling process goes on"
        time.sleep(0.05)
