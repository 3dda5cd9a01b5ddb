"""Values, and the kinds of operations between them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import numpy as np
import torch
from max.dtype import DType
from max.graph import DeviceRef

from torch_max_backend.dtypes import MAX_TO_TORCH
from torch_max_backend.mojo_ops.functions import Facts, Function
from torch_max_backend.mojo_ops.signatures import Number, Signature

_HALVES = (torch.bfloat16, torch.float16)


@dataclass(eq=False)
class Value:
    """One tensor, contiguous in memory.

    Attributes:
        dtype: of its elements.
        shape: None where an extent is symbolic.
        device: where it lies.
        maker: the operation that it is a result of; None for an argument of the graph.
        readers: operations that have it as an operand, each as often as it does; the graph keeps this.
    """

    dtype: DType
    shape: tuple[int, ...] | None
    device: DeviceRef
    maker: Operation | None = None
    readers: list[Operation] = field(default_factory=list, repr=False)

    @property
    def size(self) -> int:
        """The number of elements; 0 if an extent is symbolic."""
        return 0 if self.shape is None else math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """The size of all its elements, in bytes."""
        return self.size * self.dtype.size_in_bytes

    def like(self, shape: Sequence[int] | None = None, dtype: DType | None = None) -> Value:
        """A value of its own of the same kind, with another shape or dtype where one is given."""
        return Value(dtype or self.dtype, self.shape if shape is None else tuple(shape), self.device)


@dataclass(eq=False, frozen=True)
class Operation:
    """An operation, which makes values. Immutable, except for what ``TypedGraph`` keeps: operands and position.

    Attributes:
        operands: the values that it reads.
        results: the values that it makes.
        node: the name of the FX node that it was made for; "" where a pass made it.
        op: the aten op that it computes, or several, joined by underscores; "" if unknown.
        position: its place among the graph's operations.
    """

    operands: tuple[Value, ...]
    results: tuple[Value, ...]
    node: str = field(default="", kw_only=True)
    op: str = field(default="", kw_only=True)
    position: int = field(default=-1, kw_only=True)

    def __post_init__(self) -> None:
        for result in self.results:
            result.maker = self

    @property
    def name(self) -> str:
        """The name of what it computes."""
        return type(self).__name__.lower()

    def __str__(self) -> str:
        """The operation with its operands' dtypes and shapes."""
        shapes = (
            f"{value.dtype.name}[{', '.join(map(str, value.shape)) if value.shape is not None else '...'}]"
            for value in self.operands
        )
        return f"{self.name}({', '.join(shapes)})"


@dataclass(eq=False, frozen=True)
class Constant(Operation):
    """Values that are known now.

    Attributes:
        content: their bytes; None where MAX alone knows them.
    """

    content: bytes | None

    @cached_property
    def values(self) -> np.ndarray | None:
        """Flat; halves as float32. None where they are unknown."""
        (value,) = self.results
        dtype = MAX_TO_TORCH.get(value.dtype)
        if self.content is None or dtype is None:
            return None
        flat = torch.frombuffer(bytearray(self.content), dtype=dtype) if self.content else torch.empty(0, dtype=dtype)
        return flat.float().numpy() if dtype in _HALVES else flat.numpy()


def constant(values: np.ndarray, device: DeviceRef) -> Constant:
    """A constant of these values on ``device``."""
    value = Value(DType.from_numpy(values.dtype), values.shape, device)
    return Constant((), (value,), np.ascontiguousarray(values).tobytes())


def values_of(value: Value) -> np.ndarray | None:
    """The values of a constant, flat; None of anything else."""
    return value.maker.values if isinstance(value.maker, Constant) else None


@dataclass(eq=False, frozen=True)
class Reshape(Operation):
    """The operand's elements in their order, under another shape."""


@dataclass(eq=False, frozen=True)
class Broadcast(Operation):
    """The operand, repeated along its dimensions of one element, and along new ones in front."""


@dataclass(eq=False, frozen=True)
class Transpose(Operation):
    """Dimension i of the result is dimension ``axes[i]`` of the operand."""

    axes: tuple[int, ...]


@dataclass(eq=False, frozen=True)
class Slice(Operation):
    """From ``starts`` on (negative ones count from the end), every ``steps``-th element; steps are positive."""

    starts: tuple[int, ...]
    steps: tuple[int, ...]


@dataclass(eq=False, frozen=True)
class Pad(Operation):
    """The operand with ``filler`` around it; ``paddings`` are those in front and behind, dimension by dimension."""

    paddings: tuple[int, ...]
    filler: np.generic


@dataclass(eq=False, frozen=True)
class Concat(Operation):
    """The operands one behind the other along ``axis``."""

    axis: int


@dataclass(eq=False, frozen=True)
class Pointwise(Operation):
    """``function`` (``typed_graph.scalars``) of operands that broadcast to the result's shape."""

    function: str

    @property
    def name(self) -> str:
        return self.function


@dataclass(eq=False, frozen=True)
class Reduction(Operation):
    """The operand along ``axis``, which has one element in the result: "add", "mul", "max" or "min"."""

    kind: str
    axis: int

    @property
    def name(self) -> str:
        return f"reduce.{self.kind}"


@dataclass(eq=False, frozen=True)
class Transfer(Operation):
    """A copy on another device."""


@dataclass(eq=False, frozen=True)
class Unlisted(Operation):
    """An operation that launch lists do not have, by MAX's name for it."""

    title: str

    @property
    def name(self) -> str:
        return self.title


@dataclass(frozen=True)
class Operand:
    """In a call's words: where the operand of that number begins, or ``offset`` bytes behind."""

    number: int
    offset: int = 0


@dataclass(frozen=True)
class Result:
    """In a call's words: where the result of that number begins, or ``offset`` bytes behind."""

    number: int
    offset: int = 0


Word: TypeAlias = int | Operand | Result


@dataclass(eq=False, frozen=True)
class Call(Operation):
    """A call of a library function.

    Attributes:
        function: what is called.
        words: what it gets, as ``kernels/common/library.mojo`` says; addresses are those of operands and results.
        kernel: the name under which lowerings and passes know what it computes.
        facts: what a pass has to know of the operands that their shapes do not tell, such as a convolution's geometry.
        in_order: by a result's number, the operands of which an element is read for the result's element at the same
            place alone: the result may be written over those.
        reports: whether its kernels report an index outside its dimension.
        line: the line of the user's code that it was made for, where it reports and the line is known.
    """

    function: Function
    words: tuple[Word, ...]
    kernel: str
    facts: Facts | None = None
    in_order: Mapping[int, frozenset[int]] = field(default_factory=dict)
    reports: bool = False
    line: str = ""

    @property
    def name(self) -> str:
        return self.kernel

    @property
    def numbers(self) -> tuple[int, ...]:
        """The words in front of the first address."""
        return tuple(itertools.takewhile(lambda word: isinstance(word, int), self.words))  # type: ignore[arg-type]


def words_of(
    signature: Signature, numbers: Sequence[Number], operands: Iterable[int] | None = None
) -> tuple[Word, ...]:
    """The words of a call whose tensors come without extents.

    Args:
        signature: what is called takes.
        numbers: as it has them.
        operands: by their numbers among the call's; None for the first ones in their order.
    """
    read = range(len(signature.operands)) if operands is None else operands
    places: list[Operand | Result] = [*map(Result, range(len(signature.results))), *map(Operand, read)]
    return tuple(signature.words(numbers, [(place, ()) for place in places]))
