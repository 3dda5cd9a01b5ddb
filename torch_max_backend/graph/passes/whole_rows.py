"""Convolutions of 16 bits whose channels are no whole rows of 16 bytes: zeros fill them up, before and behind.

Hopper's copy engine takes rows of whole 16 bytes only. The kernels would copy operands with other rows, and their
result: nine copies for the three passes of one convolution. As ops of the graph, borders are written by whoever
computes the operand, and cut off by whoever reads the result; and the passes share them.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from torch_max_backend.graph.calls import add_call
from torch_max_backend.graph.views import sees_memory
from torch_max_backend.mojo_ops.functions import is_hopper

aten = torch.ops.aten

ROW = 8
"""Channels of 16 bits in 16 bytes."""
MIN_CHANNELS = 16
"""An image's few channels have a way of their own: a row of filter taps is one of channels there."""

_OPERANDS: dict[object, int] = {aten.convolution.default: 0, aten.convolution_backward.default: 1}
"""The place of x among the arguments; w follows it."""


def fill_rows(joint: GraphModule, device_type: str = "cuda") -> GraphModule:
    """Fills up the channels of a Hopper GPU's convolutions and of their gradients; returns ``joint``."""
    found = [node for node in joint.graph.nodes if _has_parts_of_rows(node, device_type)]
    if not found or not is_hopper():
        return joint
    padded = _Padded(joint.graph)
    for node in found:
        if node.target is aten.convolution.default:
            padded.forward(node)
        else:
            padded.backward(node)
    padded.copy_results()
    joint.graph.eliminate_dead_code()
    joint.recompile()
    return joint


def _has_parts_of_rows(node: Node, device_type: str) -> bool:
    """Whether this is a convolution of 16 bits, or its gradient, of known sizes, whose channels end within 16 bytes."""
    first = _OPERANDS.get(node.target)
    if first is None:
        return False
    arguments: tuple[Any, ...] = node.args
    x, w = (each.meta["val"] for each in arguments[first : first + 2])
    transposed, groups = arguments[6 + first], arguments[8 + first]
    channels = w.shape[:2]
    return (
        x.device.type == device_type
        and x.dtype in (torch.bfloat16, torch.float16)
        and not transposed
        and groups == 1
        and all(isinstance(size, int) and size > 0 for size in (*x.shape, *w.shape))
        and min(channels) >= MIN_CHANNELS
        and any(count % ROW for count in channels)
    )


class _Padded:
    """Tensors with their channels filled up, each made once, before the first op that reads it."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.made: dict[tuple[Node, tuple[int, ...]], Node] = {}
        self.parts: list[Node] = []

    def forward(self, node: Node) -> None:
        """A convolution of operands that are filled up, and the part of its result that was asked for."""
        given: tuple[Any, ...] = node.args
        x, w, bias, *rest = given
        k = w.meta["val"].shape[0]
        with self.graph.inserting_before(node):
            operands = self._filled(x, (1,)), self._filled(w, (0, 1))
            arguments = (*operands, None if bias is None else self._filled(bias, (0,)), *rest)
            whole = add_call(node, aten.convolution.default, *arguments)
            part = self._part(node, whole, {1: k})
        node.replace_all_uses_with(part)
        self.graph.erase_node(node)

    def backward(self, node: Node) -> None:
        """The gradients of operands that are filled up, without what filled them up."""
        given: tuple[Any, ...] = node.args
        gradient, x, w, *rest = given
        k, c = w.meta["val"].shape[:2]
        if rest[0] is not None:
            rest[0] = [-(-k // ROW) * ROW]
        with self.graph.inserting_before(node):
            arguments = (self._filled(gradient, (1,)), self._filled(x, (1,)), self._filled(w, (0, 1)), *rest)
            whole = add_call(node, aten.convolution_backward.default, *arguments)
        for user in list(node.users):
            number: Any = user.args[1]
            if whole.meta["val"][number] is None:
                user.replace_input_with(node, whole)
                continue
            parts = ({1: c}, {0: k, 1: c}, {0: k})[number]
            with self.graph.inserting_before(user):
                result = self.graph.call_function(operator.getitem, (whole, number))
                result.meta = {**user.meta, "val": whole.meta["val"][number]}
                part = self._part(user, result, parts)
            user.replace_all_uses_with(part)
            self.graph.erase_node(user)
        self.graph.erase_node(node)

    def _filled(self, node: Node, dims: tuple[int, ...]) -> Node:
        """The tensor with zeros behind its channels, along some dimensions."""
        value = node.meta["val"]
        extra = [-value.shape[dim] % ROW for dim in dims]
        if not any(extra):
            return node
        if (node, dims) not in self.made:
            counts = [0] * (2 * value.dim())
            for dim, count in zip(dims, extra, strict=True):
                counts[2 * (value.dim() - 1 - dim) + 1] = count
            whole = self.made[node, dims] = add_call(node, aten.constant_pad_nd.default, node, counts, 0.0)
            if dims == (1,):
                # What reads the tensor from now on reads it there, so that it need not be kept twice.
                part = self._part(node, whole, {1: value.shape[1]})
                self.made[part, dims] = whole
                # An argument that the graph updates, or returns, stays what it is.
                node.replace_all_uses_with(
                    part, lambda user: whole < user and user.op != "output" and user.target is not aten.copy_.default
                )
        return self.made[node, dims]

    def _part(self, like: Node, whole: Node, sizes: dict[int, int]) -> Node:
        """The first elements along some dimensions."""
        for dim, size in sizes.items():
            if whole.meta["val"].shape[dim] != size:
                whole = add_call(like, aten.slice.Tensor, whole, dim, 0, size)
                self.parts.append(whole)
        return whole

    def copy_results(self) -> None:
        """What the graph returns, or reads by its strides, has those that it had, and no zeros behind its channels."""
        for part in self.parts:
            users = [user for user in part.users if user not in self.parts and sees_memory(user)]
            if users:
                with self.graph.inserting_after(part):
                    copy = add_call(part, aten.clone.default, part)
                for user in users:
                    user.replace_input_with(part, copy)
