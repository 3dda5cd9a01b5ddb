"""Random ops: drawn by PyTorch before the MAX graph runs, so that a seed gives what eager gives.

What an op like ``rand_like`` or dropout's mask draws depends on shapes only. Such an op is replaced by a draw that
has no tensor input: it runs first, in the model's order, and its result enters the MAX graph as an argument.
The graph is not cut. Only ops whose distribution depends on data, and attention that draws inside PyTorch's kernel,
stay where they are, in PyTorch. A draw behind one of these waits for it, for the generator's state would advance in
another order.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node

from torch_max_backend.torch_compat import FloorDiv, OpOverload, graph_root, schema_of

aten = torch.ops.aten

DRAWN = "torch_max_backend_drawn"
"""In a placeholder's ``meta``: its tensors are draws."""
ORIGIN = "torch_max_backend_origin"
"""In a copied node's ``meta``: the name of the node that it is a copy of."""


def draw(
    op: Callable[..., Any],
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    *args: Any,
    after: Any = None,
    **kwargs: Any,
) -> torch.Tensor:
    """What ``op(x, *args, **kwargs)`` draws for any ``x`` of this shape, stride, dtype and device; ``after`` is the
    result of what draws before."""
    like = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    if op is aten.native_dropout.default:
        # On a CPU numbers near zero, which memory may hold, are slow to multiply.
        mask = op(like.zero_() if device.type == "cpu" else like, *args, **kwargs)[1]
        # Of an empty tensor PyTorch makes one in the tensor's dtype.
        return mask.to(torch.bool)
    return op(like, *args, **kwargs)


def drawn_after(op: Callable[..., Any], *args: Any, after: Any, **kwargs: Any) -> torch.Tensor:
    """The draw of ``op(*args, **kwargs)``; ``after`` is the result of the draw before it."""
    return op(*args, **kwargs)


#: Ops whose first argument only tells shape, dtype, device and memory format.
_LIKE = {
    aten.bernoulli.p,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.randint_like.default,
    aten.randint_like.low_dtype,
    aten.rand_like.generator,
    aten.randn_like.generator,
    aten.randint_like.generator,
    aten.randint_like.low_generator_dtype,
    aten.native_dropout.default,
    aten.uniform.default,
    aten.normal_functional.default,
    aten.exponential.default,
    aten.log_normal.default,
    aten.geometric.default,
    aten.cauchy.default,
}
#: Ops without a tensor argument.
_FROM_SHAPE = {
    aten.rand.default,
    aten.randn.default,
    aten.randint.default,
    aten.randint.low,
    aten.randperm.default,
    aten.normal.float_float,
    aten.rand.generator,
    aten.randn.generator,
    aten.randint.generator,
    aten.randint.low_generator,
    aten.randperm.generator,
}


def is_random(node: Node) -> bool:
    """Whether the node draws from a generator. An attention without dropout draws nothing."""
    target = node.target
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    names = [argument.name for argument in schema_of(target).arguments]
    if "dropout_p" not in names:
        return True
    position = names.index("dropout_p")
    given: Any = node.args[position] if position < len(node.args) else node.kwargs.get("dropout_p", 0.0)
    return bool(given != 0.0)


def is_draw(node: Node) -> bool:
    """Whether the node is a draw that depends on nothing in the graph."""
    return node.target in (draw, drawn_after) or (node.target in _FROM_SHAPE and _is_concrete(node))


@dataclass(frozen=True)
class Draw:
    """A draw that a graph makes before it runs: a function of no tensor, with its arguments."""

    function: Callable[..., torch.Tensor]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def recordable(self) -> bool:
        """Whether a device graph can hold it: its kernels alone, and PyTorch's own generator."""
        op = self.function if self.function in _FROM_SHAPE else self.args[0]
        generators = any(isinstance(given, torch.Generator) for given in (*self.args, *self.kwargs.values()))
        # A permutation is sorted, for which the host waits.
        return not generators and op not in (aten.randperm.default, aten.randperm.generator)

    def __call__(self) -> torch.Tensor:
        """Draws, from PyTorch's generator."""
        return self.function(*self.args, **self.kwargs)


def take_draws(gm: GraphModule) -> tuple[GraphModule, tuple[Draw, ...]]:
    """A copy of ``gm`` that gets what it draws as its last arguments, and the draws.

    Args:
        gm: whose draws stand at its front (``hoist_draws``) and depend on no size.
    """
    graph, twins, draws = gm.graph.__class__(), dict[Node, Node](), list[Draw]()
    for node in gm.graph.nodes:
        if is_draw(node):
            draws.append(Draw(node.target, tuple(node.args), dict(node.kwargs)))
            twin = graph.placeholder(node.name)
        else:
            twin = graph.node_copy(node, twins.__getitem__)
        twin.meta = {**node.meta, ORIGIN: node.name, DRAWN: is_draw(node)}
        twins[node] = twin
    return GraphModule(gm, graph), tuple(draws)


