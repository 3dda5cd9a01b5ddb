"""Reflection and replication padding; ``shape`` has padding with a constant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from max.graph import TensorValue
from torch.fx import Node

from torch_max_backend.dtypes import FLOATS
from torch_max_backend.ir.layout import GraphTensor
from torch_max_backend.lowering.context import LoweringContext
from torch_max_backend.lowering.interpolation import by_kernel
from torch_max_backend.lowering.registry import Layout, lowering
from torch_max_backend.mojo_ops.padding import border_dgrad, border_fprop

aten = torch.ops.aten


def _border_is_known(node: Node) -> str | None:
    x, padding = cast(Node, node.args[0]).meta["val"], cast(Sequence[Any], node.args[-1])
    spatial = x.shape[-(len(padding) // 2) :]
    if not all(isinstance(number, int) for number in (*padding, *spatial)):
        return "a border of a dimension of run-time extent"
    if x.dtype not in FLOATS or (x.dtype == torch.float64 and x.device.type != "cpu"):
        return f"borders run in {', '.join(map(str, FLOATS))} (on the CPU only), not {x.dtype}"
    return None


def _bordered(
    ctx: LoweringContext, x: GraphTensor, padding: Sequence[int], kernel: Callable[..., TensorValue]
) -> GraphTensor:
    """A border, or its gradient; ``padding`` is given from the last dimension to the first."""
    rank = len(padding) // 2
    given = [(padding[2 * i], padding[2 * i + 1]) for i in reversed(range(rank))]
    borders = [*[(0, 0)] * (3 - rank), *given]
    mirrored = "reflection" in str(ctx.node.target)
    return by_kernel(x, rank, ctx.out_shape(), lambda value: kernel(value, borders, mirrored=mirrored))


@lowering(
    aten.reflection_pad1d.default,
    aten.reflection_pad2d.default,
    aten.reflection_pad3d.default,
    aten.replication_pad1d.default,
    aten.replication_pad2d.default,
    aten.replication_pad3d.default,
    layout=Layout.RAW,
    supports=_border_is_known,
)
def border_pad(ctx: LoweringContext, x: GraphTensor, padding: Sequence[int]) -> GraphTensor:
    """A mirrored or repeated border; negative counts crop."""
    return _bordered(ctx, x, padding, border_fprop)


@lowering(
    aten.reflection_pad1d_backward.default,
    aten.reflection_pad2d_backward.default,
    aten.reflection_pad3d_backward.default,
    aten.replication_pad1d_backward.default,
    aten.replication_pad2d_backward.default,
    aten.replication_pad3d_backward.default,
    layout=Layout.RAW,
    supports=_border_is_known,
)
def border_pad_backward(ctx: LoweringContext, grad: GraphTensor, x: GraphTensor, padding: Sequence[int]) -> GraphTensor:
    """Gradient of a mirrored or repeated border: each element gathers the places that show it."""
    return _bordered(ctx, grad, padding, border_dgrad)
