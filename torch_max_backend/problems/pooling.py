"""The geometry of pooling: one immutable type that owns windows, output extents and the rules between them.

Spatial axes are always three, in the order D, H, W; a 2-D problem has a unit depth and a 1-D problem a unit
depth and height. Errors name the argument, its value and the rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from torch_max_backend.checked import beartype

Extents = tuple[int, int, int]
AXES = ("D", "H", "W")
NUMBERS = (
    *(f"{what}_{axis}" for what in ("window", "stride", "padding", "dilation") for axis in "dhw"),
    "ceil_mode",
    "count_include_pad",
    "divisor_override",
)
"""The names of the kernels' arguments besides tensors."""


def _spread(name: str, value: int | Sequence[int], rank: int, fill: int) -> Extents:
    """An int or one int for each spatial axis, as three, the missing leading axes filled."""
    values = [value] * rank if isinstance(value, int) else list(value)
    if len(values) == 1:
        values = values * rank
    if len(values) != rank:
        raise ValueError(f"{name}={value}: must be one int or {rank}, one for each spatial axis")
    d, h, w = [fill] * (3 - rank) + values
    return (d, h, w)


def _at_least(name: str, values: Extents, least: int) -> None:
    if min(values) < least:
        raise ValueError(f"{name}={values}: every value must be at least {least}")


