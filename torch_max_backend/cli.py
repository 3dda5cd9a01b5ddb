"""Shows what is installed and supported, times operations, compiles ahead, and manages the cache."""

from __future__ import annotations

import contextlib
import enum
import secrets
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from torch_max_backend import cli_cache, cli_compile
from torch_max_backend.bench.arguments import ArgumentError, RunControl, parse_control
from torch_max_backend.bench.lists import ListSelection

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
bench = typer.Typer(
    no_args_is_help=True,
    help="Time one operation. Positional arguments are those of Composable Kernel's examples, in the same order.",
)
app.add_typer(bench, name="bench")
app.add_typer(cli_cache.app, name="cache")
app.command("compile")(cli_compile.compile_command)

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
DtypeOption = Annotated[Precision, typer.Option("--dtype", help="Dtype of the operands.")]
DeviceOption = Annotated[DeviceName, typer.Option("--device", help="Where to run.")]
LayoutOption = Annotated[
    LayoutName, typer.Option("--layout", help="Memory order of the operands, for us and for PyTorch.")
]
CompareOption = Annotated[
    bool, typer.Option("--compare", help="Also time PyTorch's operator, interleaved, and print the ratio.")
]
JsonOption = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the results to this file.")]
ListOption = Annotated[
    Path | None,
    typer.Option("--list", metavar="FILE", help="Run the problems of a JSON or TOML file and print a table."),
]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Seed of the random inputs; by default a fresh one.")]
GroupsOption = Annotated[
    int, typer.Option("--groups", help="Number of groups; K and C are the channels of all groups.")
]
CeilOption = Annotated[bool, typer.Option("--ceil-mode", help="Include partial windows at the end.")]


CasesOption = Annotated[str, typer.Option("--cases", help="With --list: a regular expression on SUITE/NAME.")]
BatchOption = Annotated[int | None, typer.Option("--batch", help="With --list: replaces every problem's N.")]


@dataclass(frozen=True)
class _Choices:
    """The arguments that every benchmark command has."""

    operation: str
    values: list[str] | None
    dtype: Precision
    device: DeviceName
    layout: LayoutName
    compare: bool
    json_path: Path | None
    list_path: Path | None
    cases: str
    batch: int | None
    seed: int | None

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype.value)

    def texts(self) -> list[str]:
        """The positional values; one that looks like an option is an unknown option."""
        texts = list(self.values or [])
        for text in texts:
            if text.startswith("-") and not text[1:2].isdigit():
                raise ArgumentError("option", text, "one of those that --help names")
        return texts

    def selection(self) -> ListSelection | None:
        """The list to run, if any; --cases and --batch are errors without it."""
        if self.batch is not None and self.batch < 1:
            raise ArgumentError("--batch", self.batch, "an integer of at least 1")
        if self.list_path is not None:
            return ListSelection(self.list_path, self.cases, self.batch, self.device is DeviceName.cpu)
        for option, value in (("--cases", self.cases or None), ("--batch", self.batch)):
            if value is not None:
                raise ArgumentError(option, value, "--list FILE beside it")
        return None

    def list_control(self) -> RunControl:
        """With --list the only positional values are verify, init and time."""
        texts = self.texts()
        if len(texts) > 3:
            raise ArgumentError("--list", f"given with {len(texts)} values", "only verify, init and time beside it")
        return parse_control(texts)

    def place(self) -> torch.device:
        """The device, after a check that it is present."""
        from torch_max_backend.runtime.session import max_device

        if self.device is DeviceName.cpu:
            return torch.device("cpu")
        if self.dtype is Precision.float64:
            raise ArgumentError("--dtype", self.dtype.value, "float32, bfloat16 or float16 on a GPU")
        if not torch.cuda.is_available():
            raise ArgumentError("--device", self.device.value, "cpu: PyTorch sees no CUDA device here")
        device = torch.device("cuda", torch.cuda.current_device())
        max_device(device)
        return device


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


