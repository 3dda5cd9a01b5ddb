"""The packages of the library, and the families of kernels, import each other in one direction."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import torch_max_backend
from torch_max_backend.mojo_ops import KERNELS_PATH
from torch_max_backend.mojo_ops.sources import sources_of

ROOT = Path(torch_max_backend.__file__).parent

#: Of these, each imports only from those before it (docs/internals/architecture.md).
_ORDER = ("ir", "mojo_ops", "typed_graph", "fusion", "launch_list", "runtime", "graph")

#: By family of kernels, the other families that it builds on. All of them build on kernels/common/.
_FAMILIES = {"convolution": {"normalization", "pointwise"}, "reduction": {"pointwise"}}


def _imports() -> dict[str, set[str]]:
    """For each folder and each module beside them, the others that it imports."""
    found: dict[str, set[str]] = {}
    for path in ROOT.rglob("*.py"):
        own = _room(path.relative_to(ROOT).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                package, *parts = name.split(".")
                if package == "torch_max_backend" and parts:
                    found.setdefault(own, set()).add(_room(tuple(parts)))
    return {room: others - {room} for room, others in found.items()}


def _room(parts: tuple[str, ...]) -> str:
    """The folder or module below the package; what stands in the package itself is "__init__"."""
    known = (ROOT / parts[0]).is_dir() or (ROOT / f"{parts[0]}.py").is_file()
    return parts[0] if known else "__init__"


def test_imports_run_one_way() -> None:
    imports = _imports()
    assert imports["graph"] >= {"lowering", "runtime", "ir"}
    for number, room in enumerate(_ORDER):
        assert not imports[room] & set(_ORDER[number + 1 :]), room
    while imports:
        lowest = [room for room, others in imports.items() if not others & imports.keys()]
        circle = {room: sorted(others & imports.keys()) for room, others in imports.items()}
        assert lowest, f"these import each other in a circle: {circle}"
        for room in lowest:
            del imports[room]


@pytest.mark.parametrize("family", sorted(path.name for path in KERNELS_PATH.iterdir() if path.is_dir()))
def test_kernels_import_declared_families(family: str) -> None:
    files = (path.relative_to(KERNELS_PATH) for path in (KERNELS_PATH / family).rglob("*.mojo"))
    modules = [".".join(path.with_suffix("").parts) for path in files if path.stem != "__init__"]
    used = {path.relative_to(KERNELS_PATH).parts[0] for path in sources_of(modules)} - {"__init__.mojo"}
    assert used - {family} == (set() if family == "common" else {"common"} | _FAMILIES.get(family, set()))
