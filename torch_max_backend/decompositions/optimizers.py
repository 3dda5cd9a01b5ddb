"""Decompositions for optimizers' steps: ``_foreach_`` operators, lerp, addcmul and addcdiv.

A ``_foreach_`` operator becomes the same operator on each tensor of its lists, so that all work on one parameter can be
fused into one kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_max_backend.torch_compat import OpOverload, tree_map_only

aten = torch.ops.aten

#: ``_foreach_NAME`` is ``NAME`` for each tensor.
_ELEMENTWISE = (
    "abs",
    "add",
    "clamp_max",
    "clamp_min",
    "copy",
    "div",
    "exp",
    "log",
    "maximum",
    "minimum",
    "mul",
    "neg",
    "pow",
    "reciprocal",
    "rsqrt",
    "sigmoid",
    "sign",
    "sqrt",
    "sub",
    "tanh",
)
_NARROW = (torch.bfloat16, torch.float16)


def _in_compute_dtype(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``function`` in the dtype that its tensors are promoted to, as eager computes: in float32 for narrow floats,
    rounded once."""

    def wrapped(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        tensors = [each for each in (x, *args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        # A number does not widen tensors.
        common = functools.reduce(torch.promote_types, [each.dtype for each in tensors if each.dim()] or [x.dtype])
        wide = torch.float32 if common in _NARROW else common
        if all(each.dtype == wide for each in tensors if each.dim()):
            return function(x, *args, **kwargs)
        x, args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to(wide), (x, args, kwargs))
        return function(x, *args, **kwargs).to(common)

    return wrapped


@_in_compute_dtype
def lerp(start: torch.Tensor, end: torch.Tensor, weight: float) -> torch.Tensor:
    """``start + weight * (end - start)``, from the nearer end as eager does."""
    if abs(weight) < 0.5:
        return start + weight * (end - start)
    return end - (end - start) * (1.0 - weight)


@_in_compute_dtype
def addcmul(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, value: Any = 1) -> torch.Tensor:
    """``x + value * a * b``."""
    return x + a * b if _is_one(value) else x + value * a * b


@_in_compute_dtype
def addcdiv(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, value: Any = 1) -> torch.Tensor:
    """``x + value * a / b``."""
    return x + a / b if _is_one(value) else x + value * (a / b)


@_in_compute_dtype
def fma(a: torch.Tensor, b: Any, c: Any) -> torch.Tensor:
    """``a * b + c``; the graph compiler decides whether it is rounded once or twice."""
    return a * b + c


def _is_one(value: Any) -> bool:
    return isinstance(value, (int, float)) and value == 1


def _of_each(single: Callable[..., torch.Tensor]) -> Callable[..., list[torch.Tensor]]:
    """The list form of ``single``: every list argument gives one item to each call."""

    def listed(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
        count = max(len(arg) for arg in args if isinstance(arg, (list, tuple)))
        return [
            single(*(arg[i] if isinstance(arg, (list, tuple)) else arg for arg in args), **kwargs) for i in range(count)
        ]

    return listed


def _scaled(single: Callable[..., torch.Tensor]) -> Callable[..., list[torch.Tensor]]:
    """The list form of addcmul and addcdiv: the factor is one number, or one number or 0-d tensor for each."""

    def listed(
        x: Sequence[torch.Tensor],
        a: Sequence[torch.Tensor],
        b: Sequence[torch.Tensor],
        value: Any = 1,
        *,
        scalars: Any = None,
        tensor: Any = None,
    ) -> list[torch.Tensor]:
        for given in (scalars, tensor):
            value = value if given is None else given
        several = isinstance(value, (list, tuple, torch.Tensor))
        return [single(x[i], a[i], b[i], value=value[i] if several else value) for i in range(len(x))]

    return listed


def _power(exponents_of: Any, exponents: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.pow(exponents_of, exponent) for exponent in exponents]


def _lerp_each(start: Sequence[torch.Tensor], end: Sequence[torch.Tensor], weight: Any) -> list[torch.Tensor]:
    return _of_each(torch.lerp)(start, end, weight)


def _norm_each(tensors: Sequence[torch.Tensor], ord: float = 2, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    return [torch.linalg.vector_norm(tensor, ord, dtype=dtype) for tensor in tensors]


def _zeros_each(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.zeros_like(tensor) for tensor in tensors]


def optimizer_decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """The table; overloads that the running PyTorch lacks are left out."""
    table: dict[OpOverload, Callable[..., Any]] = {
        aten.lerp.Scalar: lerp,
        aten.addcmul.default: addcmul,
        aten.addcdiv.default: addcdiv,
    }
    if hasattr(torch.ops.prims, "fma"):
        table[torch.ops.prims.fma.default] = fma

    def add(name: str, function: Callable[..., Any], only: Sequence[str] | None = None) -> None:
        packet = getattr(aten, f"_foreach_{name}", None)
        for overload in packet.overloads() if packet is not None else ():
            if not overload.endswith("out") and (only is None or overload in only):
                table[getattr(packet, overload)] = function

    for name in _ELEMENTWISE:
        add(name, _of_each(getattr(aten, name)))
    add("pow", _power, only=("ScalarAndTensor",))
    add("lerp", _lerp_each)
    add("addcmul", _scaled(addcmul))
    add("addcdiv", _scaled(addcdiv))
    add("norm", _norm_each)
    add("zero", _zeros_each)
    return table