def _output_extent(size: int, window: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> int:
    room = size + 2 * padding - dilation * (window - 1) - 1 + (stride - 1 if ceil_mode else 0)
    windows = room // stride + 1
    # In ceil mode the last window must start inside the input or its left padding.
    if ceil_mode and (windows - 1) * stride >= size + padding:
        windows -= 1
    return windows


def _windows_meet(windows: int, window: int, stride: int, dilation: int) -> bool:
    """Whether two windows on one axis share an input position: tap m of one is tap 0 of a later one."""
    return any(m * dilation % stride == 0 and m * dilation // stride < windows for m in range(1, window))


@beartype
@dataclass(frozen=True)
class PoolingProblem:
    """One max or average pooling: everything but batch, channels and dtype.

    `divisor_override` and `count_include_pad` matter to averages only, `dilation` to maxima only.
    """

    rank: int
    input: Extents
    window: Extents
    stride: Extents
    padding: Extents
    dilation: Extents = (1, 1, 1)
    ceil_mode: bool = False
    count_include_pad: bool = True
    divisor_override: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= 3:
            raise ValueError(f"rank={self.rank}: pooling has 1, 2 or 3 spatial axes")
        _at_least("input", self.input, 1)
        _at_least("kernel_size", self.window, 1)
        _at_least("stride", self.stride, 1)
        _at_least("padding", self.padding, 0)
        _at_least("dilation", self.dilation, 1)
        for axis, name in enumerate(AXES):
            if self.padding[axis] > self.window[axis] // 2:
                raise ValueError(
                    f"padding={self.padding}: on axis {name} it must be at most half of kernel_size, "
                    f"{self.window[axis] // 2}"
                )
        if self.divisor_override == 0:
            raise ValueError("divisor_override=0: must not be zero")
        if min(self.output) < 1:
            raise ValueError(
                f"input={self.input}: too small for kernel_size={self.window}, stride={self.stride}, "
                f"padding={self.padding}, dilation={self.dilation}; the output would be {self.output}"
            )

    @classmethod
    @beartype
    def from_aten(
        cls,
        input: Sequence[int],
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] | None = None,
        padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> PoolingProblem:
        """From aten's arguments; `input` is the spatial extents, an absent or empty stride is the window."""
        rank = len(input)
        if not 1 <= rank <= 3:
            raise ValueError(f"input={tuple(input)}: pooling has 1, 2 or 3 spatial axes")
        window = _spread("kernel_size", kernel_size, rank, 1)
        if stride is None or (not isinstance(stride, int) and len(stride) == 0):
            stride = window[3 - rank :]
        return cls(
            rank=rank,
            input=_spread("input", list(input), rank, 1),
            window=window,
            stride=_spread("stride", stride, rank, 1),
            padding=_spread("padding", padding, rank, 0),
            dilation=_spread("dilation", dilation, rank, 1),
            ceil_mode=ceil_mode,
            count_include_pad=count_include_pad,
            divisor_override=divisor_override,
        )

    @property
    def output(self) -> Extents:
        d, h, w = (
            _output_extent(*axis, ceil_mode=self.ceil_mode)
            for axis in zip(self.input, self.window, self.stride, self.padding, self.dilation, strict=True)
        )
        return (d, h, w)

    @property
    def input_spatial(self) -> tuple[int, ...]:
        """The input's extents on the axes that the problem really has."""
        return self.input[3 - self.rank :]

    @property
    def output_spatial(self) -> tuple[int, ...]:
        return self.output[3 - self.rank :]

    @property
    def window_size(self) -> int:
        return prod(self.window)

    @property
    def is_deep(self) -> bool:
        """Whether windows reach over several slabs of D."""
        return self.window[0] > 1

    @property
    def overlaps(self) -> bool:
        """Whether some input position lies under two windows (dilated windows interleave: k2 s2 d2 does)."""
        return any(
            _windows_meet(*axis) for axis in zip(self.output, self.window, self.stride, self.dilation, strict=True)
        )

    @property
    def has_empty_windows(self) -> bool:
        """Whether some window lies wholly in padding, as only dilated ones can. Its maximum is -inf; the index that
        aten returns for it names a pixel that is not under it, which no tap's number can."""
        return any(
            dilation > 1
            and any(
                all(not 0 <= o * stride - padding + k * dilation < extent for k in range(window))
                for o in range(windows)
            )
            for extent, windows, window, stride, padding, dilation in zip(
                self.input, self.output, self.window, self.stride, self.padding, self.dilation, strict=True
            )
        )

    @property
    def windows_above(self) -> int:
        """How many windows a gradient must look at for one input position, at most."""
        return prod(
            min(windows, -(-(dilation * (window - 1) + 1) // stride))
            for windows, window, stride, dilation in zip(
                self.output, self.window, self.stride, self.dilation, strict=True
            )
        )

    @property
    def has_byte_offsets(self) -> bool:
        """Whether a byte holds a tap's number within the window, and one more."""
        return self.window_size <= 255

    def numbers(self) -> list[int]:
        """The kernels' ``NUMBERS``."""
        flags = (int(self.ceil_mode), int(self.count_include_pad), self.divisor_override or 0)
        return [*self.window, *self.stride, *self.padding, *self.dilation, *flags]


@beartype
@dataclass(frozen=True)
class AdaptivePoolingProblem:
    """Adaptive pooling: window o covers input positions floor(o I / O) to ceil((o + 1) I / O)."""

    rank: int
    input: Extents
    output: Extents

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= 3:
            raise ValueError(f"rank={self.rank}: pooling has 1, 2 or 3 spatial axes")
        _at_least("input", self.input, 1)
        _at_least("output_size", self.output, 1)

    @classmethod
    @beartype
    def from_aten(cls, input: Sequence[int], output_size: int | Sequence[int | None]) -> AdaptivePoolingProblem:
        """From aten's arguments; None in `output_size` keeps that extent."""
        rank = len(input)
        if not 1 <= rank <= 3:
            raise ValueError(f"input={tuple(input)}: pooling has 1, 2 or 3 spatial axes")
        if not isinstance(output_size, int):
            if len(output_size) == 1:
                output_size = list(output_size) * rank
            if len(output_size) != rank:
                raise ValueError(
                    f"output_size={tuple(output_size)}: must be one int or {rank}, one for each spatial axis"
                )
            sizes = [size if out is None else out for size, out in zip(input, output_size, strict=True)]
        else:
            sizes = [output_size] * rank
        return cls(
            rank=rank,
            input=_spread("input", list(input), rank, 1),
            output=_spread("output_size", sizes, rank, 1),
        )

    @property
    def input_spatial(self) -> tuple[int, ...]:
        return self.input[3 - self.rank :]

    @property
    def output_spatial(self) -> tuple[int, ...]:
        return self.output[3 - self.rank :]

    def numbers(self) -> list[int]:
        """As many as another pooling's, all 0: adaptive windows follow from the extents."""
        return [0] * len(NUMBERS)
