"""Atomic additions to memory."""

from std.atomic import Atomic, Ordering
from std.sys._assembly import inlined_assembly
from std.sys.info import is_amd_gpu, is_nvidia_gpu

from .pointer import Ptr
from .ptx import compiling_for_hopper

comptime DEVICE: StaticString = "device" if is_nvidia_gpu() else (
    "agent" if is_amd_gpu() else ""
)
"""LLVM's name of the scope in which an atomic addition is seen: the threads of one device; empty for all threads."""


@always_inline
def add_atomically[
    dtype: DType, width: SIMDLength, //
](at: Ptr[dtype], value: SIMD[dtype, width]):
    """Adds to the elements from `at` on, to each before or after all other additions there; four begin at a multiple of
    their size.

    Nothing else is ordered by it: Mojo's default has a GPU wait at a fence of the whole system before each addition.
    """
    comptime if is_nvidia_gpu() and compiling_for_hopper() and (
        width == 4 and dtype == DType.float32
    ):
        inlined_assembly[
            "red.relaxed.gpu.global.add.v4.f32 [$0], {$1, $2, $3, $4};",
            NoneType,
            constraints="l,f,f,f,f,~{memory}",
        ](at, value[0], value[1], value[2], value[3])
    else:
        comptime for k in range(width):
            _ = Atomic[scope=DEVICE].fetch_add[ordering=Ordering.RELAXED](
                at.unsafe_offset(k), value[k]
            )
