"""Compiled Dynamo graphs in the disk cache: a later process takes its first step without tracing them again.

PyTorch's AOTAutograd cache computes keys and entries. They are stored in the project's own cache beside the kernel
libraries, with its rules about ownership and its archives.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from torch_max_backend.graph.compiled import CompiledGraph
from torch_max_backend.graph.traces.stored import StorableGraph, loader
from torch_max_backend.lowering.convolution import allows_tf32
from torch_max_backend.options import Options
from torch_max_backend.runtime.caches import cache
from torch_max_backend.runtime.caches.target import target_facts
from torch_max_backend.runtime.engine import session
from torch_max_backend.torch_compat import (
    OpOverload,
    OpOverloadPacket,
    SerializableAOTDispatchCompiler,
    autograd_cache,
    saved_tensors_are_seen,
)

TRACES, FILENAME = "traces", "trace.pickle"
"""The kind and the file name of compiled Dynamo graphs in the cache."""

Compiler = Callable[..., Any]

_deterministic: Any = torch.utils.deterministic


def facts_of(gm: GraphModule, example_inputs: Sequence[Any], options: Options) -> dict[str, str] | None:
    """Everything that the compiled graphs of ``gm`` depend on, besides ``gm`` and what AOTAutograd's key covers.

    None where they are not kept.

    Raises:
        DeviceUnavailableError: a tensor on a device that MAX does not have.
    """
    devices = {value.device for value in example_inputs if isinstance(value, torch.Tensor)}
    if not devices or not all(device.type in ("cpu", "cuda") for device in devices):
        return None
    if any(isinstance(value, torch.SymInt) for value in example_inputs) or saved_tensors_are_seen():
        return None
    if not all(map(_is_told_by_key, gm.modules())):
        return None
    for device in devices:
        session.max_device(device)
    targets = [target_facts(device) for device in sorted(devices, key=str, reverse=True)]
    state = {
        "package": cache.package_digest(),
        "PyTorch": (torch.__version__, torch.version.git_version, torch.compiler.config.cache_key_tag),
        "options": dataclasses.replace(options, compile="wait", early_gradients=True),
        "targets": targets,
        "defaults": (torch.get_default_dtype(), torch.get_default_device(), _current_gpu()),
        "TF32": (allows_tf32(), torch.get_float32_matmul_precision()),
        "deterministic": (
            torch.is_deterministic_algorithms_warn_only_enabled(),
            _deterministic.fill_uninitialized_memory,
        ),
    }
    tag = hashlib.sha256(repr(state).encode()).hexdigest()
    return {**cache.versions(), "device": targets[0]["device"], "state": tag}


_NAMESPACES = ("aten", "prims", "prim")
"""Namespaces of operators whose meaning depends only on PyTorch's version."""


def _is_told_by_key(module: torch.nn.Module) -> bool:
    """Whether AOTAutograd's key covers everything about a module of a Dynamo graph."""
    if any(isinstance(value, torch.Tensor) for value in vars(module).values()):
        # Their values become constants, and the key has shapes alone.
        return False
    targets = [node.target for node in module.graph.nodes] if isinstance(module, GraphModule) else []
    ops = [target for target in targets if isinstance(target, (OpOverload, OpOverloadPacket))]
    # The key has an op's name; a user's own op may have another gradient tomorrow.
    return all(str(op).split(".")[0] in _NAMESPACES for op in ops)


def _current_gpu() -> int:
    return torch.cuda.current_device() if torch.cuda.is_available() else 0


@contextlib.contextmanager
def kept(facts: Mapping[str, str], load: Callable[[bytes], CompiledGraph]) -> Iterator[Callable[[Compiler], Compiler]]:
    """A context in which AOTAutograd reads compiled graphs from the cache and writes them to it.

    Args:
        facts: see ``facts_of``.
        load: makes a graph of ``graph.traces.stored`` ready to be compiled.

    Yields:
        What turns a compiler for AOTAutograd into one whose graphs are kept.
    """
    before = loader.set(load)
    try:
        with autograd_cache(facts["state"], functools.partial(_find, facts), functools.partial(_keep, facts)):
            yield _keeping
    finally:
        loader.reset(before)


def _keeping(compiler: Compiler) -> Compiler:
    def compile_storable(gm: GraphModule, example_inputs: Sequence[Any]) -> StorableGraph:
        start = time.perf_counter_ns()
        return StorableGraph(compiler(gm, example_inputs), time.perf_counter_ns() - start)

    return SerializableAOTDispatchCompiler(StorableGraph, compile_storable)


def _find(facts: Mapping[str, str], key: str) -> bytes | None:
    path = cache.lookup(TRACES, {**facts, "key": key}, FILENAME)
    return None if path is None else path.read_bytes()


def _keep(facts: Mapping[str, str], key: str, content: bytes) -> None:
    def write(path: Path) -> None:
        path.write_bytes(content)

    cache.store(TRACES, {**facts, "key": key}, FILENAME, write)
