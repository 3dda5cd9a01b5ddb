"""Convolutions of 16 bits whose channels are no whole rows of 16 bytes: zeros fill them up, before and behind.

Hopper's copy engine takes rows of whole 16 bytes only. The kernels would copy operands with other rows, and their
result: nine copies for the three passes of one convolution. As ops of the graph, borders are written by whoever
computes the operand, and cut off by whoever reads the result; and the passes share them.
"""

from __future__ import annotations

import contextlib
import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from torch_max_backend.mojo_ops.functions import is_hopper
from torch_max_backend.torch_compat import detect_fake_mode

aten = torch.ops.aten

ROW = 8
"""Channels of 16 bits in 16 bytes."""
MIN_CHANNELS = 16
"""An image's few channels have a way of their own: a row of filter taps is one of channels there."""


def fill_rows(joint: GraphModule) -> GraphModule:
    """Fills up the channels of a Hopper GPU's convolutions and of their gradients; returns ``joint``."""
    convolutions = joint.graph.find_nodes(op="call_function", target=aten.convolution.default)
    on_a_gpu = any(node.meta["val"].device.type == "cuda" for node in convolutions)
    return filled(joint, "cuda") if on_a_gpu and is_hopper() else joint


def filled(joint: GraphModule, device_type: str) -> GraphModule:
    """Fills up the channels of convolutions on devices of one type; returns ``joint``."""
    padded = _Padded(joint.graph)
    for node in list(joint.graph.nodes):
        arguments: tuple[Any, ...] = node.args
        if node.target is aten.convolution.default:
            x, w, transposed, groups = *arguments[:2], arguments[6], arguments[8]
            act = padded.forward
        elif node.target is aten.convolution_backward.default:
            x, w, transposed, groups = *arguments[1:3], arguments[7], arguments[9]
            act = padded.backward
        else:
            continue
        if not transposed and groups == 1 and _has_parts_of_rows(x.meta["val"], w.meta["val"], device_type):
            act(node)
    if padded.parts:
        padded.copy_results()
        joint.graph.eliminate_dead_code()
        joint.recompile()
    return joint


def _has_parts_of_rows(x: torch.Tensor, w: torch.Tensor, device_type: str) -> bool:
    """Whether these are operands of 16 bits, of known sizes, whose channels end within 16 bytes."""
    channels = w.shape[:2]
    return (
        x.device.type == device_type
        and x.dtype in (torch.bfloat16, torch.float16)
        and all(isinstance(size, int) and size > 0 for size in (*x.shape, *w.shape))
        and min(channels) >= MIN_CHANNELS
        and any(count % ROW for count in channels)
    )


def _is_returned(user: Node) -> bool:
    """Whether this is the graph's result, or a view that gets there."""
    is_view = user.target is operator.getitem or getattr(user.target, "is_view", False)
    return user.op == "output" or (is_view and any(map(_is_returned, user.users)))


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
            whole = self._call(node, aten.convolution.default, arguments)
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
            whole = self._call(node, aten.convolution_backward.default, arguments)
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
            whole = self.made[node, dims] = self._call(node, aten.constant_pad_nd.default, (node, counts, 0.0))
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
                whole = self._call(like, aten.slice.Tensor, (whole, dim, 0, size))
                self.parts.append(whole)
        return whole

    def copy_results(self) -> None:
        """What the graph returns has the strides that it had, and no zeros behind its channels."""
        for part in self.parts:
            users = [user for user in part.users if user not in self.parts and _is_returned(user)]
            if users:
                with self.graph.inserting_after(part):
                    copy = self._call(part, aten.clone.default, (part,))
                for user in users:
                    user.replace_input_with(part, copy)

    def _call(self, like: Node, target: Any, arguments: tuple[Any, ...]) -> Node:
        fresh = self.graph.call_function(target, arguments)
        values = torch.fx.node.map_arg(arguments, lambda each: each.meta["val"])
        with detect_fake_mode(values) or contextlib.nullcontext():
            fresh.meta = {**like.meta, "val": target(*values)}
        return fresh
