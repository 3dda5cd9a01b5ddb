"""grid_sample and its gradients, one typed function each.

An image is [N, C, D * H * W], or with channels last [N, D * H * W, C]; what is read [N, C, P] or [N, P, C]; the grid
[N, P, axes], the axis W first. All of one dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, get_args

import numpy as np
from max.dtype import DType
from max.graph import StaticDim, TensorType, TensorValue

from torch_max_backend.checked import beartype
from torch_max_backend.dtypes import accumulation_dtype
from torch_max_backend.mojo_ops import functions
from torch_max_backend.mojo_ops.operands import check_float
from torch_max_backend.mojo_ops.signatures import Family, Signature, Tensor, ints

Entry = Literal["sample_fprop", "sample_dgrad_grid", "sample_dgrad_input"]

_NUMBERS = ints("extents_d", "extents_h", "extents_w", "padding", "corners", "deterministic")
_X, _Y, _GRID, _DY, _DGRID = (Tensor(name, "dtype", 3) for name in ("x", "y", "grid", "dy", "dgrid"))
FAMILY = Family(
    "sampling",
    Signature("sample_fprop", (_Y,), (_X, _GRID), _NUMBERS),
    Signature("sample_dgrad_grid", (_DGRID,), (_DY, _X, _GRID), _NUMBERS),
    Signature("sample_dgrad_input", (Tensor("dx", "acc", 3),), (_DY, _GRID), _NUMBERS),
)


class SamplingMode(IntEnum):
    """How places between pixels are read, as ``aten.grid_sampler_2d`` counts the modes."""

    LINEAR = 0
    NEAREST = 1
    CUBIC = 2


class Padding(IntEnum):
    """The padding outside of an image, as ``aten.grid_sampler_2d`` numbers it."""

    ZEROS = 0
    BORDER = 1
    REFLECTION = 2


@beartype
@dataclass(frozen=True)
class Sampling:
    """How an image is read.

    Attributes:
        extents: H and W, or D, H and W.
        mode: how places between pixels are read.
        padding: what lies outside.
        corners: whether -1 and 1 are the centres of the outermost pixels, not their edges.
        channels_last: whether channels are innermost in the image and in what is read.
    """

    extents: tuple[int, ...]
    mode: SamplingMode
    padding: Padding
    corners: bool
    channels_last: bool

    def __post_init__(self) -> None:
        if len(self.extents) not in (2, 3) or min(self.extents) < 1:
            raise ValueError(f"extents={self.extents}: must be two or three numbers of at least 1")
        if self.mode is SamplingMode.CUBIC and len(self.extents) == 3:
            raise ValueError(f"mode={self.mode.name}: must be linear or nearest in three dimensions")

    @property
    def axes(self) -> int:
        return len(self.extents)

    @property
    def pixels(self) -> int:
        return int(np.prod(self.extents))

    @property
    def taps(self) -> int:
        """Places that a coordinate reads along an axis."""
        return {SamplingMode.NEAREST: 1, SamplingMode.LINEAR: 2, SamplingMode.CUBIC: 4}[self.mode]

    def numbers(self, *, deterministic: bool = False) -> list[int]:
        """The entries' numbers."""
        return [*[1] * (3 - self.axes), *self.extents, self.padding, self.corners, deterministic]


def sampling_function(
    entry: Entry, target: Literal["cpu", "gpu"], dtype: DType, sampling: Sampling
) -> functions.LibraryFunction:
    """The library function of an entry."""
    parameters = (dtype, sampling.channels_last, sampling.taps, sampling.axes == 3)
    return functions.function_of(FAMILY, entry, target, parameters)


@functions.variants(FAMILY.folder)
def _variants(target: functions.Target, dtypes: Sequence[DType]) -> Iterator[functions.LibraryFunction]:
    for entry in get_args(Entry):
        for mode in (SamplingMode.LINEAR, SamplingMode.CUBIC) if entry == "sample_dgrad_grid" else SamplingMode:
            for extents in ((1, 1),) if mode is SamplingMode.CUBIC else ((1, 1), (1, 1, 1)):
                for channels_last in (False, True):
                    sampling = Sampling(extents, mode, Padding.ZEROS, False, channels_last)
                    for dtype in dtypes:
                        yield sampling_function(entry, target, dtype, sampling)


