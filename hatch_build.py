"""Puts kernel libraries into a wheel where it is asked for them: ``TORCH_MAX_BACKEND_WHEEL="x86-64-v3 sm_90a"``."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_TARGETS, _SELECT = "TORCH_MAX_BACKEND_WHEEL", "TORCH_MAX_BACKEND_WHEEL_SELECT"
"""Targets of ``torch_max_backend.wheel``, and patterns of entries to restrict it to, each separated by spaces."""


class PrebuiltLibraries(BuildHookInterface):
    """Builds the libraries while hatch builds a wheel."""

    _scratch: tempfile.TemporaryDirectory[str] | None = None

    def dependencies(self) -> list[str]:
        """What the kernels are built with: the package's own dependencies."""
        return list(self.metadata.core.dependencies) if os.environ.get(_TARGETS) else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Builds one folder for each target, and makes the wheel one for this platform."""
        targets = os.environ.get(_TARGETS, "").split()
        if version != "standard" or not targets:
            return
        self._scratch = tempfile.TemporaryDirectory(prefix="torch-max-prebuilt-")
        select = [f"--select={pattern}" for pattern in os.environ.get(_SELECT, "").split()]
        path = os.pathsep.join([self.root, *filter(None, [os.environ.get("PYTHONPATH")])])
        for target in targets:
            folder = Path(self._scratch.name) / target
            # A process of its own for each: it has one kind of GPU.
            subprocess.run(
                [sys.executable, "-m", "torch_max_backend.wheel", target, str(folder), *select],
                env={**os.environ, "PYTHONPATH": path},
                check=True,
            )
            build_data["force_include"][str(folder)] = f"torch_max_backend/prebuilt/{target}"
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Removes what lies in the wheel now."""
        if self._scratch is not None:
            self._scratch.cleanup()
