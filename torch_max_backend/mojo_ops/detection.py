"""torchvision's operators of detection, one typed function each.

Regions are [K, 5]: the image's number, then x and y of two corners. Images are [N, H * W, C] and results [K, bins, C];
where bins read channels of their own (``ps_``) [N, C, H * W] and [K, C / bins, bins]. All of one dtype.

What a deformable convolution reads is laid out as columns: [N, P * Q, groups * taps * C / groups]. Offsets are
[N, P * Q, offset groups * taps * 2], the step down first, masks [N, P * Q, offset groups * taps].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from max.dtype import DType
from max.graph import DimLike, StaticDim, TensorType, TensorValue

from torch_max_backend.checked import beartype
from torch_max_backend.dtypes import accumulation_dtype
from torch_max_backend.ir import ops
from torch_max_backend.mojo_ops import functions
from torch_max_backend.mojo_ops.operands import check_float
from torch_max_backend.mojo_ops.signatures import Family, Number, Signature, Tensor, ints

_REGION = 5

_WINDOWS = ints(
    *(f"{what}_{axis}" for axis in "hw" for what in ("size", "windows", "taps", "stride", "padding", "dilation")),
    *("groups", "offset_groups", "masked", "channels", "deterministic"),
)
_POOLED: dict[str, type[Number]] = {
    **ints("extents_h", "extents_w", "bins_h", "bins_w", "samples", "aligned", "deterministic"),
    "scale": float,
}
_X, _Y, _DY, _OFFSET, _MASK, _DOFFSET, _DMASK, _COLUMNS, _DCOLUMNS = (
    Tensor(name, "dtype", 3) for name in ("x", "y", "dy", "offset", "mask", "doffset", "dmask", "columns", "dcolumns")
)
_DX, _REGIONS, _PLACES = Tensor("dx", "acc", 3), Tensor("regions", "dtype", 2), Tensor("places", DType.int32, 3)
FAMILY = Family(
    "detection",
    Signature("roi_align_fprop", (_Y,), (_X, _REGIONS), _POOLED),
    Signature("roi_align_dgrad", (_DX,), (_DY, _REGIONS), _POOLED),
    Signature("roi_pool_fprop", (_Y, _PLACES), (_X, _REGIONS), _POOLED),
    Signature("roi_pool_dgrad", (_DX,), (_DY, _REGIONS, _PLACES), _POOLED),
    Signature("ps_roi_fprop", (_Y,), (_X, _REGIONS), _POOLED),
    Signature("ps_roi_dgrad", (_DX,), (_DY, _REGIONS), _POOLED),
    Signature("deformable_columns", (_COLUMNS,), (_X, _OFFSET, _MASK), _WINDOWS),
    Signature("deformable_dgrad_input", (_DX,), (_DCOLUMNS, _OFFSET, _MASK), _WINDOWS),
    Signature("deformable_dgrad_offset", (_DOFFSET, _DMASK), (_DCOLUMNS, _X, _OFFSET, _MASK), _WINDOWS),
)


@beartype
@dataclass(frozen=True)
class Regions:
    """How regions are pooled.

    Attributes:
        extents: H and W of the images.
        bins: along H and W.
        samples: of a bin along each axis; 0 where it has one for each pixel that it is long. Of means between pixels.
        aligned: whether pixels' centres have whole coordinates. Of means between pixels.
        scale: pixels for a step of 1 in the regions' coordinates.
    """

    extents: tuple[int, int]
    bins: tuple[int, int]
    samples: int
    aligned: bool
    scale: float

    def __post_init__(self) -> None:
        if min(self.bins) < 1:
            raise ValueError(f"bins={self.bins}: must be at least 1")
        if min(self.extents) < 0:
            raise ValueError(f"extents={self.extents}: must be at least 0")

    def numbers(self, *, deterministic: bool = False) -> list[Number]:
        """The entries' numbers."""
        return [*self.extents, *self.bins, max(self.samples, 0), self.aligned, deterministic, self.scale]


