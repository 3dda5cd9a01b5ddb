"""Writes the attention operator into an FX graph: views of its operands, and its bias as one tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from torch_max_backend.graph.calls import add_call
from torch_max_backend.graph.written_attention.matrices import Matrices, Size, groups_of, is_unit, shape_of

aten, prims = torch.ops.aten, torch.ops.prims

#: Finite numbers of a bias stay finite in units of log(2), in which a GPU's kernels count.
_LOWEST = -1e37


@dataclass(frozen=True)
class Term:
    """An addend of the scores.

    Attributes:
        shape: of the scores that it is added to.
        factor: what it is multiplied with.
    """

    node: Node
    shape: Sequence[Size]
    factor: float = 1.0

    def times(self, factor: float) -> Term:
        """A multiple."""
        return replace(self, factor=self.factor * factor)


@dataclass(frozen=True)
class BiasShape:
    """The dimensions in which terms of scores are added up: those of all the terms' sums, split until they agree.

    Attributes:
        groups: extents of batches, heads, rows and columns; only the first batches may have an unknown extent.
    """

    groups: tuple[list[Size], ...]

    @staticmethod
    def of(terms: Sequence[Term], batch: tuple[Size, int], rows: int, columns: int) -> BiasShape | None:
        """None where the terms' dimensions do not fit together."""
        split = [groups_of(term.shape, rows, columns) for term in terms]
        extents = [
            [[term.shape[dim] for dim in dims] for dims in groups]
            for term, groups in zip(terms, split, strict=True)
            if groups is not None
        ]
        if len(extents) != len(terms):
            return None
        batches, heads = batch
        cuts = [set().union(*map(_cuts, each)) for each in zip(*extents, strict=True)]
        cuts[0] |= {heads} - {1}
        parts = [_parts(size, each) for size, each in zip((batches * heads, rows, columns), cuts, strict=True)]
        if any(part is None for part in parts):
            return None
        whole, of_rows, of_columns = parts
        assert whole is not None and of_rows is not None and of_columns is not None
        count = next((n for n in range(len(whole)) if math.prod(whole[n:]) == heads), len(whole))
        return BiasShape((whole[:count], whole[count:], of_rows, of_columns))

    def of_term(self, term: Term) -> list[Size]:
        """A term's extents in these dimensions."""
        own = [1] * (len(term.shape) - len(shape_of(term.node))) + list(shape_of(term.node))
        found: list[Size] = []
        parts = [part for group in self.groups for part in group]
        for size, extent in zip(reversed(term.shape), reversed(own), strict=True):
            if is_unit(size):
                continue
            covered: list[Size] = []
            while parts and (not isinstance(size, int) or math.prod(covered) != size):
                covered.insert(0, parts.pop())
            found = [*([1] * len(covered) if is_unit(extent) else covered), *found]
        return [*[1] * len(parts), *found]

    def sizes_of(self, term: Term) -> list[Size]:
        """A term's extents in four dimensions."""
        return self.whole(self.of_term(term))[1]

    def whole(self, extents: Sequence[Size]) -> tuple[list[Size], list[Size]]:
        """Of a sum with these extents: what it is spread to, so that it has four dimensions, and these.

        Batches before the first in which it differs are left out. Of heads, rows and columns all are there, or one.
        """
        spread: list[Size] = []
        sizes: list[Size] = []
        rest = list(extents)
        for number, group in enumerate(self.groups):
            own, rest = rest[: len(group)], rest[len(group) :]
            first = next((at for at, size in enumerate(own) if not is_unit(size)), len(own))
            if number and first < len(own):
                first = 0
            kept = [*own[:first], *group[first:]]
            spread += kept
            sizes.append(math.prod(kept))
        return spread, sizes


def _cuts(extents: Sequence[Size]) -> set[int]:
    """The number of elements of the inner dimensions together, for each place between two dimensions."""
    found: set[int] = set()
    product = 1
    for size in reversed([size for size in extents if not is_unit(size)]):
        found.add(product)
        if not isinstance(size, int):
            break
        product *= size
    return found - {1}


