"""The table between PyTorch's and MAX's dtypes and devices."""

from __future__ import annotations

import torch
from max.dtype import DType
from max.graph import DeviceRef

from torch_max_backend.errors import CannotLower

TORCH_TO_MAX: dict[torch.dtype, DType] = {
    torch.float64: DType.float64,
    torch.float32: DType.float32,
    torch.bfloat16: DType.bfloat16,
    torch.float16: DType.float16,
    torch.int64: DType.int64,
    torch.int32: DType.int32,
    torch.int16: DType.int16,
    torch.int8: DType.int8,
    torch.uint8: DType.uint8,
    torch.uint64: DType.uint64,
    torch.bool: DType.bool,
}
MAX_TO_TORCH: dict[DType, torch.dtype] = {value: key for key, value in TORCH_TO_MAX.items()}

#: Float types that kernels compute, float64 on the CPU alone.
FLOATS: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MAX_FLOATS: tuple[DType, ...] = tuple(TORCH_TO_MAX[dtype] for dtype in FLOATS)
NARROW_FLOATS: tuple[DType, ...] = (DType.bfloat16, DType.float16)

#: Float types that are stored narrow and computed in float32.
LOW_PRECISION: frozenset[torch.dtype] = frozenset({torch.bfloat16, torch.float16})


def max_dtype(dtype: torch.dtype) -> DType:
    """MAX's counterpart of ``dtype``; raises CannotLower where there is none (complex, quantized, float8)."""
    try:
        return TORCH_TO_MAX[dtype]
    except KeyError:
        raise CannotLower(f"MAX has no dtype for {dtype}") from None


def accumulation_dtype(dtype: DType) -> DType:
    """The dtype in which kernels keep sums, maxima and statistics of ``dtype`` (kernels/common/pointer.mojo)."""
    return DType.float64 if dtype == DType.float64 else DType.float32


def device_ref(device: torch.device) -> DeviceRef:
    """MAX's reference to a PyTorch device."""
    if device.type == "cpu":
        return DeviceRef.CPU()
    if device.type == "cuda":
        return DeviceRef.GPU(device.index or 0)
    raise CannotLower(f"MAX drives no device of type {device.type!r}")


def device_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a GPU's kernels read a number of the host: like PyTorch's beside a float32 tensor, they do not
    compute in float64."""
    return torch.float32 if dtype is torch.float64 else dtype
