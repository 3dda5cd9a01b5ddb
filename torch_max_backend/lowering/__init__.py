"""One function for each aten operator, one module for each family; importing this package fills the registry."""

import importlib
import pkgutil

from torch_max_backend.lowering.context import LoweringContext
from torch_max_backend.lowering.registry import Layout, Registration, lookup, lowering, registrations

__all__ = ["Layout", "LoweringContext", "Registration", "load_all", "lookup", "lowering", "registrations"]


def load_all() -> None:
    """Imports every family, found by looking: a new module stands in no list."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
