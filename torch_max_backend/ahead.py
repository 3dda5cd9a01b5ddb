"""Compiling a model's training graphs for a GPU that is not there, into the disk cache."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from beartype import beartype
from torch.fx import GraphModule

from torch_max_backend.backend import max_backend
from torch_max_backend.errors import OptionError
from torch_max_backend.graph import autograd_walk
from torch_max_backend.options import Options
from torch_max_backend.runtime import events, session
from torch_max_backend.runtime.events import CompileEvent
from torch_max_backend.runtime.target import canonical_architecture
from torch_max_backend.torch_compat import FakeTensorMode, convolutions_laid_out_by_cudnn, tree_map_only

#: Architecture to the API that drives it.
TARGETS = {"sm_80": "cuda", "sm_90a": "cuda", "sm_100a": "cuda", "gfx942": "hip"}
_ATTENTION = (
    "scaled_dot_product_attention: PyTorch asks the GPU at hand which kernel it takes, and there is none; the graph "
    "compiled here may be another than the one that the GPU's machine will ask for"
)


@beartype
def compile_ahead(
    model: torch.nn.Module,
    *inputs: Any,
    target: str,
    autocast: torch.dtype | None = None,
    options: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
    **keywords: Any,
) -> list[CompileEvent]:
    """Compiles what ``torch.compile(model.cuda(), backend="max")(*inputs, **keywords)`` will ask for on the GPU.

    Forward and backward graphs, if parameters or inputs want gradients, of the model in the mode (``train``, ``eval``)
    that it is in. Nothing runs: of the tensors, wherever they are, only shapes, strides and dtypes count, and no GPU
    need be there. A process with the same versions of everything and a GPU of this architecture finds the graphs in
    the cache.

    Args:
        model: is not touched.
        inputs: its positional arguments; their tensors stand for tensors on the GPU.
        target: the GPU's architecture, a key of ``TARGETS``.
        autocast: the dtype of ``torch.autocast("cuda", dtype=...)`` around the call, if there is one.
        options: as for ``torch.compile``.
        dynamic: as for ``torch.compile``.
        keywords: its keyword arguments.

    Returns:
        What was compiled, or found in the cache.

    Raises:
        OptionError: an unknown target, option or autocast dtype.
        DeviceUnavailableError: the process uses a GPU already.
        MaxBackendError: the compiler failed, or the cache cannot be written.
    """
    architecture = canonical_architecture(target)
    if architecture not in TARGETS:
        raise OptionError(f"target {target!r}: expected one of {', '.join(TARGETS)}")
    if autocast not in (None, torch.bfloat16, torch.float16):
        raise OptionError(f"autocast={autocast}: expected torch.bfloat16 or torch.float16")
    chosen = {**(options or {}), "compile": "wait"}
    Options.parse(chosen)

    def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> GraphModule:
        if any("scaled_dot_product_attention" in str(node.target) for node in gm.graph.nodes):
            warnings.warn(_ATTENTION, UserWarning, stacklevel=2)
        # The rest of the program needs results, of which fake tensors have all that matters.
        eager = GraphModule(gm, copy.deepcopy(gm.graph))
        max_backend(gm, example_inputs, options=chosen)
        return eager

    seen: list[CompileEvent] = []
    torch.compiler.reset()
    fake = FakeTensorMode()
    moved, arguments, named = _moved(model, fake, inputs, keywords)
    with (
        session.virtual_accelerator(TARGETS[architecture], architecture),
        _without_a_gpu(),
        fake,
        _autocast(autocast),
        events.listen(seen.append),
    ):
        torch.compile(moved, backend=backend, dynamic=dynamic)(*arguments, **named)
    torch.compiler.reset()
    return [event for event in seen if event.seconds is not None]


def _moved(
    model: torch.nn.Module, mode: FakeTensorMode, inputs: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The model and its arguments with fake tensors on a GPU."""
    # Fake tensors on a GPU need no driver from here on.
    with mode:
        pass

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        with mode:
            twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda:0")
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(twin, tensor.requires_grad)
        return twin.requires_grad_(tensor.requires_grad)

    state = [*model.parameters(), *model.buffers()]
    # A deep copy takes what its memo has for a tensor instead of copying it.
    moved = copy.deepcopy(model, {id(tensor): fake(tensor) for tensor in state})
    return moved, tree_map_only(torch.Tensor, fake, inputs), tree_map_only(torch.Tensor, fake, keywords)


@contextlib.contextmanager
def _without_a_gpu() -> Iterator[None]:
    """Makes PyTorch trace on a GPU that it does not have."""
    with (
        mock.patch.object(torch.autograd, "grad", autograd_walk.gradients),
        # Autocast would be switched off, with a warning.
        mock.patch.object(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
        mock.patch.object(torch.cuda, "is_bf16_supported", lambda *_, **__: True),
        convolutions_laid_out_by_cudnn(),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message=".*(CUDA|NVIDIA).*")
        yield


@contextlib.contextmanager
def _autocast(dtype: torch.dtype | None) -> Iterator[None]:
    with torch.autocast("cuda", dtype=dtype) if dtype is not None else contextlib.nullcontext():
        yield
