"""Decides which nodes run in MAX, and cuts the graph around the others."""

from __future__ import annotations

import operator
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner, Partition
from torch.fx.passes.operator_support import OperatorSupportBase

from torch_max_backend.dtypes import TORCH_TO_MAX
from torch_max_backend.graph.builder import is_write_back, tensors_of
from torch_max_backend.graph.constants import constants_among, give_each_reader_its_own, main_device
from torch_max_backend.graph.lines import user_line
from torch_max_backend.graph.random import ORIGIN, is_draw
from torch_max_backend.lowering import lookup
from torch_max_backend.torch_compat import OpOverload


@dataclass(frozen=True)
class Refusal:
    """A node that stays in PyTorch, and why."""

    node: str
    op: str
    arguments: str
    reason: str
    user_line: str | None


def refusals(gm: GraphModule, refused: Mapping[str, str], *, listed: bool) -> dict[str, Refusal]:
    """Every node that MAX cannot run, by name.

    Args:
        gm: the graph.
        refused: what builders found out.
        listed: the graph is to run as launch lists, which know all sizes; what depends on values stays in PyTorch.
    """
    device = main_device(gm)
    constants = constants_among(gm.graph.nodes)
    reasons: dict[Node, str] = {}
    while True:
        before = len(reasons)
        # Readers come first: a constant of another device is a part of its readers' graphs, if all run in MAX.
        for node in reversed(gm.graph.nodes):
            if node.op != "call_function" or node in reasons or is_host_node(node):
                continue
            if not reasons.keys().isdisjoint(node.all_input_nodes):
                # PyTorch computes what it is computed from.
                constants.discard(node)
            reason = refused.get(node.name) or (_value_dependence(node) if listed else None)
            reason = reason or unsupported_reason(node, device, constants)
            if reason is None and node in constants and _is_read_outside(node, reasons):
                reason = _other_device(node.meta["val"], device)
            if reason is not None:
                reasons[node] = reason
                constants.discard(node)
        if len(reasons) == before:
            break
    return {
        node.name: Refusal(node.name, op_name(node), describe_arguments(node), reasons[node], user_line(node))
        for node in gm.graph.nodes
        if node in reasons
    }


def _is_read_outside(node: Node, reasons: Container[Node]) -> bool:
    return any(
        user.op != "call_function" or user in reasons or is_write_back(user) or is_host_node(user)
        for user in node.users
    )


def is_host_node(node: Node) -> bool:
    """Draws, computations on sizes, what is asserted of these, and what ``leave_assertions`` left: they run in Python,
    before or beside the MAX graphs, as they should."""
    if is_draw(node) or node.target in _ASSERTIONS or node.meta.get(_LEFT):
        return True
    value = node.meta.get("val")
    return isinstance(value, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


_ASSERTIONS = frozenset({
    torch.ops.aten._assert_scalar.default,
    torch.ops.aten.sym_constrain_range.default,
    torch.ops.aten.sym_constrain_range_for_size.default,
})  # fmt: skip
_LEFT = "torch_max_backend_left"
"""In a node's ``meta``: PyTorch runs it beside the MAX graphs."""


def leave_assertions(gm: GraphModule, *, listed: bool) -> None:
    """Leaves what is asserted of tensors to PyTorch on a GPU, whose kernels cannot raise, and where ``gm`` is not to be
    ``listed``: MAX's compiler drops unused values."""
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_async.msg):
        if not listed or node.all_input_nodes[0].meta["val"].device.type != "cpu":
            node.meta[_LEFT] = True


def unsupported_reason(node: Node, device: torch.device, constants: Container[Node] = ()) -> str | None:
    """Why MAX cannot run ``node``; None if it can. ``constants`` may be on any device."""
    if node in constants:
        return None
    registration = lookup(node.target)
    if registration is None and is_write_back(node):
        return None
    if registration is None:
        return "no lowering is registered for this op"
    for source in [*node.all_input_nodes, node]:
        for tensor in tensors_of(source.meta.get("val")) if source not in constants else ():
            # A number for a GPU's graph: each call reads it.
            number = source is not node and tensor.dim() == 0 and tensor.device.type == "cpu"
            reason = _tensor_reason(tensor, tensor.device if number else device)
            if reason is None and not number:
                reason = _other_device(tensor, device)
            if reason is not None:
                return reason
    return registration.supports(node) if registration and registration.supports else None


def _value_dependence(node: Node) -> str | None:
    """A reason if ``node`` depends on what is known only when it runs: a size that depends on values, or a number that
    differs in every call."""
    for source in (*node.all_input_nodes, node):
        for expression in _expressions(source):
            if free_unbacked_symbols(expression):
                return f"the size {expression} depends on values"
            if not all(symbol.is_integer for symbol in expression.free_symbols):
                return f"the number {expression} is known only when it runs"
    return None


def _other_device(tensor: torch.Tensor, device: torch.device) -> str | None:
    return None if tensor.device == device else f"a tensor on {tensor.device} in a graph on {device}"