def _run(choices: _Choices, control: RunControl, tasks: Sequence[Any], device: torch.device, **extra: str) -> None:
    """Runs every task and reports results; exits with status 1 if a verification failed."""
    from rich.progress import track

    from torch_max_backend.bench import report
    from torch_max_backend.bench import results as result_files
    from torch_max_backend.bench.ceilings import ceilings
    from torch_max_backend.bench.compiled import preload
    from torch_max_backend.bench.runner import CaseResult, check_memory, run_case
    from torch_max_backend.runtime import events

    path, listed = choices.json_path, choices.list_path is not None
    if path is not None and not path.parent.is_dir():
        raise ArgumentError("--json", path, "a file in a folder that exists")
    for task in tasks:
        check_memory(task, control.verify, device)
    seed = secrets.randbits(32) if choices.seed is None else choices.seed
    results: list[CaseResult] = []

    def told(event: events.CompileEvent) -> None:
        if event.seconds is None:
            typer.echo(f"compiling {', '.join(event.graphs)} ...", err=True)

    with events.listen(told):
        preload([task.kernel for task in tasks if task.kernel is not None], device)
        for task in track(tasks, "cases", disable=not (listed and sys.stderr.isatty())):
            if listed:
                typer.echo(f"\n{task.name}")
            for line in report.descriptions(task):
                typer.echo(line)
            result = run_case(task, control, device, choices.compare, seed)
            for line in report.figures(result, ceilings(device, task.dtype) if result.times else None):
                typer.echo(line)
            results.append(result)
    settings: dict[str, Any] = {"operation": choices.operation, "layout": choices.layout.value, **extra}
    if listed:
        title = ", ".join([choices.operation, choices.dtype.value, *list(settings.values())[1:], device.type])
        report.print_table(results, title)
    if path is not None:
        settings |= {"verify": control.verify, "init": control.init, "time": control.runs, "seed": seed}
        settings |= {"compare": choices.compare, "list": str(choices.list_path) if listed else None}
        rates = {choices.dtype.value: ceilings(device, choices.torch_dtype)} if control.runs else {}
        command = " ".join(["torch-max-backend", *sys.argv[1:]])
        result_files.write(path, report.document(command, results, device, rates, settings))
    if any(result.verification is not None and not result.verification.passed for result in results):
        raise typer.Exit(1)


def _convolution(
    choices: _Choices, role: str, *, groups: int = 1, grouped: bool = False, epilogue: str = "none"
) -> None:
    with _refusing():
        from torch_max_backend.bench.arguments import parse_convolution
        from torch_max_backend.bench.convolution import CK_DEFAULT, CK_GROUPED_DEFAULT, ConvolutionTask
        from torch_max_backend.bench.epilogue import Epilogue
        from torch_max_backend.bench.lists import convolutions
        from torch_max_backend.convolution_problem import Pass

        selection = choices.selection()
        if selection is not None:
            control, problems = choices.list_control(), convolutions(selection)
        else:
            default = CK_GROUPED_DEFAULT if grouped else CK_DEFAULT
            control, problem = parse_convolution(choices.texts(), default, grouped=grouped, groups=groups)
            problems = [("ck_default" if problem is default else "case", problem)]
        device = choices.place()
        tasks = [
            ConvolutionTask(
                name, problem, Pass[role], choices.torch_dtype, device, choices.layout.value, Epilogue(epilogue)
            )
            for name, problem in problems
        ]
        _run(choices, control, tasks, device, **({"epilogue": epilogue} if grouped else {}))


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
        cases: CasesOption = "",
        batch: BatchOption = None,
        seed: SeedOption = None,
    ) -> None:
        choices = _Choices(name, values, dtype, device, layout, compare, json_path, list_path, cases, batch, seed)
        _convolution(choices, role, groups=groups)

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
    cases: CasesOption = "",
    batch: BatchOption = None,
    seed: SeedOption = None,
) -> None:
    """Gradient of a grouped convolution's input, followed by elementwise work with extra tensors."""
    name = "grouped-conv-bwd-data"
    choices = _Choices(name, values, dtype, device, layout, compare, json_path, list_path, cases, batch, seed)
    _convolution(choices, "DGRAD", grouped=True, epilogue=epilogue.value)


