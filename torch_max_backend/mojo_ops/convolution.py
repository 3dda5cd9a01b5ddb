"""Convolution passes over channels-last rank-5 tensors.

Layouts: x [N, D, H, W, C], w [K, T, R, S, C/groups], y [N, O, P, Q, K]; with fewer spatial axes the
leading extents are 1. On a CPU w may be [K, C/groups, T, R, S] instead: `Geometry.taps_inside`. A `Geometry` has the
left padding: the right one follows from the output size, so it may differ. Every extent may be symbolic; what is known
when the graph is built is checked then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal, get_args

from max.dtype import DType
from max.graph import DeviceRef, Dim, DimLike, StaticDim, TensorType, TensorValue

from torch_max_backend.checked import beartype
from torch_max_backend.dtypes import MAX_FLOATS, NARROW_FLOATS
from torch_max_backend.mojo_ops import functions
from torch_max_backend.mojo_ops.signatures import Cost, Family, Signature, Tensor, ints
from torch_max_backend.problems.convolution import ConvolutionProblem

Triple = tuple[int, int, int]
Entry = Literal["conv_fprop", "conv_dgrad", "conv_wgrad"]

WGRAD_BIAS = "conv_wgrad_bias"
"""The entry of a weight gradient with the bias gradient. Lowerings do not call it: ``fusion/bias_sums.py`` does."""

DEFAULT_WORKSPACE_LIMIT: int = 256 * 2**20
"""Most bytes of scratch memory that one convolution may use."""

_X, _W, _Y, _DX, _DW, _DY = (Tensor(name, "dtype", 5) for name in ("x", "w", "y", "dx", "dw", "dy"))
_NUMBERS = ints(
    *(f"{what}_{axis}" for what in ("stride", "dilation", "padding") for axis in "dhw"),
    *("groups", "workspace_limit", "allow_tf32", "taps_inside"),
    # Addresses that calls of fused entries have: what is called for what has been stored, and what that gets.
    *("epilogue", "epilogue_context"),
)
FAMILY = Family(
    "convolution",
    Signature("conv_fprop", (_Y,), (_X, _W), _NUMBERS, cost=Cost(1.3, 7.0, 6.0)),
    Signature("conv_dgrad", (_DX,), (_DY, _W), _NUMBERS, after=True, cost=Cost(1.3, 7.0, 10.0)),
    Signature("conv_wgrad", (_DW,), (_X, _DY), _NUMBERS, cost=Cost(1.3, 7.0, 10.0)),
    Signature(WGRAD_BIAS, (_DW, Tensor("db", "dtype", 1)), (_X, _DY), _NUMBERS, cost=Cost(hopper=10.0)),
    first={"cpu": 2.3, "gpu": 0.5, "sm90": 1.0},
)


@beartype
@dataclass(frozen=True)
class Geometry(functions.Facts):
    """The geometry of a convolution that its shapes do not determine.

    Attributes:
        stride: along D, H and W, as padding and dilation.
        padding: on the left.
        dilation: from one tap to the next.
        groups: of channels.
        workspace_limit: most bytes of scratch memory.
        allow_tf32: float32 factors may be rounded to 10 mantissa bits.
        taps_inside: w is [K, C/groups, T, R, S], as PyTorch keeps a contiguous filter, and so is its gradient.

    Raises:
        ValueError: a value is too small.
    """

    stride: Triple = (1, 1, 1)
    padding: Triple = (0, 0, 0)
    dilation: Triple = (1, 1, 1)
    groups: int = 1
    workspace_limit: int = DEFAULT_WORKSPACE_LIMIT
    allow_tf32: bool = False
    taps_inside: bool = False

    def __post_init__(self) -> None:
        for name, least in (("stride", 1), ("dilation", 1), ("padding", 0)):
            values = getattr(self, name)
            if min(values) < least:
                raise ValueError(f"{name} = {values}: every value must be at least {least}")
        for name, least in (("groups", 1), ("workspace_limit", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least {least}")

    def numbers(self) -> list[int]:
        """The entries' numbers."""
        own = self.groups, self.workspace_limit, self.allow_tf32, self.taps_inside
        return [*self.stride, *self.dilation, *self.padding, *own, 0, 0]

    def group_channels(self, w: TensorValue) -> Dim:
        """The extent C/groups of a filter."""
        return w.shape[1 if self.taps_inside else 4]

    def taps(self, w: TensorValue) -> list[Dim]:
        """The extents T, R and S of a filter."""
        return list(w.shape[2:5] if self.taps_inside else w.shape[1:4])


