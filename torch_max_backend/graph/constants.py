"""What a graph computes from no argument: small tensors that are the same at every call, like the
coordinates of a grid. PyTorch computes them once, while the graph is built; MAX would compile a program for that.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from max.graph import DeviceRef, TensorValue
from torch.fx import GraphModule, Node

from torch_max_backend.dtypes import TORCH_TO_MAX, max_dtype
from torch_max_backend.ir import ops
from torch_max_backend.torch_compat import FakeTensor, OpOverload, disable_current_modes, schema_of


def attribute_of(node: Node) -> Any:
    """What a ``get_attr`` node names."""
    return operator.attrgetter(str(node.target))(node.graph.owning_module)


def is_constant(node: Node) -> bool:
    """Whether ``node`` is a tensor that the graph itself holds, and small enough to become a part of the MAX graph.

    A literal like ``torch.tensor([1.0, 2.0])`` in a model is one. Nobody can change it: what a program may change,
    parameters, buffers and the tensors of its closures, enters as an argument.
    """
    if node.op != "get_attr":
        return False
    value = attribute_of(node)
    return (
        isinstance(value, torch.Tensor)
        and not isinstance(value, FakeTensor)
        and value.layout is torch.strided
        and value.dtype in TORCH_TO_MAX
        and 0 < value.numel() <= ops.MOST_ELEMENTS
    )


def describe_attributes(gm: GraphModule) -> None:
    """Gives the tensors that ``gm`` holds the ``meta["val"]`` that every other node has."""
    for node in gm.graph.find_nodes(op="get_attr"):
        value = attribute_of(node)
        if isinstance(value, torch.Tensor):
            node.meta.setdefault("val", value)


class Constants:
    """The values of nodes that depend on no argument."""

    def __init__(self) -> None:
        self._values: dict[Node, torch.Tensor] = {}

    def take(self, node: Node) -> bool:
        """Computes ``node``, if all that it needs is known and the result is one tensor of moderate static size."""
        if is_constant(node):
            self._values[node] = attribute_of(node).detach().cpu()
            return True
        fake = node.meta.get("val")
        if not isinstance(fake, torch.Tensor) or not all(isinstance(extent, int) for extent in fake.shape):
            return False
        if not 0 < fake.numel() <= ops.MOST_ELEMENTS or fake.dtype not in TORCH_TO_MAX:
            return False
        if any(source not in self._values for source in node.all_input_nodes):
            return False
        if not _is_a_value(node):
            return False
        if "empty" in schema_of(node.target).name:
            # Zeros, as its lowering.
            self._values[node] = torch.zeros(fake.shape, dtype=fake.dtype)
            return True
        args = torch.fx.map_arg(node.args, self._values.__getitem__)
        kwargs = torch.fx.map_arg(node.kwargs, self._values.__getitem__)
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        op: Any = node.target
        with disable_current_modes(), torch.no_grad():
            value = op(*args, **kwargs)
        if value.shape != fake.shape or value.dtype != fake.dtype:
            return False
        self._values[node] = value
        return True

    def tensor(self, node: Node, device: DeviceRef) -> TensorValue:
        """The node's value in the MAX graph that is being built."""
        value = self._values[node]
        first = value.reshape(-1)[0]
        # Zeros are equal whatever their sign.
        if torch.equal(value, first.expand_as(value)) and torch.equal(
            value.signbit(), first.signbit().expand_as(value)
        ):
            filling: Any = first.item()
            single = ops.constant(filling, max_dtype(value.dtype), device)
            return single if value.dim() == 0 else ops.broadcast_to(single, list(value.shape))
        return ops.constant(value.contiguous(), device=device)


def _is_a_value(node: Node) -> bool:
    """Whether the node's op gives the same at every call, wherever it runs."""
    if not isinstance(node.target, OpOverload):
        return False
    # Draws advance a generator.
    drawn = torch.Tag.nondeterministic_seeded in node.target.tags
    elsewhere = any(isinstance(arg, torch.device) for arg in node.args)
    return not (drawn or elsewhere)
