"""Runs a benchmark by its name: `python -m benchmarks NAME ...`; without a name it lists them.

A benchmark is a module with a `main` that reads its own options (`--help`) and writes a result file.
"""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def benchmarks() -> dict[str, str]:
    """By name, the first sentence of what each benchmark says of itself; nothing is imported."""
    found = {}
    for path in sorted(FOLDER.rglob("*.py")):
        tree = ast.parse(path.read_text())
        name = ".".join(path.relative_to(FOLDER).with_suffix("").parts)
        mains = any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body)
        if mains and not path.stem.startswith("_"):
            found[name] = (ast.get_docstring(tree) or "").splitlines()[0]
    return found


def run(arguments: list[str]) -> int:
    """Runs what the first argument names with the others; its exit status."""
    known = benchmarks()
    if not arguments or arguments[0] not in known:
        width = max(map(len, known))
        print("python -m benchmarks NAME ...\n")
        print("\n".join(f"{name:{width}}  {summary}" for name, summary in known.items()))
        return 0 if not arguments or arguments[0] in ("-h", "--help") else 2
    name = arguments[0]
    sys.argv = [f"python -m benchmarks {name}", *arguments[1:]]
    return importlib.import_module(f"benchmarks.{name}").main() or 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
