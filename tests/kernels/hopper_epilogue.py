"""Convolutions with elementwise successors, and what became of these in a graph."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from max.graph import Module
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from torch_max_backend.graph.builder import GraphBuilder
from torch_max_backend.runtime import session

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


def add_graphs(module: Module) -> None:
    """Adds graphs whose convolutions take all elementwise work in. For sm_90a, which must be the virtual device."""
    x, y, w = (N, C, H, H), (N, K, H, H), (K, C, 3, 3)
    graphs = {
        "bias_relu": traced(bias_relu, x, w, (K,)),
        "residual_block": traced(residual_block, y, x, w, (N, 1, H, H), (1, C, 1, 1), x, x, mask=True),
    }
    for name, graph in graphs.items():
        GraphBuilder(graph, name, module, session.library_to_build_with(), listed=True).build()


def add_graph_of_two_readers(module: Module) -> None:
    """Adds a graph with nothing to take in: the convolution's own result is wanted too."""
    graph = traced(two_readers, (N, C, H, H), (K, C, 3, 3))
    GraphBuilder(graph, "two_readers", module, session.library_to_build_with(), listed=True).build()


def add_graphs_with_sums(module: Module) -> None:
    """Adds graphs whose convolutions take in what batch normalization reduces."""
    x, y, w = (N, C, H, H), (N, K, H, H), (K, C, 3, 3)
    graphs = {
        "normalized": traced(normalized, x, w, (K,), (K,), channels=True),
        "normalized_gradient": traced(normalized_gradient, y, x, w, x, x, (C,), (C,), channels=True),
    }
    for name, graph in graphs.items():
        GraphBuilder(graph, name, module, session.library_to_build_with(), listed=True).build()


def add_graph_waiting_for_itself(module: Module) -> None:
    """Adds a graph whose sums cannot be made while the convolution runs."""
    graph = traced(waiting_for_itself, (N, K, H, H), (N, C, H, H), (K, C, 3, 3), (C,), (C,), channels=True)
    GraphBuilder(graph, "waiting_for_itself", module, session.library_to_build_with(), listed=True).build()


def operations(module: Module) -> list[str]:
    """What a module's graphs compute with: the kernels' ops, a generated program by its entry, and MAX's own."""
    text = module._to_mlir_str()
    names = r"conv_pointwise_sums|conv_pointwise|pointwise|conv_[a-z]+|batch_norm_statistics|batch_norm_gradient_sums"
    found = re.findall(rf'mo\.custom \[symbol = "\w+".*?function = "torch_max_({names})', text)
    return found + re.findall(r"= (?:r?mo\.)+(add|mul|select|greater|cast|relu|max|min)\b", text)
