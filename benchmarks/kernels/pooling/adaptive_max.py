"""Adaptive max pooling's library functions on problems drawn at random: checked against PyTorch, or timed beside it.

    python -m benchmarks pooling.adaptive_max --device cuda --check 3000
    python -m benchmarks pooling.adaptive_max --device cpu --count 60

Maxima and their indices must be equal to PyTorch's, gradients to exact sums. Adaptive averages are interpolations
(interpolation.run, interpolation.random_check).
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from max.dtype import DType
from torch.nn import functional

from benchmarks.kernels.drawn import Contenders, command
from benchmarks.kernels.library import Guarded, LibraryCalls, memory_format, shown
from torch_max_backend.dtypes import TORCH_TO_MAX
from torch_max_backend.mojo_ops.functions import LibraryFunction
from torch_max_backend.mojo_ops.pooling import FAMILY, pool_function
from torch_max_backend.problems.pooling import AdaptivePoolingProblem

_POOLS = (functional.adaptive_max_pool1d, functional.adaptive_max_pool2d, functional.adaptive_max_pool3d)


@dataclass(frozen=True)
class Drawn:
    """One pooling of [batch, channels, *input] to [batch, channels, *output]."""

    batch: int
    channels: int
    input: tuple[int, ...]
    output: tuple[int, ...]

    def pool(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """PyTorch's maxima and indices."""
        return _POOLS[len(self.input) - 1](x, self.output, return_indices=True)  # type: ignore[return-value]

    def __str__(self) -> str:
        return f"{self.batch}x{self.channels} {'x'.join(map(str, self.input))} > {'x'.join(map(str, self.output))}"


def draw(chance: random.Random, least: int, most: int) -> Iterator[Drawn]:
    """Problems without an end."""
    while True:
        rank = chance.choice((1, 2, 2, 2, 3))
        longest = {1: 2048, 2: 256, 3: 40}[rank]
        input = tuple(chance.choice((2, 7, 14, 28, 56, chance.randint(1, longest))) for _ in range(rank))
        output = tuple(chance.choice((1, 2, 3, 6, 7, chance.randint(1, extent))) for extent in input)
        if chance.random() < 0.5:
            output = output[:1] * rank
        problem = Drawn(chance.choice((1, 2, 8)), chance.choice((1, 3, 8, 21, 64, 128, 256, 512)), input, output)
        sizes = [problem.batch * problem.channels * torch.Size(extents).numel() for extents in (input, output)]
        if least <= max(sizes) <= most:
            yield problem


class Calls(LibraryCalls):
    """The library functions of one device."""

    family = FAMILY

    def functions(self, dtypes: Sequence[torch.dtype]) -> Iterator[LibraryFunction]:
        """As ``LibraryCalls``."""
        for entry in ("max_pool_fprop", "max_pool_dgrad"):
            yield from (self._function(entry, dtype) for dtype in dtypes)

    def _function(self, entry: str, dtype: torch.dtype) -> LibraryFunction:
        return pool_function(entry, self.target, TORCH_TO_MAX[dtype], DType.int64, adaptive=True)

    def _bind(self, entry: str, problem: Drawn, *tensors: torch.Tensor) -> Callable[[], None]:
        numbers = AdaptivePoolingProblem.from_aten(problem.input, problem.output).numbers()
        floating = next(each for each in tensors if each.is_floating_point())
        return self.bind(self._function(entry, floating.dtype), *tensors, numbers=numbers)

    def wrong(self, problem: Drawn, dtype: torch.dtype, layout: str) -> list[str]:
        """As ``Family``."""
        # Many are equal, some are NaN.
        x = torch.randint(-20, 20, (problem.batch, problem.channels, *problem.input)).to(dtype)
        x[torch.rand(x.shape) < 0.01] = float("nan")
        leaf = x.double().requires_grad_()
        wanted, places = problem.pool(leaf)
        y, indices = (Guarded(shown(wanted, layout).shape, of, self.device) for of in (dtype, torch.int64))
        self._bind("max_pool_fprop", problem, y.tensor, indices.tensor, shown(x, layout).to(self.device))()
        found = []
        if not (y.is_intact() and indices.is_intact()):
            found.append("forward wrote outside its results")
        if not torch.equal(indices.tensor.cpu(), shown(places, layout)):
            found.append("indices are not PyTorch's")
        if not torch.equal(y.tensor.cpu().double().nan_to_num(99.0), shown(wanted.detach(), layout).nan_to_num(99.0)):
            found.append("maxima are not PyTorch's")
        dy = torch.randint(-2, 3, wanted.shape).to(dtype)
        (dx,) = torch.autograd.grad(wanted, leaf, dy.double())
        gradient = Guarded(shown(dx, layout).shape, dtype, self.device)
        given = [shown(each, layout).to(self.device) for each in (dy, places)]
        self._bind("max_pool_dgrad", problem, gradient.tensor, *given)()
        if not gradient.is_intact():
            found.append("backward wrote outside its result")
        if not torch.equal(gradient.tensor.cpu().double(), shown(dx, layout)):
            found.append("the gradient is wrong")
        return found

    def contenders(self, problem: Drawn, dtype: torch.dtype, layout: str) -> Contenders:
        """As ``Family``."""
        x = torch.randn(problem.batch, problem.channels, *problem.input, device=self.device).to(dtype)
        leaf = memory_format(x, layout).requires_grad_()
        y, places = problem.pool(leaf)
        dy = memory_format(torch.randn_like(y), layout)
        x_shown, places_shown, dy_shown = shown(x, layout), shown(places, layout), shown(dy, layout)
        made = torch.empty_like(dy_shown), torch.empty_like(places_shown)
        still = leaf.detach()
        return {
            "forward": (self._bind("max_pool_fprop", problem, *made, x_shown), lambda: problem.pool(still)),
            "backward": (
                self._bind("max_pool_dgrad", problem, torch.empty_like(x_shown), dy_shown, places_shown),
                lambda: torch.autograd.grad(y, leaf, dy, retain_graph=True),
            ),
        }


def main() -> int:
    return command(__doc__, Calls, draw)


if __name__ == "__main__":
    sys.exit(main())
