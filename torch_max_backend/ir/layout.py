"""Tensors of the MAX graph with the memory order they are kept in.

A convolution wants its activations channels-last, PyTorch's default is channels-first. Instead of converting
around every convolution, each value of the graph carries the order of its dimensions in memory: a logical
permutation only relabels, elementwise ops keep the order of their operands, and data moves only where an op
insists on another order (``to_order``), once for each value and order.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from max.dtype import DType
from max.graph import Dim, StaticDim, TensorValue

from torch_max_backend.ir import ops

Order = tuple[int, ...]

#: The graph compiler refuses tensors of a higher rank.
MAX_RANK = 8


def contiguous_order(rank: int) -> Order:
    """The order of a contiguous tensor: logical dimension i at physical position i."""
    return tuple(range(rank))


def channels_last_order(rank: int) -> Order:
    """N, spatial..., C for rank 3 to 5 (N, C, spatial... logically); contiguous below rank 3."""
    return contiguous_order(rank) if rank < 3 else (0, *range(2, rank), 1)


def is_unit(dim: Dim | int) -> bool:
    """Whether a dimension is known to be 1."""
    return (isinstance(dim, StaticDim) and int(dim) == 1) or (isinstance(dim, int) and dim == 1)


def moves_data(shape: Sequence[Dim | int], permutation: Sequence[int]) -> bool:
    """Whether permuting a contiguous tensor of ``shape`` changes memory: unit dimensions move for free."""
    kept = [axis for axis in permutation if not is_unit(shape[axis])]
    return kept != sorted(kept)


def dense_order(tensor: torch.Tensor) -> Order | None:
    """The memory order of a dense, non-overlapping tensor; None where its strides leave gaps or overlap.

    Unit dimensions may carry any stride; they are placed where the recognised formats (contiguous, then
    channels-last) put them, so that one tensor has one order.
    """
    rank = tensor.dim()
    for order in (contiguous_order(rank), channels_last_order(rank)):
        if _matches(tensor, order):
            return order
    stride = tensor.stride()
    if any(isinstance(s, torch.SymInt) for s in (*stride, *tensor.shape)):
        return None
    order = tuple(sorted(range(rank), key=lambda d: (-stride[d], d)))
    return order if _matches(tensor, order) else None


def strides_of(shape: Sequence[Any], order: Order) -> tuple[Any, ...]:
    """The strides, in elements, of a dense tensor of ``shape`` in memory order ``order``."""
    strides: list[Any] = [1] * len(shape)
    step: Any = 1
    for dim in reversed(order):
        strides[dim] = step
        # As PyTorch counts where a dimension is empty.
        step = step * shape[dim] if not isinstance(shape[dim], int) else step * max(shape[dim], 1)
    return tuple(strides)


def _matches(tensor: torch.Tensor, order: Order) -> bool:
    expected: int | torch.SymInt = 1
    for dim in reversed(order):
        size = tensor.shape[dim]
        if isinstance(size, int) and size == 0:
            return True
        if isinstance(size, int) and size == 1:
            continue
        if not bool(tensor.stride(dim) == expected):
            return False
        expected = expected * size
    return True


@dataclass(frozen=True, eq=False)
class GraphTensor:
    """A value of the MAX graph: ``value`` holds logical dimension ``order[i]`` at physical position i.

    ``argument`` names the graph's argument that the value is, None for a computed one.
    """

    value: TensorValue
    order: Order
    argument: str | None = None
    _converted: dict[Order, GraphTensor] = field(default_factory=dict, repr=False)

    @staticmethod
    def contiguous(value: TensorValue) -> GraphTensor:
        """Wraps a value whose memory order is its logical order."""
        return GraphTensor(value, contiguous_order(value.rank))

    @property
    def rank(self) -> int:
        return len(self.order)

    @property
    def dtype(self) -> DType:
        return self.value.dtype

    @property
    def shape(self) -> list[Dim]:
        """The logical shape."""
        physical = list(self.value.shape)
        return [physical[self.order.index(dim)] for dim in range(self.rank)]

    def axis(self, dim: int) -> int:
        """Where logical dimension ``dim`` (negative counts from the end) lies in memory."""
        return self.order.index(dim % self.rank)

    def with_value(self, value: TensorValue) -> GraphTensor:
        """Another value in the same memory order."""
        return GraphTensor(value, self.order)

    def permuted(self, dims: Sequence[int]) -> GraphTensor:
        """The logical permutation ``aten.permute(self, dims)``; moves nothing."""
        dims = [dim % self.rank for dim in dims]
        return GraphTensor(self.value, tuple(dims.index(dim) for dim in self.order), self.argument)

    def to_order(self, order: Order) -> GraphTensor:
        """The same tensor in memory order ``order``; a copy only where memory has to change."""
        if order == self.order:
            return self
        if order not in self._converted:
            permutation = [self.order.index(dim) for dim in order]
            physical = list(self.value.shape)
            if moves_data(physical, permutation):
                _note_layout_change(self, order)
                value = ops.permute(self.value, permutation)
            else:
                value = ops.reshape(self.value, [physical[axis] for axis in permutation])
            self._converted[order] = GraphTensor(value, order)
        return self._converted[order]

    def logical(self) -> TensorValue:
        """The value in contiguous (logical) order."""
        return self.to_order(contiguous_order(self.rank)).value

    def channels_last(self) -> TensorValue:
        """The value with N first and C last, as convolution, pooling and normalization kernels take it."""
        return self.to_order(channels_last_order(self.rank)).value

    @staticmethod
    def from_channels_last(value: TensorValue) -> GraphTensor:
        """Wraps the result of a kernel that wrote N, spatial..., C."""
        return GraphTensor(value, channels_last_order(value.rank))


@dataclass(frozen=True)
class LayoutChange:
    """One copy into another memory order, for accounts and tests.

    Attributes:
        shape: the tensor's logical shape.
        source: its memory order before.
        target: and after.
        node: the FX node that asked for it; "output" where a result leaves the graph.
        argument: the graph's argument that was copied, None for a computed value.
    """

    shape: tuple[str, ...]
    source: Order
    target: Order
    node: str
    argument: str | None


class LayoutLog:
    """The copies that a graph's builder adds while its ``with`` block runs.

    Attributes:
        changes: the copies so far.
        node: the FX node that is being built.
    """

    def __init__(self) -> None:
        self.changes: list[LayoutChange] = []
        self.node = ""

    def __enter__(self) -> LayoutLog:
        self._before = _log.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _log.reset(self._before)


#: The log of the graph that this thread builds.
_log: ContextVar[LayoutLog | None] = ContextVar("layout log", default=None)


def _note_layout_change(tensor: GraphTensor, target: Order) -> None:
    log = _log.get()
    if log is not None:
        shape = tuple(str(dim) for dim in tensor.shape)
        log.changes.append(LayoutChange(shape, tensor.order, target, log.node, tensor.argument))


def common_order(tensors: Sequence[GraphTensor], rank: int) -> Order:
    """The memory order in which an elementwise op over ``tensors`` (result of ``rank``) moves least.

    The largest operand decides; a channels-last one wins a tie, since convolutions will want it so.
    """
    candidates = [tensor for tensor in tensors if tensor.rank == rank]
    if not candidates:
        return contiguous_order(rank)

    def weight(tensor: GraphTensor) -> tuple[int, bool]:
        return sum(not is_unit(dim) for dim in tensor.shape), tensor.order != contiguous_order(rank)

    return max(candidates, key=weight).order


def aligned(tensor: GraphTensor, rank: int, order: Order) -> TensorValue:
    """``tensor`` broadcastable, in memory, against tensors of ``rank`` kept in ``order``."""
    if tensor.rank == rank:
        return tensor.to_order(order).value
    if tensor.rank == 0:
        return tensor.value
    padded = ops.reshape(tensor.logical(), [1] * (rank - tensor.rank) + list(tensor.shape))
    return GraphTensor.contiguous(padded).to_order(order).value
