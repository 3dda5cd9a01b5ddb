"""`torch-max-backend bench`: one convolution or pooling, compiled as in a model, beside PyTorch's own operator."""

from __future__ import annotations

import contextlib
import enum
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
import typer

from torch_max_backend.bench import printing
from torch_max_backend.bench.arguments import ArgumentError, RunControl, parse_convolution, parse_pooling
from torch_max_backend.bench.case import Case
from torch_max_backend.bench.ceilings import ceilings
from torch_max_backend.bench.convolution import CK_DEFAULT, CK_GROUPED_DEFAULT, ConvolutionCase
from torch_max_backend.bench.epilogue import Epilogue
from torch_max_backend.bench.pooling import AVG_DEFAULT, MAX_DEFAULT, AvgPoolBackward, Form, MaxPoolBackward
from torch_max_backend.bench.runner import check_memory, run_case
from torch_max_backend.errors import DeviceUnavailableError
from torch_max_backend.problems.convolution import Pass
from torch_max_backend.runtime.engine.session import max_device

app = typer.Typer(
    no_args_is_help=True,
    help="Time one operation. Positional arguments are those of Composable Kernel's examples, in the same order.",
)

# A negative number must reach our own check instead of being parsed as an option.
_POSITIONAL = {"ignore_unknown_options": True}


class Precision(enum.StrEnum):
    """Dtypes of operands."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float64 = "float64"


class DeviceName(enum.StrEnum):
    """Devices."""

    cpu = "cpu"
    cuda = "cuda"


class LayoutName(enum.StrEnum):
    """Memory order of the operands."""

    channels_last = "channels_last"
    contiguous = "contiguous"


_SIZES = "verify (0 1), init (0 none, 1 integers, 2 decimals), time (timed runs), then "
_AXES = "strides, dilations, left pads, right pads, each one value for every axis."


def _values(order: str) -> Any:
    return typer.Argument(metavar="VALUE", help=f"{_SIZES}{order}, {_AXES}", show_default=False)


ConvolutionValues = Annotated[list[str] | None, _values("ndim, N, K, C, filter, input")]
GroupedValues = Annotated[list[str] | None, _values("ndim, G, N, K, C (of one group), filter, input")]
PoolingValues = Annotated[list[str] | None, _values("N, C, window, input")]
DtypeOption = Annotated[Precision, typer.Option("--dtype", help="Dtype of the operands.")]
DeviceOption = Annotated[DeviceName, typer.Option("--device", help="Where to run.")]
LayoutOption = Annotated[
    LayoutName, typer.Option("--layout", help="Memory order of the operands, for us and for PyTorch.")
]
CompareOption = Annotated[
    bool, typer.Option("--compare", help="Also time PyTorch's operator, interleaved, and print the ratio.")
]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Seed of the random inputs; by default a fresh one.")]
GroupsOption = Annotated[
    int, typer.Option("--groups", help="Number of groups; K and C are the channels of all groups.")
]
CeilOption = Annotated[bool, typer.Option("--ceil-mode", help="Include partial windows at the end.")]


@dataclass(frozen=True)
class _Choices:
    """The options that every command has."""

    dtype: Precision
    device: DeviceName
    layout: LayoutName
    compare: bool
    seed: int | None

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype.value)

    def place(self) -> torch.device:
        """The device, after a check that it is present."""
        if self.device is DeviceName.cpu:
            return torch.device("cpu")
        if self.dtype is Precision.float64:
            raise ArgumentError("--dtype", self.dtype.value, "float32, bfloat16 or float16 on a GPU")
        if not torch.cuda.is_available():
            raise ArgumentError("--device", self.device.value, "cpu: PyTorch sees no CUDA device here")
        device = torch.device("cuda", torch.cuda.current_device())
        max_device(device)
        return device


def _texts(values: list[str] | None) -> list[str]:
    """The positional values; one that looks like an option is an unknown option."""
    for text in values or ():
        if text.startswith("-") and not text[1:2].isdigit():
            raise ArgumentError("option", text, "one of those that --help names")
    return values or []


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Turns a bad argument into one line on stderr and exit status 2."""
    try:
        yield
    except ArgumentError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from None
    except DeviceUnavailableError as error:
        typer.echo(f"Error: --device: {error}", err=True)
        raise typer.Exit(2) from None


