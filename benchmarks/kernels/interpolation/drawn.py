"""Interpolations drawn at random, as programs call them: every mode, up and down, one to three axes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional

from torch_max_backend.problems.interpolation import Axes, Mode, interpolation_axes

#: F.interpolate's mode and antialias of each, by the number of axes.
MODES: dict[int, tuple[Mode, ...]] = {
    1: (Mode.NEAREST, Mode.NEAREST_EXACT, Mode.LINEAR, Mode.AREA),
    2: (
        Mode.NEAREST, Mode.NEAREST_EXACT, Mode.LINEAR, Mode.CUBIC, Mode.LINEAR_ANTIALIASED, Mode.CUBIC_ANTIALIASED,
        Mode.AREA
    ),
    3: (Mode.NEAREST, Mode.NEAREST_EXACT, Mode.LINEAR, Mode.AREA),
}  # fmt: skip
_LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}
_FACTORS = (0.25, 0.5, 0.6, 1.3, 1.5, 2, 2, 2, 3, 4, 4, 8, 8, 16)
_CHANNELS = (1, 2, 3, 3, 5, 8, 12, 16, 19, 21, 32, 64, 64, 128, 150, 256, 512, 2048)


@dataclass(frozen=True)
class Drawn:
    """One call of F.interpolate.

    Attributes:
        mode: how.
        batch: N.
        channels: C.
        input: spatial extents.
        output: of the result.
        align_corners: as F.interpolate has it.
        factors: those that the program gave, else ().
    """

    mode: Mode
    batch: int
    channels: int
    input: tuple[int, ...]
    output: tuple[int, ...]
    align_corners: bool = False
    factors: tuple[float, ...] = ()

    @property
    def rank(self) -> int:
        return len(self.input)

    def axes(self, *, is_gpu: bool = False) -> Axes:
        return interpolation_axes(self.mode, self.input, self.output, self.align_corners, self.factors, is_gpu=is_gpu)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.batch, self.channels, *self.input)

    @property
    def result_shape(self) -> tuple[int, ...]:
        return (self.batch, self.channels, *self.output)

    def interpolate(self, x: torch.Tensor) -> torch.Tensor:
        """PyTorch's result."""
        options = {
            Mode.NEAREST: {"mode": "nearest"},
            Mode.NEAREST_EXACT: {"mode": "nearest-exact"},
            Mode.LINEAR: {"mode": _LINEAR[self.rank], "align_corners": self.align_corners},
            Mode.CUBIC: {"mode": "bicubic", "align_corners": self.align_corners},
            Mode.LINEAR_ANTIALIASED: {"mode": "bilinear", "align_corners": self.align_corners, "antialias": True},
            Mode.AREA: {"mode": "area"},
            Mode.CUBIC_ANTIALIASED: {"mode": "bicubic", "align_corners": self.align_corners, "antialias": True},
        }[self.mode]
        size = {"scale_factor": self.factors} if self.factors else {"size": self.output}
        return functional.interpolate(x, **size, **options)  # type: ignore[arg-type]

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.input)), "x".join(map(str, self.output))
        corners = " corners" if self.align_corners else ""
        factors = f" factors {self.factors}" if self.factors else ""
        return f"{self.mode.value} {self.batch}x{self.channels} {sizes[0]} > {sizes[1]}{corners}{factors}"


def draw(chance: random.Random, *, most: int, least: int = 1) -> Iterator[Drawn]:
    """Problems without an end, whose larger tensor has ``least`` to ``most`` elements."""
    while True:
        rank = chance.choice((1, 2, 2, 2, 2, 3))
        mode = chance.choice(MODES[rank])
        longest = {1: 4096, 2: 512, 3: 64}[rank]

        def size(longest: int = longest) -> int:
            return chance.choice((1, 2, 3, 7, 14, 16, 28, 32, 56, 64, 128, chance.randint(1, longest)))

        input = tuple(size() for _ in range(rank))
        if chance.random() < 0.5:
            input = input[:1] * rank
        corners = chance.random() < 0.3 and mode not in (Mode.NEAREST, Mode.NEAREST_EXACT, Mode.AREA)
        factors: tuple[float, ...] = ()
        if chance.random() < 0.5:
            factor = chance.choice((*_FACTORS, chance.uniform(0.2, 5.0)))
            factors = (float(factor),) * rank
            output = tuple(int(extent * factor) for extent in input)
        else:
            output = tuple(size() for _ in range(rank))
        drawn = Drawn(
            mode, chance.choice((1, 2, 4, 8, 16)), chance.choice(_CHANNELS), input, output, corners, factors
        )  # fmt: skip
        elements = max(_size(drawn.shape), _size(drawn.result_shape))
        if min(output) >= 1 and max(output) <= 2 * longest and least <= elements <= most:
            yield drawn


def _size(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
