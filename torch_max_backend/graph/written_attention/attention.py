"""Attention that a model writes out as products and a softmax becomes one op, forward and backward.

    softmax(scale * Q @ K.T + bias + mask) @ V

However a model spells it, an aten graph has two batched products, a softmax and, between them, views, casts, factors
and additions. The pass begins at a softmax and reads the graph upwards to the scores' product and downwards to the
values', then finds autograd's counterparts: its formulas of these few ops always look alike. All of it must be found,
and nothing else may read probabilities or scores; otherwise the graph stays as it was. A model that returns its
weights, and one with dropout of the weights, whose mask eager PyTorch draws for the whole matrix, keep their products.

What a bias's gradient is summed with stays in the graph: it reads the scores' gradient, which the backward op returns.
"""

from __future__ import annotations

import itertools
import math
import operator
from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule, Node

from torch_max_backend.custom_ops.attention import BACKWARD, FORWARD
from torch_max_backend.dtypes import FLOATS
from torch_max_backend.graph.written_attention.assignments import simplify_assignments
from torch_max_backend.graph.written_attention.attention_writer import BiasShape, Term, Writer
from torch_max_backend.graph.written_attention.matrices import (
    Matrices,
    Size,
    argument_of,
    factor_of,
    groups_of,
    is_cast,
    is_tensor,
    is_unit,
    keeps_order,
    last_view,
    matrices_of,
    same,
    shape_of,
    transposes,
)
from torch_max_backend.mojo_ops.functions import has_tensor_cores

aten, prims = torch.ops.aten, torch.ops.prims


#: Elements of a query, a key or a value that the kernels are made for.
_LONGEST = 128

#: Heads and batches that a GPU's kernels take.
_MAX_BLOCKS = (1 << 16) - 1


def fuse_attention(gm: GraphModule) -> GraphModule:
    """Replaces attention that is written out in a joint or an inference graph, where kernels are faster; ``gm`` is
    changed and returned."""
    softmaxes = gm.graph.find_nodes(op="call_function", target=aten._softmax.default)
    if softmaxes:
        simplify_assignments(gm)
    changed = False
    for softmax in softmaxes:
        try:
            match = _Match.of(softmax)
        except _NoMatchError:
            continue
        match.rewrite()
        changed = True
    if changed:
        gm.graph.eliminate_dead_code()
        gm.graph.lint()
        gm.recompile()
    return gm


class _NoMatchError(Exception):
    """The softmax belongs to no attention that kernels take, or to none that they are faster for."""


def _require(condition: object) -> None:
    if not condition:
        raise _NoMatchError


def _operand(node: object, *, turned: bool = False) -> Matrices:
    matrices = matrices_of(node, turned)
    _require(matrices is not None)
    assert matrices is not None
    return matrices


@dataclass
class _Scores:
    """scale * temperature * product + terms.

    Attributes:
        nodes: from the product to the softmax's argument.
        temperature: a tensor that has a number for each head, or for all, None without one.
        raw: what is multiplied with that.
    """

    product: Node
    scale: float = 1.0
    temperature: Term | None = None
    raw: Node | None = None
    nodes: list[Node] = field(default_factory=list)
    terms: list[Term] = field(default_factory=list)


