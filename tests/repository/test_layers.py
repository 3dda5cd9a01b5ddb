"""The packages of the library, and the families of kernels, import each other in one direction."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import torch_max_backend
from torch_max_backend.mojo_ops import KERNELS_PATH
from torch_max_backend.mojo_ops.sources import sources_of

ROOT = Path(torch_max_backend.__file__).parent

#: By folder ("" is the package): modules, of which each imports only from those before it (architecture.md says so).
_ORDERS = {
    "": ("ir", "mojo_ops", "typed_graph", "fusion", "launch_list", "runtime", "graph"),
    "runtime": ("caches", "building", "engine", "tensors", "memory", "launching", "device_graphs", "executable"),
    "graph": (
        *("written_attention", "fake_cuda", "lines", "random", "memory", "views", "constants", "builder", "partition"),
        *("compiled", "account", "unit", "sized", "passes", "compiler", "traces"),
    ),
}

#: Modules that the last of an order imports, so that a test that finds no imports fails.
_LAST_IMPORTS = {"": {"lowering", "runtime", "ir"}, "runtime": {"launching", "tensors"}, "graph": {"compiler", "sized"}}

#: By family of kernels, the other families that it builds on. All of them build on kernels/common/.
_FAMILIES = {"convolution": {"normalization", "pointwise"}, "reduction": {"pointwise"}}


def _imports(folder: Path) -> dict[str, set[str]]:
    """For each folder in this one and each module beside them, the others that it imports."""
    above = folder.relative_to(ROOT.parent).parts
    found: dict[str, set[str]] = {}
    for path in folder.rglob("*.py"):
        own = _module(folder, path.relative_to(folder).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                parts = tuple(name.split("."))
                if parts[: len(above)] == above and len(parts) > len(above):
                    found.setdefault(own, set()).add(_module(folder, parts[len(above) :]))
    return {module: others - {module} for module, others in found.items()}


def _module(folder: Path, parts: tuple[str, ...]) -> str:
    """The folder or module below ``folder``; what stands in the package itself is "__init__"."""
    known = (folder / parts[0]).is_dir() or (folder / f"{parts[0]}.py").is_file()
    return parts[0] if known else "__init__"


@pytest.mark.parametrize("below", _ORDERS, ids=lambda below: below or "all")
def test_imports_run_one_way(below: str) -> None:
    folder, order = ROOT / below, _ORDERS[below]
    imports = _imports(folder)
    assert imports[order[-1]] >= _LAST_IMPORTS[below]
    for number, module in enumerate(order):
        assert (folder / module).is_dir() or (folder / f"{module}.py").is_file()
        assert not imports.get(module, set()) & set(order[number + 1 :]), module
    while imports:
        lowest = [module for module, others in imports.items() if not others & imports.keys()]
        circle = {module: sorted(others & imports.keys()) for module, others in imports.items()}
        assert lowest, f"these import each other in a circle: {circle}"
        for module in lowest:
            del imports[module]


@pytest.mark.parametrize("family", sorted(path.name for path in KERNELS_PATH.iterdir() if path.is_dir()))
def test_kernels_import_declared_families(family: str) -> None:
    files = (path.relative_to(KERNELS_PATH) for path in (KERNELS_PATH / family).rglob("*.mojo"))
    modules = [".".join(path.with_suffix("").parts) for path in files if path.stem != "__init__"]
    used = {path.relative_to(KERNELS_PATH).parts[0] for path in sources_of(modules)} - {"__init__.mojo"}
    assert used - {family} == (set() if family == "common" else {"common"} | _FAMILIES.get(family, set()))
