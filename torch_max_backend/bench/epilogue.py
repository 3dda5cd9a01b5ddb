"""Elementwise successors of a data gradient: GradIn = f(dgrad, D0, D1, ...).

They stand behind the kernel in the same graph, as a program that a Hopper kernel takes into its store.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import torch
from max.graph import TensorValue, ops
from torch import Tensor

from torch_max_backend.bench.task import Tolerance, draw
from torch_max_backend.lowering import numerics

#: The values of D where it is a single number: scale's factor, clamp's lower and upper bound.
_SCALE = 0.5
_CLAMP = (-8.0, 8.0)


class Epilogue(enum.Enum):
    """Which f, and what its D tensors are.

    NONE: no D. BIAS_RELU: relu(dgrad + D0), D0 one value for each group and channel. BIAS_GC: dgrad + D0 of that
    shape. RESIDUAL: dgrad + D0 of GradIn's shape. SCALE: dgrad * D0, one value. CLAMP: dgrad between D0 and D1.
    """

    NONE = "none"
    BIAS_RELU = "bias_relu"
    BIAS_GC = "bias_gc"
    RESIDUAL = "residual"
    SCALE = "scale"
    CLAMP = "clamp"

    def dims(self, result: tuple[str, ...]) -> list[tuple[str | int, ...]]:
        """The extents of each D, those of the result by name."""
        if self in (Epilogue.BIAS_RELU, Epilogue.BIAS_GC):
            return [(result[-1],)]
        if self is Epilogue.RESIDUAL:
            return [result]
        return [(1,)] * {Epilogue.NONE: 0, Epilogue.SCALE: 1, Epilogue.CLAMP: 2}[self]

    def build(self, value: TensorValue, d: Sequence[TensorValue]) -> TensorValue:
        """f in a MAX graph, over channels-last tensors."""
        if self is Epilogue.BIAS_RELU:
            return numerics.relu(value + d[0])
        if self in (Epilogue.BIAS_GC, Epilogue.RESIDUAL):
            return value + d[0]
        if self is Epilogue.SCALE:
            return value * d[0]
        if self is Epilogue.CLAMP:
            return ops.min(ops.max(value, d[0]), d[1])
        return value

    def apply(self, value: Tensor, d: Sequence[Tensor]) -> Tensor:
        """f over tensors whose channels are axis 1."""
        if self in (Epilogue.BIAS_RELU, Epilogue.BIAS_GC):
            shifted = value + d[0].view(-1, *[1] * (value.dim() - 2))
            return shifted.relu() if self is Epilogue.BIAS_RELU else shifted
        if self is Epilogue.RESIDUAL:
            return value + d[0]
        if self is Epilogue.SCALE:
            return value * d[0]
        if self is Epilogue.CLAMP:
            return value.clamp(d[0], d[1])
        return value

    def vector(
        self,
        number: int,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        init: int,
        generator: torch.Generator,
    ) -> Tensor:
        """D number `number` where it is not of GradIn's shape."""
        if self is Epilogue.SCALE:
            return torch.full(tuple(shape), _SCALE, dtype=dtype, device=device)
        if self is Epilogue.CLAMP:
            return torch.full(tuple(shape), _CLAMP[number], dtype=dtype, device=device)
        return draw(shape, dtype, device, init, generator)

    def widen(self, tolerance: Tolerance, dtype: torch.dtype, reference: Tensor) -> Tolerance:
        """f may round once more: the gradient to its dtype before it, unless the compiler fused the two. What was
        rounded may have been larger than the result."""
        if self is Epilogue.NONE:
            return tolerance
        epsilon = torch.finfo(dtype).eps
        largest = float(reference.abs().max()) if reference.numel() else 0.0
        return Tolerance(tolerance.absolute + 2 * epsilon * largest, tolerance.relative + 2 * epsilon)
