"""Lists what is installed and what is supported, from the machine and the registry of lowerings."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterable

import torch
from rich.table import Table

from torch_max_backend import lowering
from torch_max_backend.checked import beartype
from torch_max_backend.lowering.registry import Registration
from torch_max_backend.mojo_ops import KERNELS_PATH
from torch_max_backend.runtime.caches import cache, cache_archive
from torch_max_backend.torch_compat import OpOverload

_HEADING = """\
# Supported operators

The aten operators that `torch.compile(model, backend="max")` runs in MAX, by the module in
`torch_max_backend/lowering/` that holds them. Operators that PyTorch decomposes into these run too; any other
operator stays in PyTorch, with one warning that names it. "some" means that a call may stay in PyTorch because of
its arguments; `torch_max_backend.explain` gives the reason for each call.

This file is written by `torch-max-backend ops --markdown > docs/support.md`.
"""


@beartype
def installation() -> dict[str, str]:
    """The facts that `torch-max-backend info` prints, by name."""
    from max.driver import accelerator_architecture_name, accelerator_count

    accelerators = accelerator_count()
    sees = "no accelerator"
    if accelerators:
        sees = f"{accelerators} accelerator(s), {accelerator_architecture_name()}"
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    directory = cache.cache_directory()
    entries = cache_archive.entries()
    size = sum(entry.bytes for entry in entries)
    versions = cache.versions()
    return {
        "torch_max_backend": versions["backend"],
        "torch": torch.__version__,
        "max": versions["max"],
        "mojo": versions["mojo"],
        "beartype": importlib.metadata.version("beartype"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "MAX sees": f"CPU, {sees}",
        "torch sees": f"CPU with {torch.get_num_threads()} threads, {', '.join(gpus) or 'no CUDA device'}",
        "cache": f"{directory}: {size / 2**20:.1f} MiB in {len(entries)} entries",
        "kernels": f"{KERNELS_PATH}: sha256 {versions['kernels']}",
    }


@beartype
def families() -> dict[str, list[Registration]]:
    """Every registration by family, both in alphabetical order."""
    lowering.load_all()
    found: dict[str, list[Registration]] = {}
    for registration in lowering.registrations():
        found.setdefault(registration.family, []).append(registration)
    return {family: sorted(found[family], key=name) for family in sorted(found)}


@beartype
def name(registration: Registration) -> str:
    """The op's name as PyTorch prints it; the default overload goes without saying."""
    target = registration.op
    if isinstance(target, str):
        return target.replace("::", ".")
    if isinstance(target, OpOverload):
        return str(target).removesuffix(".default")
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', target)}".lstrip(".")


@beartype
def markdown_table() -> str:
    """The text of docs/support.md."""
    sections = [_HEADING]
    for family, registrations in families().items():
        lines = [f"## {_title(family)}", "", "| operator | calls | notes |", "| --- | --- | --- |"]
        lines.extend(f"| {' | '.join(row)} |" for row in _rows(registrations, code=True))
        sections.append("\n".join(lines) + "\n")
    return "\n".join(sections)


@beartype
def rich_table() -> Table:
    """The same for a terminal."""
    table = Table(title=f"{sum(map(len, families().values()))} operators run in MAX")
    for column in ("family", "operator", "calls", "notes"):
        table.add_column(column)
    for family, registrations in families().items():
        for row in _rows(registrations, code=False):
            table.add_row(family, *row)
        table.add_section()
    return table


def _rows(registrations: Iterable[Registration], *, code: bool) -> list[tuple[str, str, str]]:
    quote = "`" if code else ""
    return [
        (
            f"{quote}{name(registration)}{quote}",
            "all" if registration.supports is None else "some",
            registration.note.replace("|", "\\|") if code else registration.note,
        )
        for registration in registrations
    ]


def _title(family: str) -> str:
    return family.replace("_", " ").capitalize()