@bench.command("maxpool2d-bwd", context_settings=_POSITIONAL)
def maxpool2d_bwd(
    values: PoolingValues = None,
    dtype: DtypeOption = Precision.float32,
    device: DeviceOption = DeviceName.cpu,
    layout: LayoutOption = LayoutName.channels_last,
    form: Annotated[FormName, typer.Option("--form", help="Form of the gradient, by what the forward pass saves.")] = (
        FormName.gather
    ),
    ceil_mode: CeilOption = False,
    compare: CompareOption = False,
    json_path: JsonOption = None,
    list_path: ListOption = None,
    cases: CasesOption = "",
    batch: BatchOption = None,
    seed: SeedOption = None,
) -> None:
    """Gradient of 2-D max pooling."""
    name = "maxpool2d-bwd"
    choices = _Choices(name, values, dtype, device, layout, compare, json_path, list_path, cases, batch, seed)
    with _refusing():
        from torch_max_backend.bench.arguments import parse_pooling
        from torch_max_backend.bench.lists import poolings
        from torch_max_backend.bench.pooling import MAX_DEFAULT, Form, MaxPoolBackward

        selection = choices.selection()
        if selection is not None:
            control, problems = choices.list_control(), poolings(selection, "max", 2)
        else:
            control, sizes = parse_pooling(choices.texts(), MAX_DEFAULT, ndim=2, dilated=True, ceil_mode=ceil_mode)
            problems = [("case", sizes)]
        place = choices.place()
        tasks = [
            MaxPoolBackward(label, sizes, choices.torch_dtype, place, layout.value, Form(form.value))
            for label, sizes in problems
        ]
        _run(choices, control, tasks, place, form=form.value)


@bench.command("avgpool3d-bwd", context_settings=_POSITIONAL)
def avgpool3d_bwd(
    values: PoolingValues = None,
    dtype: DtypeOption = Precision.float32,
    device: DeviceOption = DeviceName.cpu,
    layout: LayoutOption = LayoutName.channels_last,
    ceil_mode: CeilOption = False,
    exclude_pad: Annotated[bool, typer.Option("--exclude-pad", help="Exclude padding from the divisor.")] = False,
    divisor: Annotated[int | None, typer.Option("--divisor", help="The divisor of every window's sum.")] = None,
    compare: CompareOption = False,
    json_path: JsonOption = None,
    list_path: ListOption = None,
    cases: CasesOption = "",
    batch: BatchOption = None,
    seed: SeedOption = None,
) -> None:
    """Gradient of 3-D average pooling."""
    name = "avgpool3d-bwd"
    choices = _Choices(name, values, dtype, device, layout, compare, json_path, list_path, cases, batch, seed)
    with _refusing():
        from torch_max_backend.bench.arguments import parse_pooling
        from torch_max_backend.bench.lists import poolings
        from torch_max_backend.bench.pooling import AVG_DEFAULT, AvgPoolBackward

        selection = choices.selection()
        if selection is not None:
            control, problems = choices.list_control(), poolings(selection, "avg", 3)
        else:
            control, sizes = parse_pooling(
                choices.texts(),
                AVG_DEFAULT,
                ndim=3,
                dilated=False,
                ceil_mode=ceil_mode,
                count_include_pad=not exclude_pad,
                divisor_override=divisor,
            )
            problems = [("case", sizes)]
        place = choices.place()
        tasks = [AvgPoolBackward(label, sizes, choices.torch_dtype, place, layout.value) for label, sizes in problems]
        _run(choices, control, tasks, place)


@app.command()
def info() -> None:
    """Show versions, devices, cache and kernels."""
    from torch_max_backend.support import installation

    values = installation()
    width = max(map(len, values))
    for name, value in values.items():
        typer.echo(f"{name:{width}}  {value}")


@app.command()
def ops(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the content of docs/support.md.")] = False,
) -> None:
    """List the aten ops that run in MAX, by family."""
    from torch_max_backend.support import markdown_table, rich_table

    if markdown:
        typer.echo(markdown_table(), nl=False)
    else:
        from rich.console import Console

        Console().print(rich_table())


if __name__ == "__main__":
    app()
