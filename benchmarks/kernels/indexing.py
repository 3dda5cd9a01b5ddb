"""Scattered additions on problems drawn at random: checked against float64, or timed beside PyTorch.

    python -m benchmarks indexing --device cuda --check 2000
    python -m benchmarks indexing --device cpu --count 60

In the layout "contiguous" whole rows are added at the places of one list: index_add, index_put(accumulate=True), and
the gradients of embedding and index_select. In "channels_last" each element has a place of its own: scatter_add, and
gather's gradient; gather itself is checked, too. Gradients are added to zeros. Sums must have the same bits every time
where that is asked for.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks.kernels.drawn import Contenders, command
from benchmarks.kernels.library import Guarded, LibraryCalls, excess
from torch_max_backend.dtypes import TORCH_TO_MAX
from torch_max_backend.mojo_ops.functions import LibraryFunction, function_of
from torch_max_backend.mojo_ops.indexing import FAMILY


@dataclass(frozen=True)
class Drawn:
    """``count`` rows of ``inner`` elements added to ``places`` rows, in each of ``outer`` slices.

    Attributes:
        hit: of how many rows the list speaks.
        to_zeros: whether the rows are zeros before.
    """

    outer: int
    places: int
    count: int
    inner: int
    hit: int
    to_zeros: bool

    def __str__(self) -> str:
        base = " to zeros" if self.to_zeros else ""
        return f"{self.outer}x{self.count} rows of {self.inner} to {self.hit} of {self.places}{base}"


def draw(chance: random.Random, least: int, most: int) -> Iterator[Drawn]:
    """Problems without an end: few rows that are hit often, many that are hit once, one row."""
    while True:
        places = chance.choice((1, 2, 7, 64, 169, 1000, 30522, chance.randint(1, 4096)))
        inner = chance.choice((1, 1, 2, 3, 16, 64, 96, 256, 768, 1024, 4096))
        count = chance.choice((1, 5, 64, 197, 512, 2401, 9604, 50000, chance.randint(1, 4096)))
        hit = min(places, chance.choice((1, 4, 64, places, places)))
        problem = Drawn(chance.choice((1, 1, 1, 2, 12)), places, count, inner, hit, chance.random() < 0.6)
        if least <= problem.outer * inner * max(places, count) <= most:
            yield problem


class Calls(LibraryCalls):
    """The library functions of one device."""

    family = FAMILY

    def functions(self, dtypes: Sequence[torch.dtype]) -> Iterator[LibraryFunction]:
        """As ``LibraryCalls``."""
        for entry in ("scatter_rows_add", "scatter_elements_add", "gather_elements"):
            yield from (self._function(entry, dtype) for dtype in dtypes)

    def _function(self, entry: str, dtype: torch.dtype) -> LibraryFunction:
        return function_of(FAMILY, entry, self.target, (TORCH_TO_MAX[dtype],))

    def _bind(
        self,
        y: torch.Tensor,
        x: torch.Tensor | None,
        index: torch.Tensor,
        source: torch.Tensor,
        *,
        deterministic: bool = False,
    ) -> Callable[[], None]:
        entry = "scatter_rows_add" if index.dim() == 1 else "scatter_elements_add"
        base = torch.empty(0, 0, 0, dtype=y.dtype, device=self.device) if x is None else x
        return self.bind(self._function(entry, y.dtype), y, base, index, source, numbers=[deterministic])

    def _drawn(
        self, problem: Drawn, dtype: torch.dtype, by_rows: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        shape = (problem.outer, problem.count, problem.inner)
        chosen = torch.randperm(problem.places)[: problem.hit]
        index = chosen[torch.randint(0, problem.hit, (problem.count,) if by_rows else shape)]
        x = torch.randn(problem.outer, problem.places, problem.inner).to(dtype)
        return x, index, torch.randn(shape).to(dtype)

    def wrong(self, problem: Drawn, dtype: torch.dtype, layout: str) -> list[str]:
        """As ``Family``."""
        by_rows = layout == "contiguous"
        # Sums of narrow floats are made in float32.
        dtype = torch.float64 if dtype == torch.float64 else torch.float32
        x, index, source = self._drawn(problem, dtype, by_rows)
        base = torch.zeros_like(x) if problem.to_zeros else x
        placed = [each.to(self.device) for each in (x, index, source)]
        runs = [Guarded(x.shape, dtype, self.device) for _ in range(3)]
        found = []
        for run, deterministic in zip(runs, (True, True, False), strict=True):
            given = None if problem.to_zeros else placed[0]
            self._bind(run.tensor, given, *placed[1:], deterministic=deterministic)()
            if not run.is_intact():
                found.append("wrote outside its result")
        if not torch.equal(runs[0].tensor, runs[1].tensor):
            found.append("two runs differ")
        if not by_rows:
            read = Guarded(source.shape, dtype, self.device)
            self.bind(self._function("gather_elements", dtype), read.tensor, *placed[:2])()
            if not (read.is_intact() and torch.equal(read.tensor.cpu(), x.gather(1, index))):
                found.append("gathering is wrong")
        wanted = _added(base.double(), index, source.double())
        eps = 2.0**-50 if dtype == torch.float64 else 2.0**-21
        most = _added(base.double().abs(), index, source.double().abs())
        return [*found, *(off for run in runs if (off := excess(run.tensor, wanted, eps * most)))]

    def contenders(self, problem: Drawn, dtype: torch.dtype, layout: str) -> Contenders:
        """As ``Family``."""
        by_rows = layout == "contiguous"
        x, index, source = (each.to(self.device) for each in self._drawn(problem, dtype, by_rows))
        y = torch.empty_like(x)
        name = "rows" if by_rows else "elements"

        def eager() -> torch.Tensor:
            if problem.to_zeros and by_rows and problem.outer == 1:
                return torch.ops.aten.embedding_dense_backward(source[0], index, problem.places, -1, False)
            return _added(torch.zeros_like(x) if problem.to_zeros else x, index, source)

        return {name: (self._bind(y, None if problem.to_zeros else x, index, source), eager)}


def _added(x: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return x.index_add(1, index, source) if index.dim() == 1 else x.scatter_add(1, index, source)


def main() -> int:
    # Graphs add rows of narrow floats in float32.
    return command(__doc__, Calls, draw, timed_on_gpu="float32")


if __name__ == "__main__":
    sys.exit(main())
