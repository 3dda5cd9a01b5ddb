"""``torch.compile(model, backend="max")``: trains and runs PyTorch models through Modular's MAX."""

from torch_max_backend import imports as _imports  # noqa: F401 (first: others import the same)

# isort: split
from torch_max_backend.ahead import compile_ahead
from torch_max_backend.backend import max_backend
from torch_max_backend.errors import (
    DeviceUnavailableError,
    IndexOutsideError,
    InvalidArgumentError,
    MaxBackendError,
    OptionError,
    UnsupportedOpError,
)
from torch_max_backend.inspection.explain import Explanation, explain, explain_ahead
from torch_max_backend.runtime.engine.busy_wait import settle_process
from torch_max_backend.runtime.launching.launch_times import LaunchTimes, launch_times
from torch_max_backend.version import __version__

__all__ = [
    "DeviceUnavailableError",
    "Explanation",
    "IndexOutsideError",
    "InvalidArgumentError",
    "LaunchTimes",
    "MaxBackendError",
    "OptionError",
    "UnsupportedOpError",
    "__version__",
    "compile_ahead",
    "explain",
    "explain_ahead",
    "launch_times",
    "max_backend",
]

# Must run before MAX starts its threads, which the first device or graph does.
settle_process()
