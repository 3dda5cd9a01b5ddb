"""Shows what is installed and supported, times operations, compiles ahead, and manages the cache."""

from __future__ import annotations

from typing import Annotated

import typer

from torch_max_backend.cli.bench import app as bench
from torch_max_backend.cli.cache import app as cache
from torch_max_backend.cli.compile import compile_command

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
app.add_typer(bench, name="bench")
app.add_typer(cache, name="cache")
app.command("compile")(compile_command)


@app.command()
def info() -> None:
    """Show versions, devices, cache and kernels."""
    from torch_max_backend.inspection.support import installation

    values = installation()
    width = max(map(len, values))
    for name, value in values.items():
        typer.echo(f"{name:{width}}  {value}")


@app.command()
def ops(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the content of docs/support.md.")] = False,
) -> None:
    """List the aten ops that run in MAX, by family."""
    from torch_max_backend.inspection.support import markdown_table, rich_table

    if markdown:
        typer.echo(markdown_table(), nl=False)
    else:
        from rich.console import Console

        Console().print(rich_table())


if __name__ == "__main__":
    app()
