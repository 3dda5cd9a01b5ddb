"""Registration of the matrix products: a thin op for graphs that MAX compiles.

Operands are of rank 3, and contiguous; a flag in `settings` says that one lies transposed. `function` is the library
function that the graph's builder chose.
"""

import extensibility
from extensibility import InputTensor, OutputTensor
from max.gpu.host import DeviceContext
from std.utils.index import IndexList

from ..common.library import Call
from .problem import GEOMETRY_LENGTH


@extensibility.register("matmul")
struct Matmul:
    """C [B, M, N] = A [B, M, K] B [B, K, N]; settings: allow_tf32, A is [B, K, M], B is [B, N, K] (0 or 1 each).
    """

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, function: StaticString
    ](
        c: OutputTensor[dtype=dtype, rank=3, ...],
        a: InputTensor[dtype=dtype, rank=3, ...],
        b: InputTensor[dtype=dtype, rank=3, ...],
        settings: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var flags = settings.unsafe_ptr()
        var a_turned = Int(flags[unsafe_offset=1])
        var b_turned = Int(flags[unsafe_offset=2])
        var m, n = c.dim_size(1), c.dim_size(2)
        var k = a.dim_size(1) if a_turned != 0 else a.dim_size(2)
        var b_k = b.dim_size(2) if b_turned != 0 else b.dim_size(1)
        if k != b_k:
            raise Error(t"matmul: A has {k} columns, B has {b_k} rows")
        var values = IndexList[GEOMETRY_LENGTH](
            Int(flags[unsafe_offset=0]),
            m,
            n,
            k,
            c.dim_size(0),
            1,
            1,
            0,
            m * n,
            0,
            0,
            n,
            1,
            0,
            m * k,
            0,
            0,
            1 if a_turned != 0 else k,
            m if a_turned != 0 else 1,
            0,
            k * n,
            0,
            0,
            1 if b_turned != 0 else n,
            k if b_turned != 0 else 1,
        )
        var geometry = Array[Int, GEOMETRY_LENGTH](fill=0)
        comptime for i in range(GEOMETRY_LENGTH):
            geometry[i] = values[i]
        var call = Call()
        call.append_at(
            Int(geometry.unsafe_ptr()), IndexList[1](GEOMETRY_LENGTH)
        )
        call.append_word(Int(c.unsafe_ptr()))
        call.append_word(Int(a.unsafe_ptr()))
        call.append_word(Int(b.unsafe_ptr()))
        call.run[function](ctx)
        # Only its address was handed over.
        _ = geometry^
