"""Convolutions with elementwise successors, and what became of these in a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from max.graph import Module
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from torch_max_backend.graph.builder import GraphBuilder
from torch_max_backend.runtime.engine import session
from torch_max_backend.typed_graph import TypedGraph
from torch_max_backend.typed_graph.operations import Call, Pointwise, Reduction

aten = torch.ops.aten
GEOMETRY = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
N, C, K, H = 4, 64, 72, 14


def bias_relu(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    # Without a GPU, PyTorch takes the convolution's result for a contiguous one.
    return aten.clone(aten.relu(aten.convolution(x, w, bias, *GEOMETRY)), memory_format=torch.channels_last)


def residual_block(
    dy: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    pixels: torch.Tensor,
    channels: torch.Tensor,
    skip: torch.Tensor,
    mask: torch.Tensor,
) -> torch.Tensor:
    """dgrad times a factor for each pixel, plus an addend for each channel, plus a residual, under a ReLU's mask,
    scaled and clamped."""
    dx = aten.convolution_backward(dy, x, w, None, *GEOMETRY, [True, False, False])[0]
    shifted = aten.add(aten.add(aten.mul(dx, pixels), channels), skip)
    return aten.clamp(aten.mul(aten.where(mask, shifted, 0.0), 0.5), -8.0, 8.0)


def two_readers(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = aten.convolution(x, w, None, *GEOMETRY)
    return y, aten.relu(y)


def normalized(x: torch.Tensor, w: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> list[torch.Tensor]:
    y = aten.convolution(x, w, None, *GEOMETRY)
    z, *saved = aten._native_batch_norm_legit_functional(y, None, None, mean, variance, True, 0.1, 1e-5)
    return [y, aten.relu(z), *saved]


def normalized_gradient(
    dy: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    skip: torch.Tensor,
    before: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
) -> list[torch.Tensor]:
    """dgrad plus a residual, under a ReLU's mask, then through the batch normalization of ``before``."""
    dx = aten.convolution_backward(dy, x, w, None, *GEOMETRY, [True, False, False])[0]
    dz = aten.where(aten.gt(x, 0), aten.add(dx, skip), 0.0)
    return [dz, *aten.native_batch_norm_backward(dz, before, mean, None, None, mean, invstd, True, 1e-5, [True] * 3)]


def waiting_for_itself(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, mean: torch.Tensor, invstd: torch.Tensor
) -> list[torch.Tensor]:
    """The sums' other factor is made of the convolution's result."""
    dz = aten.convolution_backward(dy, x, w, None, *GEOMETRY, [True, False, False])[0]
    before = aten.relu(dz)
    found = aten.native_batch_norm_backward(dz, before, mean, None, None, mean, invstd, True, 1e-5, [False, True, True])
    return list(found[1:])


def traced(
    function: Callable[..., Any], *shapes: tuple[int, ...], mask: bool = False, channels: bool = False
) -> torch.fx.GraphModule:
    """The function's graph over bfloat16. Where ``mask``, the last argument is a condition; where ``channels``, those
    of one axis are float32."""
    with FakeTensorMode():
        dtypes = [torch.float32 if len(shape) == 1 and channels else torch.bfloat16 for shape in shapes]
        tensors = [
            torch.empty(shape, dtype=dtype, device="cuda") for shape, dtype in zip(shapes, dtypes, strict=True)
        ]  # fmt: skip
        tensors = [t.to(memory_format=torch.channels_last) if t.dim() == 4 else t for t in tensors]
        if mask:
            tensors[-1] = tensors[-1].bool()
        return make_fx(function)(*tensors)


def _built(name: str, graph: torch.fx.GraphModule) -> TypedGraph:
    """The fused graph for sm_90a, which must be the virtual device."""
    built = GraphBuilder(graph, name, Module(), session.library_to_build_with(), listed=True).build()
    assert built.typed is not None
    return built.typed


def graphs() -> list[TypedGraph]:
    """Graphs whose convolutions take all elementwise work in."""
    x, y, w = (N, C, H, H), (N, K, H, H), (K, C, 3, 3)
    block = traced(residual_block, y, x, w, (N, 1, H, H), (1, C, 1, 1), x, x, mask=True)
    return [_built("bias_relu", traced(bias_relu, x, w, (K,))), _built("residual_block", block)]


def graphs_of_two_readers() -> list[TypedGraph]:
    """A graph with nothing to take in: the convolution's own result is wanted too."""
    return [_built("two_readers", traced(two_readers, (N, C, H, H), (K, C, 3, 3)))]


def graphs_with_sums() -> list[TypedGraph]:
    """Graphs whose convolutions take in what batch normalization reduces."""
    x, y, w = (N, C, H, H), (N, K, H, H), (K, C, 3, 3)
    gradient = traced(normalized_gradient, y, x, w, x, x, (C,), (C,), channels=True)
    return [
        _built("normalized", traced(normalized, x, w, (K,), (K,), channels=True)),
        _built("normalized_gradient", gradient),
    ]


def graphs_waiting_for_themselves() -> list[TypedGraph]:
    """A graph whose sums cannot be made while the convolution runs."""
    shapes = (N, K, H, H), (N, C, H, H), (K, C, 3, 3), (C,), (C,)
    return [_built("waiting_for_itself", traced(waiting_for_itself, *shapes, channels=True))]


def operations(found: Sequence[TypedGraph]) -> list[str]:
    """What graphs compute with: the entries that are called, and operations that no call computes."""
    each = [operation for graph in found for operation in graph.operations]
    entries = [operation.function.entry.removesuffix("_sm90") for operation in each if isinstance(operation, Call)]
    return entries + [operation.name for operation in each if isinstance(operation, (Pointwise, Reduction))]
