"""Tensor-core capabilities of the GPU that is compiled for, and their rounding of float32."""

from std.memory import bitcast
from std.sys._assembly import inlined_assembly
from std.sys.info import _accelerator_arch

comptime QUAD = 4
"""Number of float32 elements in 16 bytes."""
comptime Quad = SIMD[DType.float32, QUAD]


def blocks_compile() -> Bool:
    """Returns whether the accelerator that this compilation is for has these instructions: NVIDIA's since sm_80.
    """
    comptime arch = _accelerator_arch()
    comptime if "90" in arch or "80" in arch or "86" in arch or "89" in arch:
        return "gfx" not in arch
    elif "100" in arch or "103" in arch or "120" in arch or "121" in arch:
        return "gfx" not in arch
    else:
        return False


def pairs_compile[dtype: DType]() -> Bool:
    """Returns whether the accelerator has products of elements of this type, of two bytes.
    """
    return blocks_compile() and (
        dtype == DType.bfloat16 or dtype == DType.float16
    )


@always_inline
def to_tf32(value: Quad) -> Quad:
    """Rounds to TF32's 10 bits of mantissa, to nearest."""
    var rounded = value
    comptime for i in range(QUAD):
        rounded[i] = bitcast[DType.float32, 1](
            inlined_assembly[
                "cvt.rna.tf32.f32 $0, $1;",
                UInt32,
                constraints="=r,f",
                has_side_effect=False,
            ](value[i])
        )
    return rounded
