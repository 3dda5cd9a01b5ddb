"""Checks of operands that several families make."""

from __future__ import annotations

from max.dtype import DType
from max.graph import TensorValue

from torch_max_backend.dtypes import MAX_FLOATS


def check_float(name: str, value: TensorValue) -> None:
    """Refuses an operand that is of no float type, or of float64 on a GPU.

    Raises:
        ValueError: ``value``, which ``name`` is said for, has another dtype.
    """
    if value.dtype not in MAX_FLOATS:
        raise ValueError(f"{name} has dtype {value.dtype}: must be one of {[str(dtype) for dtype in MAX_FLOATS]}")
    if value.dtype == DType.float64 and value.device.is_gpu():
        raise ValueError(f"{name} has dtype {value.dtype}: float64 is supported on the CPU only")