def _tensor_reason(tensor: torch.Tensor, device: torch.device) -> str | None:
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout}"
    if tensor.dtype not in TORCH_TO_MAX:
        return f"MAX has no dtype for {tensor.dtype}"
    if tensor.device.type not in ("cpu", "cuda"):
        return f"MAX drives no device of type {tensor.device.type!r}"
    if tensor.dtype is torch.float64 and device.type != "cpu":
        return "float64 runs in MAX on the CPU only"
    return None


def unknown_sizes(gm: GraphModule) -> dict[Node, str]:
    """The nodes that need a size that ``gm``'s arguments do not determine, and the reasons.

    MAX binds a symbolic size where it is an extent of a tensor argument. A number handed over by itself tells it
    nothing, and an extent like s0 - 2 alone ends the process while MAX compiles. The results of a node that is found
    count as arguments: the graph will be cut there.
    """
    found: dict[Node, str] = {}
    known: set[sympy.Basic] = set()
    for node in gm.graph.find_nodes(op="placeholder"):
        if isinstance(node.meta.get("val"), torch.Tensor) and any(user.op != "output" for user in node.users):
            known |= {expression for expression in _expressions(node) if expression.is_Symbol}
    for node in gm.graph.nodes:
        if node.op != "call_function" or is_host_node(node) or is_write_back(node) or node.target is operator.getitem:
            continue
        for source in (*node.all_input_nodes, node):
            for expression in _expressions(source):
                # Numbers that are no sizes have symbols too, which are lowered or refused by themselves.
                if any(symbol.is_integer and symbol not in known for symbol in expression.free_symbols):
                    reason = f"the size {expression} cannot be told from the tensors that the graph is given"
                    found.setdefault(node, reason)
        if node in found:
            known |= {expression for expression in _expressions(node) if expression.is_Symbol}
    return found


def _expressions(node: Node) -> list[sympy.Basic]:
    """The symbolic extents of a node's tensors, or what it is if it is a number."""
    value = node.meta.get("val")
    sizes = [value, *(extent for tensor in tensors_of(value) for extent in tensor.shape)]
    return [size.node.expr for size in sizes if isinstance(size, (torch.SymInt, torch.SymFloat))]


def op_name(node: Node) -> str:
    """The op's qualified name, ``aten.convolution.default``."""
    target = node.target
    if isinstance(target, OpOverload):
        return str(target)
    return getattr(target, "__name__", str(target))


def describe_arguments(node: Node) -> str:
    """The arguments in words: tensors as dtype and shape."""
    parts = [_describe(arg) for arg in node.args]
    parts += [f"{name}={_describe(arg)}" for name, arg in node.kwargs.items()]
    return ", ".join(parts)


def _describe(arg: Any) -> str:
    if isinstance(arg, Node):
        value = arg.meta.get("val")
        if isinstance(value, torch.Tensor):
            name = str(value.dtype).removeprefix("torch.")
            where = "" if value.device.type == "cpu" else f" on {value.device}"
            return f"{name}[{', '.join(map(str, value.shape))}]{where}"
        return str(value)
    if isinstance(arg, (list, tuple)):
        return f"[{', '.join(_describe(item) for item in arg)}]"
    return repr(arg)


def unpacked(node: Node) -> Node:
    """The node that a ``getitem`` indexes."""
    whole = node.args[0]
    assert isinstance(whole, Node)
    return whole


class _Runs(OperatorSupportBase):
    def __init__(self, outside: Mapping[str, Any]) -> None:
        self.outside = outside

    def is_node_supported(self, submodules: Mapping[str, torch.nn.Module], node: Node) -> bool:
        if node.op != "call_function" or is_host_node(node) or is_write_back(node):
            return False
        if node.target is operator.getitem and not self.is_node_supported(submodules, unpacked(node)):
            return False
        return node.meta[ORIGIN] not in self.outside


def cut(gm: GraphModule, outside: Mapping[str, Any]) -> GraphModule:
    """A copy of ``gm`` in which maximal MAX-runnable partitions are submodules (``call_module`` nodes)."""
    graph = gm.graph.__class__()
    val_map: dict[Node, Node] = {}
    outputs = graph.graph_copy(gm.graph, val_map)
    graph.output(outputs)
    for node, twin in val_map.items():
        twin.meta = {**node.meta, ORIGIN: node.name}
    # Made of the finished graph, for only then it takes over the attributes that get_attr nodes name.
    copy = GraphModule(gm, graph)
    give_each_reader_its_own(copy)
    partitioner = CapabilityBasedPartitioner(copy, _Runs(outside), allows_single_node_partition=True)
    partitions = partitioner.propose_partitions()
    _keep_results_with_their_op(partitions)
    return partitioner.fuse_partitions([each for each in partitions if each.nodes])


def _keep_results_with_their_op(partitions: Sequence[Partition]) -> None:
    """Puts every ``getitem`` into the partition of the op that it unpacks: only tensors may cross a cut."""
    home = {node: partition for partition in partitions for node in partition.nodes}
    for partition in partitions:
        for node in list(partition.nodes):
            if node.target is operator.getitem and home.get(unpacked(node)) is not partition:
                partition.remove_node(node)
    for node, partition in home.items():
        for user in node.users:
            if user.target is operator.getitem and user not in partition.nodes:
                partition.add_node(user)
