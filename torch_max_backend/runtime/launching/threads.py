"""The threads on which kernels of launch lists run on a CPU: PyTorch's OpenMP team."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch


@functools.cache
def team_start() -> int:
    """The address of ``GOMP_parallel`` in the OpenMP runtime that PyTorch runs on, 0 where it runs on none.

    GNU's runtime has it, and so have LLVM's and Intel's, for programs that GCC compiled.
    """
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        # Also looks in what the library itself is linked to, which need not be global.
        function = ctypes.CDLL(str(library)).GOMP_parallel
    except (OSError, AttributeError):
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0
