"""Interpolation as weighted sums: which elements of an axis a result reads, and with which weights.

Every mode is separable: a result is a weighted sum of neighbouring elements along each axis. A table describes each
axis; the table of the gradient lists, for each element, the results that read it. Kernels know only these tables.

Sources: ATen's UpSample.h and UpSampleKernel.cpp; Keys, "Cubic convolution interpolation for digital image processing",
1981, for the cubic weights; Pillow's Resample.c for the filters of antialiasing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from torch_max_backend.checked import beartype

_Floats = NDArray[np.float64]
_Ints = NDArray[np.int64]


class Mode(Enum):
    """How results are computed along an axis."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest_exact"
    LINEAR = "linear"
    CUBIC = "cubic"
    LINEAR_ANTIALIASED = "linear_aa"
    CUBIC_ANTIALIASED = "cubic_aa"
    LANCZOS_ANTIALIASED = "lanczos_aa"
    AREA = "area"


@dataclass(frozen=True, eq=False)
class AxisTable:
    """Results of an axis as weighted sums of neighbouring elements.

    Attributes:
        extent: how many elements there are.
        first: for each result the first element that it reads; never less than for the result before.
        count: and how many, 0 where it reads none.
        weights: [results, most], zeros from ``count`` on.
    """

    extent: int
    first: _Ints
    count: _Ints
    weights: _Floats

    @property
    def results(self) -> int:
        return len(self.first)

    @property
    def most(self) -> int:
        """The most elements that a result reads."""
        return self.weights.shape[1]

    @property
    def places(self) -> NDArray[np.int32]:
        """[results, 2]: ``first`` and ``count``, as kernels take them."""
        return np.stack([self.first, self.count], 1).astype(np.int32)

    @property
    def spans(self) -> NDArray[np.int64]:
        """How many neighbouring elements 1, 2, 4, ... neighbouring results read together at most, where the first one's
        number is a multiple of how many they are; the last entry is that of all results."""
        spans, size = [], 1
        while True:
            begins = np.arange(0, self.results, size)
            ends = np.maximum.reduceat(self.first + self.count, begins)
            spans.append(max(1, int((ends - self.first[begins]).max())))
            if size >= self.results:
                return np.array(spans, np.int64)
            size *= 2

    def transposed(self) -> AxisTable:
        """The gradient's: for each element the results that read it, which are neighbours because first and last
        elements only grow. Those that read it with weight 0 at either end are left out: kernels choose by the most that
        an element has, and the first result of an enlargement would give every bilinear gradient a fifth."""
        last = self.first + self.count - 1
        elements = np.arange(self.extent)
        first = np.searchsorted(last, elements)
        count = np.maximum(np.searchsorted(self.first, elements, side="right") - first, 0)
        first = np.minimum(first, self.results - 1)
        reader = first[:, None] + np.arange(max(1, int(count.max())))
        given = reader < (first + count)[:, None]
        reader = np.where(given, reader, 0)
        tap = np.where(given, elements[:, None] - self.first[reader], 0)
        return AxisTable(self.results, first, count, np.where(given, self.weights[reader, tap], 0.0)).without_zeros()

    def without_zeros(self) -> AxisTable:
        """Without weights of 0 in front of and behind those of a result that has others."""
        has_weight = self.weights != 0
        kept = has_weight.any(1)
        front = np.where(kept, has_weight.argmax(1), 0)
        end = np.where(kept, self.most - has_weight[:, ::-1].argmax(1), self.count)
        # First elements only grow.
        first = np.minimum.accumulate((self.first + front)[::-1])[::-1]
        count = self.first + end - first
        tap = (first - self.first)[:, None] + np.arange(max(1, int(count.max())))
        given = tap < (first - self.first + count)[:, None]
        weights = np.take_along_axis(self.weights, np.where(given, tap, 0), 1)
        return AxisTable(self.extent, first, count, np.where(given, weights, 0.0))