@beartype
@dataclass(frozen=True)
class Deformable:
    """The windows of a deformable convolution.

    Attributes:
        extents: H and W of the images.
        taps: R and S.
        stride: along H and W.
        padding: along H and W.
        dilation: along H and W.
        channels: of the images.
        groups: of the convolution.
        offset_groups: of channels with offsets of their own.
        masked: whether values are multiplied by a mask (version 2).
    """

    extents: tuple[int, int]
    taps: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    channels: int
    groups: int
    offset_groups: int
    masked: bool

    def __post_init__(self) -> None:
        for name in ("taps", "stride", "dilation"):
            if min(getattr(self, name)) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if min(self.padding) < 0:
            raise ValueError(f"padding={self.padding}: must be at least 0")
        for name in ("groups", "offset_groups"):
            number = getattr(self, name)
            if number < 1 or self.channels % number:
                raise ValueError(f"{name}={number}: must divide the number of channels, {self.channels}")
        if min(self.windows) < 1:
            raise ValueError(f"extents={self.extents}: no window of {self.taps} taps fits")

    @property
    def windows(self) -> tuple[int, int]:
        """The number of windows along H and W."""
        sizes = zip(self.extents, self.taps, self.stride, self.padding, self.dilation, strict=True)
        first, second = ((size + 2 * pad - far * (taps - 1) - 1) // step + 1 for size, taps, step, pad, far in sizes)
        return first, second

    @property
    def column(self) -> int:
        """Elements that a window reads."""
        return prod(self.taps) * self.channels

    def numbers(self, *, deterministic: bool = False) -> list[Number]:
        """The entries' numbers."""
        axes = zip(
            self.extents, self.windows, self.taps, self.stride, self.padding, self.dilation, strict=True
        )  # fmt: skip
        groups = self.groups, self.offset_groups, self.masked
        return [*(number for axis in axes for number in axis), *groups, self.channels, deterministic]


@beartype
def roi_align_fprop(x: TensorValue, regions: TensorValue, how: Regions) -> TensorValue:
    """The means of what the samples of each bin read in ``x`` [N, H * W, C]: [K, bins, C].

    A region whose image does not exist raises on a CPU, when the graph runs, and gives zeros on a GPU.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    _check_image("x", x, how.extents, 1)
    _check_regions(regions, x)
    shape = [regions.shape[0], prod(how.bins), x.shape[2]]
    return _call("roi_align_fprop", [x, regions], how.numbers(), [_like(x, shape)])[0]


@beartype
def roi_align_dgrad(
    dy: TensorValue, regions: TensorValue, how: Regions, batch: int, *, deterministic: bool = True
) -> TensorValue:
    """The gradient of ``batch`` images, for ``dy`` [K, bins, C]; in float32 for narrow floats.

    On a GPU additions are atomic unless ``deterministic``.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    _check_result(dy, regions, how, 1)
    shape = [batch, prod(how.extents), dy.shape[2]]
    return _call(
        "roi_align_dgrad",
        [dy, regions],
        how.numbers(deterministic=deterministic),
        [_sums_like(dy, shape)],
    )[0]


@beartype
def roi_pool_fprop(x: TensorValue, regions: TensorValue, how: Regions) -> tuple[TensorValue, TensorValue]:
    """The maxima of ``x`` [N, H * W, C] in each bin, [K, bins, C], and their pixels, int32: -1 where there is none.

    A region whose image does not exist raises on a CPU, when the graph runs, and gives zeros on a GPU.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    _check_image("x", x, how.extents, 1)
    _check_regions(regions, x)
    shape = [regions.shape[0], prod(how.bins), x.shape[2]]
    values, places = _call(
        "roi_pool_fprop", [x, regions], how.numbers(), [_like(x, shape), _like(x, shape, DType.int32)]
    )
    return values, places


@beartype
def roi_pool_dgrad(
    dy: TensorValue,
    regions: TensorValue,
    places: TensorValue,
    how: Regions,
    batch: int,
    *,
    deterministic: bool = True,
) -> TensorValue:
    """The gradient of ``batch`` images, for ``dy`` and the maxima's ``places``, both [K, bins, C].

    In float32 for narrow floats. On a GPU additions are atomic unless ``deterministic``.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    _check_result(dy, regions, how, 1)
    if places.dtype != DType.int32 or list(places.shape) != list(dy.shape):
        raise ValueError(f"places is {places.dtype} {list(places.shape)}: must be int32 {list(dy.shape)}")
    shape = [batch, prod(how.extents), dy.shape[2]]
    return _call(
        "roi_pool_dgrad",
        [dy, regions, places],
        how.numbers(deterministic=deterministic),
        [_sums_like(dy, shape)],
    )[0]


@beartype
def ps_roi_fprop(x: TensorValue, regions: TensorValue, how: Regions, *, align: bool) -> TensorValue:
    """The means of each bin in a channel of its own of ``x`` [N, C, H * W]: [K, C / bins, bins].

    With ``align`` of samples between pixels, else of whole pixels. A region whose image does not exist raises on a CPU,
    when the graph runs, and gives zeros on a GPU.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    _check_image("x", x, how.extents, 2)
    _check_regions(regions, x)
    channels, bins = x.shape[1], prod(how.bins)
    if not isinstance(channels, StaticDim) or int(channels) % bins:
        raise ValueError(f"x has shape {list(x.shape)}: channels must be a multiple of the {bins} bins")
    shape = [regions.shape[0], int(channels) // bins, bins]
    return _call("ps_roi_fprop", [x, regions], how.numbers(), [_like(x, shape)], align)[0]


@beartype
def ps_roi_dgrad(
    dy: TensorValue, regions: TensorValue, how: Regions, batch: int, *, align: bool, deterministic: bool = True
) -> TensorValue:
    """The gradient of ``batch`` images, for ``dy`` [K, C / bins, bins]; in float32 for narrow floats.

    On a GPU additions are atomic unless ``deterministic``.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    _check_result(dy, regions, how, 2)
    shape = [batch, dy.shape[1] * prod(how.bins), prod(how.extents)]
    return _call(
        "ps_roi_dgrad",
        [dy, regions],
        how.numbers(deterministic=deterministic),
        [_sums_like(dy, shape)],
        align,
    )[0]


@beartype
def deformable_columns(x: TensorValue, offset: TensorValue, mask: TensorValue | None, how: Deformable) -> TensorValue:
    """Samples ``x`` [N, H * W, C] at the places of the windows, as columns.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    _check_image("x", x, how.extents, 1)
    points = _points(x, offset, mask, how)
    shape = [x.shape[0], prod(how.windows), how.column]
    return _call("deformable_columns", [x, *points], how.numbers(), [_like(x, shape)])[0]


@beartype
def deformable_dgrad_input(
    dcolumns: TensorValue,
    offset: TensorValue,
    mask: TensorValue | None,
    how: Deformable,
    *,
    deterministic: bool = True,
) -> TensorValue:
    """The gradient of the images, for that of the columns; in float32 for narrow floats.

    On a GPU additions are atomic unless ``deterministic``.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    points = _points(dcolumns, offset, mask, how)
    shape = [dcolumns.shape[0], prod(how.extents), how.channels]
    types = [_sums_like(dcolumns, shape)]
    return _call("deformable_dgrad_input", [dcolumns, *points], how.numbers(deterministic=deterministic), types)[0]


@beartype
def deformable_dgrad_offset(
    dcolumns: TensorValue, x: TensorValue, offset: TensorValue, mask: TensorValue | None, how: Deformable
) -> tuple[TensorValue, TensorValue]:
    """The gradients of ``offset`` and ``mask``, for that of the columns; of no mask nothing. Deterministic.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    _check_image("x", x, how.extents, 1)
    points = _points(dcolumns, offset, mask, how)
    types = [_like(each, each.shape) for each in points]
    doffset, dmask = _call("deformable_dgrad_offset", [dcolumns, x, *points], how.numbers(), types)
    return doffset, dmask


def _check(name: str, value: TensorValue, rank: int = 3) -> None:
    if value.rank != rank:
        raise ValueError(f"{name} has shape {list(value.shape)}: must have rank {rank}")
    check_float(name, value)


def _check_image(name: str, x: TensorValue, extents: tuple[int, int], axis: int) -> None:
    _check(name, x)
    pixels = x.shape[axis]
    if not isinstance(pixels, StaticDim) or int(pixels) != prod(extents):
        raise ValueError(f"{name} has shape {list(x.shape)}: must have {prod(extents)} pixels")


def _check_regions(regions: TensorValue, other: TensorValue) -> None:
    _check("regions", regions, 2)
    if regions.dtype != other.dtype:
        raise ValueError(f"regions has dtype {regions.dtype}: must be {other.dtype}")
    if regions.shape[1] != _REGION:
        raise ValueError(f"regions has shape {list(regions.shape)}: must be [K, {_REGION}]")


def _check_result(dy: TensorValue, regions: TensorValue, how: Regions, axis: int) -> None:
    _check("dy", dy)
    _check_regions(regions, dy)
    if dy.shape[0] != regions.shape[0] or dy.shape[axis] != prod(how.bins):
        raise ValueError(
            f"dy has shape {list(dy.shape)}: must have {regions.shape[0]} regions of {prod(how.bins)} bins"
        )


def _points(
    like: TensorValue, offset: TensorValue, mask: TensorValue | None, how: Deformable
) -> tuple[TensorValue, TensorValue]:
    """Offsets and mask as the kernels take them; a tensor without elements is no mask."""
    if how.masked != (mask is not None):
        raise ValueError(f"mask is {'given' if mask is not None else None}: masked is {how.masked}")
    numbers = how.offset_groups * prod(how.taps)
    for name, value, count in (("offset", offset, 2 * numbers), ("mask", mask, numbers)):
        if value is not None:
            _check(name, value)
            wanted = [like.shape[0], prod(how.windows), count]
            if list(value.shape) != wanted or value.dtype != like.dtype:
                raise ValueError(f"{name} is {value.dtype} {list(value.shape)}: must be {like.dtype} {wanted}")
    if mask is None:
        mask = ops.constant(np.zeros((0, 0, 0)), like.dtype, device=like.device)
    return offset, mask


def _sums_like(value: TensorValue, shape: Sequence[DimLike]) -> TensorType:
    return _like(value, shape, accumulation_dtype(value.dtype))


def _like(value: TensorValue, shape: Sequence[DimLike], dtype: DType | None = None) -> TensorType:
    return TensorType(dtype or value.dtype, shape, value.device)


@functions.variants(FAMILY.folder)
def _variants(target: functions.Target, dtypes: Sequence[DType]) -> Iterator[functions.LibraryFunction]:
    for entry in (signature.name for signature in FAMILY.signatures):
        for dtype in dtypes:
            for flags in ((False,), (True,)) if entry.startswith("ps_") else ((),):
                yield functions.function_of(FAMILY, entry, target, (dtype, *flags))


def _call(
    entry: str, values: list[TensorValue], numbers: list[Number], types: list[TensorType], *flags: bool
) -> list[TensorValue]:
    target = functions.target_of(values[0].device)
    function = functions.function_of(FAMILY, entry, target, (values[0].dtype, *flags))
    return functions.call(FAMILY[entry], function, values, types, numbers)
