"""Register-blocked inner products: a tile of ROWS rows by VECTORS vectors of columns, kept in registers.

Where the processor multiplies pairs of bfloat16 values and adds both products in float32, the packed operands stay in
bfloat16, and two steps of the reduction lie beside each other: [step / 2][column][2].
"""

from std.math import ceildiv
from std.memory import bitcast
from std.sys import CompilationTarget
from std.sys.intrinsics import llvm_intrinsic

from ...common.amx import TILE_STEPS, has_tiles
from ...common.packed import REGISTERS, VECTORS
from ...common.pointer import Ptr, accumulation_type

comptime PtrTable[dtype: DType] = MutPointer[Ptr[dtype], MutUntrackedOrigin]

comptime has_pairs[dtype: DType]: Bool = (
    dtype == DType.bfloat16 and CompilationTarget._has_feature["avx512bf16"]()
)
"""Whether steps of the reduction are taken in pairs."""
comptime packed_type[dtype: DType]: DType = dtype if has_pairs[
    dtype
] else accumulation_type[dtype]
"""Element type of packed operands."""

# Vectors of columns in a full panel; the last panel of a matrix may have fewer.
comptime PANEL_VECTORS = VECTORS
# Every tile height divides this, so blocks of rows are cut at its multiples.
comptime ROW_GRANULE = 48 if has_tiles[DType.bfloat16] else 24


@always_inline
def tile_rows[vectors: Int]() -> Int:
    """Returns the rows that fill the vector registers beside the `vectors` that hold the second operand.
    """
    comptime if REGISTERS == 16:
        return 12 // vectors
    elif vectors <= 2:
        return 12
    elif vectors == 3:
        return 8
    else:
        return 6


@always_inline
def packed_length[dtype: DType](length: Int) -> Int:
    """Returns the number of steps, rounded up to whole pairs or tiles where steps are packed so.
    """
    comptime if has_tiles[dtype]:
        return ceildiv(length, TILE_STEPS) * TILE_STEPS
    elif has_pairs[dtype]:
        return ceildiv(length, 2) * 2
    return length


@always_inline
def _add_pair[
    dtype: DType, acc_type: DType, width: Int, rows: Int, vectors: Int, row: Int
](
    mut acc: Array[SIMD[acc_type, width], rows * vectors],
    pair: SIMD[dtype, 2],
    f: Array[SIMD[dtype, 2 * width], vectors],
):
    """Adds the products of one row's pair of values with a pair of rows of columns.
    """
    var s = bitcast[DType.bfloat16, 2 * width](
        SIMD[DType.int32, width](bitcast[DType.int32, 1](pair))
    )
    comptime for v in range(vectors):
        comptime i = row * vectors + v
        acc[i] = llvm_intrinsic[
            "llvm.x86.avx512bf16.dpbf16ps.512", SIMD[acc_type, width]
        ](acc[i], s, f[v])


@always_inline
def _columns[
    dtype: DType, size: Int, vectors: Int
](b: Ptr[dtype]) -> Array[SIMD[dtype, size], vectors]:
    var f = Array[SIMD[dtype, size], vectors](fill=0)
    comptime for v in range(vectors):
        f[v] = b.unsafe_offset(v * size).unsafe_load[width=size]()
    return f^


@always_inline
def gather_tile[
    dtype: DType, acc_type: DType, width: Int, rows: Int, vectors: Int
](
    mut acc: Array[SIMD[acc_type, width], rows * vectors],
    table: PtrTable[dtype],
    offset: Int,
    length: Int,
    panel: Ptr[packed_type[dtype]],
):
    """Adds a[row][offset + i] * panel[i][:] over i < length, each row given by its own pointer.
    """
    var a = Array[Ptr[dtype], rows](fill=table[])
    comptime for row in range(rows):
        a[row] = table[unsafe_offset=row].unsafe_offset(offset)
    comptime if has_pairs[dtype]:
        var b = rebind[Ptr[dtype]](panel)
        for i in range(0, length - 1, 2):
            var f = _columns[dtype, 2 * width, vectors](b)
            comptime for row in range(rows):
                _add_pair[dtype, acc_type, width, rows, vectors, row](
                    acc, a[row].unsafe_offset(i).unsafe_load[width=2](), f
                )
            b = b.unsafe_offset(2 * vectors * width)
        if length % 2 == 1:
            # The last value beside a zero: what lies behind it in memory is none.
            var f = _columns[dtype, 2 * width, vectors](b)
            comptime for row in range(rows):
                var pair = SIMD[dtype, 2](a[row][unsafe_offset=length - 1], 0)
                if length > 1:
                    pair = (
                        a[row].unsafe_offset(length - 2).unsafe_load[width=2]()
                    )
                    pair = bitcast[dtype, 2](
                        bitcast[DType.uint32, 1](pair) >> 16
                    )
                _add_pair[dtype, acc_type, width, rows, vectors, row](
                    acc, pair, f
                )
        return
    var b = rebind[Ptr[acc_type]](panel)
    for i in range(length):
        var f = _columns[acc_type, width, vectors](b)
        comptime for row in range(rows):
            var s = SIMD[acc_type, width](
                a[row][unsafe_offset=i].cast[acc_type]()
            )
            comptime for v in range(vectors):
                acc[row * vectors + v] = s.fma(f[v], acc[row * vectors + v])
        b = b.unsafe_offset(vectors * width)


@always_inline
def outer_tile[
    dtype: DType, acc_type: DType, width: Int, rows: Int, vectors: Int
](
    mut acc: Array[SIMD[acc_type, width], rows * vectors],
    a: Ptr[packed_type[dtype]],
    b: Ptr[packed_type[dtype]],
    length: Int,
):
    """Adds a[i][row] * b[i][:] over i < length; both operands are packed tiles, `length` is a packed one.
    """
    comptime if has_pairs[dtype]:
        var ap = rebind[Ptr[dtype]](a)
        var bp = rebind[Ptr[dtype]](b)
        for _ in range(0, length, 2):
            var f = _columns[dtype, 2 * width, vectors](bp)
            comptime for row in range(rows):
                _add_pair[dtype, acc_type, width, rows, vectors, row](
                    acc, ap.unsafe_offset(2 * row).unsafe_load[width=2](), f
                )
            ap = ap.unsafe_offset(2 * rows)
            bp = bp.unsafe_offset(2 * vectors * width)
        return
    var ap = rebind[Ptr[acc_type]](a)
    var bp = rebind[Ptr[acc_type]](b)
    for _ in range(length):
        var f = _columns[acc_type, width, vectors](bp)
        comptime for row in range(rows):
            var s = SIMD[acc_type, width](ap[unsafe_offset=row])
            comptime for v in range(vectors):
                acc[row * vectors + v] = s.fma(f[v], acc[row * vectors + v])
        ap = ap.unsafe_offset(rows)
        bp = bp.unsafe_offset(vectors * width)
