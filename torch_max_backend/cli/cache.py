"""`torch-max-backend cache`: shows the disk cache and copies it to another machine."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from torch_max_backend.runtime.caches import cache, cache_archive, prebuilt

app = typer.Typer(
    no_args_is_help=True, help="Show the cache of compiled graphs and kernels, or copy it to another machine."
)

ArchiveFile = Annotated[Path, typer.Argument(metavar="FILE", help="A tar file.", show_default=False)]


@contextlib.contextmanager
def _refusing(file: Path) -> Iterator[None]:
    """Turns an error in a file into one line on stderr and exit status 2."""
    try:
        yield
    except (cache_archive.ArchiveError, OSError) as error:
        typer.echo(f"Error: {file}: {error}", err=True)
        raise typer.Exit(2) from None


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


@app.command()
def info() -> None:
    """Show the cache's directory, its size, its targets, and what came with the package."""
    found = cache_archive.entries()
    directory = cache.cache_directory()
    typer.echo(f"{directory}: {_size(sum(entry.bytes for entry in found))} in {len(found)} entries")
    reason = cache.untrusted(directory.resolve())
    if reason is not None:
        typer.echo(f"not used: {reason}")
    counts: Counter[tuple[str, str, bool]] = Counter()
    sizes: Counter[tuple[str, str, bool]] = Counter()
    for entry in found:
        key = (entry.kind, entry.target, entry.usable)
        counts[key] += 1
        sizes[key] += entry.bytes
    for kind, target, usable in sorted(counts):
        key = (kind, target, usable)
        note = "" if usable else ", of other versions or damaged"
        typer.echo(f"  {counts[key]} {kind} for {target}: {_size(sizes[key])}{note}")
    for target, libraries in _prebuilt().items():
        functions = [facts for library in libraries for facts in library.functions]
        note = "" if all(map(cache_archive.is_current, functions)) else ", of other versions"
        size = _size(sum(library.path.stat().st_size for library in libraries))
        typer.echo(f"came with the package: {len(functions)} kernels for {target}: {size}{note}")


def _prebuilt() -> dict[str, list[prebuilt.Prebuilt]]:
    """The libraries that came with the package, by what they run on."""
    found: dict[str, list[prebuilt.Prebuilt]] = {}
    for library in prebuilt.libraries():
        found.setdefault(library.target, []).append(library)
    return found


@app.command("export")
def export_(file: ArchiveFile) -> None:
    """Write the entries that the installed versions use to FILE (compressed if it ends in .gz)."""
    with _refusing(file):
        count, size = cache_archive.export_cache(file)
    typer.echo(f"{count} entries, {_size(size)}, written to {file}")


@app.command("import")
def import_(file: ArchiveFile) -> None:
    """Add the entries of FILE to the cache. They are code that will run with your rights: import only files from people
    whom you trust with that."""
    with _refusing(file):
        taken, left = cache_archive.import_cache(file)
    typer.echo(f"{taken} entries imported to {cache.cache_directory()}")
    if left:
        typer.echo(f"{left} entries of other versions or another kind of machine left out")


@app.command()
def clear(
    stale: Annotated[
        bool, typer.Option("--stale", help="Only entries that the installed versions do not use.")
    ] = False,
) -> None:
    """Remove the compiled graphs and kernels. They are compiled again when needed."""
    count, size = cache_archive.clear(stale)
    typer.echo(f"{count} entries removed from {cache.cache_directory()}, {_size(size)}")