@beartype
def sample_fprop(x: TensorValue, grid: TensorValue, sampling: Sampling) -> TensorValue:
    """Samples ``x`` at the points of ``grid``.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    _check_image("x", x, sampling)
    _check_grid(grid, x, sampling)
    n, points = grid.shape[0], grid.shape[1]
    shape = [n, points, x.shape[2]] if sampling.channels_last else [n, x.shape[1], points]
    return _call("sample_fprop", [x, grid], sampling, x.dtype, shape)


@beartype
def sample_dgrad_grid(dy: TensorValue, x: TensorValue, grid: TensorValue, sampling: Sampling) -> TensorValue:
    """The gradient of ``grid``, for ``dy``, that of what was read. Deterministic.

    Raises:
        ValueError: shapes or dtypes do not fit, or nearest pixels are read: the gradient is zero then.
    """
    if sampling.mode is SamplingMode.NEAREST:
        raise ValueError(f"mode={sampling.mode.name}: the gradient of the grid is zero")
    _check_image("x", x, sampling)
    _check_grid(grid, x, sampling)
    _check_read(dy, grid, sampling)
    return _call("sample_dgrad_grid", [dy, x, grid], sampling, dy.dtype, list(grid.shape))


@beartype
def sample_dgrad_input(
    dy: TensorValue, grid: TensorValue, sampling: Sampling, *, deterministic: bool = True
) -> TensorValue:
    """The gradient of the image, for ``dy``, that of what was read; in float32 for narrow floats.

    On a GPU additions are atomic unless ``deterministic``.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    _check_grid(grid, dy, sampling)
    _check_read(dy, grid, sampling)
    sums = accumulation_dtype(dy.dtype)
    pixels = sampling.pixels
    shape = [dy.shape[0], pixels, dy.shape[2]] if sampling.channels_last else [*dy.shape[:2], pixels]
    return _call("sample_dgrad_input", [dy, grid], sampling, sums, shape, deterministic=deterministic)


def _check_image(name: str, x: TensorValue, sampling: Sampling) -> None:
    _check(name, x)
    pixels = x.shape[1 if sampling.channels_last else 2]
    if not isinstance(pixels, StaticDim) or int(pixels) != sampling.pixels:
        raise ValueError(f"{name} has shape {list(x.shape)}: must have {sampling.pixels} pixels")


def _check_read(dy: TensorValue, grid: TensorValue, sampling: Sampling) -> None:
    _check("dy", dy)
    if dy.shape[1 if sampling.channels_last else 2] != grid.shape[1]:
        raise ValueError(f"dy has shape {list(dy.shape)}: must have as many points as grid, {list(grid.shape)}")


def _check_grid(grid: TensorValue, other: TensorValue, sampling: Sampling) -> None:
    _check("grid", grid)
    if grid.dtype != other.dtype:
        raise ValueError(f"grid has dtype {grid.dtype}: must be {other.dtype}")
    if grid.shape[0] != other.shape[0] or grid.shape[2] != sampling.axes:
        raise ValueError(f"grid has shape {list(grid.shape)}: must be [{other.shape[0]}, points, {sampling.axes}]")


def _check(name: str, value: TensorValue) -> None:
    if value.rank != 3:
        raise ValueError(f"{name} has shape {list(value.shape)}: must have rank 3")
    check_float(name, value)


def _call(
    entry: Entry,
    values: list[TensorValue],
    sampling: Sampling,
    dtype: DType,
    shape: list,  # type: ignore[type-arg]
    *,
    deterministic: bool = False,
) -> TensorValue:
    device = values[0].device
    function = sampling_function(entry, functions.target_of(device), values[0].dtype, sampling)
    types = [TensorType(dtype, shape, device)]
    return functions.call(FAMILY[entry], function, values, types, sampling.numbers(deterministic=deterministic))[0]
