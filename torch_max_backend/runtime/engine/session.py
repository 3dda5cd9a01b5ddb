"""MAX's engine: devices, sessions, the kernel library, and compiling a module of graphs."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import torch
from max import mlir
from max.driver import (
    CPU,
    Accelerator,
    Device,
    accelerator_count,
    is_virtual_device_mode,
    set_virtual_cpu_target,
    set_virtual_device_api,
    set_virtual_device_count,
    set_virtual_device_target_arch,
)
from max.engine import InferenceSession, Model
from max.engine import read as read_artifact
from max.graph import KernelLibrary, Module

from torch_max_backend.errors import DeviceUnavailableError, MaxBackendError
from torch_max_backend.max_compat import declare_kernels, in_mlir_context, text_of
from torch_max_backend.runtime import events
from torch_max_backend.runtime.building import libraries
from torch_max_backend.runtime.building.progress import progress_line
from torch_max_backend.runtime.caches import cache
from torch_max_backend.runtime.caches.target import cpu_target, target_facts
from torch_max_backend.runtime.engine import graph_team

GRAPHS, ARTIFACT = "graphs", "model.mef"
"""The kind and the file name of compiled modules in the cache."""

_lock = threading.RLock()


class _DeferredKernelLibrary(KernelLibrary):
    """Stands for the project's kernels while a graph is built, without reading them.

    A graph that runs as a launch list never needs them, and MAX's compiler looks at every op again: reading the kernels
    takes seconds in every process, and packaging them a machine's first process ten more.
    """

    def verify_custom_op(self, custom_op: mlir.Operation) -> None:
        """Takes the op as it is."""


@functools.cache
@in_mlir_context
def library_to_build_with() -> KernelLibrary:
    """A stand-in for the kernel library, with which graphs with the project's ops are built."""
    return _DeferredKernelLibrary()


@functools.cache
@in_mlir_context
def kernel_library() -> KernelLibrary:
    """The project's kernels as MAX compiles graphs with them, loaded once for the process."""
    library = KernelLibrary()
    library.load_paths([cache.kernel_library_path()])
    return library


def max_device(device: torch.device) -> Device:
    """MAX's driver for a PyTorch device.

    Raises:
        DeviceUnavailableError: the device is neither a CPU nor a CUDA/ROCm device that MAX can open.
    """
    if device.type == "cpu":
        return CPU()
    if device.type != "cuda":
        raise DeviceUnavailableError(f"device {device}: MAX drives 'cpu' and 'cuda' devices, not {device.type!r}")
    index = device.index or 0
    count = accelerator_count()
    if index >= count:
        raise DeviceUnavailableError(f"device {device}: MAX sees {count} accelerator(s)")
    return Accelerator(index)


_sessions: dict[torch.device, InferenceSession] = {}


def session(device: torch.device) -> InferenceSession:
    """The session that compiles for and runs on ``device``."""
    with _lock:
        if device not in _sessions:
            _sessions[device] = InferenceSession(devices=[max_device(device)])
        return _sessions[device]


@contextlib.contextmanager
def virtual_accelerator(api: str, architecture: str) -> Iterator[None]:
    """A context in which MAX sees one virtual accelerator to compile for, and no other.

    Raises:
        DeviceUnavailableError: this process has opened an accelerator already.
    """
    if any(device.type != "cpu" for device in _sessions):
        raise DeviceUnavailableError("this process uses an accelerator already: compile for another in a new one")
    set_virtual_device_api(api)
    set_virtual_device_target_arch(architecture)
    set_virtual_device_count(1)
    try:
        yield
    finally:
        for device in [device for device in _sessions if device.type != "cpu"]:
            del _sessions[device]
        set_virtual_device_count(0)


@in_mlir_context
def compile_module(
    module: Module, device: torch.device, names: Sequence[str], op_count: int, label: str
) -> dict[str, Model]:
    """Every graph of ``module``, compiled together or read from the disk cache, by name, and ready to run.

    ``names`` are in the order of the graphs: MAX's own cache compares modules without their graphs' names and
    returns those under which it first met the content, so that only a graph's place says which one it is.

    Raises:
        MaxBackendError: the graph compiler refused the module.
    """
    graph = content_digest(module)
    facts = {**cache.versions(), **target_facts(device), "ops": cache.ops_digest(), "graph": graph}
    if device.type == "cpu":
        # What a graph needs beside the libraries that it calls is built with them.
        graph_team.require_graph_team()
    with (
        progress_line(events.compilation_in_words(names, op_count)),
        libraries.ready(device),
        events.compiling(tuple(names), op_count) as cached,
    ):
        models = _load_cached(facts, device, names)
        if models is None:
            with cache.claim(GRAPHS, facts):
                models = _load_cached(facts, device, names)
                if models is None:
                    cached(False)
                    return _compile(module, facts, device, names, label)
        cached(True)
        return models


def _load_libraries(device: torch.device) -> None:
    libraries.load(device)
    if device.type == "cpu":
        graph_team.lend()


def _load_cached(facts: Mapping[str, str], device: torch.device, names: Sequence[str]) -> dict[str, Model] | None:
    """The graphs of the cache entry for ``facts``, None where there is none that can be used."""
    artifact = cache.lookup(GRAPHS, facts, ARTIFACT)
    if artifact is None:
        return None
    try:
        return _load(artifact, device, names)
    except Exception as error:
        cache.discard(GRAPHS, facts, f"it does not load: {error}")
        return None


def _load(artifact: Path, device: torch.device, names: Sequence[str]) -> dict[str, Model]:
    """The graphs of a compiled module, ready to run.

    Raises:
        ValueError: it holds another number of graphs.
    """
    if is_virtual_device_mode():
        # It can be compiled for, but not run on: who calls such a graph is told that it is not there.
        return {name: cast(Model, None) for name in names}
    _load_libraries(device)
    with _lock:
        models = session(device).init_all(read_artifact(artifact))
    if len(models) != len(names):
        raise ValueError(f"it holds {len(models)} graphs, not {len(names)}")
    return dict(zip(names, models.values(), strict=True))


def _compile(
    module: Module, facts: Mapping[str, str], device: torch.device, names: Sequence[str], label: str
) -> dict[str, Model]:
    library = kernel_library()
    with _lock:
        engine = session(device)
        declare_kernels(library, module)
        set_virtual_cpu_target(cpu_target(device))
        try:
            compiled = engine.compile(module, custom_extensions=library.library_paths())
        except Exception as error:
            raise MaxBackendError(f"MAX could not compile {label}: {error.__cause__ or error}") from error
        finally:
            set_virtual_cpu_target("")
    # An artifact for a device that is not there is of no use but in the cache.
    if cache.store(GRAPHS, facts, ARTIFACT, compiled.export_mef) is None and is_virtual_device_mode():
        raise MaxBackendError(f"what was compiled for {facts['device']} could not be kept: the cache cannot be written")
    if not is_virtual_device_mode():
        _load_libraries(device)
    with _lock:
        return dict(zip(names, engine.init_all(compiled).values(), strict=True))


#: What a module's text tells of the process that built it: the accelerator that is attached (its architecture is a fact
#: of its own), and where the kernels lie.
_PROCESS = re.compile(r"mo\.device_info_mapping = \{[^}]*\}|_kernel_library_paths = \[[^\]]*\]")


@in_mlir_context
def content_digest(module: Module) -> str:
    """SHA-256 over what the module computes: equal in every process that builds the same graphs."""
    text = _PROCESS.sub("", text_of(module))
    return hashlib.sha256(text.encode()).hexdigest()
