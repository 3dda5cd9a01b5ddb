"""torchvision's operators of detection on problems drawn at random: checked against float64, or timed beside eager.

    python -m benchmarks detection --device cuda --check 2000
    python -m benchmarks detection --device cpu --count 60

Bins of whole pixels are checked against torchvision in float32, whose rounding decides where a bin ends.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torchvision import ops as vision

from benchmarks.kernels.drawn import Contenders, command
from benchmarks.kernels.library import Guarded, LibraryCalls, excess, memory_format
from torch_max_backend.dtypes import TORCH_TO_MAX
from torch_max_backend.mojo_ops.detection import FAMILY, Deformable, Regions
from torch_max_backend.mojo_ops.functions import LibraryFunction, function_of
from torch_max_backend.mojo_ops.signatures import Number

KINDS = ("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d")


@dataclass(frozen=True)
class Drawn:
    """One call: ``count`` regions, or a deformable convolution, of images [batch, channels, *extents]."""

    kind: str
    batch: int
    channels: int
    count: int
    shape: Regions | Deformable

    def __str__(self) -> str:
        s = self.shape
        size = "x".join(map(str, s.extents))
        if isinstance(s, Regions):
            bins = "x".join(map(str, s.bins))
            aligned = " aligned" if s.aligned else ""
            what = f"{self.count} regions > {bins}, {s.samples} samples, scale {s.scale}{aligned}"
        else:
            taps = "x".join(map(str, s.taps))
            masked = " masked" if s.masked else ""
            what = f"{taps} stride {s.stride} pad {s.padding} dilation {s.dilation} groups {s.offset_groups}{masked}"
        return f"{self.kind} {self.batch}x{self.channels} {size}: {what}"


def draw(chance: random.Random, least: int, most: int) -> Iterator[Drawn]:
    """Problems without an end."""
    while True:
        kind = chance.choice(KINDS)
        extents = chance.choice((1, 2, 7, 13, 25, 50, chance.randint(1, 96))), chance.choice((1, 5, 14, 40, 64))
        batch, channels = chance.choice((1, 1, 2, 3)), chance.choice((1, 3, 8, 20, 64, 256))
        if kind == "deform_conv2d":
            groups = chance.choice([each for each in (1, 1, 2, 4) if channels % each == 0])
            taps = chance.choice((1, 3, 3, 5)), chance.choice((1, 3, 3))
            stride, padding, dilation = (
                (chance.choice(numbers), chance.choice(numbers)) for numbers in ((1, 1, 2, 3), (0, 1, 2), (1, 1, 2))
            )
            try:
                shape = Deformable(extents, taps, stride, padding, dilation, channels, 1, groups, chance.random() < 0.5)
            except ValueError:
                continue
            problem = Drawn(kind, batch, channels, 0, shape)
            size = batch * shape.windows[0] * shape.windows[1] * shape.column
        else:
            bins = chance.choice(((7, 7), (14, 14), (1, 1), (2, 3), (chance.randint(1, 40), 4)))
            if kind.startswith("ps"):
                bins = bins if bins[0] * bins[1] <= 49 else (3, 3)
                channels = bins[0] * bins[1] * chance.choice((1, 2, 5))
            samples = chance.choice((0, 2, 1, 3))
            shape = Regions(extents, bins, samples, chance.random() < 0.5, chance.choice((1.0, 0.5, 0.25, 1 / 16)))
            problem = Drawn(kind, batch, channels, chance.choice((0, 1, 5, 30, 200, 500)), shape)
            size = channels * max(batch * extents[0] * extents[1], problem.count * bins[0] * bins[1])
        if least <= size <= most:
            yield problem


class Calls(LibraryCalls):
    """The library functions of one device."""

    family = FAMILY

    def functions(self, dtypes: Sequence[torch.dtype]) -> Iterator[LibraryFunction]:
        """As ``LibraryCalls``."""
        plain = [
            *(f"{kind}_{direction}" for kind in ("roi_align", "roi_pool") for direction in ("fprop", "dgrad")),
            *(f"deformable_{part}" for part in ("columns", "dgrad_input", "dgrad_offset")),
        ]
        positions = [(entry, (align,)) for entry in ("ps_roi_fprop", "ps_roi_dgrad") for align in (True, False)]
        for entry, flags in [*((each, ()) for each in plain), *positions]:
            yield from (self._function(entry, dtype, *flags) for dtype in dtypes)

    def _function(self, entry: str, dtype: torch.dtype, *flags: bool) -> LibraryFunction:
        return function_of(FAMILY, entry, self.target, (TORCH_TO_MAX[dtype], *flags))

    def _bind(self, key: tuple[Any, ...], numbers: Sequence[Number], *tensors: torch.Tensor) -> Callable[[], None]:
        return self.bind(self._function(*key), *tensors, numbers=numbers)

    def wrong(self, problem: Drawn, dtype: torch.dtype, layout: str) -> list[str]:
        """As ``Family``."""
        return (self._deformable if problem.kind == "deform_conv2d" else self._regions)(problem, dtype)

    def _compare(self, found: list[str], name: str, made: Guarded, wanted: torch.Tensor, allowed: torch.Tensor) -> None:
        if not made.is_intact():
            found.append(f"{name} wrote outside its result")
        off = excess(made.tensor, wanted, allowed)
        if off:
            found.append(f"{name}: {off}")

    def _regions(self, problem: Drawn, dtype: torch.dtype) -> list[str]:
        x = torch.randn(problem.batch, problem.channels, *problem.shape.extents).to(dtype)
        regions = _boxes(problem, dtype)
        eps, around = torch.finfo(dtype).eps, 2.0**-42 if dtype == torch.float64 else 2.0**-16
        # Where a bin ends is a rounded product, in float32 for all narrower floats.
        exact = torch.float32 if problem.kind.endswith("_pool") and dtype != torch.float64 else torch.float64
        wide = x.to(exact).clone().requires_grad_(), regions.to(exact)
        y = _pooled(problem, *wide)
        dy = torch.randn(y.shape).to(dtype)
        (dx,) = torch.autograd.grad(y, wide[0], dy.to(exact)) if y.numel() else (torch.zeros_like(wide[0]),)
        inside = wide[0].detach().abs().requires_grad_()
        most = _pooled(problem, inside, wide[1])
        (dx_most,) = torch.autograd.grad(most, inside, dy.to(exact).abs()) if y.numel() else (dx,)
        if problem.kind == "roi_pool":
            dx_most = _scattered_size(problem, wide, dy)
        planes = problem.kind.startswith("ps")
        show = _planes if planes else _flat
        place = [show(x).to(self.device), regions.to(self.device), show(dy).to(self.device)]
        sums = torch.float64 if dtype == torch.float64 else torch.float32
        numbers = problem.shape.numbers()
        made, back = (Guarded(show(each).shape, kind, self.device) for each, kind in ((y, dtype), (x, sums)))
        found: list[str] = []
        # A sample's coordinate is rounded: its weights move, between neighbours as far apart as the largest.
        size = float(x.double().abs().max()) if x.numel() else 0.0
        loose = around * (1 + max(problem.shape.extents)) * size
        key: tuple[Any, ...] = (dtype,)
        more: list[torch.Tensor] = []
        if problem.kind == "roi_pool":
            places = Guarded(show(y).shape, torch.int32, self.device)
            self._bind(("roi_pool_fprop", *key), numbers, made.tensor, places.tensor, *place[:2])()
            if not places.is_intact():
                found.append("places wrote outside their result")
            _, wanted = torch.ops.torchvision.roi_pool(*[each.detach() for each in wide], *_arguments(problem))
            if not torch.equal(places.tensor.cpu(), show(wanted)):
                found.append("places are wrong")
            more = [places.tensor]
            name = "roi_pool"
        else:
            name = "ps_roi" if planes else "roi_align"
            if planes:
                key = (dtype, problem.kind == "ps_roi_align")
            self._bind((f"{name}_fprop", *key), numbers, made.tensor, *place[:2])()
        self._compare(found, "forward", made, show(y).detach(), show(eps * y.detach().abs() + loose))
        shift = around * (1 + max(problem.shape.extents)) * (1 + dx_most.abs().max() if x.numel() else 1)
        for deterministic in (False, True):
            run = self._bind(
                (f"{name}_dgrad", *key), problem.shape.numbers(deterministic=deterministic), back.tensor, place[2],
                place[1], *more,
            )  # fmt: skip
            run()
            self._compare(found, "gradient", back, show(dx), show(around * dx_most.abs() + shift))
        first = back.tensor.clone()
        run()
        if not torch.equal(first.nan_to_num(7), back.tensor.nan_to_num(7)):
            found.append("two runs of the gradient differ")
        return found

    def _deformable(self, problem: Drawn, dtype: torch.dtype) -> list[str]:
        s = problem.shape
        x, offset, mask = (each.to(dtype) for each in _deformed(problem))
        wide = [each.double().clone().requires_grad_() for each in (x, offset, mask)]
        filters = _identity(problem)
        columns = _torchvision(problem, *wide, filters)
        given = torch.randn(columns.shape).to(dtype)
        wanted = torch.autograd.grad(columns, wide, given.double(), allow_unused=True)
        show = [_flat(each).to(self.device) for each in (x, offset, mask)]
        if not s.masked:
            show[2] = torch.empty(0, 0, 0, dtype=dtype, device=self.device)
        around = 2.0**-40 if dtype == torch.float64 else 2.0**-15
        sums = torch.float64 if dtype == torch.float64 else torch.float32
        found: list[str] = []
        loose = around * (1 + max(s.extents)) * (1 + float(x.double().abs().max()))
        eps = torch.finfo(dtype).eps
        made = Guarded(_flat(columns).shape, dtype, self.device)
        self._bind(("deformable_columns", dtype), s.numbers(), made.tensor, *show)()
        y = _flat(columns).detach()
        self._compare(found, "columns", made, y, eps * y.abs() + loose)
        dcolumns = _flat(given).to(self.device)
        for deterministic in (False, True):
            back = Guarded(_flat(x).shape, sums, self.device)
            numbers = s.numbers(deterministic=deterministic)
            self._bind(("deformable_dgrad_input", dtype), numbers, back.tensor, dcolumns, *show[1:])()
            dx = _flat(wanted[0])
            most = (1 + max(s.extents)) * (1 + dx.abs().max()) * 8
            self._compare(found, "image's gradient", back, dx, torch.full_like(dx, float(around * most)))
        shifts = [Guarded(each.shape, dtype, self.device) for each in show[1:]]
        self._bind(("deformable_dgrad_offset", dtype), s.numbers(), *[e.tensor for e in shifts], dcolumns, *show)()
        scale = loose * problem.channels * (1 + float(given.double().abs().max()))
        for name, each, want in zip(("offset", "mask"), shifts, wanted[1:], strict=True):
            if name == "offset" or s.masked:
                flat = _flat(want)
                self._compare(found, f"{name}'s gradient", each, flat, eps * flat.abs() + scale)
        return found

    def contenders(self, problem: Drawn, dtype: torch.dtype, layout: str) -> Contenders:
        """As ``Family``."""
        if problem.kind == "deform_conv2d":
            return self._time_deformable(problem, dtype, layout)
        x = torch.randn(problem.batch, problem.channels, *problem.shape.extents, device=self.device).to(dtype)
        regions = _boxes(problem, dtype).to(self.device)
        leaf = memory_format(x, layout).requires_grad_()
        y = _pooled(problem, leaf, regions)
        dy = memory_format(torch.randn_like(y), layout)
        planes = problem.kind.startswith("ps")
        show = _planes if planes else _flat
        sums = torch.float64 if dtype == torch.float64 else torch.float32
        numbers = problem.shape.numbers()
        flat, given = show(x), show(dy)
        made, back = torch.empty_like(given), torch.empty_like(flat, dtype=sums)
        places = torch.empty_like(given, dtype=torch.int32)
        if problem.kind == "roi_pool":
            forward = self._bind(("roi_pool_fprop", dtype), numbers, made, places, flat, regions)
            forward()
            backward = self._bind(("roi_pool_dgrad", dtype), numbers, back, given, regions, places)
        elif planes:
            align = (problem.kind == "ps_roi_align",)
            forward = self._bind(("ps_roi_fprop", dtype, *align), numbers, made, flat, regions)
            backward = self._bind(("ps_roi_dgrad", dtype, *align), numbers, back, given, regions)
        else:
            forward = self._bind(("roi_align_fprop", dtype), numbers, made, flat, regions)
            backward = self._bind(("roi_align_dgrad", dtype), numbers, back, given, regions)

        def theirs() -> None:
            with torch.no_grad():
                _pooled(problem, leaf, regions)

        return {
            f"{problem.kind} forward": (forward, theirs),
            f"{problem.kind} backward": (
                backward,
                lambda: torch.autograd.grad(y, leaf, dy, retain_graph=True),
            ),
        }

    def _time_deformable(self, problem: Drawn, dtype: torch.dtype, layout: str) -> Contenders:
        s = problem.shape
        parts = [each.to(self.device, dtype) for each in _deformed(problem)]
        leaves = [memory_format(each, layout).requires_grad_() for each in parts]
        # Filters of one channel: torchvision's time is its columns'.
        filters = torch.randn(1, problem.channels, *s.taps, device=self.device, dtype=dtype)
        y = _torchvision(problem, *leaves, filters)
        show = [_flat(each) for each in parts]
        if not s.masked:
            show[2] = torch.empty(0, 0, 0, dtype=dtype, device=self.device)
        columns = torch.randn(problem.batch, s.windows[0] * s.windows[1], s.column, device=self.device).to(dtype)
        sums = torch.float64 if dtype == torch.float64 else torch.float32
        made = torch.empty_like(columns)
        forward = self._bind(("deformable_columns", dtype), s.numbers(), made, *show)
        to_image = self._bind(
            ("deformable_dgrad_input", dtype), s.numbers(), torch.empty_like(show[0], dtype=sums), columns, *show[1:]
        )
        shifts = [torch.empty_like(each) for each in show[1:]]
        to_offset = self._bind(("deformable_dgrad_offset", dtype), s.numbers(), *shifts, columns, *show)

        def backward() -> None:
            to_image()
            to_offset()

        def theirs() -> None:
            with torch.no_grad():
                _torchvision(problem, *leaves, filters)

        def gradients() -> None:
            torch.autograd.grad(y, leaves, torch.ones_like(y), retain_graph=True, allow_unused=True)

        return {"deform_conv2d forward": (forward, theirs), "deform_conv2d backward": (backward, gradients)}


def _flat(x: torch.Tensor) -> torch.Tensor:
    """[N, places, C] of [N, C, H, W]."""
    return x.flatten(2).transpose(1, 2).contiguous()


def _planes(x: torch.Tensor) -> torch.Tensor:
    """[N, C, places]."""
    return x.flatten(2).contiguous()


def _arguments(problem: Drawn) -> tuple[float, int, int]:
    return problem.shape.scale, *problem.shape.bins


def _pooled(problem: Drawn, x: torch.Tensor, regions: torch.Tensor) -> torch.Tensor:
    """torchvision's result."""
    s = problem.shape
    if problem.kind == "roi_align":
        return vision.roi_align(x, regions, s.bins, s.scale, s.samples, s.aligned)
    if problem.kind == "ps_roi_align":
        return vision.ps_roi_align(x, regions, s.bins, s.scale, s.samples)
    op = vision.roi_pool if problem.kind == "roi_pool" else vision.ps_roi_pool
    return op(x, regions, s.bins, s.scale)