def _run(choices: _Choices, control: RunControl, make: Callable[[torch.dtype, torch.device, str], Case]) -> None:
    """Runs the case and prints its results; exits with status 1 if the verification failed."""
    device = choices.place()
    case = make(choices.torch_dtype, device, choices.layout.value)
    check_memory(case, control.verify, device)
    for line in printing.descriptions(case):
        typer.echo(line)
    result = run_case(
        case, control, device, choices.compare, secrets.randbits(32) if choices.seed is None else choices.seed
    )
    for line in printing.figures(result, ceilings(device, case.dtype) if result.times else None):
        typer.echo(line)
    if result.verification is not None and not result.verification.passed:
        raise typer.Exit(1)


def _convolution_command(name: str, role: Pass, summary: str) -> None:
    def command(
        values: ConvolutionValues = None,
        dtype: DtypeOption = Precision.float32,
        device: DeviceOption = DeviceName.cpu,
        layout: LayoutOption = LayoutName.channels_last,
        groups: GroupsOption = 1,
        compare: CompareOption = False,
        seed: SeedOption = None,
    ) -> None:
        with _refusing():
            control, problem = parse_convolution(_texts(values), CK_DEFAULT, groups=groups)
            choices = _Choices(dtype, device, layout, compare, seed)
            _run(choices, control, partial(ConvolutionCase, name, problem, role))

    app.command(name, help=summary, context_settings=_POSITIONAL)(command)


_convolution_command("conv-fwd", Pass.FPROP, "Convolution, forward: y = x * w.")
_convolution_command("conv-bwd-data", Pass.DGRAD, "Gradient of a convolution's input.")
_convolution_command("conv-bwd-weight", Pass.WGRAD, "Gradient of a convolution's weight.")


@app.command("grouped-conv-bwd-data", context_settings=_POSITIONAL)
def grouped_conv_bwd_data(
    values: GroupedValues = None,
    dtype: DtypeOption = Precision.float32,
    device: DeviceOption = DeviceName.cpu,
    layout: LayoutOption = LayoutName.channels_last,
    epilogue: Annotated[
        Epilogue, typer.Option("--epilogue", help="GradIn = f(dgrad, D0, D1), in the same graph.")
    ] = Epilogue.none,
    compare: CompareOption = False,
    seed: SeedOption = None,
) -> None:
    """Gradient of a grouped convolution's input, followed by elementwise work with extra tensors."""
    with _refusing():
        control, problem = parse_convolution(_texts(values), CK_GROUPED_DEFAULT, grouped=True)
        choices, name = _Choices(dtype, device, layout, compare, seed), "grouped-conv-bwd-data"
        _run(choices, control, partial(ConvolutionCase, name, problem, Pass.DGRAD, epilogue=epilogue))


@app.command("maxpool2d-bwd", context_settings=_POSITIONAL)
def maxpool2d_bwd(
    values: PoolingValues = None,
    dtype: DtypeOption = Precision.float32,
    device: DeviceOption = DeviceName.cpu,
    layout: LayoutOption = LayoutName.channels_last,
    form: Annotated[Form, typer.Option("--form", help="What the forward pass saves: indices or one-byte offsets.")] = (
        Form.gather
    ),
    ceil_mode: CeilOption = False,
    compare: CompareOption = False,
    seed: SeedOption = None,
) -> None:
    """Gradient of 2-D max pooling."""
    with _refusing():
        control, sizes = parse_pooling(_texts(values), MAX_DEFAULT, ndim=2, dilated=True, ceil_mode=ceil_mode)
        choices = _Choices(dtype, device, layout, compare, seed)
        _run(choices, control, partial(MaxPoolBackward, "maxpool2d-bwd", sizes, form=form))


@app.command("avgpool3d-bwd", context_settings=_POSITIONAL)
def avgpool3d_bwd(
    values: PoolingValues = None,
    dtype: DtypeOption = Precision.float32,
    device: DeviceOption = DeviceName.cpu,
    layout: LayoutOption = LayoutName.channels_last,
    ceil_mode: CeilOption = False,
    exclude_pad: Annotated[bool, typer.Option("--exclude-pad", help="Exclude padding from the divisor.")] = False,
    divisor: Annotated[int | None, typer.Option("--divisor", help="The divisor of every window's sum.")] = None,
    compare: CompareOption = False,
    seed: SeedOption = None,
) -> None:
    """Gradient of 3-D average pooling."""
    with _refusing():
        control, sizes = parse_pooling(
            _texts(values),
            AVG_DEFAULT,
            ndim=3,
            dilated=False,
            ceil_mode=ceil_mode,
            count_include_pad=not exclude_pad,
            divisor_override=divisor,
        )
        choices = _Choices(dtype, device, layout, compare, seed)
        _run(choices, control, partial(AvgPoolBackward, "avgpool3d-bwd", sizes))