UNIT = Geometry()
"""Every stride, dilation and group 1, no padding."""


class Grouping(Enum):
    """The groups that a library function serves; the values are parameters, named in kernels/convolution/passes.mojo.

    What is known when the graph is built leaves kernels out that it cannot need.
    """

    ONE = 0
    WIDE = 1
    ANY = 2
    DEPTHWISE = None
    """One channel in each group, in and out: tables of their own."""

    @classmethod
    def of(cls, groups: int, group_channels: object, filters: object) -> Grouping:
        """The grouping of a filter [filters, ..., group_channels]; an extent that is no number is not known yet."""
        if groups == 1:
            return cls.ONE
        if not isinstance(group_channels, int) or not isinstance(filters, int):
            return cls.ANY
        return cls.DEPTHWISE if group_channels == 1 and filters == groups else cls.WIDE


@beartype
def conv_fprop(
    x: TensorValue,
    w: TensorValue,
    geometry: Geometry = UNIT,
    *,
    output_size: Sequence[DimLike] | None = None,
) -> TensorValue:
    """y [N, O, P, Q, K]. Without `output_size` x's extents are static and right padding equals left."""
    _check_operands("conv_fprop", x=x, w=w)
    _check_order("conv_fprop", geometry, x.device)
    _check_channels("conv_fprop", x.shape[4], w.shape[0], geometry.group_channels(w), geometry.groups)
    if output_size is None:
        output_size = [
            _output_extent(axis, extent, taps, *rest)
            for axis, extent, taps, *rest in zip(
                "DHW",
                x.shape[1:4],
                geometry.taps(w),
                geometry.stride,
                geometry.padding,
                geometry.dilation,
                strict=True,
            )
        ]
    shape = [x.shape[0], *_extents("output_size", output_size), w.shape[0]]
    grouping = _grouping(geometry, geometry.group_channels(w), w.shape[0])
    return conv_with_geometry("conv_fprop", x, w, geometry, shape, grouping=grouping)


@beartype
def conv_dgrad(
    dy: TensorValue,
    w: TensorValue,
    geometry: Geometry = UNIT,
    *,
    input_size: Sequence[DimLike],
    after: Sequence[TensorValue] = (),
) -> TensorValue:
    """dx [N, D, H, W, C] of the given (D, H, W): the gradient of x, or a transposed convolution's forward.

    It runs when `after`, other gradients of the convolution, have been computed: see `conv_with_geometry`.
    """
    _check_operands("conv_dgrad", dy=dy, w=w)
    _check_order("conv_dgrad", geometry, dy.device)
    channels = geometry.group_channels(w) * geometry.groups
    _check_channels("conv_dgrad", channels, w.shape[0], geometry.group_channels(w), geometry.groups)
    if isinstance(dy.shape[4], StaticDim) and isinstance(w.shape[0], StaticDim) and dy.shape[4] != w.shape[0]:
        raise ValueError(f"conv_dgrad: dy has {dy.shape[4]} channels: must be w.shape[0] = {w.shape[0]}")
    shape = [dy.shape[0], *_extents("input_size", input_size), channels]
    grouping = _grouping(geometry, geometry.group_channels(w), w.shape[0])
    return conv_with_geometry("conv_dgrad", dy, w, geometry, shape, grouping=grouping, after=after)


@beartype
def conv_wgrad(
    x: TensorValue,
    dy: TensorValue,
    geometry: Geometry = UNIT,
    *,
    filter_size: Triple,
) -> TensorValue:
    """dw [K, T, R, S, C/groups] of the given (T, R, S), or [K, C/groups, T, R, S]."""
    _check_operands("conv_wgrad", x=x, dy=dy)
    _check_order("conv_wgrad", geometry, x.device)
    if min(filter_size) < 1:
        raise ValueError(f"conv_wgrad: filter_size = {filter_size}: every extent must be at least 1")
    _check_channels("conv_wgrad", x.shape[4], dy.shape[4], None, geometry.groups)
    channels = x.shape[4] // geometry.groups
    inner = [channels, *filter_size] if geometry.taps_inside else [*filter_size, channels]
    shape = [dy.shape[4], *inner]
    grouping = _grouping(geometry, channels, dy.shape[4])
    return conv_with_geometry("conv_wgrad", x, dy, geometry, shape, grouping=grouping)


