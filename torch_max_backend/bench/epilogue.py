"""Elementwise work behind a data gradient: GradIn = f(dgrad, D0, D1, ...)."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_max_backend.bench.case import Tolerance

#: The values of D where it is a single number: scale's factor, clamp's lower and upper bound.
_SCALE = 0.5
_CLAMP = (-8.0, 8.0)


class Epilogue(enum.StrEnum):
    """The function f, and its D tensors.

    none: no D. bias_relu: relu(dgrad + D0), D0 one value for each group and channel. bias_gc: dgrad + D0 of that
    shape. residual: dgrad + D0 of GradIn's shape. scale: dgrad * D0, one value. clamp: dgrad between D0 and D1.
    """

    none = "none"
    bias_relu = "bias_relu"
    bias_gc = "bias_gc"
    residual = "residual"
    scale = "scale"
    clamp = "clamp"

    def shapes(self, result: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The shape of each D, beside a result of this shape."""
        if self in (Epilogue.bias_relu, Epilogue.bias_gc):
            return [(1, result[1], *[1] * (len(result) - 2))]
        if self is Epilogue.residual:
            return [result]
        return [(1,)] * {Epilogue.none: 0, Epilogue.scale: 1, Epilogue.clamp: 2}[self]

    def number(self, index: int) -> float | None:
        """The value of D number `index` if it is a single number."""
        return {Epilogue.scale: _SCALE, Epilogue.clamp: _CLAMP[index % 2]}.get(self)

    def apply(self, value: Tensor, d: Sequence[Tensor]) -> Tensor:
        """f."""
        match self:
            case Epilogue.bias_relu:
                return (value + d[0]).relu()
            case Epilogue.bias_gc | Epilogue.residual:
                return value + d[0]
            case Epilogue.scale:
                return value * d[0]
            case Epilogue.clamp:
                return value.clamp(d[0], d[1])
        return value

    def widen(self, tolerance: Tolerance, dtype: torch.dtype, reference: Tensor) -> Tolerance:
        """f may round once more: the gradient to its dtype before it, unless the compiler fused the two. What was
        rounded may have been larger than the result."""
        if self is Epilogue.none:
            return tolerance
        epsilon = torch.finfo(dtype).eps
        largest = float(reference.abs().max()) if reference.numel() else 0.0
        return Tolerance(tolerance.absolute + 2 * epsilon * largest, tolerance.relative + 2 * epsilon)
