"""`torch-max-backend`: what is installed, what is supported, how fast it is."""

from __future__ import annotations

import contextlib
import enum
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from torch_max_backend.bench.arguments import ArgumentError, RunControl, parse_control

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
bench = typer.Typer(
    no_args_is_help=True,
    help="Times one operation. Positional arguments are those of Composable Kernel's examples, in their order.",
)
app.add_typer(bench, name="bench")

# A negative number must reach our own check instead of being taken for an option.
_POSITIONAL = {"ignore_unknown_options": True}


class Precision(enum.StrEnum):
    """Dtypes of operands."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float64 = "float64"


class DeviceName(enum.StrEnum):
    """Where to run."""

    cpu = "cpu"
    cuda = "cuda"


class LayoutName(enum.StrEnum):
    """Memory order of the operands."""

    channels_last = "channels_last"
    contiguous = "contiguous"


class EpilogueName(enum.StrEnum):
    """See torch_max_backend.bench.epilogue."""

    none = "none"
    bias_relu = "bias_relu"
    bias_gc = "bias_gc"
    residual = "residual"
    scale = "scale"
    clamp = "clamp"


class FormName(enum.StrEnum):
    """See torch_max_backend.bench.pooling."""

    gather = "gather"
    offsets = "offsets"
    scatter = "scatter"
    recompute = "recompute"


_SIZES = "verify (0 1), init (0 none, 1 integers, 2 decimals), time (timed runs), then "
_AXES = "strides, dilations, left pads, right pads, each one value for every axis."
ConvolutionValues = Annotated[
    list[str] | None,
    typer.Argument(metavar="VALUE", help=f"{_SIZES}ndim, N, K, C, filter, input, {_AXES}", show_default=False),
]
GroupedValues = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="VALUE",
        help=f"{_SIZES}ndim, G, N, K, C (of one group), filter, input, {_AXES}",
        show_default=False,
    ),
]
PoolingValues = Annotated[
    list[str] | None,
    typer.Argument(metavar="VALUE", help=f"{_SIZES}N, C, window, input, {_AXES}", show_default=False),
]
DtypeOption = Annotated[Precision, typer.Option("--dtype", help="Of the operands.")]
DeviceOption = Annotated[DeviceName, typer.Option("--device", help="Where to run.")]
LayoutOption = Annotated[
    LayoutName, typer.Option("--layout", help="Memory order of the operands, ours and PyTorch's alike.")
]
CompareOption = Annotated[
    bool, typer.Option("--compare", help="Time PyTorch's own operator too, interleaved, and print the ratio.")
]
JsonOption = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures here.")]
ListOption = Annotated[
    Path | None,
    typer.Option("--list", metavar="FILE", help="Run a committed list of problems (JSON or TOML); ends with a table."),
]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Of the random inputs; by default a fresh one.")]
GroupsOption = Annotated[int, typer.Option("--groups", help="Groups; K and C count the channels of all of them.")]
CeilOption = Annotated[bool, typer.Option("--ceil-mode", help="Partial windows at the end count.")]


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Turns a bad argument into one line on stderr and exit status 2."""
    from torch_max_backend.errors import DeviceUnavailableError

    try:
        yield
    except ArgumentError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from None
    except DeviceUnavailableError as error:
        typer.echo(f"Error: --device: {error}", err=True)
        raise typer.Exit(2) from None


def _fewer_options(values: Sequence[str] | None) -> list[str]:
    """The positional values; what looks like an option did not match any."""
    texts = list(values or [])
    for text in texts:
        if text.startswith("-") and not text[1:2].isdigit():
            raise ArgumentError("option", text, "one of those that --help names")
    return texts


def _device(name: DeviceName, dtype: Precision) -> torch.device:
    from torch_max_backend.runtime.session import max_device

    if name is DeviceName.cpu:
        return torch.device("cpu")
    if dtype is Precision.float64:
        raise ArgumentError("--dtype", dtype.value, "float32, bfloat16 or float16 on a GPU")
    if not torch.cuda.is_available():
        raise ArgumentError("--device", name.value, "cpu: PyTorch sees no CUDA device here")
    device = torch.device("cuda", torch.cuda.current_device())
    max_device(device)
    return device