@beartype
def conv_with_geometry(
    op: Entry,
    a: TensorValue,
    b: TensorValue,
    geometry: Geometry | TensorValue,
    result_shape: Sequence[DimLike],
    *,
    grouping: Grouping = Grouping.ANY,
    after: Sequence[TensorValue] = (),
) -> TensorValue:
    """The bare op, whose operands and result follow the three functions above.

    `geometry` may be a host tensor of a geometry's numbers, which are checked at run time: one graph then serves every
    problem. Kernels that `grouping` does not need are not compiled.

    A data gradient can be told to run `after` the gradients of filter and bias, of rank 5. MAX plans memory from what
    ops take and make: a dy that an op reads from which nothing follows but the graph's result keeps its memory to the
    graph's end. With this order it is free for the layers before.
    """
    known = geometry if isinstance(geometry, Geometry) else None
    operands = [a, b]
    if op == "conv_dgrad":
        operands += after or [b]
    result = TensorType(a.dtype, result_shape, a.device)
    function = convolution_function(op, functions.target_of(a.device), a.dtype, grouping, deep=a.shape[1] != 1)
    numbers = geometry.numbers() if isinstance(geometry, Geometry) else geometry
    return functions.call(FAMILY[op], function, operands, [result], numbers, facts=known)[0]


def convolution_function(
    op: Entry,
    target: Literal["cpu", "gpu"],
    dtype: DType,
    grouping: Grouping,
    deep: bool = False,
) -> functions.LibraryFunction:
    """The library function of a convolution for the machine at hand.

    On Hopper it is one with Hopper's kernels, which calls the one for any GPU. Of 16 bits and one group it takes nearly
    all itself: not what three axes of few channels have, and extreme strides and paddings.

    Args:
        op: the pass.
        target: MAX's word for the kind of device.
        dtype: of the operands.
        grouping: the groups that it serves.
        deep: there are three axes.
    """
    if grouping is Grouping.DEPTHWISE:
        table = f"{target}.dispatch.DEPTHWISE_KERNELS"
        return replace(functions.function_of(FAMILY, op, target, (dtype, Grouping.ANY.value)), table=table)
    table = f"{target}.dispatch.{target.upper()}_KERNELS"
    general = functions.function_of(FAMILY, op, target, (dtype, grouping.value))
    general = replace(general, table=table, graded=True)
    if target == "cpu" or not functions.is_hopper():
        return general
    rare = dtype != DType.float32 and grouping is Grouping.ONE and not deep
    return replace(general, table="sm90.dispatch.SM90_KERNELS", rest=general, rest_is_rare=rare)


@beartype
def wgrad_bias_function(dtype: DType) -> functions.LibraryFunction:
    """The library function of a weight gradient together with the bias gradient, on Hopper and of 16 bits.

    Args:
        dtype: of the operands and the results.
    """
    general = convolution_function("conv_wgrad", "gpu", dtype, Grouping.ONE).rest
    function = functions.function_of(FAMILY, WGRAD_BIAS, "gpu", (dtype,), folder="sm90", module="bias_entries")
    return replace(function, rest=general, rest_is_rare=True)


@functions.variants(FAMILY.folder)
def _variants(target: functions.Target, dtypes: Sequence[DType]) -> Iterator[functions.LibraryFunction]:
    for op in get_args(Entry):
        for dtype in dtypes:
            for grouping in Grouping:
                for deep in (False, True):
                    yield convolution_function(op, target, dtype, grouping, deep)
    if target == "gpu" and functions.is_hopper():
        yield from (wgrad_bias_function(dtype) for dtype in dtypes if dtype in NARROW_FLOATS)


def _grouping(geometry: Geometry, group_channels: Dim, filters: Dim) -> Grouping:
    known = (int(dim) if isinstance(dim, StaticDim) else dim for dim in (group_channels, filters))
    return Grouping.of(geometry.groups, *known)


