"""Decompositions of ``grid_sample``, forward and backward, in two and three dimensions.

Along each axis a coordinate reads one place (nearest), two (linear) or four (cubic), each with a weight; a value is the
sum over all combinations of these places. Pixels are read as rows of channels. 16-bit floats are computed in float32. A
place outside the image contributes nothing, whatever its weight is.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_max_backend.torch_compat import OpOverload

aten = torch.ops.aten

_LINEAR, _NEAREST, _CUBIC = range(3)
_ZEROS, _BORDER, _REFLECTION = range(3)
#: The constant of PyTorch's cubic convolution.
_A = -0.75


@dataclass
class _Tap:
    """One place along one axis, for every point of the grid.

    Attributes:
        place: its number, int64, inside the axis.
        inside: whether the place is one of the axis.
        weight: its share in the value, zero outside.
        slope: the weight's derivative by the grid's number, zero outside; None where the value does not depend on it.
    """

    place: Tensor
    inside: Tensor
    weight: Tensor
    slope: Tensor | None


def _clipped(coordinate: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """``coordinate`` brought between the first and the last pixel (NaN to the first), and whether it was there."""
    inside = (coordinate > 0) & (coordinate < size - 1)
    return torch.where(coordinate > 0, coordinate, 0.0).clamp(max=size - 1), inside


def _reflected(coordinate: Tensor, size: int, corners: bool) -> tuple[Tensor, Tensor]:
    """``coordinate`` mirrored at the first and last pixel's centre (``corners``) or outer edge, and the derivative."""
    low, span = (0.0, size - 1) if corners else (-0.5, size)
    if span == 0:
        return torch.zeros_like(coordinate), torch.zeros_like(coordinate)
    distance = (coordinate - low).abs()
    extra = distance - (distance / (2 * span)).trunc() * (2 * span)
    return torch.minimum(extra, 2 * span - extra) + low, torch.where((coordinate < low) ^ (extra > span), -1.0, 1.0)


def _padded(coordinate: Tensor, size: int, padding: int, corners: bool) -> tuple[Tensor, Tensor]:
    """``coordinate`` as the padding mode has it, and the derivative."""
    if padding == _ZEROS:
        return coordinate, torch.ones_like(coordinate)
    if padding == _BORDER:
        coordinate, inside = _clipped(coordinate, size)
        return coordinate, inside.to(coordinate.dtype)
    coordinate, sign = _reflected(coordinate, size, corners)
    coordinate, inside = _clipped(coordinate, size)
    return coordinate, torch.where(inside, sign, 0.0)