@beartype
@dataclass(frozen=True)
class InterpolationAxis:
    """One axis of an interpolation, as aten's arguments say it.

    Attributes:
        mode: how.
        input: its extent.
        output: how many results.
        align_corners: whether the first and the last results lie on the first and the last element.
        factor: results for each element where the model gave that and ATen goes by it; else the extents tell.
    """

    mode: Mode
    input: int
    output: int
    align_corners: bool = False
    factor: float | None = None

    def __post_init__(self) -> None:
        for name in ("input", "output"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.factor is not None and not self.factor > 0:
            raise ValueError(f"factor={self.factor}: must be greater than 0")

    @property
    def step(self) -> float:
        """Elements from one result to the next."""
        if self.align_corners:
            return (self.input - 1) / (self.output - 1) if self.output > 1 else 0.0
        return 1 / self.factor if self.factor else self.input / self.output

    def table(self) -> AxisTable:
        """The forward pass."""
        return _table(self)

    def gradient_table(self) -> AxisTable:
        """The backward pass."""
        return _gradient_table(self)


_NEAREST = (Mode.NEAREST, Mode.NEAREST_EXACT)
Axes = tuple[InterpolationAxis, InterpolationAxis, InterpolationAxis]


@beartype
def interpolation_axes(
    mode: Mode,
    input: Sequence[int],
    output: Sequence[int],
    align_corners: bool = False,
    factors: Sequence[float | None] = (),
    *,
    is_gpu: bool = False,
) -> Axes:
    """The axes D, H and W of an aten op, unit ones in front where it has fewer.

    Args:
        mode: how.
        input: the one to three spatial extents.
        output: as many.
        align_corners: as in aten.
        factors: one for each axis, or none; None and numbers that are not positive count as not given.
        is_gpu: ATen's kernels for CPUs and GPUs ignore a factor in different cases.

    Raises:
        ValueError: an extent is less than 1, or the numbers of axes differ.
    """
    if not 1 <= len(input) <= 3 or len(output) != len(input) or (factors and len(factors) != len(input)):
        raise ValueError(
            f"input={tuple(input)}, output={tuple(output)}, factors={tuple(factors)}: must be one to three extents, as "
            "many in each"
        )
    kept = is_gpu and tuple(input) == tuple(output)
    axes = []
    for size, results, factor in zip(input, output, factors or [None] * len(input), strict=True):
        if factor is not None and (not factor > 0 or align_corners or kept or _ignores(mode, size, results, is_gpu)):
            factor = None
        axes.append(InterpolationAxis(mode, size, results, align_corners, factor))
    unit = InterpolationAxis(Mode.NEAREST, 1, 1)
    d, h, w = [unit] * (3 - len(axes)) + axes
    return d, h, w


def _ignores(mode: Mode, size: int, results: int, is_gpu: bool) -> bool:
    """Whether ATen goes by the extents of one axis though it has a factor."""
    if is_gpu:
        return mode in _NEAREST and results == size
    if mode is Mode.NEAREST and results == 2 * size:
        return True
    return results == size and mode not in (Mode.NEAREST_EXACT, Mode.CUBIC)


@functools.lru_cache(256)
def _table(axis: InterpolationAxis) -> AxisTable:
    if axis.output == axis.input and axis.factor is None:
        return _reading(axis, np.arange(axis.output))
    if axis.mode in _NEAREST:
        return _reading(axis, _nearest(axis))
    if axis.mode is Mode.AREA:
        return _area(axis)
    if axis.mode is Mode.LINEAR:
        return _linear(axis)
    return _cubic(axis) if axis.mode is Mode.CUBIC else _antialiased(axis)


@functools.lru_cache(256)
def _gradient_table(axis: InterpolationAxis) -> AxisTable:
    return axis.table().transposed()


def _reading(axis: InterpolationAxis, element: _Ints) -> AxisTable:
    """Each result is one element."""
    return AxisTable(axis.input, element, np.ones_like(element), np.ones((len(element), 1)))


def _nearest(axis: InterpolationAxis) -> _Ints:
    """In float32, as ATen for every dtype: indices must be the same."""
    step = np.float32(axis.step) if axis.factor else np.float32(axis.input) / np.float32(axis.output)
    place = np.arange(axis.output) + (0.5 if axis.mode is Mode.NEAREST_EXACT else 0.0)
    return np.minimum(np.floor(place.astype(np.float32) * step).astype(np.int64), axis.input - 1)


def _area(axis: InterpolationAxis) -> AxisTable:
    """Adaptive average pooling: result o is the average of the elements floor(o I / O) to ceil((o + 1) I / O) - 1."""
    results = np.arange(axis.output)
    first = results * axis.input // axis.output
    count = -(-(results + 1) * axis.input // axis.output) - first
    taps = np.arange(int(count.max()))
    return AxisTable(axis.input, first, count, (taps < count[:, None]) / count[:, None])


def _source(axis: InterpolationAxis, clamped: bool) -> tuple[_Ints, _Floats]:
    """For each result the element at or before it, and how far behind that it lies.

    In float64 for every dtype: weights are continuous in it, so that no other element counts for the difference.
    """
    results = np.arange(axis.output)
    place = results * axis.step if axis.align_corners else (results + 0.5) * axis.step - 0.5
    if clamped:
        place = np.maximum(place, 0)
    # Rounded to float32 first, as ATen does.
    element = np.minimum(np.floor(place.astype(np.float32)).astype(np.int64), axis.input - 1)
    return element, np.clip(place - element, 0.0, 1.0)


def _linear(axis: InterpolationAxis) -> AxisTable:
    element, share = _source(axis, clamped=True)
    return _clamped(axis, element, np.stack([1 - share, share], 1))


def _cubic(axis: InterpolationAxis) -> AxisTable:
    element, share = _source(axis, clamped=False)
    distances = np.stack([share + 1, share, 1 - share, 2 - share], 1)
    return _clamped(axis, element - 1, _cubic_filter(distances, -0.75))


def _clamped(axis: InterpolationAxis, first: _Ints, weights: _Floats) -> AxisTable:
    """Elements first, first + 1, ... where the nearest one stands for what is outside."""
    taps = weights.shape[1]
    elements = np.clip(first[:, None] + np.arange(taps), 0, axis.input - 1)
    start, end = elements[:, 0], elements[:, -1] + 1
    summed = np.zeros((axis.output, int((end - start).max())))
    for tap in range(taps):
        summed[np.arange(axis.output), elements[:, tap] - start] += weights[:, tap]
    return AxisTable(axis.input, start, end - start, summed)


def _cubic_filter(distance: _Floats, a: float) -> _Floats:
    near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return np.where(distance <= 1, near, np.where(distance < 2, far, 0.0))


#: How far each filter reaches, and its weights by the distance.
_FILTERS: dict[Mode, tuple[int, Callable[[_Floats], _Floats]]] = {
    Mode.LINEAR_ANTIALIASED: (1, lambda distance: np.maximum(1 - distance, 0)),
    Mode.CUBIC_ANTIALIASED: (2, lambda distance: _cubic_filter(distance, -0.5)),
    Mode.LANCZOS_ANTIALIASED: (3, lambda distance: np.sinc(distance) * np.sinc(distance / 3) * (distance < 3)),
}  # fmt: skip


def _antialiased(axis: InterpolationAxis) -> AxisTable:
    """A filter as wide as the step from one result to the next."""
    radius, filter = _FILTERS[axis.mode]
    width = max(axis.step, 1.0)
    centre = (np.arange(axis.output) + 0.5) * axis.step
    # Whole numbers are cut towards zero.
    start, end = (np.trunc(centre + sign * radius * width + 0.5).astype(np.int64) for sign in (-1, 1))
    start = np.clip(start, 0, axis.input - 1)
    count = np.clip(end, 1, axis.input) - start
    taps = np.arange(max(1, int(count.max())))
    weights = filter(np.abs(start[:, None] + taps - centre[:, None] + 0.5) / width)
    weights = np.where(taps < count[:, None], weights, 0.0)
    total = weights.sum(1, keepdims=True)
    return AxisTable(axis.input, start, np.maximum(count, 0), weights / np.where(total == 0, 1.0, total))
