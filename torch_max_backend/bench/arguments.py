"""Positional arguments in the order of Composable Kernel's examples.

verify, init, time, ndim, [G,] N, K, C, filter, input, strides, dilations, left pads, right pads; pooling has no K and
no ndim. Nothing is compiled before every argument has passed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch_max_backend.checked import beartype
from torch_max_backend.problems.convolution import ConvolutionProblem
from torch_max_backend.problems.pooling import PoolingProblem

_LARGEST = 2**31 - 1
_AXES = ("z", "y", "x")


class ArgumentError(ValueError):
    """A bad argument: which one, its value, and what was expected."""

    def __init__(self, argument: str, value: object, expected: str) -> None:
        super().__init__(f"{argument} = {value}: expected {expected}")


@dataclass(frozen=True)
class RunControl:
    """The first three arguments.

    Attributes:
        verify: whether results are compared with float64.
        init: 0 leaves inputs as the allocator gave them, 1 draws small integers, 2 draws decimals.
        runs: how many runs are timed; 0 times nothing.
    """

    verify: bool = False
    init: int = 2
    runs: int = 20


@dataclass(frozen=True)
class _Argument:
    name: str
    least: int
    most: int = _LARGEST


_CONTROL = (_Argument("verify", 0, 1), _Argument("init", 0, 2), _Argument("time", 0, 100_000))


def _spatial(ndim: int) -> list[_Argument]:
    """Filter, input, strides, dilations, left and right pads, each one value for each axis."""
    axes = _AXES[3 - ndim :]
    return [
        *(_Argument(axis.upper(), 1) for axis in axes),
        *(_Argument(f"{'DHW'[_AXES.index(axis)]}i", 1) for axis in axes),
        *(_Argument(f"S{axis}", 1) for axis in axes),
        *(_Argument(f"D{axis}", 1) for axis in axes),
        *(_Argument(f"LeftP{axis}", 0) for axis in axes),
        *(_Argument(f"RightP{axis}", 0) for axis in axes),
    ]


def _integer(argument: _Argument, text: str) -> int:
    expected = f"an integer from {argument.least} to {argument.most}"
    try:
        value = int(text)
    except ValueError:
        raise ArgumentError(argument.name, repr(text), expected) from None
    if not argument.least <= value <= argument.most:
        raise ArgumentError(argument.name, value, expected)
    return value


def _read(arguments: Sequence[_Argument], texts: Sequence[str]) -> dict[str, int]:
    """Every argument by name; the values must be as many as the names."""
    values = {argument.name: _integer(argument, text) for argument, text in zip(arguments, texts, strict=False)}
    names = " ".join(argument.name for argument in arguments)
    if len(texts) < len(arguments):
        raise ArgumentError(arguments[len(texts)].name, "(missing)", f"{len(arguments)} values: {names}")
    if len(texts) > len(arguments):
        extra = " ".join(texts[len(arguments) :])
        raise ArgumentError("arguments", f"... {extra}", f"no more than {len(arguments)} values: {names}")
    return values


def _control(values: Mapping[str, int]) -> RunControl:
    control = RunControl(bool(values["verify"]), values["init"], values["time"])
    if control.verify and control.init == 0:
        raise ArgumentError("init", 0, "1 or 2 where verify is 1: nothing can be verified on uninitialised inputs")
    return control


@beartype
def parse_control(texts: Sequence[str]) -> RunControl:
    """verify, init and time, or none of them."""
    if not texts:
        return RunControl()
    return _control(_read(_CONTROL, texts))


@beartype
def parse_convolution(
    texts: Sequence[str], default: ConvolutionProblem, *, grouped: bool = False, groups: int = 1
) -> tuple[RunControl, ConvolutionProblem]:
    """A convolution's arguments. With `grouped`, G stands before N, and K and C count one group's channels;
    else K and C count all channels of `groups` groups.

    Raises:
        ArgumentError: names the argument, its value and what was expected.
    """
    if groups < 1:
        raise ArgumentError("--groups", groups, "an integer of at least 1")
    if len(texts) <= len(_CONTROL):
        if groups != 1:
            raise ArgumentError("--groups", groups, "the sizes with it: the default problem has one group")
        return parse_control(texts), default
    ndim = _integer(_Argument("ndim", 1, 3), texts[len(_CONTROL)])
    sizes = [_Argument(name, 1) for name in ("G", "N", "K", "C")[0 if grouped else 1 :]]
    values = _read([*_CONTROL, _Argument("ndim", 1, 3), *sizes, *_spatial(ndim)], texts)
    if grouped:
        groups = values["G"]
    for name in () if grouped else ("K", "C"):
        if values[name] % groups:
            raise ArgumentError(name, values[name], f"a multiple of --groups = {groups}")
    per_group = groups if grouped else 1
    axes = _AXES[3 - ndim :]
    return _control(values), _convolution(values, values["K"] * per_group, values["C"] * per_group, groups, axes)


def _convolution(values: Mapping[str, int], k: int, c: int, groups: int, axes: Sequence[str]) -> ConvolutionProblem:
    inputs = [f"{'DHW'[_AXES.index(axis)]}i" for axis in axes]
    for axis, name in zip(axes, inputs, strict=True):
        window = values[f"D{axis}"] * (values[axis.upper()] - 1) + 1
        room = values[name] + values[f"LeftP{axis}"] + values[f"RightP{axis}"]
        if room < window:
            raise ArgumentError(
                name, values[name], f"at least {window} with its pads (the window's extent), not {room}"
            )
        left, right, stride = values[f"LeftP{axis}"], values[f"RightP{axis}"], values[f"S{axis}"]
        if (room - window) // stride != (room - right + left - window) // stride:
            raise ArgumentError(f"RightP{axis}", right, f"LeftP{axis} = {left}: PyTorch pads both sides alike")
    return ConvolutionProblem.from_sizes(
        values["N"],
        c,
        k,
        [values[name] for name in inputs],
        [values[axis.upper()] for axis in axes],
        stride=[values[f"S{axis}"] for axis in axes],
        dilation=[values[f"D{axis}"] for axis in axes],
        padding=[values[f"LeftP{axis}"] for axis in axes],
        groups=groups,
    )


@dataclass(frozen=True)
class PoolingSizes:
    """A pooling problem with its batch and channels."""

    n: int
    c: int
    problem: PoolingProblem


@beartype
def parse_pooling(
    texts: Sequence[str],
    default: PoolingSizes,
    *,
    ndim: int,
    dilated: bool,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> tuple[RunControl, PoolingSizes]:
    """A pooling's arguments: verify, init, time, N, C, then window, input, strides, dilations and pads.

    Raises:
        ArgumentError: names the argument, its value and what was expected.
    """
    if divisor_override == 0:
        raise ArgumentError("--divisor", 0, "any integer but zero")
    modes: dict[str, Any] = {
        "ceil_mode": ceil_mode,
        "count_include_pad": count_include_pad,
        "divisor_override": divisor_override,
    }
    if len(texts) <= len(_CONTROL):
        own = default.problem
        problem = PoolingProblem.from_aten(
            own.input_spatial,
            own.window[3 - ndim :],
            own.stride[3 - ndim :],
            own.padding[3 - ndim :],
            own.dilation[3 - ndim :],
            **modes,
        )
        return parse_control(texts), PoolingSizes(default.n, default.c, problem)
    values = _read([*_CONTROL, _Argument("N", 1), _Argument("C", 1), *_spatial(ndim)], texts)
    axes = _AXES[3 - ndim :]
    inputs = [f"{'DHW'[_AXES.index(axis)]}i" for axis in axes]
    for axis, name in zip(axes, inputs, strict=True):
        window = values[f"D{axis}"] * (values[axis.upper()] - 1) + 1
        left, right = values[f"LeftP{axis}"], values[f"RightP{axis}"]
        if not dilated and values[f"D{axis}"] != 1:
            raise ArgumentError(f"D{axis}", values[f"D{axis}"], "1: average pooling has no dilation")
        if left > window // 2:
            raise ArgumentError(f"LeftP{axis}", left, f"at most {window // 2}, half the window")
        if right != left:
            raise ArgumentError(f"RightP{axis}", right, f"LeftP{axis} = {left}: pooling pads both sides alike")
        if values[name] + left + right < window:
            raise ArgumentError(name, values[name], f"at least {window} with its pads, the window's extent")
    problem = PoolingProblem.from_aten(
        [values[name] for name in inputs],
        [values[axis.upper()] for axis in axes],
        [values[f"S{axis}"] for axis in axes],
        [values[f"LeftP{axis}"] for axis in axes],
        [values[f"D{axis}"] for axis in axes],
        **modes,
    )
    return _control(values), PoolingSizes(values["N"], values["C"], problem)