def _run(
    control: RunControl,
    tasks: Sequence[Any],
    device: torch.device,
    *,
    compare: bool,
    json_path: Path | None,
    listed: Path | None,
    seed: int | None,
    settings: dict[str, Any],
) -> None:
    """Runs every task and reports; exit status 1 where a verification failed."""
    from rich.progress import track

    from torch_max_backend.bench import report
    from torch_max_backend.bench.ceilings import ceilings
    from torch_max_backend.bench.compiled import preload
    from torch_max_backend.bench.runner import CaseResult, check_memory, run_case
    from torch_max_backend.runtime import events

    if json_path is not None and not json_path.parent.is_dir():
        raise ArgumentError("--json", json_path, "a file in a folder that exists")
    for task in tasks:
        check_memory(task, control.verify, device)
    seed = secrets.randbits(32) if seed is None else seed
    results: list[CaseResult] = []

    def told(event: events.CompileEvent) -> None:
        if event.seconds is None:
            typer.echo(f"compiling {', '.join(event.graphs)} ...", err=True)

    with events.listen(told):
        preload([task.kernel for task in tasks], device)
        for task in track(tasks, "cases", disable=listed is None or not sys.stderr.isatty()):
            if listed is not None:
                typer.echo(task.name)
            for line in report.descriptions(task):
                typer.echo(line)
            result = run_case(task, control, device, compare, seed)
            rates = ceilings(device, task.dtype) if result.times is not None else None
            for line in report.figures(result, rates):
                typer.echo(line)
            results.append(result)
    rates = {str(t.dtype).removeprefix("torch."): ceilings(device, t.dtype) for t in tasks} if control.runs else {}
    if listed is not None:
        report.print_table(
            results, f"{settings['operation']}, {settings['dtype']}, {settings['layout']}, {device.type}"
        )
    if json_path is not None:
        settings |= {"verify": control.verify, "init": control.init, "time": control.runs, "seed": seed}
        settings |= {"compare": compare, "list": None if listed is None else str(listed)}
        arguments = " ".join(["torch-max-backend", *sys.argv[1:]])
        report.write(json_path, report.document(arguments, results, device, rates, settings))
    if any(result.verification is not None and not result.verification.passed for result in results):
        raise typer.Exit(1)


def _list_control(texts: Sequence[str]) -> RunControl:
    """With --list only verify, init and time are left to give."""
    if len(texts) > 3:
        raise ArgumentError("--list", f"given with {len(texts)} values", "only verify, init and time beside it")
    return parse_control(texts)


def _convolution(
    role: str,
    values: list[str] | None,
    dtype: Precision,
    device_name: DeviceName,
    layout: LayoutName,
    compare: bool,
    json_path: Path | None,
    list_path: Path | None,
    seed: int | None,
    *,
    groups: int = 1,
    grouped: bool = False,
    epilogue: EpilogueName = EpilogueName.none,
) -> None:
    with _refusing():
        texts = _fewer_options(values)
        from torch_max_backend.bench.arguments import parse_convolution
        from torch_max_backend.bench.convolution import CK_DEFAULT, CK_GROUPED_DEFAULT, ConvolutionTask
        from torch_max_backend.bench.epilogue import Epilogue
        from torch_max_backend.bench.lists import convolutions
        from torch_max_backend.convolution_problem import Pass

        on_cpu = device_name is DeviceName.cpu
        if list_path is not None:
            control = _list_control(texts)
            problems = convolutions(list_path, cpu=on_cpu)
        else:
            default = CK_GROUPED_DEFAULT if grouped else CK_DEFAULT
            control, problem = parse_convolution(texts, default, grouped=grouped, groups=groups)
            problems = [("ck_default" if problem is default else "case", problem)]
        device = _device(device_name, dtype)
        tasks = [
            ConvolutionTask(
                name,
                problem,
                Pass[role],
                getattr(torch, dtype.value),
                device,
                layout.value,
                Epilogue(epilogue.value),
            )
            for name, problem in problems
        ]
        operation = {"FPROP": "conv-fwd", "DGRAD": "conv-bwd-data", "WGRAD": "conv-bwd-weight"}[role]
        settings = {
            "operation": "grouped-conv-bwd-data" if grouped else operation,
            "dtype": dtype.value,
            "layout": layout.value,
            "epilogue": epilogue.value,
        }
        _run(
            control,
            tasks,
            device,
            compare=compare,
            json_path=json_path,
            listed=list_path,
            seed=seed,
            settings=settings,
        )


def _convolution_command(name: str, role: str, summary: str) -> None:
    def command(
        values: ConvolutionValues = None,
        dtype: DtypeOption = Precision.float32,
        device: DeviceOption = DeviceName.cpu,
        layout: LayoutOption = LayoutName.channels_last,
        groups: GroupsOption = 1,
        compare: CompareOption = False,
        json_path: JsonOption = None,
        list_path: ListOption = None,
        seed: SeedOption = None,
    ) -> None:
        _convolution(role, values, dtype, device, layout, compare, json_path, list_path, seed, groups=groups)

    bench.command(name, help=summary, context_settings=_POSITIONAL)(command)


_convolution_command("conv-fwd", "FPROP", "Convolution, forward: y = x * w.")
_convolution_command("conv-bwd-data", "DGRAD", "Gradient of a convolution's input.")
_convolution_command("conv-bwd-weight", "WGRAD", "Gradient of a convolution's weight.")


