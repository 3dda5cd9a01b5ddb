"""Processes that compile modules (``worker.py``), started and ended by this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import torch

from torch_max_backend.errors import MaxBackendError
from torch_max_backend.runtime import session, worker
from torch_max_backend.runtime.target import accelerator_of, cpu_target


class Workers:
    """The processes of one compilation.

    Args:
        niceness: how much the rest of the machine goes before them, as of ``os.nice``.

    Attributes:
        processes: that run now.
        ended: set by ``end``.
    """

    def __init__(self, niceness: int = 0) -> None:
        self.processes: set[subprocess.Popen[bytes]] = set()
        self.ended = threading.Event()
        self._niceness = niceness
        self._lock = threading.Lock()

    def end(self) -> None:
        """Kills those that run; no other starts."""
        with self._lock:
            self.ended.set()
            for process in self.processes:
                process.kill()

    def compile(self, bytecode: bytes, device: torch.device, label: str, folder: Path) -> Path:
        """Has a process compile the module, and waits for it.

        Returns:
            The artifact, in ``folder``.

        Raises:
            MaxBackendError: it failed, with what it said; or ``end`` was called.
        """
        module, job, said, artifact = (folder / name for name in ("module.mlirbc", "job.json", "said", "model.mef"))
        module.write_bytes(bytecode)
        api, architecture = accelerator_of(device)
        description = {
            "module": str(module),
            "libraries": [str(path) for path in session.kernel_library().library_paths()],
            "api": api,
            "architecture": architecture,
            "accelerators": (device.index or 0) + 1,
            "cpu_target": cpu_target(device),
            "niceness": self._niceness,
            "artifact": str(artifact),
        }
        job.write_text(json.dumps(description))
        status = self._run([sys.executable, "-P", worker.__file__, str(job)], said)
        if self.ended.is_set():
            raise MaxBackendError(f"the compilation of {label} was ended")
        if status:
            text = said.read_text(errors="replace").strip()
            raise MaxBackendError(f"MAX could not compile {label} (status {status}): {text[-4000:]}")
        return artifact

    def _run(self, command: list[str], said: Path) -> int:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        with said.open("wb") as output, self._lock:
            if self.ended.is_set():
                return 0
            # Ctrl-C is this process's to hear, in a session of its own the other does not.
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )
            self.processes.add(process)
        try:
            return process.wait()
        finally:
            with self._lock:
                self.processes.discard(process)
            assert process.stdin is not None
            process.stdin.close()
