"""What kernels are for, as progress says it."""

from __future__ import annotations

import subprocess
import sys

ASKED = """
from torch_max_backend.mojo_ops.functions import LibraryFunction
for family in ("runner", "movement", "pooling"):
    print(LibraryFunction(family, "entry", "cpu", ()).use)
"""


def test_families_that_nobody_has_imported_say_it_too() -> None:
    done = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:3] == ["running graphs", "copies", "pooling"]
