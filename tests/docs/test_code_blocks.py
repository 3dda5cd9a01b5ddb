"""Every Python block of the README and the pages runs, a page's blocks one after the other; the site builds."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._functorch import config as functorch_config

import torch_max_backend
from benchmarks import ROOT
from benchmarks.pages.figures import pages
from tests.harness import ALL_CASES
from torch_max_backend import backend

BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
PAGES = [page for page in {ROOT / "README.md", *pages()} if BLOCK.search(page.read_text())]

#: Pages whose blocks are compiled; graphs of the others' are built, and PyTorch runs them.
COMPILED = ("README.md", "index.md")
#: What the pages' readers have at hand: the quick start's model, so that all pages share its compiled graphs.
AT_HAND = next(BLOCK.finditer((ROOT / "docs" / "index.md").read_text())).group(2).partition("compiled =")[0] + (
    "criterion = nn.functional.cross_entropy\nimages, labels = torch.randn(4, 3, 8, 8), torch.randint(0, 10, (4,))\n"
)
#: More of it, for single pages.
MORE = {
    "troubleshooting.md": 'compiled = torch.compile(model, backend="max")\n',
    # Defining a lowering twice is an error: the page's decorator does nothing here.
    "adding-an-op.md": "from max.graph import TensorValue\n"
    "from torch_max_backend.lowering.context import LoweringContext\n"
    "from torch_max_backend.lowering.registry import Layout\n"
    "from torch_max_backend.mojo_ops.signatures import Signature, Tensor, ints\n"
    "aten = torch.ops.aten\n"
    "def lowering(op, *, layout):\n"
    "    return lambda function: function\n",
}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No state of Dynamo's; files go elsewhere; tests/test_ahead.py compiles ahead, here its call is checked alone."""

    def ahead(*args: Any, **kwargs: Any) -> None:
        inspect.signature(genuine).bind(*args, **kwargs)

    genuine = torch_max_backend.compile_ahead
    monkeypatch.setattr(torch_max_backend, "compile_ahead", ahead)
    monkeypatch.chdir(tmp_path)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("page", sorted(PAGES), ids=lambda page: page.name)
def test_code_blocks_run(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page.name not in COMPILED and not ALL_CASES:
        genuine = torch.compile

        def compiled(model: Any = None, **given: Any) -> Any:
            return genuine(model, **{**given, "backend": backend.build_only})

        monkeypatch.setattr(torch, "compile", compiled)
    namespace: dict[str, Any] = {"__name__": "page"}
    exec(AT_HAND + MORE.get(page.name, ""), namespace)
    # A page lowers the budget for the rest of the process.
    with functorch_config.patch(activation_memory_budget=functorch_config.activation_memory_budget):
        for number, (_, block) in enumerate(BLOCK.findall(page.read_text())):
            code = compile(
                "from __future__ import annotations\n" + textwrap.dedent(block), f"{page.name}[{number}]", "exec"
            )
            exec(code, namespace)


def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stdout + built.stderr
    assert (tmp_path / "site" / "habits" / "index.html").exists()