def hoist_draws(gm: GraphModule) -> GraphModule:
    """Replaces shape-only random ops by draws at the front of the graph, or behind the last random op that stays;
    ``gm`` is changed and returned."""
    graph = gm.graph
    # Every draw goes behind the one before it; the first behind the arguments.
    last = next((node for node in reversed(graph.nodes) if node.op == "placeholder"), graph_root(graph))
    # What a draw waits for; where a graph is cut, nothing else keeps their order.
    before: dict[str, Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or not is_random(node):
            continue
        if node.target in _FROM_SHAPE and _is_concrete(node):
            if node.prev is not last:
                last.append(node)
            if before:
                node.args, node.kwargs = (node.target, *node.args), {**node.kwargs, "after": before["after"]}
                node.target = drawn_after
                before["after"] = node
            last = node
            continue
        if node.target is aten.native_dropout.default and node.args[2] is False:
            continue
        sizes = _Sizes(gm, last)
        extents = _extents(node, sizes) if node.target in _LIKE and _is_drawn_alike(node) else None
        if extents is None:
            last = before["after"] = node
            continue
        last = _replace_by_draw(node, sizes.last, *extents, before)
        if before:
            before["after"] = last
    graph.eliminate_dead_code()
    graph.lint()
    gm.recompile()
    return gm


def _extents(node: Node, sizes: _Sizes) -> tuple[tuple[int | Node, ...], tuple[int | Node, ...]] | None:
    """Shape and strides of the node's first argument; None where they cannot be known before the graph runs."""
    source = node.args[0]
    assert isinstance(source, Node)
    fake = source.meta["val"]
    try:
        return tuple(map(sizes.of, fake.shape)), tuple(map(sizes.of, fake.stride()))
    except _NoSizeError:
        return None


def _is_concrete(node: Node) -> bool:
    """Whether all arguments of an op without tensors are known."""
    return not any(map(_holds_node, (*node.args, *node.kwargs.values())))


def _is_drawn_alike(node: Node) -> bool:
    """Nothing but the first argument, a tensor, is computed."""
    return isinstance(node.args[0], Node) and not any(map(_holds_node, (*node.args[1:], *node.kwargs.values())))


class _NoSizeError(Exception):
    """A size that no argument of the graph tells."""


class _Sizes:
    """Sizes as arguments of a draw: numbers, or nodes that compute them of the sizes that the graph is given.

    Args:
        gm: the graph.
        last: the node behind which nodes are added; it moves with them.
    """

    def __init__(self, gm: GraphModule, last: Node) -> None:
        self._graph = gm.graph
        self.last = last
        self._given: dict[sympy.Basic, Node] = {}
        for node in gm.graph.find_nodes(op="placeholder"):
            if isinstance(node.meta.get("val"), torch.SymInt):
                self._given.setdefault(node.meta["val"].node.expr, node)

    def of(self, size: int | torch.SymInt) -> int | Node:
        """A size.

        Raises:
            _NoSizeError: it depends on what the graph is not given, or in a way that is not known here.
        """
        return size if isinstance(size, int) else self._of(size.node.expr)

    def _of(self, expression: sympy.Basic) -> int | Node:
        if expression.is_Integer:
            return int(expression)
        if expression in self._given:
            return self._given[expression]
        function = _ARITHMETIC.get(type(expression))
        if function is None:
            raise _NoSizeError
        return functools.reduce(lambda a, b: self._call(function, a, b), map(self._of, expression.args))

    def _call(self, function: Callable[..., Any], a: int | Node, b: int | Node) -> Node:
        with self._graph.inserting_after(self.last):
            node = self._graph.call_function(function, (a, b))
        node.meta["val"] = function(*(arg.meta["val"] if isinstance(arg, Node) else arg for arg in (a, b)))
        self.last = node
        return node


#: What sizes are made with.
_ARITHMETIC: dict[type[sympy.Basic], Callable[..., Any]] = {
    sympy.Add: operator.add,
    sympy.Mul: operator.mul,
    FloorDiv: operator.floordiv,
}


def _holds_node(arg: Any) -> bool:
    if isinstance(arg, (tuple, list)):
        return any(_holds_node(item) for item in arg)
    return isinstance(arg, (Node, torch.SymInt, torch.SymFloat))


def _replace_by_draw(
    node: Node, last: Node, shape: tuple[int | Node, ...], stride: tuple[int | Node, ...], before: Mapping[str, Node]
) -> Node:
    """Puts the draw for ``node``, with the shape and the strides of its argument, behind ``last`` and returns it."""
    graph = node.graph
    source = node.args[0]
    fake = source.meta["val"]
    arguments = (
        node.target,
        shape,
        stride,
        fake.dtype,
        fake.device,
        *node.args[1:],
    )
    with graph.inserting_after(last):
        drawn = graph.call_function(draw, arguments, {**node.kwargs, **before})
    drawn.meta = dict(node.meta)
    if node.target is not aten.native_dropout.default:
        node.replace_all_uses_with(drawn)
        graph.erase_node(node)
        return drawn
    drawn.meta["val"] = node.meta["val"][1]
    write_out_dropout(node, drawn)
    return drawn


def write_out_dropout(node: Node, mask: Node) -> None:
    """Computes the result of a ``native_dropout`` from its mask, elementwise; ``mask`` stands for both.

    The node goes unless ``mask`` is one of its results.
    """
    graph, source = node.graph, node.args[0]
    result = node.meta["val"][0]
    given: Any = node.args[1]
    probability = float(given)
    scale = 0.0 if probability == 1.0 else 1.0 / (1.0 - probability)
    readers = [user for user in node.users if user is not mask]
    with graph.inserting_before(mask.next if mask in node.users else node):
        kept = graph.call_function(aten.mul.Tensor, (source, mask))
        scaled = graph.call_function(aten.mul.Tensor, (kept, scale))
    for added in (kept, scaled):
        added.meta = {**node.meta, "val": result}
    for user in readers:
        user.replace_all_uses_with(scaled if user.args[1] == 0 else mask)
        graph.erase_node(user)
    if not node.users:
        graph.erase_node(node)
