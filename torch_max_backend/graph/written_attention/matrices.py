"""Batches of matrices in an FX graph, seen through the views that models and autograd put around a product.

A view here is an operator that keeps the elements in row-major order. A batch of matrices is [batch, rows, columns],
whatever dimensions a view has split these into; unit dimensions may be anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

aten, prims = torch.ops.aten, torch.ops.prims

Size = int | torch.SymInt

_VIEWS = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.expand.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
}
_CASTS = {aten._to_copy.default, prims.convert_element_type.default}


def shape_of(node: Node) -> Sequence[Size]:
    """The shape of a node that is a tensor."""
    shape: Sequence[Size] = node.meta["val"].shape
    return shape


def is_tensor(node: object) -> bool:
    """Whether an argument is a node with a tensor."""
    return isinstance(node, Node) and isinstance(node.meta.get("val"), torch.Tensor)


def groups_of(shape: Sequence[Size], *sizes: int) -> list[list[int]] | None:
    """The dimensions of a shape: first those of a batch, then for each of ``sizes`` those whose extents' product it is.
    None where the shape has no such dimensions."""
    groups: list[list[int]] = []
    end = len(shape)
    for size in reversed(sizes):
        product, begin = 1, end
        while product < size:
            begin -= 1
            if begin < 0 or not isinstance(shape[begin], int):
                return None
            product *= int(shape[begin])
        if product != size:
            return None
        groups.insert(0, list(range(begin, end)))
        end = begin
    return [list(range(end)), *groups]


def is_unit(size: Size) -> bool:
    """Whether an extent is known to be 1."""
    return isinstance(size, int) and size == 1


def _moved(node: Node) -> list[int]:
    """The order that a permutation gives to the dimensions of more than one element."""
    arguments: tuple[Any, ...] = node.args
    source, dims = arguments
    shape = shape_of(source)
    places = [dim % len(shape) for dim in dims]
    return [dim for dim in places if not is_unit(shape[dim])]


def keeps_order(node: Node) -> bool:
    """Whether the node has its argument's elements in the same order."""
    if node.target in _VIEWS:
        source = node.args[0]
        same = isinstance(source, Node) and math.prod(shape_of(source)) == math.prod(shape_of(node))
        return node.target is not aten.expand.default or bool(same)
    if node.target is aten.permute.default:
        moved = _moved(node)
        return moved == sorted(moved)
    return False


def transposes(node: Node, rows: int, columns: int) -> bool:
    """Whether the node transposes matrices of so many rows and columns."""
    if node.target is not aten.permute.default:
        return False
    source = node.args[0]
    assert isinstance(source, Node)
    shape = shape_of(source)
    groups = groups_of(shape, rows, columns)
    if groups is None:
        return False
    batch, first, second = groups
    return _moved(node) == [dim for dim in (*batch, *second, *first) if not is_unit(shape[dim])]


def is_cast(node: Node) -> bool:
    """Whether the node is a cast from floats to floats on one device."""
    if node.target not in _CASTS or not node.args or not is_tensor(node.args[0]):
        return False
    source: Any = node.args[0]
    old, new = source.meta["val"], node.meta["val"]
    return bool(old.dtype.is_floating_point and new.dtype.is_floating_point and old.device == new.device)


def factor_of(node: Node) -> float | None:
    """The number that an elementwise op multiplies its first argument with."""
    if node.target not in (aten.mul.Tensor, aten.div.Tensor, aten.mul.Scalar, aten.div.Scalar) or node.kwargs:
        return None
    number = node.args[1]
    if not isinstance(number, (int, float)) or not math.isfinite(number) or number == 0:
        return None
    return float(number) if node.target in (aten.mul.Tensor, aten.mul.Scalar) else 1 / float(number)


def argument_of(node: Node) -> Node:
    """The first argument of an op of one tensor."""
    source = node.args[0]
    assert isinstance(source, Node)
    return source


@dataclass(frozen=True)
class Matrices:
    """A batch of matrices, which a node has or its transposes."""

    node: Node
    rows: int
    columns: int
    turned: bool = False

    def upward(self) -> Iterator[Matrices]:
        """This node and the chain of nodes that it is a view of."""
        at = self
        while True:
            yield at
            node = at.node
            rows, columns = (at.columns, at.rows) if at.turned else (at.rows, at.columns)
            if keeps_order(node):
                at = Matrices(argument_of(node), at.rows, at.columns, at.turned)
            elif transposes(node, columns, rows):
                at = Matrices(argument_of(node), at.rows, at.columns, not at.turned)
            else:
                return

    def root(self) -> tuple[Node, bool]:
        """The last of these. A row and a column are turned as they are."""
        *_, last = self.upward()
        return last.node, last.turned and min(self.rows, self.columns) > 1

    def is_aligned(self) -> bool:
        """Whether a view has dimensions of the batch, of rows and of columns."""
        sizes = (self.columns, self.rows) if self.turned else (self.rows, self.columns)
        return groups_of(shape_of(self.node), *sizes) is not None

    def source(self) -> Matrices:
        """The first of these whose dimensions are those of a batch, rows and columns, the right way round if any is."""
        known = [each for each in self.upward() if each.is_aligned()]
        plain = [each for each in known if not each.turned]
        return (plain or known)[-1]

    def batch(self) -> list[Size]:
        """The extents of the batch."""
        sizes = (self.columns, self.rows) if self.turned else (self.rows, self.columns)
        groups = groups_of(shape_of(self.node), *sizes)
        assert groups is not None
        return [shape_of(self.node)[dim] for dim in groups[0] if not is_unit(shape_of(self.node)[dim])]


def matrices_of(node: object, turned: bool = False) -> Matrices | None:
    """An operand of a batched product, or with ``turned`` its transposes; None where a matrix has an unknown size."""
    if not is_tensor(node):
        return None
    assert isinstance(node, Node)
    _, rows, columns = shape_of(node)
    if not isinstance(rows, int) or not isinstance(columns, int):
        return None
    return Matrices(node, columns, rows, True) if turned else Matrices(node, rows, columns)


def same(a: Matrices, b: Matrices) -> bool:
    """Whether both are views of one node with the same matrices."""
    return (a.rows, a.columns) == (b.rows, b.columns) and a.root() == b.root()


def last_view(node: Node, rows: int, columns: int) -> tuple[Node, bool]:
    """The last view of a node's matrices such that no earlier one has other readers, and whether it is transposed."""
    turned = False
    while len(node.users) == 1:
        (user,) = node.users
        if user.op != "call_function" or not is_tensor(user):
            break
        if not keeps_order(user):
            if not transposes(user, rows, columns):
                break
            turned, rows, columns = not turned, columns, rows
        node = user
    return node, turned