def _check_operands(op: str, **operands: TensorValue) -> None:
    first_name, first = next(iter(operands.items()))
    for name, value in operands.items():
        if value.rank != 5:
            raise ValueError(f"{op}: {name} has rank {value.rank}: must be 5, channels last")
        if value.dtype not in MAX_FLOATS:
            supported = ", ".join(dtype.name for dtype in MAX_FLOATS)
            raise ValueError(f"{op}: {name} has dtype {value.dtype.name}: must be one of {supported}")
        if value.dtype == DType.float64 and value.device.is_gpu():
            raise ValueError(f"{op}: {name} has dtype float64 on a GPU: must be on the CPU")
        if value.dtype != first.dtype:
            raise ValueError(f"{op}: {name} has dtype {value.dtype.name}: must be {first_name}'s, {first.dtype.name}")
        if value.device != first.device:
            raise ValueError(f"{op}: {name} is on {value.device}: must be {first_name}'s device, {first.device}")


def _check_order(op: str, geometry: Geometry, device: DeviceRef) -> None:
    if geometry.taps_inside and device.is_gpu():
        raise ValueError(f"{op}: w is [K, C/groups, T, R, S]: must be channels last on a GPU")


def _check_channels(op: str, c: Dim, k: Dim, group_c: Dim | None, groups: int) -> None:
    for name, dim in (("C", c), ("K", k)):
        if isinstance(dim, StaticDim) and int(dim) % groups:
            raise ValueError(f"{op}: {name} = {dim}: must be divisible by groups = {groups}")
    if isinstance(c, StaticDim) and isinstance(group_c, StaticDim) and int(group_c) * groups != int(c):
        raise ValueError(f"{op}: w has {group_c} channels in each of {groups} groups: must be C = {c} in total")


def workspace_limit(problem: ConvolutionProblem, itemsize: int, on_gpu: bool) -> int:
    """Most bytes of scratch memory for a convolution whose elements have ``itemsize`` bytes.

    Hopper's kernels copy tensors whose channels are no whole rows of 16 bytes, or so few that a row of taps is taken as
    channels. There is room for these copies however large they are: without them a convolution takes several times as
    long. On a CPU there is room for the packed filter, or the sums of its gradient: a linear layer's may be larger than
    the default.
    """
    extents = problem.input_pixels, problem.output_pixels, problem.taps, problem.c, problem.k
    if problem.groups != 1 or not all(isinstance(extent, int) for extent in extents):
        return DEFAULT_WORKSPACE_LIMIT
    if not on_gpu:
        # In the type of the sums, in panels of up to 64 columns.
        c, k = (-(-int(channels) // 64) * 64 for channels in (problem.c, problem.k))
        packed = int(problem.taps) * c * k * max(itemsize, 4)
        return max(DEFAULT_WORKSPACE_LIMIT, packed + DEFAULT_WORKSPACE_LIMIT // 4)
    row = 16 // itemsize
    c, k = (-(-int(channels) // row) * row for channels in (problem.c, problem.k))
    folds = problem.filter_size[-1] > 1
    copies_x, copies_y = (
        own != padded or (folds and own <= 4 * row) for own, padded in ((problem.c, c), (problem.k, k))
    )
    copied = copies_x * int(problem.input_pixels) * c + copies_y * int(problem.output_pixels) * k
    copied += (copied > 0) * k * int(problem.taps) * c
    # The rest is for sums.
    return max(DEFAULT_WORKSPACE_LIMIT, copied * itemsize + DEFAULT_WORKSPACE_LIMIT // 4)


def _output_extent(axis: str, extent: Dim, taps: Dim, stride: int, padding: int, dilation: int) -> int:
    size = int(_static(f"x's extent {axis}", extent))
    window = dilation * (int(_static(f"w's extent on {axis}", taps)) - 1) + 1
    padded = size + 2 * padding
    if padded < window:
        raise ValueError(f"x's extent {axis} = {size}: must be, padded ({padded}), at least the window's {window}")
    return (padded - window) // stride + 1


def _extents(name: str, sizes: Sequence[DimLike]) -> list[Dim]:
    if len(sizes) != 3:
        raise ValueError(f"{name} has {len(sizes)} values: must be 3, for depth, height and width")
    return [Dim(size) for size in sizes]


def _static(name: str, dim: Dim) -> StaticDim:
    if not isinstance(dim, StaticDim):
        raise ValueError(f"{name} = {dim}: must be known when the graph is built")
    return dim
