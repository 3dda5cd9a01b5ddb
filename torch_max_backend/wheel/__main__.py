"""``python -m torch_max_backend.wheel TARGET FOLDER``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from torch_max_backend.wheel.prebuild import TARGETS, prebuild


def main(
    target: Annotated[str, typer.Argument(help=f"one of {', '.join(TARGETS)}")],
    folder: Annotated[Path, typer.Argument(help="a new folder")],
    select: Annotated[
        list[str], typer.Option(help="a pattern of names of entries (conv_*) or of typical networks (digits)")
    ] = [],  # noqa: B006
) -> None:
    """Build the kernel libraries that a wheel carries for one target."""
    count = prebuild(target, folder, select)
    size = sum(path.stat().st_size for path in folder.iterdir())
    typer.echo(f"{count} functions for {target}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    typer.run(main)
