"""How tensors enter and leave a compiled graph, as the graph's builder describes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from max.graph import Graph

from torch_max_backend.ir.layout import LayoutChange, Order
from torch_max_backend.launch_list import LaunchList
from torch_max_backend.typed_graph import TypedGraph


class Draw(Protocol):
    """Draws from PyTorch's generator what a graph gets as an argument."""

    @property
    def recordable(self) -> bool:
        """Whether a device graph can hold it."""
        ...

    def __call__(self) -> torch.Tensor:
        """The draw for one call."""
        ...


@dataclass(frozen=True)
class InputSpec:
    """How one tensor enters a MAX graph: the argument it comes from and the memory order it must have.

    Attributes:
        position: of the argument.
        dtype: of the tensor.
        order: the memory order that the graph was built for.
        device: where the tensor lies.
        shape: None where a size is symbolic.
        dense: the traced tensor lay in ``order``, without gaps.
        unguarded: no guard has checked that the tensor's negation bit is as traced (a gradient's).
        alignment: of the tensor's memory, in bytes; 1 where the dtype's own will do.
        drawn: the tensor is drawn for each call: that two of them lie at one address means nothing.
    """

    position: int
    dtype: torch.dtype
    order: Order
    device: torch.device
    shape: tuple[int, ...] | None
    dense: bool = True
    unguarded: bool = False
    alignment: int = 1
    drawn: bool = False


@dataclass(frozen=True)
class View:
    """Elements of a dense tensor, by shape, strides and the offset of the first one."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class OutputSpec:
    """How one result leaves: from the model's output ``index`` in memory order ``order``, or as argument
    ``passthrough`` itself, or as a constant that no computation makes (None, an int). Two results of one ``index``
    are one tensor. ``shape`` is None where a size is symbolic, and ``bytes`` are those of the traced sizes.
    ``foldable``: MAX may find that it is a constant, and return the model's own memory. ``view``: only these elements
    leave, where they lie."""

    index: int = -1
    order: Order = ()
    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] | None = ()
    passthrough: int | None = None
    constant: Any = None
    bytes: int = 0
    foldable: bool = True
    view: View | None = None


@dataclass(frozen=True)
class WriteSpec:
    """The model's output ``index``, in memory order ``order``, is the new value of argument ``position``."""

    position: int
    index: int
    order: Order
    dtype: torch.dtype
    shape: tuple[int, ...] | None


@dataclass
class BuiltGraph:
    """A graph that is built, with the way tensors enter and leave it.

    ``graph`` is MAX's, for its compiler, None where a launch list runs.
    """

    name: str
    graph: Graph | None
    inputs: list[InputSpec]
    outputs: list[OutputSpec]
    layout_changes: list[LayoutChange] = field(default_factory=list)
    #: The aten ops in it, with how often each occurs.
    ops: dict[str, int] = field(default_factory=dict)
    #: The FX graph returns one value, not a sequence of one.
    bare_output: bool = False
    #: New values of arguments that the model updates in place: the model's outputs that PyTorch copies there.
    writes: list[WriteSpec] = field(default_factory=list)
    #: Bytes of all values that its ops compute, at the traced sizes.
    computed_bytes: int = 0
    #: The same graph as library calls; None where it is one for MAX's compiler.
    listing: LaunchList | None = None
    #: What the listing was made of; None without one, and where it came from the cache.
    typed: TypedGraph | None = None

    @property
    def op_count(self) -> int:
        """How many aten ops the graph holds."""
        return sum(self.ops.values())
