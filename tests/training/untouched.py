"""A program that uses the backend, and looks after each step whether what belongs to it is as it was."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import io
import locale
import logging
import multiprocessing
import os
import random
import resource
import signal
import sys
import threading
import time
import warnings
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

STATES = {
    "random": random.getstate,
    "numpy.random": lambda: [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()],
    "torch's generator": lambda: torch.get_rng_state().tolist(),
    "CUDA's generators": lambda: (
        [state.tolist() for state in torch.cuda.get_rng_state_all()] if torch.cuda.is_initialized() else []
    ),
    "environment": lambda: {name: value for name, value in os.environ.items() if name not in DOCUMENTED},
    "signal handlers": lambda: {number: signal.getsignal(number) for number in signal.valid_signals()},
    "blocked signals": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, []),
    "warning filters": lambda: list(warnings.filters),
    "warnings": lambda: (warnings.showwarning, warnings.formatwarning),
    "threads": lambda: (torch.get_num_threads(), torch.get_num_interop_threads()),
    "defaults": lambda: (torch.get_default_dtype(), torch.get_default_device()),
    "matmul precision": lambda: (torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32),
    "cuDNN": lambda: [
        (name, getattr(torch.backends.cudnn, name)) for name in ("enabled", "benchmark", "deterministic", "allow_tf32")
    ],
    "deterministic": lambda: (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    ),
    "modes": lambda: (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_anomaly_enabled(),
        torch.get_autocast_dtype("cpu"),
    ),
    "denormals": lambda: ((torch.tensor([1e-40]) * 1).item(), float(np.float32(1e-40) * np.float32(1))),
    "Dynamo's settings": lambda: torch._dynamo.config.get_config_copy(),
    "functorch's settings": lambda: torch._functorch.config.get_config_copy(),
    "garbage collection": lambda: (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()),
    "interpreter": lambda: (sys.getrecursionlimit(), sys.getswitchinterval(), sys.gettrace(), sys.getprofile()),
    "hooks": lambda: (sys.excepthook, sys.unraisablehook, sys.displayhook, threading.excepthook),
    "streams": lambda: (id(sys.stdin), id(sys.stdout), id(sys.stderr)),
    "path": lambda: (list(sys.path), list(sys.argv), os.getcwd()),
    "logging": lambda: (list(logging.root.handlers), logging.root.level, logging.root.disabled),
    "faulthandler": faulthandler.is_enabled,
    "start method": lambda: multiprocessing.get_start_method(allow_none=True),
    "locale": lambda: locale.setlocale(locale.LC_ALL),
    "umask": lambda: [os.umask(mask := os.umask(0)), mask],
    "limits": lambda: [resource.getrlimit(each) for each in (resource.RLIMIT_STACK, resource.RLIMIT_NOFILE)],
    "cores": lambda: os.sched_getaffinity(0),
}


#: MAX's own variables, by which it finds its files and starts its threads.
DOCUMENTED = {
    "MODULAR_MAX_PACKAGE_ROOT",
    "MODULAR_MOJO_MAX_PACKAGE_ROOT",
    "MODULAR_MOJO_MAX_IMPORT_PATH",
    "MODULAR_THREAD_BUSY_WAIT_US",
    "MODULAR_RUNTIME_THREAD_BUSY_WAIT_TIME_US",
}


def states() -> dict[str, Any]:
    """All states at this moment."""
    return {name: get() for name, get in STATES.items()}


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What differs, in words."""
    found = []
    for name, old in before.items():
        new = after[name]
        if old != new:
            if isinstance(old, dict):
                old, new = ({k: v for k, v in a.items() if b.get(k) != v} for a, b in ((old, new), (new, old)))
            found.append(f"{name}: {str(old)[:300]} has become {str(new)[:300]}")
    return found


class Listener(logging.Handler):
    """Keeps what is logged."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())


class Terminal(io.StringIO):
    """Standard error, as it is for who sits before it."""

    def isatty(self) -> bool:
        return True


class Net(nn.Module):
    """Two kinds of operations, one of which updates buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, 3, L] to [N, 4, L - 2]."""
        return F.relu(self.norm(self.first(x)))


def main() -> None:
    """Ends with what has changed, if anything has."""
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    # What torch.compile itself does to the process.
    torch.compile(Net(), backend="aot_eager")(torch.randn(2, 3, 8)).sum().backward()
    torch.compiler.reset()
    model, other, batches = Net(), Net(), [torch.randn(n, 3, 8) for n in (2, 3, 4, 5)]
    wrong = torch.randn(2, 5, 8)
    said: list[str] = []
    listener = Listener(said)
    logging.getLogger("torch_max_backend").addHandler(listener)
    logging.getLogger("torch_max_backend").setLevel(logging.INFO)
    before, found = states(), list[str]()

    def check(step: str) -> None:
        nonlocal before
        after = states()
        found.extend(f"{step}: {change}" for change in changes(before, after))
        before = after

    import torch_max_backend
    from torch_max_backend.runtime.building.progress import progress_line

    check("import")
    run = torch.compile(model, backend="max")
    out = run(batches[0])
    check("first call")
    out.sum().backward()
    check("backward pass")
    for number, size in enumerate(("second", "third", "fourth"), 1):
        run(batches[number]).sum().backward()
        check(f"{size} size")
    # A generated program that no cache has seen.
    waves = [torch.sin if bit == "1" else torch.cos for bit in f"{time.time_ns() // 1000:b}"[-16:]]
    behind = torch.compile(
        lambda x: functools.reduce(lambda y, wave: wave(y), waves, other(x)),
        backend="max",
        options={"compile": "background"},
    )
    end = time.monotonic() + 400
    while time.monotonic() < end and not any("runs in MAX from now on" in line for line in said):
        behind(batches[0]).sum().backward()
        time.sleep(0.2)
    check("compiling in the background")
    with mock.patch.object(sys, "stderr", Terminal()), progress_line("waiting", 0):
        time.sleep(0.3)
    check("progress line")
    print(torch_max_backend.explain(model, batches[0]))
    check("explain")
    with torch_max_backend.launch_times() as times:
        run(batches[0]).sum().backward()
    print(times)
    check("launch times")
    with contextlib.suppress(torch_max_backend.UnsupportedOpError):
        torch.compile(torch.linalg.eigh, backend="max", options={"fallback": "error"})(torch.eye(3))
        raise AssertionError
    with contextlib.suppress(torch_max_backend.OptionError):
        torch.compile(model, backend="max", options={"no": 1})(batches[0])
        raise AssertionError
    with contextlib.suppress(RuntimeError):
        run(wrong)
        raise AssertionError
    check("errors")
    assert any("runs in MAX from now on" in line for line in said), said[-9:]
    sys.exit("\n".join(found) or None)


if __name__ == "__main__":
    main()
