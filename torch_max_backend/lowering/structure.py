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


def _start_in_memory(source: torch.Tensor, result: torch.Tensor, offset: Any) -> int | None:
    """Where in a dense tensor's memory a dense one begins that is a part of it; None of any other."""
    if dense_order(source) is None or dense_order(result) is None or not isinstance(offset, int | None):
        return None
    start = 0 if offset is None else offset - source.storage_offset()
    if not isinstance(start, int):
        return None
    if start == 0 and source.numel() == result.numel():
        return 0
    static = _are_ints([*source.shape, *result.shape])
    return start if static and 0 <= start <= source.numel() - result.numel() else None


def _offset_of(node: Node, place: int) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get("storage_offset")


def _is_part_of_memory(node: Node) -> str | None:
    """``as_strided`` reads storage, which a graph value has not: a dense part of a dense tensor's own memory alone."""
    source: Any = node.args[0]
    if _start_in_memory(source.meta["val"], node.meta["val"], _offset_of(node, 3)) is not None:
        return None
    return "as_strided with strides that do not cover a part of the tensor's own memory in order"


@lowering(aten.as_strided.default, layout=Layout.RAW, supports=_is_part_of_memory)
def as_strided(ctx: LoweringContext, x: GraphTensor, size: Any, stride: Any, storage_offset: Any = None) -> GraphTensor:
    """The tensor's memory, from its first element to its last, or a part of it, under another shape."""
    source, order = dense_order(ctx.arg_meta(0)), dense_order(ctx.meta)
    start = _start_in_memory(ctx.arg_meta(0), ctx.meta, storage_offset)
    if source is None or order is None or start is None:
        raise CannotLower("as_strided of a tensor that is not dense")
    shape, value = ctx.out_shape(), x.to_order(source).value
    if ctx.meta.numel() != ctx.arg_meta(0).numel():
        flat = ops.reshape(value, [ctx.arg_meta(0).numel()])
        value = ops.slice_tensor(flat, [slice(start, start + ctx.meta.numel())])
    return GraphTensor(ops.reshape(value, [shape[dim] for dim in order]), order)


def _replaces_memory(node: Node) -> str | None:
    """``as_strided_scatter`` is a relabelling where the new values cover all of a dense tensor."""
    given: list[Any] = [arg.meta["val"] if isinstance(arg, Node) else arg for arg in node.args[:4]]
    target, values, size, stride = given
    offset = _offset_of(node, 4)
    view = torch.empty_strided(size, stride, device="meta") if _are_ints([*size, *stride]) else None
    covers = view is not None and dense_order(view) is not None and dense_order(target) is not None
    if covers and target.numel() == values.numel() and offset in (None, target.storage_offset()):
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
