"""Keeps less for the backward pass than the partitioner chose: values are computed again shortly before they are read.

PyTorch's partitioner, asked for less by ``activation_memory_budget``, computes whole chains of values again at the
beginning of the backward pass, where they then live as long as saved ones would: what it saves falls, the peak may not.
Here a value that would be saved is computed from others that are, or from arguments, just before its first reader. What
it needs of values that are computed again themselves, elementwise, is part of the same program and is not kept for
later. The cheapest bytes go first, and no more than are asked for.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from torch_max_backend.custom_ops.attention import BACKWARD
from torch_max_backend.graph.builder import tensors_of
from torch_max_backend.graph.compiled import outputs_of
from torch_max_backend.graph.random import is_random
from torch_max_backend.graph.views import is_view, whole_of
from torch_max_backend.torch_compat import OpOverload, schema_of

aten = torch.ops.aten

_LONGEST_CHAIN = 4
"""Values computed again of which each needs the one before it."""
_MAX_NODES = 64
"""The most nodes that recompute one value."""
_MIN_SHARE = 2**-10
"""The share of all kept bytes below which a value stays."""
_BYTES_PER_SECOND, _FLOPS_PER_SECOND = 3.3e12, 4e14
"""Those of an H100; only their ratio matters, which is similar on other devices."""
_MOVES = (aten._to_copy.default, aten.cat.default, aten.constant_pad_nd.default, operator.getitem)
_ROWS = (aten.native_layer_norm.default, aten.native_group_norm.default)
_PRODUCTS = (aten.convolution.default, aten.mm.default, aten.addmm.default, aten.bmm.default)
_ATTENTION_GRADIENTS = (
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
    BACKWARD,
)


@dataclass(frozen=True)
class _Recomputation:
    """The way in which a value is recomputed.

    Attributes:
        nodes: in their order; the last one is the value.
        sources: kept values and arguments that they read.
        seconds: about how long it takes.
    """

    nodes: tuple[Node, ...]
    sources: tuple[Node, ...]
    seconds: float

    @property
    def elementwise(self) -> bool:
        """Whether one program can compute it."""
        return not any(node.target in _PRODUCTS or node.target in _ROWS for node in self.nodes)


def keep_less(forward: GraphModule, backward: GraphModule, results: int, budget: float) -> bool:
    """Lets the forward graph keep at most ``budget`` of the bytes that it keeps now.

    With a budget of 1 only views that would be copies are no longer kept. Random draws, and what a checkpoint's policy
    wants kept, stay.

    Args:
        forward: a forward graph of known sizes.
        backward: its backward graph; its first arguments are what the forward graph keeps.
        results: how many of the forward graph's outputs are no such values.
        budget: from 0 to 1.

    Returns:
        Whether that is possible. Otherwise both graphs stay as they were.
    """
    outputs = list(outputs_of(forward))
    kept = outputs[results:]
    arguments = backward.graph.find_nodes(op="placeholder")
    if not all(_is_known(node) for node in kept) or [node.name for node in kept] != _names(arguments[: len(kept)]):
        return False
    free = {node for node in outputs[:results] if isinstance(node, Node)}
    sizes = {node: 0 if node.op == "placeholder" or node in free else _bytes(node) for node in kept}
    bases = _bases_of_views(sizes, dict(zip(kept, arguments, strict=False)))
    chosen = _chosen({**sizes, **bases}, budget)
    if chosen is None:
        return False
    if chosen:
        _apply(forward, backward, results, list(bases), chosen)
    return True


def _names(nodes: Sequence[Node]) -> list[str]:
    return [node.name for node in nodes]


def _is_known(value: Any) -> bool:
    """Whether an output is a tensor of known sizes."""
    if not isinstance(value, Node) or not isinstance(value.meta.get("val"), torch.Tensor):
        return False
    return all(isinstance(size, int) for size in value.meta["val"].shape)


def _bytes(node: Node) -> int:
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors_of(node.meta.get("val")))


def _bases_of_views(sizes: dict[Node, int], twins: dict[Node, Node]) -> dict[Node, int]:
    """The bases of several kept views, where a base itself is not kept, with their bytes.

    A part would have to be copied out of it in both passes, but for attention, which reads it where it lies
    (``fusion/attention.py``).
    """
    views: dict[Node, list[Node]] = {}
    for node in sizes:
        base = whole_of(node)
        if base is not node and base.op == "call_function" and _is_known(base):
            views.setdefault(base, []).append(node)
    found = {base: (_bytes(base), nodes) for base, nodes in views.items() if len(nodes) > 1 and base not in sizes}
    return {
        base: size
        for base, (size, nodes) in found.items()
        if all(sizes[node] == size for node in nodes)
        or (sum(sizes[node] for node in nodes) == size and all(_is_for_attention(twins[node]) for node in nodes))
    }


def _is_for_attention(argument: Node) -> bool:
    """Whether attention's gradients alone read it."""
    return all(reader.target in _ATTENTION_GRADIENTS for reader in argument.users)


