"""wgmma with its left operand in registers, for both types of two bytes: MAX has it for bfloat16 alone."""

from std.sys import _RegisterPackType
from std.sys._assembly import inlined_assembly

comptime Sums[columns: Int] = SIMD[DType.float32, columns // 2]
"""A lane's sums of 16 rows."""


def _numbers(first: Int, count: Int, prefix: String) -> String:
    var text = String()
    for i in range(first, first + count):
        if i > first:
            text += ","
        text += prefix + String(i)
    return text


@always_inline
def add_wgmma[
    dtype: DType, columns: Int
](sums: Sums[columns], a: SIMD[DType.uint32, 4], b: Int64) -> Sums[columns]:
    """Starts adding A [64, 16] times B [16, columns], whose rows lie one behind the other in shared memory. `b` is its
    descriptor.
    """
    comptime count = columns // 2
    comptime word = "bf16" if dtype == DType.bfloat16 else "f16"
    comptime instruction = (
        "{.reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n"
        + String(columns)
        + "k16.f32."
        + word
        + "."
        + word
        + " {"
        + _numbers(0, count, "$")
        + "}, {"
        + _numbers(count, 4, "$")
        + "}, $"
        + String(count + 4)
        + ", p, 1, 1, 1;}"
    )
    comptime constraints = "=f," * count + "r,r,r,r,l," + _numbers(0, count, "")
    # fmt: off
    comptime if columns == 64:
        var r = inlined_assembly[
            instruction,
            _RegisterPackType[
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
            ],
            constraints=constraints,
        ](
            a[0], a[1], a[2], a[3], b,
            sums[0], sums[1], sums[2], sums[3], sums[4], sums[5], sums[6], sums[7],
            sums[8], sums[9], sums[10], sums[11], sums[12], sums[13], sums[14], sums[15],
            sums[16], sums[17], sums[18], sums[19], sums[20], sums[21], sums[22], sums[23],
            sums[24], sums[25], sums[26], sums[27], sums[28], sums[29], sums[30], sums[31],
        )
        return rebind[Sums[columns]](
            SIMD[DType.float32, 32](
                r[0], r[1], r[2], r[3], r[4], r[5], r[6], r[7],
                r[8], r[9], r[10], r[11], r[12], r[13], r[14], r[15],
                r[16], r[17], r[18], r[19], r[20], r[21], r[22], r[23],
                r[24], r[25], r[26], r[27], r[28], r[29], r[30], r[31],
            )
        )
    elif columns == 128:
        var r = inlined_assembly[
            instruction,
            _RegisterPackType[
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
                Float32, Float32, Float32, Float32, Float32, Float32, Float32, Float32,
            ],
            constraints=constraints,
        ](
            a[0], a[1], a[2], a[3], b,
            sums[0], sums[1], sums[2], sums[3], sums[4], sums[5], sums[6], sums[7],
            sums[8], sums[9], sums[10], sums[11], sums[12], sums[13], sums[14], sums[15],
            sums[16], sums[17], sums[18], sums[19], sums[20], sums[21], sums[22], sums[23],
            sums[24], sums[25], sums[26], sums[27], sums[28], sums[29], sums[30], sums[31],
            sums[32], sums[33], sums[34], sums[35], sums[36], sums[37], sums[38], sums[39],
            sums[40], sums[41], sums[42], sums[43], sums[44], sums[45], sums[46], sums[47],
            sums[48], sums[49], sums[50], sums[51], sums[52], sums[53], sums[54], sums[55],
            sums[56], sums[57], sums[58], sums[59], sums[60], sums[61], sums[62], sums[63],
        )
        return rebind[Sums[columns]](
            SIMD[DType.float32, 64](
                r[0], r[1], r[2], r[3], r[4], r[5], r[6], r[7],
                r[8], r[9], r[10], r[11], r[12], r[13], r[14], r[15],
                r[16], r[17], r[18], r[19], r[20], r[21], r[22], r[23],
                r[24], r[25], r[26], r[27], r[28], r[29], r[30], r[31],
                r[32], r[33], r[34], r[35], r[36], r[37], r[38], r[39],
                r[40], r[41], r[42], r[43], r[44], r[45], r[46], r[47],
                r[48], r[49], r[50], r[51], r[52], r[53], r[54], r[55],
                r[56], r[57], r[58], r[59], r[60], r[61], r[62], r[63],
            )
        )
    else:
        comptime assert False, "columns are 64 or 128"
    # fmt: on
