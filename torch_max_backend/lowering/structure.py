"""Ops that only name or pass on values: tuple access, detach, clone."""

from __future__ import annotations

import operator
from typing import Any

import torch

from torch_max_backend.graph.layout import GraphTensor
from torch_max_backend.lowering.context import LoweringContext
from torch_max_backend.lowering.registry import Layout, lowering

aten = torch.ops.aten


@lowering(operator.getitem, layout=Layout.RAW)
def getitem(ctx: LoweringContext, values: Any, index: int) -> Any:
    """One result of an op with several."""
    return values[index]


@lowering(
    aten.detach.default,
    aten.alias.default,
    aten.clone.default,
    aten.lift_fresh_copy.default,
    aten.contiguous.default,
    layout=Layout.RAW,
)
def passed_on(ctx: LoweringContext, x: GraphTensor, *, memory_format: Any = None) -> GraphTensor:
    """The value itself: graph values are immutable, and memory order is settled where they leave the graph."""
    return x
