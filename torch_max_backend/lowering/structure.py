"""Operators that only name or pass on values: tuple access, detach, clone."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from torch_max_backend.errors import CannotLower
from torch_max_backend.ir import ops
from torch_max_backend.ir.layout import GraphTensor, dense_order
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


def _covers_memory(node: Node) -> str | None:
    """``as_strided`` reads storage, which a graph value has not, unless it covers a dense tensor with a dense one."""
    source, result = node.args[0].meta["val"], node.meta["val"]
    offset = node.args[3] if len(node.args) > 3 else node.kwargs.get("storage_offset")
    dense = dense_order(source) is not None and dense_order(result) is not None
    if dense and source.numel() == result.numel() and not offset:
        return None
    return "as_strided with strides that do not cover the tensor's own memory in order"


@lowering(aten.as_strided.default, layout=Layout.RAW, supports=_covers_memory)
def as_strided(ctx: LoweringContext, x: GraphTensor, *geometry: Any) -> GraphTensor:
    """The tensor's memory, from its first element to its last, under another shape."""
    source, order = dense_order(ctx.arg_meta(0)), dense_order(ctx.meta)
    if source is None or order is None:
        raise CannotLower("as_strided of a tensor that is not dense")
    shape = ctx.out_shape()
    return GraphTensor(ops.reshape(x.to_order(source).value, [shape[dim] for dim in order]), order)


def _replaces_memory(node: Node) -> str | None:
    """``as_strided_scatter`` is a relabelling where the new values cover all of a dense tensor."""
    given: list[Any] = [arg.meta["val"] if isinstance(arg, Node) else arg for arg in node.args[:4]]
    target, values, size, stride = given
    offset = node.args[4] if len(node.args) > 4 else node.kwargs.get("storage_offset")
    view = torch.empty_strided(size, stride, device="meta") if _are_ints([*size, *stride]) else None
    covers = view is not None and dense_order(view) is not None and dense_order(target) is not None
    if covers and target.numel() == values.numel() and not offset:
        return None
    return "as_strided_scatter that does not replace the whole of a dense tensor"


def _are_ints(sizes: Sequence[Any]) -> bool:
    return all(isinstance(size, int) for size in sizes)


@lowering(aten.as_strided_scatter.default, layout=Layout.RAW, supports=_replaces_memory)
def as_strided_scatter(
    ctx: LoweringContext, x: GraphTensor, values: GraphTensor, size: Sequence[int], stride: Sequence[int], *rest: Any
) -> GraphTensor:
    """The new values, laid over the tensor's memory from its first element to its last."""
    source = dense_order(torch.empty_strided(size, stride, device="meta"))
    order = dense_order(ctx.arg_meta(0))
    if source is None or order is None:
        raise CannotLower("as_strided_scatter into a tensor that is not dense")
    shape = ctx.out_shape()
    return GraphTensor(ops.reshape(values.to_order(source).value, [shape[dim] for dim in order]), order)