def _scores(node: object) -> _Scores | None:
    """The scores that the node computes; None if it computes none."""
    if not is_tensor(node):
        return None
    assert isinstance(node, Node)
    if node.target is aten.bmm.default:
        return _Scores(node, nodes=[node])
    factor = factor_of(node)
    if factor is not None or keeps_order(node) or is_cast(node):
        found = _scores(node.args[0])
        if found is None:
            return None
        if factor is not None:
            found.scale *= factor
            found.terms = [term.times(factor) for term in found.terms]
        found.nodes.append(node)
        return found
    if node.target is aten.add.Tensor and not node.kwargs:
        for whole, term in (node.args[:2], node.args[1::-1]):
            # What is broadcast cannot be the scores, of which each query and key has its own.
            if not isinstance(whole, Node) or not isinstance(term, Node) or not is_tensor(whole) or not is_tensor(term):
                continue
            found = _scores(whole) if shape_of(whole) == shape_of(node) else None
            if found is not None:
                found.terms.append(Term(term, shape_of(node)))
                found.nodes.append(node)
                return found
    if node.target is aten.mul.Tensor and not node.kwargs:
        for whole, number in (node.args[:2], node.args[1::-1]):
            if not isinstance(whole, Node) or not isinstance(number, Node) or not is_tensor(number):
                continue
            found = _scores(whole) if is_tensor(whole) and shape_of(whole) == shape_of(node) else None
            if found is not None and not found.terms and found.temperature is None:
                found.temperature, found.raw = Term(number, shape_of(node)), whole
                found.nodes.append(node)
                return found
    return None


@dataclass
class _Read:
    """Who reads a node, its views and casts and, where that is asked for, their multiples.

    Attributes:
        nodes: all of these that are not multiplied with the temperature.
        left: products that have one as their left operand, and whether that is transposed.
        right: the same of the right operand.
        factors: what the node is multiplied with before it is a product's operand, or NaN where it is not multiplied
            with the temperature.
        others: the other readers.
    """

    nodes: set[Node] = field(default_factory=set)
    left: dict[Node, bool] = field(default_factory=dict)
    right: dict[Node, bool] = field(default_factory=dict)
    factors: dict[Node, float] = field(default_factory=dict)
    others: list[Node] = field(default_factory=list)

    @staticmethod
    def of(node: Node, rows: int, columns: int, *, multiples: bool = False, temperature: Node | None = None) -> _Read:
        read = _Read()
        warm: set[Node] = set()
        waiting = [(node, False, 1.0)]
        while waiting:
            at, turned, by = waiting.pop()
            if at not in warm:
                read.nodes.add(at)
            for user in at.users:
                factor = factor_of(user) if multiples else None
                if user.target is aten.bmm.default and user.args[0] is not user.args[1]:
                    side = read.left if user.args[0] is at else read.right
                    side[user] = turned
                    read.factors[user] = by if temperature is None or at in warm else math.nan
                    continue
                if at in warm:
                    warm.add(user)
                if user.op != "call_function" or not is_tensor(user):
                    read.others.append(user)
                elif keeps_order(user) or is_cast(user):
                    waiting.append((user, turned, by))
                elif transposes(user, *((columns, rows) if turned else (rows, columns))):
                    waiting.append((user, not turned, by))
                elif factor is not None:
                    waiting.append((user, turned, by * factor))
                elif temperature is not None and at not in warm and _multiplies(user, at, temperature):
                    warm.add(user)
                    waiting.append((user, turned, by))
                else:
                    read.others.append(user)
        return read


def _multiplies(node: Node, a: Node, b: Node) -> bool:
    """Whether the node is the product of two nodes, element by element."""
    return node.target is aten.mul.Tensor and not node.kwargs and node.args in ((a, b), (b, a))


@dataclass
class _Result:
    """A node that is replaced by a batch of matrices [rows, columns], or by their transposes."""

    node: Node
    rows: int
    columns: int
    turned: bool

    @staticmethod
    def of(node: Node, rows: int, columns: int, turned: bool) -> _Result:
        """The last view of a node with these matrices, or their transposes, that is all anybody sees of it."""
        last, again = last_view(node, *((columns, rows) if turned else (rows, columns)))
        return _Result(last, rows, columns, turned is not again)

    def multiple(self, factor: float) -> _Result | None:
        """Its product with a number, if that is all anybody sees of it."""
        (user, *others) = self.node.users
        if others or factor_of(user) != factor:
            return None
        return _Result.of(user, self.rows, self.columns, self.turned)


