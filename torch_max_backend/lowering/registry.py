"""The table from aten operators to the functions that build them in a MAX graph.

A lowering is registered in the module of its family::

    @lowering(aten.relu.default, layout=Layout.ELEMENTWISE)
    def relu(ctx: LoweringContext, x: TensorValue) -> TensorValue: ...

Partitioning, ``explain`` and the table of supported operators all read this registry; there is no second list.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from torch_max_backend.mojo_ops.functions import Function
from torch_max_backend.torch_compat import OpOverload

__all__ = ["Layout", "Registration", "lookup", "lowering", "registrations"]


class Layout(enum.Enum):
    """The memory orders that a lowering expects.

    RAW: gets and returns GraphTensor values, and decides itself.
    LOGICAL: tensors arrive as TensorValue in logical (contiguous) order, results are in logical order.
    ELEMENTWISE: tensors arrive as TensorValue in one common memory order, already broadcastable against each
        other; results have that order.
    """

    RAW = "raw"
    LOGICAL = "logical"
    ELEMENTWISE = "elementwise"


@dataclass(frozen=True)
class Registration:
    """One lowered op.

    Attributes:
        op: the aten overload (or other call_function target); of an op of a library that may not be installed, its
            qualified name.
        build: ``build(ctx, *args, **kwargs)``, with the node's arguments, tensors replaced by values.
        family: the module that holds it, for the support table.
        layout: see Layout.
        supports: ``supports(node) -> reason | None``: None when this very node can be lowered. Runs before the
            graph is cut, so a reason here costs nothing.
        note: a limit in words, for the support table.
        functions: ``functions(node)``: library functions that the node will call and that take long to build, known
            before it is lowered.
    """

    op: Any
    build: Callable[..., Any]
    family: str
    layout: Layout
    supports: Callable[[Node], str | None] | None
    note: str
    functions: Callable[[Node], Iterable[Function]] | None


_REGISTRY: dict[Any, Registration] = {}


def lowering(
    *targets: Any,
    layout: Layout = Layout.LOGICAL,
    supports: Callable[[Node], str | None] | None = None,
    note: str = "",
    functions: Callable[[Node], Iterable[Function]] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the decorated function for every op in ``targets``: aten overloads, or, of a library that the user's
    program imports and not this one, names like "torchvision::roi_align"."""

    def register(build: Callable[..., Any]) -> Callable[..., Any]:
        for target in targets:
            if target in _REGISTRY:
                raise ValueError(f"{target} is lowered twice: {_REGISTRY[target].build} and {build}")
            if not (isinstance(target, (OpOverload, str)) or callable(target)):
                raise TypeError(f"a lowering's target is an aten overload or a name, got {target!r}")
            family = build.__module__.rpartition(".")[2]
            _REGISTRY[target] = Registration(target, build, family, layout, supports, note, functions)
        return build

    return register


def lookup(target: Any) -> Registration | None:
    """The registration of an FX call_function target, None where there is none."""
    found = _REGISTRY.get(target)
    if found is None and isinstance(target, OpOverload):
        return _REGISTRY.get(target.name())
    return found


def registrations() -> Iterable[Registration]:
    """Every registration, in the order of registration."""
    return _REGISTRY.values()