def _scattered_size(problem: Drawn, wide: tuple[torch.Tensor, torch.Tensor], dy: torch.Tensor) -> torch.Tensor:
    """The size of what is added to each pixel where maxima were."""
    return (
        torch.autograd.grad(_pooled(problem, *wide), wide[0], dy.to(wide[0].dtype).abs())[0]
        if dy.numel()
        else wide[0] * 0
    )


def _boxes(problem: Drawn, dtype: torch.dtype) -> torch.Tensor:
    """Regions in and around the images, some of them empty or turned over.

    Corners are multiples of an eighth of a pixel and no halves. Where rounding would add a sample, or take one across
    an image's edge, there is no region.
    """
    s = problem.shape
    height, width = s.extents
    first = torch.rand(problem.count, 2) * 1.5 - 0.25
    extent = torch.rand(problem.count, 2) ** 2 * torch.where(torch.rand(problem.count, 1) < 0.1, -0.2, 1.0)
    corners = torch.cat([first, first + extent], 1) * torch.tensor([width, height, width, height])
    corners = ((corners * 4).round() * 2 + 1) / 8 / s.scale
    image = torch.randint(0, problem.batch, (problem.count, 1)).double()
    regions = torch.cat([image, corners.double()], 1).to(dtype)
    if problem.kind.endswith("pool"):
        return regions
    clear = torch.ones(problem.count, dtype=torch.bool)
    shifted = s.aligned or problem.kind == "ps_roi_align"
    for axis, (size, bins) in enumerate(zip((width, height), (s.bins[1], s.bins[0]), strict=True)):
        low, high = (regions[:, at + axis].double() * s.scale - 0.5 * shifted for at in (1, 3))
        length = (high - low if shifted else (high - low).clamp_min(1)) / bins
        samples = torch.full_like(length, s.samples) if s.samples else length.ceil().clamp_min(1)
        steps = torch.arange(int(samples.max()) * bins) if problem.count else torch.arange(0)
        places = low[:, None] + (steps + 0.5) * (length / samples)[:, None]
        clear &= ((places + 1).abs() > 1e-3).all(1) & ((places - size).abs() > 1e-3).all(1)
        if not s.samples:
            clear &= (length - length.round()).abs() > 1e-3
    return regions[clear]


