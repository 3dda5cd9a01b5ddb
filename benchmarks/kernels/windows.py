"""The library functions of sliding windows on problems drawn at random: checked against PyTorch, or timed beside it.

    python -m benchmarks windows --device cuda --check 3000
    python -m benchmarks windows --device cpu --count 60

In the layout "contiguous" F.unfold and F.fold (im2col, col2im); in "channels_last" ``Tensor.unfold`` along an axis and
its gradient. Columns must be equal to PyTorch's, sums as near to float64 as rounding explains.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import get_args

import torch
from torch.nn import functional

from benchmarks.kernels.drawn import Contenders, command
from benchmarks.kernels.library import Guarded, LibraryCalls, excess
from torch_max_backend.dtypes import TORCH_TO_MAX
from torch_max_backend.mojo_ops.functions import LibraryFunction
from torch_max_backend.mojo_ops.windows import FAMILY, Entry, Windows, windows_function


@dataclass(frozen=True)
class Drawn:
    """Windows over [batch, channels, H, W]; or, of the axis W of [batch, W, channels] alone, those of one row."""

    batch: int
    channels: int
    windows: Windows

    @property
    def along(self) -> Windows:
        """The windows of one row, without padding, as ``Tensor.unfold`` has them."""
        w = self.windows
        return Windows((1, w.input[1]), (1, w.taps[1]), (1, w.stride[1]))

    def __str__(self) -> str:
        w = self.windows
        return (
            f"{self.batch}x{self.channels} {w.input} taps {w.taps} stride {w.stride} padding {w.padding} "
            f"dilation {w.dilation}"
        )


def draw(chance: random.Random, least: int, most: int) -> Iterator[Drawn]:
    """Problems without an end."""

    def pair(*choices: int) -> tuple[int, int]:
        first = chance.choice(choices)
        return (first, first if chance.random() < 0.6 else chance.choice(choices))

    while True:
        input = pair(1, 2, 5, 7, 14, 16, 28, 32, 56, chance.randint(1, 70))
        taps = pair(1, 2, 3, 3, 3, 4, 7, 8)
        numbers = (
            taps,
            chance.choice((taps, pair(1, 1, 2, 3, 4))),
            pair(0, 0, 1, 1, 2, 3),
            pair(1, 1, 1, 1, 2, 3),
        )
        try:
            problem = Drawn(
                chance.choice((1, 1, 2, 8)), chance.choice((1, 3, 8, 17, 48, 64, 192)), Windows(input, *numbers)
            )
            problem.along  # noqa: B018  (raises where a row has no window)
        except ValueError:
            continue
        columns = torch.Size(problem.windows.columns_shape(problem.batch, problem.channels, taps_first=True)).numel()
        if least <= max(columns, problem.batch * problem.channels * input[0] * input[1]) <= most:
            yield problem


class Calls(LibraryCalls):
    """The library functions of one device."""

    family = FAMILY

    def functions(self, dtypes: Sequence[torch.dtype]) -> Iterator[LibraryFunction]:
        """As ``LibraryCalls``."""
        for entry, dtype, taps_first in product(get_args(Entry), dtypes, (False, True)):
            yield windows_function(entry, self.target, TORCH_TO_MAX[dtype], taps_first)

    def _bind(
        self, entry: Entry, result: torch.Tensor, source: torch.Tensor, windows: Windows, taps_first: bool
    ) -> Callable[[], None]:
        function = windows_function(entry, self.target, TORCH_TO_MAX[result.dtype], taps_first)
        return self.bind(function, result, source, numbers=windows.numbers())

    def wrong(self, problem: Drawn, dtype: torch.dtype, layout: str) -> list[str]:
        """As ``Family``."""
        taps_first = layout == "contiguous"
        windows = problem.windows if taps_first else problem.along
        x = torch.randn(self._shape(problem, taps_first)).to(dtype)
        wanted = _columns(x.double(), problem, taps_first)
        shape = _kernel_columns(problem, windows, taps_first)
        columns = Guarded(shape, dtype, self.device)
        self._bind("lay_out_windows", columns.tensor, self._shown(x, taps_first), windows, taps_first)()
        found = []
        if not columns.is_intact():
            found.append("laying out wrote outside its result")
        if not torch.equal(columns.tensor.cpu().double(), wanted.reshape(shape)):
            found.append("columns are not PyTorch's")
        given = torch.randn(shape).to(dtype)
        sums = Guarded(self._shown(x, taps_first).shape, dtype, self.device)
        self._bind("add_up_windows", sums.tensor, given.to(self.device), windows, taps_first)()
        if not sums.is_intact():
            found.append("adding up wrote outside its result")
        total, magnitude = (_added(each, x, problem, taps_first) for each in (given.double(), given.double().abs()))
        eps = 2.0**-50 if dtype == torch.float64 else 2.0**-21
        allowed = eps * magnitude + torch.finfo(dtype).eps * total.abs()
        off = excess(sums.tensor, total.reshape(sums.tensor.shape), allowed.reshape(sums.tensor.shape))
        return [*found, f"sums: {off}"] if off else found

    @staticmethod
    def _shape(problem: Drawn, taps_first: bool) -> tuple[int, ...]:
        h, w = problem.windows.input
        return (problem.batch, problem.channels, h, w) if taps_first else (problem.batch, w, problem.channels)

    def _shown(self, x: torch.Tensor, taps_first: bool) -> torch.Tensor:
        return (x.reshape(-1, *x.shape[2:], 1) if taps_first else x.unsqueeze(1)).to(self.device)

    def contenders(self, problem: Drawn, dtype: torch.dtype, layout: str) -> Contenders:
        """As ``Family``."""
        taps_first = layout == "contiguous"
        windows = problem.windows if taps_first else problem.along
        x = torch.randn(self._shape(problem, taps_first), device=self.device).to(dtype)
        source = self._shown(x, taps_first)
        columns = torch.empty(_kernel_columns(problem, windows, taps_first), dtype=dtype, device=self.device)
        theirs = _columns(x, problem, taps_first)
        return {
            "lay out": (
                self._bind("lay_out_windows", columns, source, windows, taps_first),
                lambda: _columns(x, problem, taps_first),
            ),
            "add up": (
                self._bind("add_up_windows", torch.empty_like(source), columns.clone(), windows, taps_first),
                lambda: _added(theirs, x, problem, taps_first),
            ),
        }


def _kernel_columns(problem: Drawn, windows: Windows, taps_first: bool) -> tuple[int, ...]:
    batch, channels = (problem.batch * problem.channels, 1) if taps_first else (problem.batch, problem.channels)
    return tuple(map(int, windows.columns_shape(batch, channels, taps_first=taps_first)))


def _columns(x: torch.Tensor, problem: Drawn, taps_first: bool) -> torch.Tensor:
    """PyTorch's, as the kernels have them in memory."""
    w = problem.windows
    if taps_first:
        return functional.unfold(x, w.taps, w.dilation, w.padding, w.stride)
    # Columns without overlap lie in memory as x does, but the kernel copies them.
    return x.unfold(1, w.taps[1], w.stride[1]).movedim(-1, 2).clone(memory_format=torch.contiguous_format)


def _added(columns: torch.Tensor, x: torch.Tensor, problem: Drawn, taps_first: bool) -> torch.Tensor:
    """What PyTorch makes of columns, as [N, C, H, W] or [N, W, C]."""
    w = problem.windows
    if taps_first:
        flat = columns.reshape(problem.batch, problem.channels * w.taps[0] * w.taps[1], -1)
        return functional.fold(flat, w.input, w.taps, w.dilation, w.padding, w.stride)
    count = problem.along.output[1]
    grad = columns.reshape(problem.batch, count, w.taps[1], problem.channels).movedim(2, -1)
    return torch.ops.aten.unfold_backward(grad, x.shape, 1, w.taps[1], w.stride[1])


def main() -> int:
    return command(__doc__, Calls, draw)


if __name__ == "__main__":
    sys.exit(main())
