"""Imports MAX and Rich without lasting changes to the process's own state."""

from __future__ import annotations

import importlib
import os
import random
import sys

_MODULES = ("rich.style", "max.driver")
"""The first draws a number of Python's ``random``, the second silences another library by environment variables."""
_OWN = "MODULAR"
"""Prefixes of MAX's own variables: where it lies, how it runs."""


def import_quietly() -> None:
    """Imports what is not imported yet."""
    if all(name in sys.modules for name in _MODULES):
        return
    state, environment = random.getstate(), dict(os.environ)
    for name in _MODULES:
        importlib.import_module(name)
    random.setstate(state)
    for name in os.environ.keys() - environment.keys():
        if not name.startswith(_OWN):
            del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


import_quietly()
