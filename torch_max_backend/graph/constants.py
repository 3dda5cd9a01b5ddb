"""Values that a graph computes from no argument: small tensors that are the same in every call, like the
coordinates of a grid. PyTorch computes them once, while the graph is built; MAX would compile code for that.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable
from typing import Any

import torch
from max.graph import DeviceRef, TensorValue
from torch.fx import GraphModule, Node

from torch_max_backend.dtypes import TORCH_TO_MAX, max_dtype
from torch_max_backend.ir import ops
from torch_max_backend.torch_compat import FakeTensor, OpOverload, disable_current_modes, schema_of, tree_leaves

#: 32 million coordinates of bfloat16; the launch list holds them, and each process that runs it, once.
_MAX_FOREIGN_BYTES = 1 << 26


def attribute_of(node: Node) -> Any:
    """The attribute that a ``get_attr`` node names."""
    return operator.attrgetter(str(node.target))(node.graph.owning_module)


def is_constant(node: Node) -> bool:
    """Whether ``node`` is a tensor that the graph itself holds, and small enough to become a part of the MAX graph.

    A literal like ``torch.tensor([1.0, 2.0])`` in a model is one. It cannot change: what a model may change,
    parameters, buffers and the tensors of its closures, enters as an argument.
    """
    if node.op == "call_function" and isinstance(node.target, Literal):
        return True
    if node.op != "get_attr":
        return False
    value = attribute_of(node)
    return (
        isinstance(value, torch.Tensor)
        and not isinstance(value, FakeTensor)
        and value.layout is torch.strided
        and value.dtype in TORCH_TO_MAX
        and _is_moderate(value, node)
    )


def _is_moderate(tensor: torch.Tensor, node: Node) -> bool:
    """Whether the node's tensor, of static size, is small enough to be a constant.

    In a GPU's graph one that the CPU computes, or its copy on the GPU, may have many more bytes: computed outside the
    graph it would be moved in every call.
    """
    if 0 < tensor.numel() <= ops.MAX_ELEMENTS:
        return True
    if not 0 < tensor.numel() * tensor.dtype.itemsize <= _MAX_FOREIGN_BYTES:
        return False
    gm = node.graph.owning_module
    read = [source.meta["val"] for source in node.all_input_nodes if source.meta["val"].dim()]
    return gm is not None and any(each.device != main_device(gm) for each in (tensor, *read))


def describe_attributes(gm: GraphModule) -> None:
    """Gives the tensors that ``gm`` holds the ``meta["val"]`` that every other node has."""
    for node in gm.graph.find_nodes(op="get_attr"):
        value = attribute_of(node)
        if isinstance(value, torch.Tensor):
            node.meta.setdefault("val", value)


def constants_among(nodes: Iterable[Node]) -> set[Node]:
    """The nodes of a graph that depend on no argument and whose values ``Constants`` computes.

    The device that a model named for them says nothing: a constant stands where it is read. So what a model
    computes on the CPU of a GPU's graph, such as places for an index, is a part of that graph.
    """
    found: set[Node] = set()
    for node in nodes:
        if is_constant(node) or _follows(node, found):
            found.add(node)
    return found


def fold_foreign_constants(gm: GraphModule) -> GraphModule:
    """Makes what a GPU's graph computes on the CPU from no argument a tensor that the graph holds; ``gm`` is changed
    and returned. PyTorch's partitioner would save it for the backward graph, as a result on the CPU."""
    describe_attributes(gm)
    constants = constants_among(gm.graph.nodes)
    foreign = {node for node in constants if _is_foreign(node, gm)}
    known = Constants()
    for node in gm.graph.nodes:
        if node not in foreign or not known.take(node) or node.op == "get_attr" or foreign.issuperset(node.users):
            continue
        if any(user.op == "output" for user in node.users):
            continue
        name = f"_constant_{node.name}"
        gm.register_buffer(name, known.value(node))
        with gm.graph.inserting_before(node):
            held = gm.graph.get_attr(name)
        held.meta = dict(node.meta)
        node.replace_all_uses_with(held, delete_user_cb=lambda user: user not in foreign)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm


def main_device(gm: GraphModule) -> torch.device:
    """The device that most of the graph's data is on: the first accelerator met, else the CPU."""
    for node in gm.graph.nodes:
        for tensor in tree_leaves(node.meta.get("val")):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "cpu":
                return tensor.device
    return torch.device("cpu")


def _is_foreign(node: Node, gm: GraphModule) -> bool:
    return node.meta["val"].device != main_device(gm)


class Literal:
    """The target of a node that is a constant without arguments."""

    __name__ = "literal"

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def __call__(self) -> torch.Tensor:
        return self.value


def give_each_reader_its_own(gm: GraphModule) -> None:
    """Copies constants of another device, so that each is read by one node and can join that node's part of a graph
    that is cut."""
    constants = [node for node in constants_among(gm.graph.nodes) if _is_foreign(node, gm)]
    order = {node: number for number, node in enumerate(gm.graph.nodes)}
    for node in sorted(constants, key=order.__getitem__, reverse=True):
        readers = list(node.users) if node.op == "get_attr" else list(node.users)[1:]
        for user in readers:
            with gm.graph.inserting_before(user):
                if node.op == "get_attr":
                    twin = gm.graph.call_function(Literal(attribute_of(node)))
                else:
                    twin = gm.graph.node_copy(node)
            twin.meta = dict(node.meta)
            user.replace_input_with(node, twin)


def _follows(node: Node, known: Container[Node]) -> bool:
    """Whether the node's value can be computed: one tensor of moderate static size, of values that are known."""
    fake = node.meta.get("val")
    if node.op != "call_function" or not isinstance(fake, torch.Tensor):
        return False
    if not all(isinstance(extent, int) for extent in fake.shape):
        return False
    if fake.dtype not in TORCH_TO_MAX or not all(source in known for source in node.all_input_nodes):
        return False
    return _is_a_value(node) and _is_moderate(fake, node)


class Constants:
    """The values of nodes that depend on no argument."""

    def __init__(self) -> None:
        self._values: dict[Node, torch.Tensor] = {}

    def take(self, node: Node) -> bool:
        """Computes ``node``, if all that it needs is known and the result is one tensor of moderate static size."""
        if is_constant(node):
            held = node.target.value if isinstance(node.target, Literal) else attribute_of(node)
            with disable_current_modes():
                self._values[node] = held.detach().cpu()
            return True
        if not _follows(node, self._values):
            return False
        fake = node.meta["val"]
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

    def value(self, node: Node) -> torch.Tensor:
        """The node's value, on the CPU."""
        return self._values[node]

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
