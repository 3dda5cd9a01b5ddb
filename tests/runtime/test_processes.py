"""What a compilation owes to the process that it happens in: nothing but the threads' MLIR contexts."""

from __future__ import annotations

import os
import subprocess
import sys

BUILD = """
import sys, threading, torch, torch.nn.functional as F
from torch_max_backend.runtime.engine import session
from torch_max_backend.runtime.caches.target import target_facts

digests = []

class Stop(Exception):
    pass

def note(module, device, names, op_count, label):
    digests.append((session.content_digest(module), *target_facts(device).values()))
    raise Stop

session.compile_module = note

class Net(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv, self.norm = torch.nn.Conv2d(3, width, 3), torch.nn.BatchNorm2d(width)
        self.table = torch.nn.Parameter(torch.randn(width, 5))

    def forward(self, x):
        y = F.interpolate(F.gelu(self.norm(self.conv(x))), size=(21, 19), mode="bilinear")
        return F.log_softmax(F.dropout(F.max_pool2d(y, 2)).mean((2, 3)) @ self.table, 1)

def build(width, size, dynamic):
    torch._dynamo.reset()
    try:
        run = torch.compile(Net(width), backend="max", dynamic=dynamic, options={"run": "graph"})
        run(torch.randn(4, 3, size, size))
    except Exception as error:
        assert "Stop" in repr(error), error

"""
PLAIN = "build(8, 16, False); build(8, 16, True)"
#: Other graphs came first, another number of threads computes, an accelerator is there, and another thread builds.
AFTER_OTHERS = """
from max.driver import set_virtual_device_api, set_virtual_device_count, set_virtual_device_target_arch
set_virtual_device_api("cuda")
set_virtual_device_target_arch("sm_90a")
set_virtual_device_count(1)
torch.set_num_threads(1)
build(16, 20, None)
del digests[:]
thread = threading.Thread(target=lambda: (build(8, 16, False), build(8, 16, True)))
thread.start()
thread.join()
"""


def _run(script: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_a_graph_has_one_digest_whatever_the_process_did_before() -> None:
    digests = {
        _run(f"{BUILD}{history}\nprint(*digests, sep='\\n')", PYTHONHASHSEED=seed)
        for history, seed in ((PLAIN, "1"), (AFTER_OTHERS, "2"))
    }
    assert len(digests) == 1, digests
    (lines,) = digests
    assert len(set(lines.splitlines())) == 2, "a static and a dynamic graph"


THREADS = """
import contextlib, threading, types, torch
from torch_max_backend import backend

# The backward graph is compiled when backward first runs, as it is wherever PyTorch puts it off.
backend.functorch_config = types.SimpleNamespace(
    activation_memory_budget=1.0, patch=lambda **_: contextlib.nullcontext()
)
results = {}
x = torch.arange(6.0).requires_grad_()

def in_thread(name, function):
    def work():
        results[name] = function()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

run = torch.compile(lambda x: (x * x).sum(), backend="max", options={"fallback": "error"})
in_thread("forward", lambda: run(x))
in_thread("backward", lambda: results["forward"].backward())
print(results["forward"].item(), x.grad.tolist())
"""


def test_graphs_compile_in_any_thread() -> None:
    """The first call in a thread, the first backward pass in another."""
    assert _run(THREADS).split("\n")[0] == "55.0 [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]"