def _parts(size: Size, cuts: set[int]) -> list[Size] | None:
    """Extents of dimensions with these places between them; None where there are none."""
    parts: list[Size] = []
    inner = 1
    for cut in sorted(cuts):
        if cut % inner:
            return None
        parts.insert(0, cut // inner)
        inner = cut
    if isinstance(size, int) and size % inner:
        return None
    outer = size // inner
    return parts if is_unit(outer) and parts else [outer, *parts]


class Writer:
    """Adds nodes before a node, whose place in the graph they take over.

    Args:
        place: the node.
        batch: batches and heads.
    """

    def __init__(self, place: Node, batch: tuple[Size, int]) -> None:
        self._place = place
        self._batch, self._heads = batch

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """A node with its fake value."""
        with self._place.graph.inserting_before(self._place):
            return add_call(self._place, target, *args, **kwargs)

    def view(self, node: Node, shape: Sequence[Size]) -> Node:
        """The node's elements in another shape, of which one extent may be known at run time only."""
        if list(shape_of(node)) == list(shape):
            return node
        sizes = [size if isinstance(size, int) else -1 for size in shape]
        if not node.meta["val"].is_contiguous():
            # Where PyTorch runs the view; in MAX this does nothing.
            node = self.call(aten.clone.default, node, memory_format=torch.contiguous_format)
        return self.call(aten.view.default, node, sizes)

    def restrided(self, node: Node, fake: torch.Tensor) -> Node:
        """The node with the strides of a fake tensor, whose elements lie together: readers were traced with these."""
        if node.meta["val"].stride() == fake.stride():
            return node
        order, strides = list(range(fake.dim())), fake.stride()
        if all(isinstance(stride, int) for stride in strides):
            order.sort(key=lambda dim: -strides[dim])
        # In MAX none of these does anything.
        if order == sorted(order):
            return self.call(aten.clone.default, node, memory_format=torch.contiguous_format)
        turned = self.call(aten.permute.default, node, order)
        dense = self.call(aten.clone.default, turned, memory_format=torch.contiguous_format)
        return self.call(aten.permute.default, dense, [order.index(dim) for dim in range(fake.dim())])

    def cast(self, node: Node, dtype: torch.dtype) -> Node:
        """The node in a dtype."""
        return node if node.meta["val"].dtype == dtype else self.call(prims.convert_element_type.default, node, dtype)

    def product(self, node: Node, by: Node) -> Node:
        """The product with a tensor, in the node's dtype."""
        return self.cast(self.call(aten.mul.Tensor, node, by), node.meta["val"].dtype)

    def sum_of_products(self, a: Node, b: Node, fake: torch.Tensor) -> Node:
        """sum(a * b) of two [B, H, rows, columns], of each head or of all, in the dtype and shape of a fake tensor."""
        wide = torch.float64 if fake.dtype == torch.float64 else torch.float32
        product = self.call(aten.mul.Tensor, self.cast(a, wide), self.cast(b, wide))
        dims = [0, 1, 2, 3] if fake.numel() == 1 else [0, 2, 3]
        total = self.call(aten.sum.dim_IntList, product, dims, True)
        return self.cast(self.view(total, fake.shape), fake.dtype)

    def rows(self, matrices: Matrices) -> Node:
        """[B, H, rows, columns]."""
        sizes = (matrices.columns, matrices.rows) if matrices.turned else (matrices.rows, matrices.columns)
        node = self.view(matrices.node, [self._batch, self._heads, *sizes])
        return self.call(aten.permute.default, node, [0, 1, 3, 2]) if matrices.turned else node

    def bias(self, terms: Sequence[Term], shape: BiasShape) -> Node:
        """The sum of terms as the kernels take it."""
        total = self.total(terms, shape)
        fake = total.meta["val"]
        if fake.device.type == "cpu" or fake.dtype == torch.float16:
            return total
        hidden = self.call(aten.eq.Scalar, total, -math.inf)
        return self.call(aten.where.self, hidden, total, self.call(aten.clamp.default, total, _LOWEST))

    def total(self, terms: Sequence[Term], shape: BiasShape) -> Node:
        """The sum of terms [A, H or 1, rows or 1, columns or 1], where batch b reads number b % A."""
        total: Node | None = None
        for term in terms:
            node = self.view(term.node, shape.of_term(term))
            if term.factor != 1:
                node = self.call(aten.mul.Tensor, node, term.factor)
            total = node if total is None else self.call(aten.add.Tensor, total, node)
        assert total is not None
        whole, sizes = shape.whole(shape_of(total))
        if any(is_unit(old) != is_unit(new) for old, new in zip(shape_of(total), whole, strict=True)):
            total = self.call(aten.expand.default, total, [size if isinstance(size, int) else -1 for size in whole])
        return self.view(total, sizes)
