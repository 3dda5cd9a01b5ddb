"""``torch.compile(model, backend="max")``: PyTorch models, training included, on Modular's MAX graph compiler."""

from torch_max_backend.backend import max_backend
from torch_max_backend.errors import (
    DeviceUnavailableError,
    MaxBackendError,
    OptionError,
    UnsupportedOpError,
)

__all__ = ["DeviceUnavailableError", "MaxBackendError", "OptionError", "UnsupportedOpError", "max_backend"]