def _deformed(problem: Drawn) -> list[torch.Tensor]:
    """Image, offsets and mask, with points away from pixels' lines."""
    s = problem.shape
    x = torch.randn(problem.batch, problem.channels, *s.extents)
    numbers = s.offset_groups * s.taps[0] * s.taps[1]
    shape = problem.batch, 2 * numbers, *s.windows
    offset = torch.randint(-2, 3, shape) + 0.125 + torch.randint(0, 7, shape) / 8
    mask = torch.rand(problem.batch, numbers, *s.windows)
    return [x, offset, mask]


def _identity(problem: Drawn) -> torch.Tensor:
    """Filters with which a convolution's result has the columns as channels, taps outermost."""
    s = problem.shape
    taps = s.taps[0] * s.taps[1]
    filters = torch.eye(taps * problem.channels, dtype=torch.float64)
    filters = filters.reshape(-1, taps, problem.channels).transpose(1, 2).reshape(-1, problem.channels, *s.taps)
    # Fresh strides: torchvision 0.26 refuses those that a filter of one tap has kept.
    return torch.empty(filters.shape, dtype=filters.dtype).copy_(filters)


def _torchvision(
    problem: Drawn, x: torch.Tensor, offset: torch.Tensor, mask: torch.Tensor, filters: torch.Tensor
) -> torch.Tensor:
    s = problem.shape
    return vision.deform_conv2d(x, offset, filters, None, s.stride, s.padding, s.dilation, mask if s.masked else None)


def main() -> int:
    # torchvision's roi_align has no bfloat16 on a GPU.
    return command(__doc__, Calls, draw, timed_on_gpu="float32")


if __name__ == "__main__":
    sys.exit(main())
