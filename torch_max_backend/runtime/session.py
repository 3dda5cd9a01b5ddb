"""MAX's engine: devices, sessions, the kernel library, and compiling a module of graphs."""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Sequence

import torch
from max.driver import CPU, Accelerator, Device, accelerator_architecture_name, accelerator_count
from max.engine import InferenceSession, Model
from max.engine import read as read_artifact
from max.graph import KernelLibrary, Module

from torch_max_backend.errors import DeviceUnavailableError, MaxBackendError
from torch_max_backend.runtime import cache, events

_lock = threading.RLock()


@functools.cache
def kernel_library() -> KernelLibrary:
    """The project's kernels, loaded once for the process."""
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


@functools.cache
def session(device: torch.device) -> InferenceSession:
    """The session that compiles for and runs on ``device``."""
    return InferenceSession(devices=[max_device(device)])


@functools.cache
def _architecture(device: torch.device) -> str:
    if device.type == "cpu":
        return f"cpu:{torch.backends.cpu.get_cpu_capability()}:{torch.get_num_threads()}"
    return f"{device.type}:{accelerator_architecture_name()}"


def compile_module(
    module: Module, device: torch.device, names: Sequence[str], op_count: int, label: str
) -> dict[str, Model]:
    """Every graph of ``module``, compiled together or read from the disk cache, by name.

    ``names`` are in the order of the graphs: MAX's own cache compares modules without their graphs' names and
    returns those under which it first met the content, so that only a graph's place says which one it is.

    Raises:
        MaxBackendError: the graph compiler refused the module.
    """
    with _lock, events.compiling(tuple(names), op_count) as cached:
        engine = session(device)
        facts = {
            **cache.versions(),
            "device": _architecture(device),
            "graph": _content_digest(module),
        }
        artifact = cache.lookup("graphs", facts, "model.mef")
        if artifact is not None:
            try:
                models = engine.init_all(read_artifact(artifact))
                if len(models) == len(names):
                    cached(True)
                    return dict(zip(names, models.values(), strict=True))
                reason = f"it holds {len(models)} graphs, not {len(names)}"
            except Exception as error:
                reason = f"it does not load: {error}"
            cache.discard("graphs", facts, reason)
        library = kernel_library()
        library._analysis.seed_kernel_decls(module.mlir_module)
        try:
            compiled = engine.compile(module, custom_extensions=library.library_paths())
        except Exception as error:
            raise MaxBackendError(f"MAX could not compile {label}: {error.__cause__ or error}") from error
        cache.store("graphs", facts, "model.mef", compiled.export_mef)
        cached(False)
        return dict(zip(names, engine.init_all(compiled).values(), strict=True))


def _content_digest(module: Module) -> str:
    """SHA-256 over the module's text, without the place where the kernels lie: a cache may move."""
    text = module._to_mlir_str().replace(str(cache.kernel_library_path()), "kernels")
    return hashlib.sha256(text.encode()).hexdigest()
