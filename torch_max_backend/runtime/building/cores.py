"""The number of cores that a compilation may use."""

from __future__ import annotations

import os

from torch_max_backend.errors import OptionError

_CORES = "TORCH_MAX_BACKEND_COMPILE_CORES"


def cores() -> int:
    """``TORCH_MAX_BACKEND_COMPILE_CORES``, else those that this process runs on.

    Raises:
        OptionError: the variable is no number of at least 1.
    """
    chosen = os.environ.get(_CORES)
    if not chosen:
        return len(os.sched_getaffinity(0))
    if not chosen.isdecimal() or int(chosen) < 1:
        raise OptionError(f"{_CORES}={chosen!r}: expected a number of at least 1")
    return int(chosen)
