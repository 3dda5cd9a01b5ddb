"""grid_sample's library functions on problems drawn at random: checked against float64, or timed beside PyTorch.

    python -m benchmarks sampling --device cuda --check 2000
    python -m benchmarks sampling --device cpu --count 60

A coordinate that rounding takes across a pixel's border would read another pixel: grids to check lie away from borders.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import get_args

import torch

from benchmarks.kernels.drawn import Contenders, command
from benchmarks.kernels.library import Guarded, LibraryCalls, excess, memory_format
from torch_max_backend.dtypes import TORCH_TO_MAX
from torch_max_backend.mojo_ops.functions import LibraryFunction
from torch_max_backend.mojo_ops.sampling import FAMILY, Entry, Padding, Sampling, SamplingMode, sampling_function

aten = torch.ops.aten


@dataclass(frozen=True)
class Drawn:
    """One call of aten.grid_sampler_2d or _3d: points [batch, *points, axes] in [batch, channels, *extents]."""

    batch: int
    channels: int
    points: tuple[int, ...]
    sampling: Sampling

    def arguments(self) -> tuple[int, int, bool]:
        """Of aten's ops."""
        return int(self.sampling.mode), int(self.sampling.padding), self.sampling.corners

    def read(self, x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        """PyTorch's result."""
        op = aten.grid_sampler_2d if self.sampling.axes == 2 else aten.grid_sampler_3d
        return op(x, grid, *self.arguments())

    def gradients(
        self, dy: torch.Tensor, x: torch.Tensor, grid: torch.Tensor, mask: Sequence[bool]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """PyTorch's gradients."""
        op = aten.grid_sampler_2d_backward if self.sampling.axes == 2 else aten.grid_sampler_3d_backward
        return op(dy, x, grid, *self.arguments(), list(mask))

    def __str__(self) -> str:
        s = self.sampling
        sizes = "x".join(map(str, s.extents)), "x".join(map(str, self.points))
        corners = " corners" if s.corners else ""
        return (
            f"{s.mode.name.lower()} {s.padding.name.lower()} {self.batch}x{self.channels} {sizes[0]} > "
            f"{sizes[1]}{corners}"
        )


def draw(chance: random.Random, least: int, most: int) -> Iterator[Drawn]:
    """Problems without an end."""
    while True:
        axes = chance.choice((2, 2, 3))
        longest = {2: 128, 3: 24}[axes]
        extents, points = (
            tuple(chance.choice((1, 2, 7, 14, 16, chance.randint(1, longest))) for _ in range(axes)) for _ in range(2)
        )
        mode = chance.choice(
            (
                SamplingMode.LINEAR,
                SamplingMode.LINEAR,
                SamplingMode.NEAREST,
                SamplingMode.CUBIC if axes == 2 else SamplingMode.LINEAR,
            )
        )
        sampling = Sampling(extents, mode, chance.choice(list(Padding)), chance.random() < 0.5, False)
        problem = Drawn(chance.choice((1, 2, 4)), chance.choice((1, 2, 3, 8, 20, 32, 64, 128)), points, sampling)
        if least <= problem.batch * problem.channels * max(prod(extents), prod(points)) <= most:
            yield problem


class Calls(LibraryCalls):
    """The library functions of one device."""

    family = FAMILY

    def functions(self, dtypes: Sequence[torch.dtype]) -> Iterator[LibraryFunction]:
        """As ``LibraryCalls``."""
        kinds = [
            Sampling((2,) * axes, mode, Padding.ZEROS, False, last)
            for axes, modes in ((2, list(SamplingMode)), (3, [SamplingMode.LINEAR, SamplingMode.NEAREST]))
            for mode in modes
            for last in (False, True)
        ]
        for entry, dtype, kind in product(get_args(Entry), dtypes, kinds):
            if entry != "sample_dgrad_grid" or kind.mode is not SamplingMode.NEAREST:
                yield sampling_function(entry, self.target, TORCH_TO_MAX[dtype], kind)

    def _bind(
        self, entry: Entry, sampling: Sampling, *tensors: torch.Tensor, deterministic: bool = False
    ) -> Callable[[], None]:
        function = sampling_function(entry, self.target, TORCH_TO_MAX[tensors[-1].dtype], sampling)
        return self.bind(function, *tensors, numbers=sampling.numbers(deterministic=deterministic))

    def wrong(self, problem: Drawn, dtype: torch.dtype, layout: str) -> list[str]:
        """As ``Family``."""
        sampling = replace(problem.sampling, channels_last=layout == "channels_last")
        x = torch.randn(problem.batch, problem.channels, *sampling.extents).to(dtype)
        grid = _grid(problem).to(dtype)
        dy = torch.randn(problem.batch, problem.channels, *problem.points).to(dtype)
        wide = [each.double() for each in (x, grid, dy)]
        y, y_most = (problem.read(each, wide[1]) for each in (wide[0], wide[0].abs()))
        mask = (True, sampling.mode is not SamplingMode.NEAREST)
        dx, dgrid = problem.gradients(wide[2], wide[0], wide[1], mask)
        dx_most, _ = problem.gradients(wide[2].abs(), wide[0], wide[1], mask)
        # Cubic weights are negative, too; coordinates are rounded, and the weights change with them.
        around = 2.0**-40 if dtype == torch.float64 else 2.0**-18
        loose = around * (1 + max(sampling.extents)) * (4 if sampling.mode is SamplingMode.CUBIC else 1)
        size = max(1.0, float(x.double().abs().max()) if x.numel() else 1.0)
        most = max(1.0, float(dy.double().abs().max()) if dy.numel() else 1.0)
        shown = [each.to(self.device) for each in (_flat(x, sampling), _points(grid), _flat(dy, sampling))]
        shape_y, shape_x, shape_grid = shown[2].shape, shown[0].shape, shown[1].shape
        sums = torch.float64 if dtype == torch.float64 else torch.float32
        found = []

        def compare(name: str, result: Guarded, wanted: torch.Tensor, allowed: torch.Tensor) -> None:
            if not result.is_intact():
                found.append(f"{name} wrote outside its result")
            off = excess(result.tensor, wanted, allowed)
            if off:
                found.append(f"{name}: {off}")

        made = Guarded(shape_y, dtype, self.device)
        self._bind("sample_fprop", sampling, made.tensor, shown[0], shown[1])()
        eps = torch.finfo(dtype).eps
        compare(
            "forward",
            made,
            _flat(y, sampling),
            _flat(loose * (y_most.abs() + size) + eps * y.abs(), sampling),
        )
        for deterministic in (False, True):
            made = Guarded(shape_x, sums, self.device)
            self._bind("sample_dgrad_input", sampling, made.tensor, shown[2], shown[1], deterministic=deterministic)()
            share = loose * (dx_most.abs() + most * prod(problem.points) ** 0.5)
            compare("image's gradient", made, _flat(dx, sampling), _flat(share, sampling))
        if sampling.mode is not SamplingMode.NEAREST:
            made = Guarded(shape_grid, dtype, self.device)
            self._bind("sample_dgrad_grid", sampling, made.tensor, shown[2], shown[0], shown[1])()
            scale = loose * max(sampling.extents) * problem.channels * most * size
            compare("grid's gradient", made, _points(dgrid), scale + eps * _points(dgrid).abs())
        return found

    def contenders(self, problem: Drawn, dtype: torch.dtype, layout: str) -> Contenders:
        """As ``Family``."""
        sampling = replace(problem.sampling, channels_last=layout == "channels_last")
        x = torch.randn(problem.batch, problem.channels, *sampling.extents, device=self.device).to(dtype)
        grid = _grid(problem).to(self.device, dtype)
        dy = torch.randn(problem.batch, problem.channels, *problem.points, device=self.device).to(dtype)
        shown = _flat(x, sampling), _points(grid), _flat(dy, sampling)
        sums = torch.float64 if dtype == torch.float64 else torch.float32
        theirs = memory_format(x, layout), memory_format(dy, layout)
        forward = self._bind("sample_fprop", sampling, torch.empty_like(shown[2]), shown[0], shown[1])
        to_image = self._bind(
            "sample_dgrad_input", sampling, torch.empty_like(shown[0], dtype=sums), shown[2], shown[1]
        )
        nearest = sampling.mode is SamplingMode.NEAREST
        to_grid = (
            None
            if nearest
            else self._bind("sample_dgrad_grid", sampling, torch.empty_like(shown[1]), shown[2], shown[0], shown[1])
        )

        def backward() -> None:
            to_image()
            if to_grid is not None:
                to_grid()

        return {
            "forward": (forward, lambda: problem.read(theirs[0], grid)),
            "backward": (backward, lambda: problem.gradients(theirs[1], theirs[0], grid, (True, not nearest))),
        }


def _flat(x: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """As the kernels have an image, or what is read."""
    flat = x.flatten(2)
    return (flat.transpose(1, 2) if sampling.channels_last else flat).contiguous()


def _points(grid: torch.Tensor) -> torch.Tensor:
    return grid.reshape(len(grid), -1, grid.shape[-1])


def _grid(problem: Drawn) -> torch.Tensor:
    """Numbers whose coordinates lie well between pixels' centres and edges, in and around the image."""
    sampling = problem.sampling
    parts = []
    for size in reversed(sampling.extents):
        steps = torch.randint(-size, 2 * size + 1, (problem.batch, *problem.points))
        coordinate = steps + torch.rand(steps.shape) * 0.3 + torch.where(torch.rand(steps.shape) < 0.5, 0.1, 0.6)
        # To where narrow floats are exact, a number is a small multiple of a power of two.
        scale = (size - 1) / 2 if sampling.corners else size / 2
        number = (coordinate if sampling.corners else coordinate + 0.5) / max(scale, 0.5) - 1
        parts.append(number)
    return torch.stack(parts, -1)


def main() -> int:
    return command(__doc__, Calls, draw)


if __name__ == "__main__":
    sys.exit(main())