@dataclass
class _Backward:
    """Autograd's counterpart.

    Attributes:
        grad: the output's gradient [M, E].
        first: the first node that computes with it.
        query: what is replaced by the gradient of the queries, None where none is wanted.
        key: the same of the keys.
        value: the same of the values.
        scores: the node that is the scores' gradient.
        scores_wanted: whether anything but these gradients is computed of it.
        temperature: the node that is the temperature's gradient, None where none is wanted.
    """

    grad: Matrices
    first: Node
    query: _Result | None
    key: _Result | None
    value: _Result | None
    scores: Node
    scores_wanted: bool = False
    temperature: Node | None = None


@dataclass
class _Match:
    """One attention.

    Attributes:
        product: that of probabilities and values.
        query: [M, D], like key [N, D] and value [N, E] as a product reads it.
        batch: of the op's operands, with the number of heads.
        bias: the dimensions of its bias, None without one.
        temperature: the same of the temperature.
    """

    softmax: Node
    scores: _Scores
    product: Node
    output: _Result
    query: Matrices
    key: Matrices
    value: Matrices
    backward: _Backward | None
    batch: tuple[Size, int] = (0, 0)
    bias: BiasShape | None = None
    temperature: BiasShape | None = None

    @staticmethod
    def of(softmax: Node) -> _Match:
        """Raises _NoMatchError where the softmax is no part of one."""
        x, dim, _ = softmax.args
        assert isinstance(x, Node) and isinstance(dim, int)
        rank = len(shape_of(x))
        _require(rank >= 2 and dim % rank == rank - 1)
        scores = _scores(x)
        _require(scores is not None)
        assert scores is not None
        query, key = _operand(scores.product.args[0]), _operand(scores.product.args[1], turned=True)
        rows, columns = query.rows, key.rows
        chain = [*scores.nodes, softmax]
        _require(min(rows, columns, query.columns) > 0 and all(groups_of(shape_of(n), rows, columns) for n in chain))
        # Autograd multiplies scores with their gradient for the temperature's.
        for node, reader in itertools.pairwise(chain):
            _require(reader in node.users and len(node.users) <= (2 if node is scores.raw else 1))
        read = _Read.of(softmax, rows, columns)
        forward = [(node, False) for node, turned in read.left.items() if not turned]
        forward += [(node, True) for node, turned in read.right.items() if turned]
        _require(len(forward) == 1)
        ((product, turned),) = forward
        value = _operand(product.args[0], turned=True) if turned else _operand(product.args[1])
        _require(value.rows == columns and value.columns > 0)
        output = _Result.of(product, rows, value.columns, turned)
        match = _Match(softmax, scores, product, output, query, key, value, None)
        match.find_backward(read, turned)
        match.fold_factors()
        match.decide()
        return match

    def find_backward(self, read: _Read, turned: bool) -> None:
        """Finds autograd's products; with ``turned`` the forward product is V^T P^T."""
        rows, columns = self.query.rows, self.key.rows
        of_value = [node for node, other in read.left.items() if other]
        of_value += [node for node, other in read.right.items() if not other]
        if not read.others:
            _require(not of_value and (self.scores.raw is None or len(self.scores.raw.users) == 1))
            return
        _require(len(read.others) == 1 and len(of_value) <= 1)
        (slopes,) = read.others
        _require(slopes.target is aten._softmax_backward_data.default)
        incoming, probabilities = slopes.args[:2]
        _require(probabilities in read.nodes and incoming not in read.nodes and is_tensor(incoming))
        assert isinstance(incoming, Node)
        # dP = dO V^T, or its transpose V dO^T.
        at = Matrices(incoming, rows, columns)
        while is_cast(at.root()[0]):
            node, flag = at.root()
            at = Matrices(argument_of(node), rows, columns, flag)
        first, flag = at.root()
        _require(first.target is aten.bmm.default and flag is turned)
        if turned:
            grad, value = _operand(first.args[1], turned=True), _operand(first.args[0])
        else:
            grad, value = _operand(first.args[0]), _operand(first.args[1], turned=True)
        _require(same(value, self.value) and (grad.rows, grad.columns) == (rows, value.columns))
        self.backward = _Backward(grad, first, None, None, None, slopes)
        # dV = P^T dO, or its transpose dO^T P.
        for product in of_value:
            flag = product in read.right
            _require(same(_operand(product.args[0], turned=True) if flag else _operand(product.args[1]), grad))
            self.backward.value = _Result.of(product, columns, value.columns, flag)
        temperature = self.scores.temperature
        number = None if temperature is None else temperature.node
        read = _Read.of(slopes, rows, columns, multiples=True, temperature=number)
        self.find_gradient_of_temperature(self.backward, read)
        self.find_gradients_of_scores(self.backward, read)

    def find_gradient_of_temperature(self, backward: _Backward, read: _Read) -> None:
        """sum(dS * scores), which is sum(dQ * Q) for the queries that the temperature is multiplied with."""
        raw, temperature = self.scores.raw, self.scores.temperature
        if raw is None or temperature is None or len(raw.users) == 1:
            return
        products = [node for node in read.others if any(_multiplies(node, at, raw) for at in read.nodes)]
        _require(len(products) == 1 and len(products[0].users) == 1)
        (total,) = products[0].users
        _require(total.target is aten.sum.dim_IntList)
        _require(math.prod(shape_of(total)) == math.prod(shape_of(temperature.node)))
        read.others.remove(products[0])
        backward.temperature = total

    def find_gradients_of_scores(self, backward: _Backward, read: _Read) -> None:
        """dQ = scale * dS K and dK = scale * dS^T Q, or its transpose."""
        query, key = self.query, self.key
        for product in (*read.left, *read.right):
            _require(math.isclose(read.factors[product], self.scores.scale, rel_tol=1e-12))
            if product in read.right:
                _require(not read.right[product] and same(_operand(product.args[0], turned=True), query))
                _require(backward.key is None)
                backward.key = _Result.of(product, key.rows, key.columns, True)
            elif read.left[product]:
                _require(backward.key is None and same(_operand(product.args[1]), query))
                backward.key = _Result.of(product, key.rows, key.columns, False)
            else:
                _require(backward.query is None and same(_operand(product.args[1]), key))
                backward.query = _Result.of(product, query.rows, query.columns, False)
        backward.scores_wanted = bool(read.others)
        # Without a bias nothing but queries and keys has a gradient.
        _require(self.scores.terms or not read.others)

    def fold_factors(self) -> None:
        """Takes numbers that queries or keys are multiplied with into the scale."""
        backward = self.backward
        for name in ("query", "key"):
            while True:
                operand: Matrices = getattr(self, name)
                node, turned = operand.root()
                factor = factor_of(node)
                if factor is None:
                    break
                if backward is not None and (result := getattr(backward, name)) is not None:
                    multiple = result.multiple(factor)
                    if multiple is None:
                        break
                    setattr(backward, name, multiple)
                setattr(self, name, Matrices(argument_of(node), operand.rows, operand.columns, turned))
                self.scores.scale *= factor

    def decide(self) -> None:
        """Raises _NoMatchError unless kernels take the operands and are faster than products and a softmax."""
        operands = [each.node.meta["val"] for each in (self.query, self.key, self.value)]
        dtype, device = operands[0].dtype, operands[0].device
        _require(all((each.dtype, each.device) == (dtype, device) for each in operands) and dtype in FLOATS)
        temperature = self.scores.temperature
        for term in (*self.scores.terms, *([temperature] if temperature else [])):
            fake = term.node.meta["val"]
            _require(fake.device == device and fake.dtype in (dtype, torch.float32, torch.bfloat16, torch.float16))
        self.find_batch()
        if self.scores.terms:
            self.bias = BiasShape.of(self.scores.terms, self.batch, self.query.rows, self.key.rows)
            _require(self.bias is not None)
        if temperature is not None:
            self.temperature = BiasShape.of([temperature], self.batch, self.query.rows, self.key.rows)
            _require(self.temperature is not None)
            assert self.temperature is not None
            batches, _, *inside = self.temperature.sizes_of(temperature)
            _require([batches, *inside] == [1, 1, 1])
        # A size that is known at run time can be left to a view once.
        shapes = [shape_of(result.node) for result in self._results()]
        _require(all(sum(not isinstance(size, int) for size in shape) < 2 for shape in shapes))
        sizes = self.query.columns, self.value.columns
        _require(max(sizes) <= _LONGEST)
        if device.type == "cpu":
            return
        _require(not any(isinstance(size, int) and size > _MAX_BLOCKS for size in self.batch))
        if dtype == torch.float32:
            # The kernels multiply exactly; products that may round to TF32 run on tensor cores.
            _require(torch.get_float32_matmul_precision() == "highest")
        else:
            _require(dtype != torch.float64 and has_tensor_cores() and not any(size % 8 for size in sizes))

    def _results(self) -> list[_Result]:
        backward = self.backward
        found = [backward.query, backward.key, backward.value] if backward else []
        return [self.output, *(result for result in found if result is not None)]

    def find_batch(self) -> None:
        """Tells heads, the innermost of several dimensions, from batches."""
        batch = self.query.source().batch()
        heads = batch[-1] if len(batch) > 1 else 1
        for term in self.scores.terms if len(batch) == 1 else ():
            groups = groups_of(term.shape, self.query.rows, self.key.rows)
            inner = [term.shape[dim] for dim in groups[0] if not is_unit(term.shape[dim])] if groups else []
            if len(inner) > 1:
                heads = inner[-1]
                break
        _require(isinstance(heads, int))
        assert isinstance(heads, int)
        self.batch = math.prod(batch) // heads, heads

    def rewrite(self) -> None:
        """Puts the op in the place of the product with the values, and the backward op in that of autograd's nodes."""
        scale, backward = self.scores.scale, self.backward
        new = Writer(self.product, self.batch)
        operands = [new.rows(each.source()) for each in (self.query, self.key, self.value)]
        bias = new.bias(self.scores.terms, self.bias) if self.bias else None
        plain, by = operands[0], None
        if self.scores.temperature is not None and self.temperature is not None:
            by = new.total([self.scores.temperature], self.temperature)
            operands[0] = new.product(plain, by)
        called = new.call(FORWARD, *operands, bias, scale)
        output, sums = (new.call(operator.getitem, called, number) for number in range(2))
        self._replace(new, self.output, output)
        if backward is None:
            return
        new = Writer(backward.first, self.batch)
        grad = new.rows(backward.grad.source())
        wanted = backward.scores_wanted
        called = new.call(BACKWARD, grad, *operands, bias, output, sums, scale, wanted)
        of_query = new.call(operator.getitem, called, 0)
        if backward.query is not None:
            self._replace(new, backward.query, of_query if by is None else new.product(of_query, by))
        if backward.temperature is not None:
            total = new.sum_of_products(plain, of_query, backward.temperature.meta["val"])
            backward.temperature.replace_all_uses_with(total)
        results = [None, backward.key, backward.value]
        if wanted:
            results.append(_Result.of(backward.scores, self.query.rows, self.key.rows, False))
        for number, result in enumerate(results):
            if result is not None:
                self._replace(new, result, new.call(operator.getitem, called, number))

    @staticmethod
    def _replace(new: Writer, result: _Result, made: Node) -> None:
        """Puts ``made`` [B, H, rows, columns] in the place of a node."""
        value = new.call(aten.permute.default, made, [0, 1, 3, 2]) if result.turned else made
        fake = result.node.meta["val"]
        value = new.restrided(new.cast(new.view(value, fake.shape), fake.dtype), fake)
        result.node.replace_all_uses_with(value)
