"""The two rates that bound any kernel, measured in the run that they are used in."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import partial

import torch

from torch_max_backend.bench.memory import available_bytes, cache_bytes
from torch_max_backend.bench.timing import interleaved
from torch_max_backend.checked import beartype
from torch_max_backend.dtypes import LOW_PRECISION

_RUNS = 7


@dataclass(frozen=True)
class Floor:
    """The least time that a piece of work can take.

    Attributes:
        seconds: the larger of the two below.
        flop_seconds: its operations at the matmul's rate.
        byte_seconds: its bytes, each moved once, at the copy's rate.
    """

    flop_seconds: float
    byte_seconds: float

    @property
    def seconds(self) -> float:
        return max(self.flop_seconds, self.byte_seconds)

    @property
    def bound(self) -> str:
        return "flops" if self.flop_seconds > self.byte_seconds else "bytes"


@dataclass(frozen=True)
class Ceilings:
    """Rates of a large copy (bytes read plus bytes written) and a large matmul, through PyTorch.

    The best of a few runs, for a ceiling is what the machine can do undisturbed.
    """

    bytes_per_second: float
    flops_per_second: float

    def floor(self, flops: int, moved: int, *, arithmetic: bool = True) -> Floor:
        """The floor of `flops` operations and `moved` bytes; without `arithmetic` the operations are no matmul's."""
        return Floor(flops / self.flops_per_second if arithmetic else 0.0, moved / self.bytes_per_second)


@functools.cache
@beartype
def ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Measured once for each device and dtype of a process, on random data."""
    flops = _matmul_rate(device, dtype)
    if device.type == "cpu" and dtype in LOW_PRECISION:
        # PyTorch's narrow product may be emulated, float32's units are there all the same.
        flops = max(flops, ceilings(device, torch.float32).flops_per_second)
    rates = Ceilings(copy_rate(device), flops)
    if device.type == "cuda":
        # PyTorch would keep the memory, and MAX allocates beside it.
        torch.cuda.empty_cache()
    return rates


@functools.cache
@beartype
def copy_rate(device: torch.device) -> float:
    """Bytes read plus bytes written in a second by a copy that no cache holds, the best of a few."""
    wanted = 2**32 if device.type == "cuda" else max(2**28, 4 * cache_bytes(device))
    size = min(wanted, available_bytes(device) // 8) // 4 * 4
    source = torch.randint(0, 2**31 - 1, (size // 4,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    times = interleaved({"copy": [lambda: target.copy_(source)]}, _RUNS, device)["copy"]
    return 2 * source.nbytes / times.best


def _matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """The largest square product that takes at most about half a second, up to 8192 on a GPU and 2048 on a CPU."""
    # cuDNN's setting, not the matmul's: it is what governs float32 convolutions.
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32
    try:
        rate = 0.0
        for size in (1024, 2048, 8192) if device.type == "cuda" else (512, 1024, 2048):
            if rate and 2 * size**3 / rate > 0.5:
                break
            a, b = (torch.randn(size, size, dtype=torch.float32, device=device).to(dtype) for _ in range(2))
            times = interleaved({"matmul": [partial(torch.matmul, a, b)]}, _RUNS, device)["matmul"]
            rate = max(rate, 2 * size**3 / times.best)
        return rate
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
