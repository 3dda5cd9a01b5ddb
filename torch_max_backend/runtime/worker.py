"""Compiles one MAX module in a process of its own: ``python -P worker.py JOB``.

JOB is a JSON file: the ``module`` (a file of MLIR bytecode), the ``libraries`` of kernels, the ``api`` and
``architecture`` of a virtual accelerator (empty for the CPU alone), how many ``accelerators`` there are, the
``cpu_target`` (empty for this machine's CPU), the ``niceness`` and the file for the ``artifact``. The process opens
no accelerator, imports no PyTorch, and ends when the other end of its standard input closes, as it does when its
parent ends.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import threading
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any


def _end_with_parent() -> None:
    # No buffered reader: its lock would be in the way of the interpreter's end.
    while os.read(0, 4096):
        pass
    os._exit(1)


def _max_compat() -> ModuleType:
    """``max_compat.py`` alone: the package around it imports PyTorch."""
    spec = importlib.util.spec_from_file_location("max_compat", Path(__file__).resolve().parents[1] / "max_compat.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compile_job(job: dict[str, Any]) -> None:
    """Compiles the job's module and writes its artifact."""
    from max.driver import (
        CPU,
        Accelerator,
        set_virtual_cpu_target,
        set_virtual_device_api,
        set_virtual_device_count,
        set_virtual_device_target_arch,
    )
    from max.engine import InferenceSession
    from max.graph import KernelLibrary

    if job["api"]:
        set_virtual_device_api(job["api"])
        set_virtual_device_target_arch(job["architecture"])
        set_virtual_device_count(job["accelerators"])
    set_virtual_cpu_target(job["cpu_target"])
    library = KernelLibrary()
    library.load_paths([Path(path) for path in job["libraries"]])
    compat = _max_compat()
    module = compat.read_bytecode(Path(job["module"]).read_bytes())
    device = Accelerator(job["accelerators"] - 1) if job["api"] else CPU()
    compat.declare_kernels(library, module)
    compiled = InferenceSession(devices=[device]).compile(module, custom_extensions=library.library_paths())
    compiled.export_mef(job["artifact"])


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    job = json.loads(Path(sys.argv[1]).read_text())
    os.nice(job["niceness"])
    try:
        compile_job(job)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    # Not through the interpreter's end: there a thread of MAX's now and then aborts the process.
    os._exit(0)
