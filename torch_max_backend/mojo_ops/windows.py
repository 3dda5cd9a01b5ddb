"""Sliding windows as columns (im2col), and columns added up where windows lie (col2im), one typed function each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from max.dtype import DType
from max.graph import Dim, StaticDim, TensorType, TensorValue

from torch_max_backend.checked import beartype
from torch_max_backend.mojo_ops import functions
from torch_max_backend.mojo_ops.operands import check_float
from torch_max_backend.mojo_ops.signatures import Family, Signature, Tensor, ints

Pair = tuple[int, int]
_X, _COLUMNS = Tensor("x", "dtype", 4), Tensor("columns", "dtype", 6)
_NUMBERS = ints(*(f"{what}_{axis}" for axis in "hw" for what in ("taps", "stride", "padding", "dilation")))
FAMILY = Family(
    "windows",
    Signature("lay_out_windows", results=(_COLUMNS,), operands=(_X,), numbers=_NUMBERS),
    Signature("add_up_windows", results=(_X,), operands=(_COLUMNS,), numbers=_NUMBERS),
)
Entry = Literal["lay_out_windows", "add_up_windows"]


@beartype
@dataclass(frozen=True)
class Windows:
    """Windows over [H, W].

    Attributes:
        input: H and W.
        taps: the extents of a window, R and S.
        stride: from one window to the next.
        padding: elements outside on each side, which count as zeros.
        dilation: from one tap to the next.
    """

    input: Pair
    taps: Pair
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)

    def __post_init__(self) -> None:
        for name in ("input", "taps", "stride", "dilation"):
            if min(getattr(self, name)) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1 each")
        if min(self.padding) < 0:
            raise ValueError(f"padding={self.padding}: must be at least 0 each")
        if min(self.output) < 1:
            raise ValueError(f"input={self.input}: too small for windows of {self.taps} taps")

    @property
    def output(self) -> Pair:
        """The numbers of windows, P and Q."""
        sizes = zip(self.input, self.taps, self.stride, self.padding, self.dilation, strict=True)
        p, q = (
            max(0, (extent + 2 * padding - dilation * (taps - 1) - 1) // stride + 1)
            for extent, taps, stride, padding, dilation in sizes
        )
        return p, q

    def numbers(self) -> list[int]:
        """The entries' numbers: taps, stride, padding and dilation of H, then of W."""
        axes = zip(self.taps, self.stride, self.padding, self.dilation, strict=True)
        return [number for axis in axes for number in axis]

    def columns_shape(self, batch: Dim | int, channels: Dim | int, *, taps_first: bool) -> tuple[Dim | int, ...]:
        """[N, R, S, P, Q, C], or [N, P, Q, R, S, C]."""
        middle = (*self.taps, *self.output) if taps_first else (*self.output, *self.taps)
        return (batch, *middle, channels)


def windows_function(
    entry: Entry, target: Literal["cpu", "gpu"], dtype: DType, taps_first: bool
) -> functions.LibraryFunction:
    """The library function of an entry."""
    return functions.function_of(FAMILY, entry, target, (dtype, taps_first))


@functions.variants(FAMILY.folder)
def _variants(target: functions.Target, dtypes: Sequence[DType]) -> Iterator[functions.LibraryFunction]:
    for entry in get_args(Entry):
        for dtype in dtypes:
            for taps_first in (False, True):
                yield windows_function(entry, target, dtype, taps_first)


@beartype
def lay_out_windows(x: TensorValue, windows: Windows, *, taps_first: bool) -> TensorValue:
    """The elements under each window of ``x`` [N, H, W, C]: columns [N, R, S, P, Q, C], where C must be 1, or [N, P, Q,
    R, S, C].

    Raises:
        ValueError: shape or dtype of ``x`` do not fit.
    """
    _check("x", x, 4, {1: windows.input[0], 2: windows.input[1], **({3: 1} if taps_first else {})})
    shape = windows.columns_shape(x.shape[0], x.shape[3], taps_first=taps_first)
    return _call("lay_out_windows", x, shape, windows, taps_first)


@beartype
def add_up_windows(columns: TensorValue, windows: Windows, *, taps_first: bool) -> TensorValue:
    """[N, H, W, C] from columns as ``lay_out_windows`` makes them: each element is the sum of what columns have for it,
    in float32, or float64 in float64. Deterministic.

    Raises:
        ValueError: shape or dtype of ``columns`` do not fit.
    """
    wanted = windows.columns_shape(1, 1, taps_first=taps_first)
    _check("columns", columns, 6, {axis: int(wanted[axis]) for axis in range(1, 6 if taps_first else 5)})
    shape = (columns.shape[0], *windows.input, columns.shape[5])
    return _call("add_up_windows", columns, shape, windows, taps_first)


def _check(name: str, value: TensorValue, rank: int, extents: dict[int, int]) -> None:
    if value.rank != rank:
        raise ValueError(f"{name} has shape {list(value.shape)}: must have rank {rank}")
    check_float(name, value)
    for axis, extent in extents.items():
        dim = value.shape[axis]
        if not isinstance(dim, StaticDim) or int(dim) != extent:
            raise ValueError(f"{name} has shape {list(value.shape)}: axis {axis} must have {extent} elements")


def _call(
    entry: Entry,
    value: TensorValue,
    shape: Sequence[Dim | int],
    windows: Windows,
    taps_first: bool,
) -> TensorValue:
    function = windows_function(entry, functions.target_of(value.device), value.dtype, taps_first)
    types = [TensorType(value.dtype, shape, value.device)]
    return functions.call(FAMILY[entry], function, [value], types, windows.numbers())[0]
