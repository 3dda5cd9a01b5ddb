"""Runs a benchmark by its name: `python -m benchmarks NAME ...`; without a name it lists them.

A benchmark is a module with a `main` that reads its own options (`--help`) and writes a result file. Its name is its
path inside one of the folders here: `compiling/first_step.py` is `first_step`, `kernels/pooling/run.py` `pooling.run`.
"""

from __future__ import annotations

import ast
import importlib
import sys
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Benchmark:
    """A benchmark.

    Attributes:
        module: its module's name.
        summary: the first sentence of what it says of itself.
    """

    module: str
    summary: str


def benchmarks() -> dict[str, Benchmark]:
    """All benchmarks by name; nothing is imported."""
    found: dict[str, Benchmark] = {}
    for path in sorted(FOLDER.glob("*/**/*.py")):
        tree = ast.parse(path.read_text())
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
            parts = path.relative_to(FOLDER).with_suffix("").parts
            name = ".".join(parts[1:])
            assert name not in found, f"two benchmarks are called {name}"
            found[name] = Benchmark(".".join(("benchmarks", *parts)), (ast.get_docstring(tree) or "").splitlines()[0])
    return dict(sorted(found.items()))


def run(arguments: list[str]) -> int:
    """Runs what the first argument names with the others; its exit status."""
    known = benchmarks()
    if not arguments or arguments[0] not in known:
        width = max(map(len, known))
        print("python -m benchmarks NAME ...\n")
        print("\n".join(f"{name:{width}}  {each.summary}" for name, each in known.items()))
        return 0 if not arguments or arguments[0] in ("-h", "--help") else 2
    name = arguments[0]
    sys.argv = [f"python -m benchmarks {name}", *arguments[1:]]
    return importlib.import_module(known[name].module).main() or 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
