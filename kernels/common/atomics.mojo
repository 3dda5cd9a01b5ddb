"""Additions that meet in memory."""

from std.atomic import Atomic, Ordering
from std.sys.info import is_amd_gpu, is_nvidia_gpu

from .pointer import Ptr

comptime DEVICE: StaticString = "device" if is_nvidia_gpu() else (
    "agent" if is_amd_gpu() else ""
)
"""Those who meet, as LLVM names them: threads of one device, or all."""


@always_inline
def add_atomically[dtype: DType, //](at: Ptr[dtype], value: Scalar[dtype]):
    """Adds to what `at` points to, before or after all other additions there.

    Nothing else is ordered by it: Mojo's default has a GPU wait at a fence of the whole system before each addition.
    """
    _ = Atomic[scope=DEVICE].fetch_add[ordering=Ordering.RELAXED](at, value)