def _cubic(t: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The weights of the four places around a coordinate that is ``t`` behind the second, with their derivatives."""
    for place in range(4):
        # Distance from the place, and its derivative.
        x, sign = (t + (1 - place), 1.0) if place < 2 else ((place - 1) - t, -1.0)
        if place in (0, 3):
            yield ((_A * x - 5 * _A) * x + 8 * _A) * x - 4 * _A, ((3 * _A * x - 10 * _A) * x + 8 * _A) * sign
        else:
            yield ((_A + 2) * x - (_A + 3)) * x * x + 1, (3 * (_A + 2) * x - 2 * (_A + 3)) * x * sign


def _taps(number: Tensor, size: int, mode: int, padding: int, corners: bool) -> list[_Tap]:
    """The places along an axis of ``size`` pixels that are read for the grid's numbers, -1 to 1 along that axis."""
    scale = (size - 1) / 2 if corners else size / 2
    coordinate = (number + 1) * scale
    if not corners:
        coordinate = coordinate - 0.5
    found: list[tuple[Tensor, Tensor, Tensor | None]]
    if mode == _CUBIC:
        first = coordinate.floor()
        found = [
            (_padded(first + (place - 1), size, padding, corners)[0], weight, slope * scale)
            for place, (weight, slope) in enumerate(_cubic(coordinate - first))
        ]
    else:
        coordinate, factor = _padded(coordinate, size, padding, corners)
        if mode == _NEAREST:
            found = [(coordinate.round(), torch.ones_like(coordinate), None)]
        else:
            first = coordinate.floor()
            t = coordinate - first
            rise = factor * scale
            found = [(first, 1 - t, -rise), (first + 1, t, rise)]
    taps = []
    for place, weight, slope in found:
        inside = (place >= 0) & (place < size)
        taps.append(
            _Tap(
                torch.where(inside, place, 0.0).to(torch.int64),
                inside,
                torch.where(inside, weight, 0.0),
                None if slope is None else torch.where(inside, slope, 0.0),
            )
        )
    return taps


class _Sampling:
    """The places that a grid reads in an image.

    Args:
        x: the image, [N, C, *extents].
        grid: [N, *points, axes], the last axis of the image first.
        mode: how places between pixels are read, as ``aten.grid_sampler_2d`` counts the modes.
        padding: what lies outside.
        corners: whether -1 and 1 are the centres of the outermost pixels, not their edges.
    """

    def __init__(self, x: Tensor, grid: Tensor, mode: int, padding: int, corners: bool) -> None:
        self.batch, self.channels, *self.extents = x.shape
        self.points = list(grid.shape[1:-1])
        self.count = math.prod(self.points)
        self.pixels = math.prod(self.extents)
        self.dtype = torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype
        numbers = grid.to(self.dtype).reshape(self.batch, self.count, len(self.extents))
        axes = range(len(self.extents))
        self.taps = [
            _taps(numbers[..., len(self.extents) - 1 - axis], self.extents[axis], mode, padding, corners)
            for axis in axes
        ]
        self._rows = self.rows(x).reshape(self.batch * self.pixels, self.channels)
        self._starts = torch.arange(self.batch, device=x.device).mul(self.pixels).reshape(self.batch, 1)

    def rows(self, image: Tensor) -> Tensor:
        """[N, C, *] as [N, places, C]."""
        return image.movedim(1, -1).reshape(self.batch, math.prod(image.shape[2:]), self.channels)

    def image(self, rows: Tensor, extents: Sequence[int]) -> Tensor:
        """[N, places, C] as [N, C, *extents]."""
        return rows.reshape(self.batch, *extents, self.channels).movedim(-1, 1).contiguous()

    def corners(self) -> Iterator[tuple[tuple[_Tap, ...], Tensor, Tensor]]:
        """The combinations of the axes' taps, the pixel of each, [N, points], and whether the image has it."""
        for taps in itertools.product(*self.taps):
            place, inside = taps[0].place, taps[0].inside
            for tap, extent in zip(taps[1:], self.extents[1:], strict=True):
                place = place * extent + tap.place
                inside = inside & tap.inside
            yield taps, place, inside

    def read(self, place: Tensor) -> Tensor:
        """The pixels there, [N, points, C]."""
        flat = (place + self._starts).reshape(-1)
        return self._rows.index_select(0, flat).to(self.dtype).reshape(self.batch, self.count, self.channels)


def _product(factors: Sequence[Tensor]) -> Tensor:
    return functools.reduce(operator.mul, factors)


def grid_sampler(x: Tensor, grid: Tensor, interpolation_mode: int, padding_mode: int, align_corners: bool) -> Tensor:
    """``aten.grid_sampler_2d`` and ``aten.grid_sampler_3d``: [N, C, *points] of x [N, C, *extents] and grid
    [N, *points, axes]."""
    sampling = _Sampling(x, grid, interpolation_mode, padding_mode, align_corners)
    parts = []
    for taps, place, inside in sampling.corners():
        weight = _product([tap.weight for tap in taps]).unsqueeze(-1)
        parts.append(torch.where(inside.unsqueeze(-1), sampling.read(place), 0.0) * weight)
    return sampling.image(functools.reduce(operator.add, parts).to(x.dtype), sampling.points)


def grid_sampler_backward(
    grad: Tensor,
    x: Tensor,
    grid: Tensor,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
    output_mask: Sequence[bool] = (True, True),
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of x and grid, from that of ``grid_sampler``'s result; None for those that ``output_mask`` leaves
    out. What several points add to a pixel is added in an order that is always the same."""
    sampling = _Sampling(x, grid, interpolation_mode, padding_mode, align_corners)
    grads = sampling.rows(grad).to(sampling.dtype)
    image = grads.new_zeros(sampling.batch, sampling.pixels, sampling.channels) if output_mask[0] else None
    slopes: list[list[Tensor]] = [[] for _ in sampling.extents]
    for taps, place, inside in sampling.corners():
        if image is not None:
            share = grads * _product([tap.weight for tap in taps]).unsqueeze(-1)
            share = torch.where(inside.unsqueeze(-1), share, 0.0)
            image = image.scatter_add(1, place.unsqueeze(-1).expand_as(share), share)
        if not output_mask[1] or interpolation_mode == _NEAREST:
            continue
        along = torch.where(inside, (grads * sampling.read(place)).sum(-1), 0.0)
        for axis, tap in enumerate(taps):
            assert tap.slope is not None
            others = [other.weight for number, other in enumerate(taps) if number != axis]
            slopes[axis].append(_product([along, tap.slope, *others]))
    grad_x = None if image is None else sampling.image(image.to(x.dtype), sampling.extents)
    if not output_mask[1]:
        return grad_x, None
    if interpolation_mode == _NEAREST:
        return grad_x, torch.zeros_like(grid, memory_format=torch.contiguous_format)
    columns = [functools.reduce(operator.add, parts) for parts in reversed(slopes)]
    return grad_x, torch.stack(columns, -1).to(grid.dtype).reshape(grid.shape)


def _cudnn(x: Tensor, grid: Tensor) -> Tensor:
    """``aten.cudnn_grid_sampler``: what PyTorch calls on a GPU for linear reading, zeros outside, corners aligned."""
    return grid_sampler(x, grid, _LINEAR, _ZEROS, True)


def _cudnn_backward(x: Tensor, grid: Tensor, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """``aten.cudnn_grid_sampler_backward``."""
    return grid_sampler_backward(grad, x, grid, _LINEAR, _ZEROS, True)


def sampling_decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """The table of these decompositions."""
    return {
        aten.grid_sampler_2d.default: grid_sampler,
        aten.grid_sampler_3d.default: grid_sampler,
        aten.grid_sampler_2d_backward.default: grid_sampler_backward,
        aten.grid_sampler_3d_backward.default: grid_sampler_backward,
        aten.cudnn_grid_sampler.default: _cudnn,
        aten.cudnn_grid_sampler_backward.default: _cudnn_backward,
    }
