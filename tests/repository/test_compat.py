"""Private names of PyTorch, MAX and Mojo stand in the two compat modules alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import torch_max_backend

ROOT = Path(torch_max_backend.__file__).parent
COMPAT = {"torch_compat.py", "max_compat.py"}
#: Private of this package, or ends the process.
OWN = {"super()._compile", "job._thread", "os._exit"}


def _private_names(tree: ast.AST) -> Iterator[str]:
    """Private modules and names that are imported, and private attributes of anything but ``self``."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = getattr(node, "module", None) or ""
            for alias in node.names:
                name = f"{module}.{alias.name}"
                if name.lstrip(".").startswith(("torch.", "max.", "mojo.")) and re.search(r"\._[a-z]", name):
                    yield name
        elif isinstance(node, ast.Attribute) and re.match(r"_[^_]", node.attr):
            # What begins with an underscore below aten is an op like others.
            owner = ast.unparse(node.value)
            if owner not in ("self", "cls", "aten", "torch.ops.aten"):
                yield f"{owner}.{node.attr}"


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_private_names_stand_in_compat(path: Path) -> None:
    found = set(_private_names(ast.parse(path.read_text()))) - OWN
    assert bool(found) is (path.name in COMPAT), sorted(found)