@bench.command("grouped-conv-bwd-data", context_settings=_POSITIONAL)
def grouped_conv_bwd_data(
    values: GroupedValues = None,
    dtype: DtypeOption = Precision.float32,
    device: DeviceOption = DeviceName.cpu,
    layout: LayoutOption = LayoutName.channels_last,
    epilogue: Annotated[
        EpilogueName, typer.Option("--epilogue", help="GradIn = f(dgrad, D0, D1), in the same graph.")
    ] = EpilogueName.none,
    compare: CompareOption = False,
    json_path: JsonOption = None,
    list_path: ListOption = None,
    seed: SeedOption = None,
) -> None:
    """Gradient of a grouped convolution's input, with elementwise work over extra tensors behind it."""
    _convolution(
        "DGRAD",
        values,
        dtype,
        device,
        layout,
        compare,
        json_path,
        list_path,
        seed,
        grouped=True,
        epilogue=epilogue,
    )


@bench.command("maxpool2d-bwd", context_settings=_POSITIONAL)
def maxpool2d_bwd(
    values: PoolingValues = None,
    dtype: DtypeOption = Precision.float32,
    device: DeviceOption = DeviceName.cpu,
    layout: LayoutOption = LayoutName.channels_last,
    form: Annotated[FormName, typer.Option("--form", help="What the forward kept, and how the gradient moves.")] = (
        FormName.gather
    ),
    ceil_mode: CeilOption = False,
    compare: CompareOption = False,
    json_path: JsonOption = None,
    list_path: ListOption = None,
    seed: SeedOption = None,
) -> None:
    """Gradient of 2-D max pooling."""
    with _refusing():
        texts = _fewer_options(values)
        from torch_max_backend.bench.arguments import parse_pooling
        from torch_max_backend.bench.lists import poolings
        from torch_max_backend.bench.pooling import MAX_DEFAULT, Form, MaxPoolBackward

        if list_path is not None:
            control = _list_control(texts)
            problems = poolings(list_path, "max", 2, cpu=device is DeviceName.cpu)
        else:
            control, sizes = parse_pooling(texts, MAX_DEFAULT, ndim=2, dilated=True, ceil_mode=ceil_mode)
            problems = [("case", sizes)]
        place = _device(device, dtype)
        tasks = [
            MaxPoolBackward(name, sizes, getattr(torch, dtype.value), place, layout.value, Form(form.value))
            for name, sizes in problems
        ]
        settings = {"operation": "maxpool2d-bwd", "dtype": dtype.value, "layout": layout.value, "form": form.value}
        _run(
            control,
            tasks,
            place,
            compare=compare,
            json_path=json_path,
            listed=list_path,
            seed=seed,
            settings=settings,
        )


@bench.command("avgpool3d-bwd", context_settings=_POSITIONAL)
def avgpool3d_bwd(
    values: PoolingValues = None,
    dtype: DtypeOption = Precision.float32,
    device: DeviceOption = DeviceName.cpu,
    layout: LayoutOption = LayoutName.channels_last,
    ceil_mode: CeilOption = False,
    exclude_pad: Annotated[bool, typer.Option("--exclude-pad", help="Padding does not count in the divisor.")] = False,
    divisor: Annotated[int | None, typer.Option("--divisor", help="Divides every window's sum.")] = None,
    compare: CompareOption = False,
    json_path: JsonOption = None,
    list_path: ListOption = None,
    seed: SeedOption = None,
) -> None:
    """Gradient of 3-D average pooling."""
    with _refusing():
        texts = _fewer_options(values)
        from torch_max_backend.bench.arguments import parse_pooling
        from torch_max_backend.bench.lists import poolings
        from torch_max_backend.bench.pooling import AVG_DEFAULT, AvgPoolBackward

        if list_path is not None:
            control = _list_control(texts)
            problems = poolings(list_path, "avg", 3, cpu=device is DeviceName.cpu)
        else:
            control, sizes = parse_pooling(
                texts,
                AVG_DEFAULT,
                ndim=3,
                dilated=False,
                ceil_mode=ceil_mode,
                count_include_pad=not exclude_pad,
                divisor_override=divisor,
            )
            problems = [("case", sizes)]
        place = _device(device, dtype)
        tasks = [
            AvgPoolBackward(name, sizes, getattr(torch, dtype.value), place, layout.value) for name, sizes in problems
        ]
        settings = {"operation": "avgpool3d-bwd", "dtype": dtype.value, "layout": layout.value}
        _run(
            control,
            tasks,
            place,
            compare=compare,
            json_path=json_path,
            listed=list_path,
            seed=seed,
            settings=settings,
        )


@app.command()
def info() -> None:
    """Versions, devices, cache and kernels."""
    from torch_max_backend.support import installation

    values = installation()
    width = max(map(len, values))
    for name, value in values.items():
        typer.echo(f"{name:{width}}  {value}")


@app.command()
def ops(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print what docs/support.md holds.")] = False,
) -> None:
    """The aten ops that run in MAX, by family."""
    from torch_max_backend.support import markdown_table, rich_table

    if markdown:
        typer.echo(markdown_table(), nl=False)
    else:
        from rich.console import Console

        Console().print(rich_table())


def main(arguments: Sequence[str] | None = None) -> Callable[..., Any] | None:
    """The entry point as a function of its arguments."""
    return app(list(arguments) if arguments is not None else None)


if __name__ == "__main__":
    app()
