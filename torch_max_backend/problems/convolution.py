"""Convolution geometry in Python; `kernels/convolution/problem.mojo` is its counterpart.

Letters follow the literature: N batch, C input channels, K output channels, G groups, D/H/W input extents, T/R/S filter
extents, O/P/Q output extents. A transposed convolution is the same problem with its roles swapped: PyTorch's input is y
here, and the forward pass is the data gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from torch_max_backend.checked import beartype

IntLike = int | torch.SymInt
Triple = tuple[int, int, int]
Extents = tuple[IntLike, IntLike, IntLike]

_AXES = ("depth", "height", "width")


class Pass(Enum):
    """The three passes; the value is the name of the entry."""

    FPROP = "conv_fprop"
    DGRAD = "conv_dgrad"
    WGRAD = "conv_wgrad"


@dataclass(frozen=True, slots=True)
class Gemm:
    """A pass as `batch` matrix products [m, k] x [k, n], one for each group."""

    m: IntLike
    n: IntLike
    k: IntLike
    batch: int


@dataclass(frozen=True, slots=True)
class ConvolutionProblem:
    """Geometry of one convolution; every derived size comes from here."""

    n: IntLike
    c: int
    k: int
    groups: int
    input_size: Extents
    """(D, H, W); leading extents are 1 with fewer spatial axes, as in every other triple."""
    filter_size: Triple
    """(T, R, S)."""
    output_size: Extents
    """(O, P, Q)."""
    stride: Triple
    dilation: Triple
    padding: Triple
    """Left padding; `right_padding` follows from the output size."""
    spatial_rank: int
    transposed: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.spatial_rank <= 3:
            raise ValueError(f"spatial_rank = {self.spatial_rank}: must be 1, 2 or 3")
        for name, values, least in (
            ("stride", self.stride, 1),
            ("dilation", self.dilation, 1),
            ("padding", self.padding, 0),
            ("filter_size", self.filter_size, 1),
            ("output_size", self.output_size, 0),
            ("input_size", self.input_size, 0),
        ):
            for axis, value in zip(_AXES, values, strict=True):
                if isinstance(value, int) and value < least:
                    raise ValueError(f"{name} = {values}: the {axis} value must be at least {least}")
        for name, value, least in (("groups", self.groups, 1), ("C", self.c, 0), ("K", self.k, 0)):
            if value < least:
                raise ValueError(f"{name} = {value}: must be at least {least}")
        for name, value in (("C", self.c), ("K", self.k)):
            if value % self.groups:
                raise ValueError(f"{name} = {value}: must be divisible by groups = {self.groups}")

    # Construction.

    @staticmethod
    @beartype
    def from_sizes(
        n: IntLike,
        c: int,
        k: int,
        input_size: Sequence[IntLike],
        filter_size: Sequence[int],
        *,
        stride: Sequence[int] = (1,),
        dilation: Sequence[int] = (1,),
        padding: Sequence[int] = (0,),
        right_padding: Sequence[int] | None = None,
        groups: int = 1,
    ) -> ConvolutionProblem:
        """From one to three spatial extents; a single stride, dilation or padding stands for every axis."""
        rank = len(input_size)
        if not 1 <= rank <= 3:
            raise ValueError(f"input_size = {tuple(input_size)}: must be 1 to 3 spatial extents")
        if len(filter_size) != rank:
            raise ValueError(f"filter_size = {tuple(filter_size)}: must be {rank} extents, as input_size")
        strides = _triple("stride", stride, rank, 1)
        dilations = _triple("dilation", dilation, rank, 1)
        left = _triple("padding", padding, rank, 0)
        right = left if right_padding is None else _triple("right_padding", right_padding, rank, 0)
        inputs = _leading_ones(input_size)
        filters = _leading_ones(filter_size)
        _check_at_least("stride", strides, 1)
        _check_at_least("dilation", dilations, 1)
        _check_at_least("filter_size", filters, 1)
        depth, height, width = (
            _output_extent(axis, *values)
            for axis, *values in zip(_AXES, inputs, filters, strides, dilations, left, right, strict=True)
        )
        outputs = (depth, height, width)
        return ConvolutionProblem(n, c, k, groups, inputs, filters, outputs, strides, dilations, left, rank)

    @staticmethod
    @beartype
    def from_aten(
        input_shape: Sequence[IntLike],
        weight_shape: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        transposed: bool,
        output_padding: Sequence[int],
        groups: int,
    ) -> ConvolutionProblem:
        """From the arguments of aten.convolution: shapes are N, C, then the spatial extents."""
        rank = len(input_shape) - 2
        if not 1 <= rank <= 3:
            raise ValueError(f"input has shape {tuple(input_shape)}: must be N, C and 1 to 3 spatial extents")
        if len(weight_shape) != rank + 2:
            raise ValueError(f"weight has shape {tuple(weight_shape)}: must be of rank {rank + 2}, as input")
        if groups < 1:
            raise ValueError(f"groups = {groups}: must be at least 1")
        channels = input_shape[1]
        if transposed:
            if channels != weight_shape[0]:
                raise ValueError(f"input has {channels} channels: must be weight.size(0) = {weight_shape[0]}")
        elif channels != weight_shape[1] * groups:
            raise ValueError(
                f"input has {channels} channels: must be groups * weight.size(1) = {groups} * {weight_shape[1]}"
            )
        if weight_shape[0] % groups:
            raise ValueError(f"weight.size(0) = {weight_shape[0]}: must be divisible by groups = {groups}")
        extra = _triple("output_padding", output_padding, rank, 0)
        _check_at_least("output_padding", extra, 0)
        if not transposed:
            if any(extra):
                raise ValueError(
                    f"output_padding = {tuple(output_padding)}: must be 0 unless the convolution is transposed"
                )
            return ConvolutionProblem.from_sizes(
                input_shape[0],
                weight_shape[1] * groups,
                weight_shape[0],
                input_shape[2:],
                weight_shape[2:],
                stride=stride,
                dilation=dilation,
                padding=padding,
                groups=groups,
            )
        strides = _triple("stride", stride, rank, 1)
        dilations = _triple("dilation", dilation, rank, 1)
        pads = _triple("padding", padding, rank, 0)
        filters = _leading_ones(weight_shape[2:])
        _check_at_least("stride", strides, 1)
        _check_at_least("dilation", dilations, 1)
        for i in range(3):
            if extra[i] and extra[i] >= max(strides[i], dilations[i]):
                raise ValueError(
                    f"output_padding = {tuple(output_padding)}: must be, on the {_AXES[i]}, less than stride "
                    f"{strides[i]} or dilation {dilations[i]}"
                )
        small = _leading_ones(input_shape[2:])
        large = tuple(
            (small[i] - 1) * strides[i] - 2 * pads[i] + dilations[i] * (filters[i] - 1) + 1 + extra[i] for i in range(3)
        )
        for axis, value in zip(_AXES, large, strict=True):
            if isinstance(value, int) and value < 0:
                raise ValueError(f"the transposed convolution's output {axis} is {value}: must be at least 0")
        return ConvolutionProblem(
            n=input_shape[0],
            c=weight_shape[1] * groups,
            k=weight_shape[0],
            groups=groups,
            input_size=large,
            filter_size=filters,
            output_size=small,
            stride=strides,
            dilation=dilations,
            padding=pads,
            spatial_rank=rank,
            transposed=True,
        )

    # Roles: which pass and which operand an aten call means.

    @property
    def forward_pass(self) -> Pass:
        """The pass that aten.convolution runs."""
        return Pass.DGRAD if self.transposed else Pass.FPROP

    @property
    def grad_input_pass(self) -> Pass:
        """The pass that gives aten.convolution_backward's grad_input."""
        return Pass.FPROP if self.transposed else Pass.DGRAD

    @property
    def aten_input_shape(self) -> tuple[IntLike, ...]:
        """Shape of aten's input: x, or y when transposed."""
        return self._y_shape if self.transposed else self._x_shape

    @property
    def aten_output_shape(self) -> tuple[IntLike, ...]:
        """Shape of aten's output and grad_output: y, or x when transposed."""
        return self._x_shape if self.transposed else self._y_shape

    @property
    def aten_weight_shape(self) -> tuple[int, ...]:
        """Shape of aten's weight, transposed or not."""
        return (self.k, self.c // self.groups, *self.filter_size[3 - self.spatial_rank :])

    @property
    def _x_shape(self) -> tuple[IntLike, ...]:
        return (self.n, self.c, *self.input_size[3 - self.spatial_rank :])

    @property
    def _y_shape(self) -> tuple[IntLike, ...]:
        return (self.n, self.k, *self.output_size[3 - self.spatial_rank :])

    @beartype
    def check_grad_output(self, shape: Sequence[IntLike]) -> None:
        """Raises unless grad_output has the shape of the forward pass's result."""
        if len(shape) != self.spatial_rank + 2 or any(
            isinstance(a, int) and isinstance(b, int) and a != b
            for a, b in zip(shape, self.aten_output_shape, strict=True)
        ):
            raise ValueError(
                f"grad_output has shape {tuple(shape)}: must be the forward's output, {self.aten_output_shape}"
            )

    # Derived sizes.

    @property
    def right_padding(self) -> tuple[IntLike, IntLike, IntLike]:
        """Right padding that the windows reach; negative where trailing input pixels are never read."""
        return tuple(
            (o - 1) * stride + dilation * (taps - 1) + 1 - extent - left
            for o, stride, dilation, taps, extent, left in zip(
                self.output_size,
                self.stride,
                self.dilation,
                self.filter_size,
                self.input_size,
                self.padding,
                strict=True,
            )
        )

    @property
    def taps(self) -> int:
        return math.prod(self.filter_size)

    @property
    def input_pixels(self) -> IntLike:
        return self.n * math.prod(self.input_size)

    @property
    def output_pixels(self) -> IntLike:
        return self.n * math.prod(self.output_size)

    def gemm(self, pass_: Pass) -> Gemm:
        """The matrix product that the pass is, padding counted."""
        c, k = self.c // self.groups, self.k // self.groups
        if pass_ is Pass.FPROP:
            return Gemm(self.output_pixels, k, self.taps * c, self.groups)
        if pass_ is Pass.DGRAD:
            return Gemm(self.input_pixels, c, self.taps * k, self.groups)
        return Gemm(k, self.taps * c, self.output_pixels, self.groups)

    @property
    def flops(self) -> IntLike:
        """Floating-point operations of any one pass: 2 N O P Q K T R S C/G."""
        return 2 * self.output_pixels * self.k * self.taps * (self.c // self.groups)

    def elements(self) -> dict[str, IntLike]:
        """Element counts of x, w and y."""
        return {
            "x": self.input_pixels * self.c,
            "w": self.k * self.taps * (self.c // self.groups),
            "y": self.output_pixels * self.k,
        }

    def bytes(self, itemsize: int) -> IntLike:
        """Bytes that any one pass must move: two operands read and one written, each once."""
        return itemsize * sum(self.elements().values())


def _triple(name: str, values: Sequence[int], rank: int, fill: int) -> Triple:
    if len(values) not in (1, rank):
        raise ValueError(f"{name} = {tuple(values)}: must be 1 or {rank} values")
    given = list(values) * rank if len(values) == 1 else list(values)
    first, second, third = [fill] * (3 - rank) + given
    return first, second, third


def _leading_ones(sizes: Sequence[Any]) -> tuple[Any, Any, Any]:
    return (1,) * (3 - len(sizes)) + tuple(sizes)


def _check_at_least(name: str, values: Sequence[int], least: int) -> None:
    if min(values) < least:
        raise ValueError(f"{name} = {tuple(values)}: every value must be at least {least}")


def _output_extent(axis: str, extent: IntLike, taps: int, stride: int, dilation: int, left: int, right: int) -> IntLike:
    window = dilation * (taps - 1) + 1
    padded = extent + left + right
    if isinstance(padded, int) and padded < window:
        raise ValueError(
            f"input {axis} = {extent}, padded {padded}: must be at least the window's {window} "
            f"(filter {taps}, dilation {dilation})"
        )
    return (padded - window) // stride + 1
