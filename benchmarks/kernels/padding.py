"""The library functions of mirrored and repeated borders on random problems: checked, or timed beside PyTorch.

    python -m benchmarks padding --device cuda --check 3000
    python -m benchmarks padding --device cpu --count 60

Borders must be equal to PyTorch's, gradients as near to float64 as rounding explains.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from benchmarks.kernels.drawn import Contenders, command
from benchmarks.kernels.library import Guarded, LibraryCalls, excess, memory_format, shown
from torch_max_backend.dtypes import TORCH_TO_MAX
from torch_max_backend.mojo_ops.functions import LibraryFunction, function_of
from torch_max_backend.mojo_ops.padding import FAMILY


@dataclass(frozen=True)
class Drawn:
    """One padding of [batch, channels, *input], by (in front, behind) of each axis; negative numbers crop."""

    batch: int
    channels: int
    input: tuple[int, ...]
    borders: tuple[tuple[int, int], ...]
    mirrored: bool

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        """PyTorch's result."""
        numbers = [number for pair in reversed(self.borders) for number in pair]
        return functional.pad(x, numbers, mode="reflect" if self.mirrored else "replicate")

    def numbers(self) -> list[int]:
        """The numbers that the entries take."""
        missing = [0] * (6 - 2 * len(self.borders))
        return [*missing, *(number for pair in self.borders for number in pair), int(self.mirrored)]

    def __str__(self) -> str:
        mode = "reflect" if self.mirrored else "replicate"
        return f"{mode} {self.batch}x{self.channels} {'x'.join(map(str, self.input))} by {self.borders}"


def draw(chance: random.Random, least: int, most: int) -> Iterator[Drawn]:
    """Problems without an end."""
    while True:
        rank, mirrored = chance.choice((1, 2, 2, 2, 3)), chance.random() < 0.5
        longest = {1: 4096, 2: 256, 3: 40}[rank]
        input = tuple(chance.choice((2, 7, 14, 28, 56, chance.randint(1, longest))) for _ in range(rank))
        widest = chance.choice((1, 2, 3, 8))

        def border(extent: int, mirrored: bool = mirrored, widest: int = widest) -> int:
            border = chance.randint(0, widest)
            return min(border, extent - 1) if mirrored else border

        borders = tuple((border(extent), border(extent)) for extent in input)
        problem = Drawn(
            chance.choice((1, 2, 8)), chance.choice((1, 3, 8, 21, 64, 128, 256)), input, borders, mirrored
        )  # fmt: skip
        padded = [extent + low + high for extent, (low, high) in zip(input, borders, strict=True)]
        if least <= problem.batch * problem.channels * torch.Size(padded).numel() <= most:
            yield problem


class Calls(LibraryCalls):
    """The library functions of one device."""

    family = FAMILY

    def functions(self, dtypes: Sequence[torch.dtype]) -> Iterator[LibraryFunction]:
        """As ``LibraryCalls``."""
        for entry in ("border_fprop", "border_dgrad"):
            yield from (self._function(entry, dtype) for dtype in dtypes)

    def _function(self, entry: str, dtype: torch.dtype) -> LibraryFunction:
        return function_of(FAMILY, entry, self.target, (TORCH_TO_MAX[dtype],))

    def _bind(self, entry: str, problem: Drawn, *tensors: torch.Tensor) -> Callable[[], None]:
        return self.bind(self._function(entry, tensors[0].dtype), *tensors, numbers=problem.numbers())

    def wrong(self, problem: Drawn, dtype: torch.dtype, layout: str) -> list[str]:
        """As ``Family``."""
        x = torch.randn(problem.batch, problem.channels, *problem.input).to(dtype)
        leaf = x.double().requires_grad_()
        wanted = problem.pad(leaf)
        y = Guarded(shown(wanted, layout).shape, dtype, self.device)
        self._bind("border_fprop", problem, y.tensor, shown(x, layout).to(self.device))()
        found = []
        if not y.is_intact():
            found.append("forward wrote outside its result")
        if not torch.equal(y.tensor.cpu().double(), shown(wanted.detach(), layout)):
            found.append("the borders are not PyTorch's")
        dy = torch.randn(wanted.shape).to(dtype)
        dx, most = (
            torch.autograd.grad(wanted, leaf, each, retain_graph=True)[0] for each in (dy.double(), dy.double().abs())
        )
        made = Guarded(shown(dx, layout).shape, dtype, self.device)
        self._bind("border_dgrad", problem, made.tensor, shown(dy, layout).to(self.device))()
        if not made.is_intact():
            found.append("backward wrote outside its result")
        eps = 2.0**-50 if dtype == torch.float64 else 2.0**-20
        off = excess(
            made.tensor, shown(dx, layout), eps * shown(most, layout) + torch.finfo(dtype).eps * shown(dx, layout).abs()
        )
        return [*found, f"gradient: {off}"] if off else found

    def contenders(self, problem: Drawn, dtype: torch.dtype, layout: str) -> Contenders:
        """As ``Family``."""
        x = torch.randn(problem.batch, problem.channels, *problem.input, device=self.device).to(dtype)
        leaf = memory_format(x, layout).requires_grad_()
        y = problem.pad(leaf)
        dy = memory_format(torch.randn_like(y), layout)
        x_shown, dy_shown, still = shown(x, layout), shown(dy, layout), leaf.detach()
        return {
            "forward": (
                self._bind("border_fprop", problem, torch.empty_like(dy_shown), x_shown),
                lambda: problem.pad(still),
            ),
            "backward": (
                self._bind("border_dgrad", problem, torch.empty_like(x_shown), dy_shown),
                lambda: torch.autograd.grad(y, leaf, dy, retain_graph=True),
            ),
        }


def main() -> int:
    return command(__doc__, Calls, draw)


if __name__ == "__main__":
    sys.exit(main())
