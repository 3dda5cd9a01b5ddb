"""The interface of an operation that the runner times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

MemoryLayout = Literal["channels_last", "contiguous"]


@dataclass(frozen=True)
class Tolerance:
    """The difference from the float64 reference that a result may have: `absolute` + `relative` * |reference|.

    Attributes:
        exact: the sums are exact, so the result must be the reference's own rounding; the figures are 0 then.
    """

    absolute: float
    relative: float
    exact: bool = False


class Case(Protocol):
    """One problem of one operation, in one dtype, layout and on one device.

    Attributes:
        dtype: of the floating-point operands and the result.
        operands: logical shapes by name, for the printed description.
        flops: operations, those on padding counted.
        moved: bytes, every operand read and the result written once.
        set_bytes: bytes of the operands that are read.
        read: how many of the inputs these are; of those behind them only shape and memory order matter.
        arithmetic: whether the operations are those of a matrix product, and so bound by its rate.
    """

    name: str
    dtype: torch.dtype
    layout: MemoryLayout
    operands: dict[str, tuple[int, ...]]
    flops: int
    moved: int
    set_bytes: int
    read: int
    arithmetic: bool

    def inputs(self, init: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        """One set of operands, logical shapes, in the case's layout."""

    def ours(self, *inputs: torch.Tensor) -> torch.Tensor:
        """The function that is compiled."""

    def theirs(self, *inputs: torch.Tensor) -> torch.Tensor:
        """PyTorch's own way to the same result."""

    def reference(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The result in float64."""

    def tolerance(self, init: int, reference: torch.Tensor) -> Tolerance:
        """The tolerance, from the dtype and the reduction length."""


def draw(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    init: int,
    generator: torch.Generator,
    layout: MemoryLayout = "contiguous",
) -> torch.Tensor:
    """A tensor [N, C, spatial...]: as allocated (0), integers from -2 to 2 (1), or normally distributed (2)."""
    if init == 0:
        tensor = torch.empty(shape, dtype=dtype, device=device)
    elif init == 1:
        tensor = torch.randint(-2, 3, tuple(shape), dtype=torch.int8, device=device, generator=generator).to(dtype)
    else:
        tensor = torch.randn(tuple(shape), dtype=torch.float32, device=device, generator=generator).to(dtype)
    return ordered(tensor, layout)


def ordered(tensor: torch.Tensor, layout: MemoryLayout) -> torch.Tensor:
    """The same values in this memory order."""
    if layout == "contiguous":
        return tensor.contiguous()
    return tensor.movedim(1, -1).contiguous().movedim(-1, 1)


#: The largest |value| that `draw` gives with init 1.
LARGEST_INTEGER = 2


def summation_tolerance(dtype: torch.dtype, device: torch.device, init: int, length: int, *, matmul: bool) -> Tolerance:
    """For sums of `length` products of operands from `draw`, accumulated in float32 (float64 for float64).

    Integers whose sums stay exact in the accumulator must agree to the bit. Decimals may be off by one rounding of
    the result, and by what a sum of `length` terms of unit variance collects when every partial sum is rounded.
    """
    accumulator = torch.float64 if dtype == torch.float64 else torch.float32
    epsilon = torch.finfo(accumulator).eps
    if init == 1 and length * LARGEST_INTEGER**2 <= 1 / epsilon:
        return Tolerance(0.0, 0.0, exact=True)
    absolute = 4 * epsilon * max(length, 1)
    if matmul and device.type == "cuda" and dtype == torch.float32 and torch.backends.cudnn.allow_tf32:
        # Both factors of each product lose all but ten bits.
        absolute += 8 * 2**-10 * max(length, 1) ** 0.5
    return Tolerance(absolute, 2 * torch.finfo(dtype).eps)
