"""Graphs with every operation that generated programs know, in every way of reading."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from max.dtype import DType
from max.graph import Module
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from torch_max_backend.dtypes import MAX_TO_TORCH
from torch_max_backend.graph.builder import GraphBuilder
from torch_max_backend.runtime.engine import session

aten = torch.ops.aten
ROWS, CHANNELS = 24, 64


def numbers(x: Tensor, row: Tensor, column: Tensor, odd: Tensor, narrow: Tensor) -> list[Tensor]:
    """Read in order, along a row, one number for each row, and element by element."""
    unary = [aten.exp, aten.erf, aten.tanh, aten.sin, aten.cos, aten.floor, aten.trunc, aten.round, aten.abs, aten.neg]
    total = x + row * column
    for function in unary:
        total = function(total) + 0.5
    total = total + aten.log(aten.abs(x)) + aten.log1p(aten.abs(x)) + aten.sqrt(aten.abs(row)) + aten.rsqrt(aten.abs(x))
    return [
        aten.where(total > column, total / row, aten.maximum(x, row)),
        (total > x) & (row < x) | aten.logical_not(x == column) ^ (x >= row),
        aten.isnan(total).to(torch.int64) + aten.isinf(x).to(torch.int64),
        odd * narrow,
        aten.permute(x, [1, 0]) * 2,
        *padded(x, odd),
    ]


def padded(x: Tensor, odd: Tensor) -> list[Tensor]:
    """Read in order, along rows and element by element, where a place is inside."""
    return [
        aten.constant_pad_nd(aten.slice(x, 1, 8, 48), [0, 0, 3, 1], 2.0) * 2,
        aten.constant_pad_nd(x, [1, 2]),
        aten.constant_pad_nd(odd, [1, 0, 0, 1]),
        aten.cat([aten.slice(x, 1, 1, 9), x], 1),
        aten.sum(aten.cat([x, x * 2], 0), [0]),
    ]


def reductions(x: Tensor, row: Tensor, column: Tensor, odd: Tensor, whole: Tensor) -> list[Tensor]:
    """Over rows and columns, with vectors and without, one result and several, every kind."""
    scaled = x * row - column
    return [
        aten.sum(scaled, [0]),
        aten.sum(scaled * x, [0]),
        aten.sum(scaled, [1]),
        aten.amax(x, [1]),
        aten.amin(odd, [0]),
        aten.sum(odd, [2]),
        aten.prod(column),
        aten.argmax(x, 1),
        aten.div(whole, 3, rounding_mode="floor"),
        aten.sum(whole, [0]),
        # Accumulated in 8 bits, and by threads that exchange them.
        aten.any(aten.gt(x, 1), 1),
        aten.amax(aten._to_copy(whole, dtype=torch.int8), [1]),
    ]


def conversions(*tensors: Tensor) -> list[Tensor]:
    return [tensor.to(torch.int32) for tensor in tensors]


def updates(step: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Adam's step over many tensors, their gradients' norms, and all of them one behind the other."""
    found: list[Tensor] = []
    for state, gradient, square in zip(tensors[::3], tensors[1::3], tensors[2::3], strict=True):
        mean = aten.mul(square, 0.999) + gradient * gradient * 0.001
        found += [state - gradient / (aten.sqrt(mean) + 1 / step), mean]
    found += [aten.sum(gradient * gradient) for gradient in tensors[1::3]]
    found.append(aten.cat([aten.reshape(each, [-1]) for each in tensors]))
    return found


def add_graphs(module: Module, dtypes: Sequence[DType]) -> None:
    """Adds the graphs, for the virtual device."""
    for dtype in dtypes:
        with FakeTensorMode():
            make = functools.partial(torch.empty, dtype=MAX_TO_TORCH[dtype], device="cuda")
            several = [make((n, 3)) for n in range(1, 6)]
            reading = [make((ROWS, CHANNELS)), make((CHANNELS,)), make((ROWS, 1)), make((5, 7, 3)), make((7, 1))]
            whole = torch.empty((ROWS, 3), dtype=torch.int64, device="cuda")
            graphs = {
                "numbers": make_fx(numbers)(*reading),
                "reductions": make_fx(reductions)(*reading[:4], whole),
                "conversions": make_fx(conversions)(*several),
                "updates": make_fx(updates)(make(()), *(make((n, 3)) for n in range(1, 5) for _ in range(3))),
            }
        library = session.library_to_build_with()
        for name, graph in graphs.items():
            GraphBuilder(graph, f"{name}_{dtype.name}", module, library, listed=True).build()
