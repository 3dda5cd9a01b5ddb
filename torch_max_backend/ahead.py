"""Compiles a model's training graphs into the disk cache, for a GPU that is not present."""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch.fx import GraphModule

from torch_max_backend.backend import max_backend
from torch_max_backend.checked import beartype
from torch_max_backend.errors import OptionError
from torch_max_backend.graph.fake_cuda import autograd_walk
from torch_max_backend.graph.fake_cuda.attention_choice import attention_as_on
from torch_max_backend.graph.fake_cuda.lazy_values import LazyValueMode
from torch_max_backend.options import Options
from torch_max_backend.runtime import events
from torch_max_backend.runtime.caches.target import canonical_architecture
from torch_max_backend.runtime.engine import session
from torch_max_backend.runtime.events import CompileEvent
from torch_max_backend.torch_compat import (
    composite_replaced,
    convolutions_laid_out_by_cudnn,
    enable_python_dispatcher,
    literals_not_computed,
    tree_map_only,
)

aten = torch.ops.aten

#: Architectures, and MAX's API for each.
TARGETS = {"sm_80": "cuda", "sm_90a": "cuda", "sm_100a": "cuda", "gfx942": "hip"}


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
    """Compiles the graphs that ``torch.compile(model.cuda(), backend="max")(*inputs, **keywords)`` needs on the GPU.

    Compiles the forward graph, and the backward graph if parameters or inputs require gradients, for the model's
    present mode (``train`` or ``eval``). Nothing runs and no GPU is needed: only the shapes, strides and dtypes of the
    tensors matter, not their device. Where the model's Python depends on a tensor's value, its graph ends as it would
    on the GPU, and the value is computed on the CPU, from the model's and the inputs' values. A process with the same
    versions and a GPU of this architecture then finds the graphs in the cache.

    Args:
        model: the model, which is not modified.
        inputs: its positional arguments; their tensors represent tensors on the GPU.
        target: the GPU's architecture, a key of ``TARGETS``.
        autocast: the dtype of ``torch.autocast("cuda", dtype=...)`` around the call, if any.
        options: as for ``torch.compile``.
        dynamic: as for ``torch.compile``.
        keywords: its keyword arguments.

    Returns:
        One event for each compilation, including those that the cache already had.

    Raises:
        OptionError: an unknown target, option or autocast dtype.
        DeviceUnavailableError: the process already uses a GPU.
        MaxBackendError: the compiler failed, or the cache cannot be written.
    """
    chosen = {**(options or {}), "compile": "wait"}
    Options.parse(chosen)
    seen: list[CompileEvent] = []
    with events.listen(seen.append):
        trace_ahead(
            functools.partial(max_backend, options=chosen),
            model,
            inputs,
            keywords,
            target=target,
            autocast=autocast,
            dynamic=dynamic,
        )
    return [event for event in seen if event.seconds is not None]


def trace_ahead(
    backend: Callable[[GraphModule, Sequence[Any]], Any],
    model: torch.nn.Module,
    inputs: tuple[Any, ...],
    keywords: dict[str, Any],
    *,
    target: str,
    autocast: torch.dtype | None = None,
    dynamic: bool | None = None,
) -> None:
    """Hands the graphs of a call of ``model`` on a GPU that is not present to ``backend``.

    See ``compile_ahead`` for the arguments and for what is raised. ``backend`` gets Dynamo's graphs and their fake
    inputs; what it returns is not called.
    """
    architecture = canonical_architecture(target)
    if architecture not in TARGETS:
        raise OptionError(f"target {target!r}: expected one of {', '.join(TARGETS)}")
    if autocast not in (None, torch.bfloat16, torch.float16):
        raise OptionError(f"autocast={autocast}: expected torch.bfloat16 or torch.float16")

    def traced(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        # Dynamo notes its inputs' types, which are part of a key in the cache: on the GPU's machine none are fake.
        for node, value in zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True):
            if isinstance(value, torch.Tensor):
                node.type = torch.nn.Parameter if isinstance(value, torch.nn.Parameter) else torch.Tensor
        gm.recompile()
        # The rest of the user's code needs results; eager PyTorch computes them as fake tensors.
        eager = GraphModule(gm, copy.deepcopy(gm.graph))
        with enable_python_dispatcher():
            backend(gm, example_inputs)

        def run(*args: Any) -> Any:
            with enable_python_dispatcher():
                return eager(*args)

        return run

    torch.compiler.reset()
    mode = LazyValueMode()
    moved, arguments, named = _moved(model, mode, inputs, keywords)
    with (
        session.virtual_accelerator(TARGETS[architecture], architecture),
        _without_a_gpu(architecture),
        mode,
        _autocast(autocast),
    ):
        torch.compile(moved, backend=traced, dynamic=dynamic)(*arguments, **named)
    torch.compiler.reset()


def _moved(
    model: torch.nn.Module, mode: LazyValueMode, inputs: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The model and its arguments, with fake tensors on a GPU."""
    # After its first use the mode creates fake tensors on a GPU without a driver.
    with mode:
        pass
    twin = functools.partial(mode.twin, device="cuda:0")
    state = [*model.parameters(), *model.buffers()]
    # A deep copy uses what the memo has for a tensor instead of copying it.
    moved = copy.deepcopy(model, {id(tensor): twin(tensor) for tensor in state})
    return moved, tree_map_only(torch.Tensor, twin, inputs), tree_map_only(torch.Tensor, twin, keywords)


@contextlib.contextmanager
def _without_a_gpu(architecture: str) -> Iterator[None]:
    """Lets PyTorch trace for a GPU that it does not have."""
    with (
        mock.patch.object(torch.autograd, "grad", autograd_walk.gradients),
        # Otherwise PyTorch would disable autocast, with a warning.
        mock.patch.object(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
        mock.patch.object(torch.cuda, "is_bf16_supported", lambda *_, **__: True),
        convolutions_laid_out_by_cudnn(),
        literals_not_computed(),
        composite_replaced(aten.grid_sampler.default, _grid_sampler),
        attention_as_on(architecture),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message=".*(CUDA|NVIDIA).*")
        yield


def _grid_sampler(x: torch.Tensor, grid: torch.Tensor, *how: Any) -> torch.Tensor:
    """``aten.grid_sampler`` without cuDNN, whose op runs where it is traced; both are decomposed alike."""
    return (aten.grid_sampler_2d if x.dim() == 4 else aten.grid_sampler_3d)(x, grid, *how)


@contextlib.contextmanager
def _autocast(dtype: torch.dtype | None) -> Iterator[None]:
    with torch.autocast("cuda", dtype=dtype) if dtype is not None else contextlib.nullcontext():
        yield
