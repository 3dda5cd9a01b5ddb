"""Typed Python functions over the project's Mojo kernels, one module per kernel family.

Each function checks its arguments, infers the output type and adds one custom op to the MAX graph that is
being built; it never runs anything itself.
"""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent

# In a wheel the Mojo sources travel inside the Python package; in a checkout they stand beside it.
KERNELS_PATH: Path = next(
    path for path in (_PACKAGE / "kernels", _PACKAGE.parent / "kernels") if path.is_dir()
)
