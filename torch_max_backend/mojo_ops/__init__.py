"""Typed Python functions over the project's Mojo kernels, one module per kernel family.

Each function checks its arguments, infers the output type and adds one custom op to the MAX graph that is
being built; it never runs anything itself.
"""

import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


def _kernels_path() -> Path:
    """The Mojo package: ``TORCH_MAX_BACKEND_KERNELS`` (for work on kernels), else the one that was shipped.

    In a wheel the Mojo sources travel inside the Python package; in a checkout they stand beside it.
    """
    chosen = os.environ.get("TORCH_MAX_BACKEND_KERNELS")
    candidates = [Path(chosen)] if chosen else [_PACKAGE / "kernels", _PACKAGE.parent / "kernels"]
    for path in candidates:
        if (path / "__init__.mojo").is_file():
            return path
    raise FileNotFoundError(f"no Mojo package (a folder with __init__.mojo) at {', '.join(map(str, candidates))}")


KERNELS_PATH: Path = _kernels_path()
