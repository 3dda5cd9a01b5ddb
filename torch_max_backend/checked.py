"""Run-time checks of argument types, as configured for the whole package."""

from __future__ import annotations

from beartype import BeartypeConf
from beartype import beartype as _beartype

beartype = _beartype(conf=BeartypeConf(is_random=False))
"""``beartype.beartype`` without random draws: it checks a fixed item of a container, since a draw would advance
Python's ``random``, which belongs to the user."""
