"""`torch-max-backend compile`: compiles a model's graphs for a GPU that is not present."""

from __future__ import annotations

import enum
import runpy
from pathlib import Path
from typing import Annotated, Any

import typer


class AutocastName(enum.StrEnum):
    """Dtypes of autocast."""

    bfloat16 = "bfloat16"
    float16 = "float16"


def compile_command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE:FUNCTION",
            help="A Python file, and a function in it without arguments that returns a model and a tuple of inputs.",
            show_default=False,
        ),
    ],
    target: Annotated[str, typer.Option("--target", help="The GPU's architecture: sm_80, sm_90a, sm_100a or gfx942.")],
    autocast: Annotated[
        AutocastName | None, typer.Option("--autocast", help='The dtype of torch.autocast("cuda") around the call.')
    ] = None,
    dynamic: Annotated[bool, typer.Option("--dynamic", help="Compile for symbolic sizes.")] = False,
) -> None:
    """Compile a model's training graphs into the cache, for a GPU that is not present."""
    import torch

    from torch_max_backend.ahead import compile_ahead
    from torch_max_backend.errors import MaxBackendError

    model, inputs = _example(source)
    dtype = getattr(torch, autocast.value) if autocast else None
    try:
        compiled = compile_ahead(model, *inputs, target=target, autocast=dtype, dynamic=dynamic or None)
    except MaxBackendError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, ValueError) else 1) from None
    for event in compiled:
        how = "in the cache already" if event.cached else f"{event.seconds:.0f} s"
        typer.echo(f"{', '.join(event.graphs)} for {target}: {event.ops} aten ops, {how}")


def _example(source: str) -> tuple[Any, tuple[Any, ...]]:
    """The checked result of the function in the file."""
    from torch import nn

    file, _, name = source.rpartition(":")
    if not Path(file).is_file() or not name.isidentifier():
        raise typer.BadParameter(f"{source!r}: expected the name of a file that exists, a colon, and a function's name")
    function = runpy.run_path(file, run_name="__torch_max_backend_compile__").get(name)
    if not callable(function):
        raise typer.BadParameter(f"{file} has no function {name!r}")
    result = function()
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], nn.Module)):
        raise typer.BadParameter(
            f"{name}() returned {type(result).__name__}: expected a model and a tuple of its inputs"
        )
    model, inputs = result
    if not isinstance(inputs, tuple):
        raise typer.BadParameter(f"{name}() returned inputs of type {type(inputs).__name__}: expected a tuple")
    return model, inputs
