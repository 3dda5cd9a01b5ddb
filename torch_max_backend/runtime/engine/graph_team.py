"""Lets CPU kernels run on MAX's own threads, in graphs that MAX compiles.

The library for this is built with the first such graph. Launch lists run on PyTorch's threads and do not need it.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from max.driver import CPU

from torch_max_backend.errors import MaxBackendError
from torch_max_backend.max_compat import device_context
from torch_max_backend.mojo_ops.functions import LibraryFunction, require_function
from torch_max_backend.runtime.building import libraries

_HOST = torch.device("cpu")


def require_graph_team() -> str:
    """The symbol of the function that lends the threads; it is built with whatever else is required."""
    return require_function(LibraryFunction("runner", "graph_team", "cpu", (), module="graph_entries"))


@functools.cache
def lend() -> None:
    """Kernels run on MAX's threads from now on while no launch list runs, and in launch lists without a team.

    Raises:
        MaxBackendError: the library cannot be built or loaded.
    """
    symbol = require_graph_team()
    libraries.load(_HOST)
    host = CPU()
    message = ctypes.create_string_buffer(libraries.MESSAGE_BYTES)
    function = libraries.callable_at(libraries.address(symbol, _HOST))
    if function(0, device_context(host), ctypes.addressof(message)):
        raise MaxBackendError(f"MAX's threads cannot be used: {message.value.decode(errors='replace')}")