def _chosen(sizes: dict[Node, int], budget: float) -> dict[Node, _Recomputation] | None:
    """The values to recompute so that at most ``budget`` of the bytes are kept; None if that is not enough.

    Views cost nothing, and are not kept beside what they are views of in any case: they would be copies.
    """
    total = sum(sizes.values())
    ways = {node: _again(node, sizes) for node, size in sizes.items() if size > total * _MIN_SHARE}
    known = {node: way for node, way in ways.items() if way is not None}
    chosen = {node: way for node, way in known.items() if not way.seconds}
    total -= sum(sizes[node] for node in chosen)
    wanted = budget * total
    costly = [node for node in known if node not in chosen]
    for node in sorted(costly, key=lambda node: (known[node].seconds / sizes[node], -sizes[node])):
        if total <= wanted:
            break
        trial = {**chosen, node: known[node]}
        depths: dict[Node, int] = {}
        if max(_depth(each, trial, depths) for each in trial) <= _LONGEST_CHAIN:
            chosen, total = trial, total - sizes[node]
    return chosen if total <= wanted else None


def _depth(node: Node, chosen: dict[Node, _Recomputation], depths: dict[Node, int]) -> int:
    """The number of values that are recomputed one after the other up to ``node``."""
    if node not in chosen:
        return 0
    if node not in depths:
        depths[node] = 1 + max((_depth(source, chosen, depths) for source in chosen[node].sources), default=0)
    return depths[node]


def _again(value: Node, kept: dict[Node, int]) -> _Recomputation | None:
    """How ``value`` can be computed from kept values and arguments; None where it cannot."""
    nodes: set[Node] = set()
    sources: dict[Node, None] = {}
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if node is not value and (node in kept or node.op == "placeholder"):
            if not _is_known(node):
                return None
            sources[node] = None
        elif node not in nodes:
            if not _can_run_again(node) or len(nodes) >= _MAX_NODES:
                return None
            nodes.add(node)
            waiting += node.all_input_nodes
    order = tuple(sorted(nodes))
    return _Recomputation(order, tuple(sources), _seconds(value, order, list(sources)))


def _can_run_again(node: Node) -> bool:
    target = node.target
    if node.op != "call_function" or node.meta.get("recompute") == CheckpointPolicy.MUST_SAVE:
        return False
    if target in _MOVES or target in _ROWS or target in _PRODUCTS:
        return True
    if not isinstance(target, OpOverload) or is_random(node) or schema_of(target).is_mutable:
        return False
    return is_view(node) or torch.Tag.pointwise in target.tags


def _seconds(value: Node, nodes: Sequence[Node], sources: Sequence[Node]) -> float:
    """Elementwise work reads the sources and writes the value; products and rows stand by themselves."""
    if all(map(is_view, nodes)):
        return 0.0
    moved = sum(map(_bytes, sources)) + _bytes(value)
    operations = 0.0
    for node in nodes:
        if node.target in _PRODUCTS or node.target in _ROWS:
            moved += _bytes(node) + sum(map(_bytes, node.all_input_nodes))
            operations += _operations(node)
    return moved / _BYTES_PER_SECOND + operations / _FLOPS_PER_SECOND


def _operations(node: Node) -> float:
    """Multiplications and additions of a product."""
    if node.target not in _PRODUCTS:
        return 0.0
    result = node.meta["val"]
    if node.target is aten.convolution.default:
        weight, transposed = node.all_input_nodes[1].meta["val"], node.args[6]
        return 2.0 * result.numel() * weight.numel() / max(1, weight.shape[1 if transposed else 0])
    a = node.all_input_nodes[1 if node.target is aten.addmm.default else 0].meta["val"]
    return 2.0 * result.numel() * a.shape[-1]


def _apply(
    forward: GraphModule, backward: GraphModule, results: int, bases: Sequence[Node], chosen: dict[Node, _Recomputation]
) -> None:
    """Computes the chosen values in the backward graph, which is given ``bases`` and the arguments that this needs."""
    output = forward.graph.output_node()
    outputs = list(outputs_of(forward))
    kept = outputs[results:]
    arguments = backward.graph.find_nodes(op="placeholder")
    twins: dict[Node, Node] = dict(zip(kept, arguments, strict=False))
    removed = {twins.pop(node): node for node in chosen if node in twins}
    sources = (source for way in chosen.values() for source in way.sources)
    given = (node for node in sources if node.op == "placeholder" or (node in bases and node not in chosen))
    added = [node for node in dict.fromkeys(given) if node not in twins]
    with backward.graph.inserting_before(arguments[0]):
        for node in added:
            twins[node] = backward.graph.placeholder(node.name)
            twins[node].meta = dict(node.meta)

    def compute(value: Node, before: Node) -> Node:
        found: dict[Node, Node] = {}
        for source in chosen[value].sources:
            if source in twins:
                found[source] = twins[source]
            else:
                found[source] = compute(source, before)
                if not chosen[source].elementwise:
                    twins[source] = found[source]
        with backward.graph.inserting_before(before):
            for node in chosen[value].nodes:
                found[node] = backward.graph.node_copy(node, found.__getitem__)
                found[node].meta["autograd_backward"] = True
        return found[value]

    for reader in list(backward.graph.nodes):
        for argument in reader.all_input_nodes:
            value = removed.get(argument)
            if value is not None:
                if value not in twins:
                    twins[value] = compute(value, reader)
                reader.replace_input_with(argument, twins[value])
    for argument in removed:
        backward.graph.erase_node(argument)
    left = [node for node in kept if node not in chosen]
    output.args = ((*outputs[:results], *added, *left),)
    _describe(output, results, len(added) + len(left))
    for graph in (forward, backward):
        graph.graph.lint()
        graph.recompile()


def _describe(output: Node, results: int, kept: int) -> None:
    """AOTAutograd describes each output."""
    described = output.meta.get("desc")
    if isinstance(described, (list, tuple)):
        output.meta["desc"] = [*described[:results], *described[results : results + kept]]
