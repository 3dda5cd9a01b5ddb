"""Run-time checks of argument types, as configured for the whole package."""

from __future__ import annotations

from beartype import BeartypeConf
from beartype import beartype as _beartype

beartype = _beartype(conf=BeartypeConf(is_random=False))
"""As ``beartype.beartype``, but the item of a container that it looks at is not drawn: a draw would move Python's
``random``, whose numbers belong to the user."""
