"""Register-blocked inner products: a tile of ROWS rows by VECTORS vectors of columns, kept in registers."""

from ..common import Ptr

comptime PtrTable[dtype: DType] = MutPointer[Ptr[dtype], MutUntrackedOrigin]

# Vectors of columns in a full panel; the last panel of a matrix may have fewer.
comptime PANEL_VECTORS = 4
# Every tile height below divides this, so blocks of rows are cut at its multiples.
comptime ROW_GRANULE = 24


@always_inline
def tile_rows[vectors: Int]() -> Int:
    """Rows that fill 32 vector registers beside the `vectors` that hold the second operand.
    """
    comptime if vectors <= 2:
        return 12
    elif vectors == 3:
        return 8
    else:
        return 6


@always_inline
def gather_tile[
    dtype: DType, acc_type: DType, width: Int, rows: Int, vectors: Int
](
    mut acc: Array[SIMD[acc_type, width], rows * vectors],
    table: PtrTable[dtype],
    offset: Int,
    length: Int,
    panel: Ptr[acc_type],
):
    """Adds a[row][offset + i] * panel[i][:] over i < length, each row given by its own pointer.
    """
    var a = Array[Ptr[dtype], rows](fill=table[])
    comptime for row in range(rows):
        a[row] = table[unsafe_offset=row].unsafe_offset(offset)
    var b = panel
    for i in range(length):
        var f = Array[SIMD[acc_type, width], vectors](fill=0)
        comptime for v in range(vectors):
            f[v] = b.unsafe_offset(v * width).unsafe_load[width=width]()
        comptime for row in range(rows):
            var s = SIMD[acc_type, width](
                a[row][unsafe_offset=i].cast[acc_type]()
            )
            comptime for v in range(vectors):
                acc[row * vectors + v] = s.fma(f[v], acc[row * vectors + v])
        b = b.unsafe_offset(vectors * width)


@always_inline
def outer_tile[
    acc_type: DType, width: Int, rows: Int, vectors: Int
](
    mut acc: Array[SIMD[acc_type, width], rows * vectors],
    a: Ptr[acc_type],
    b: Ptr[acc_type],
    length: Int,
):
    """Adds a[i][row] * b[i][:] over i < length; both operands are packed tiles.
    """
    var ap = a
    var bp = b
    for _ in range(length):
        var f = Array[SIMD[acc_type, width], vectors](fill=0)
        comptime for v in range(vectors):
            f[v] = bp.unsafe_offset(v * width).unsafe_load[width=width]()
        comptime for row in range(rows):
            var s = SIMD[acc_type, width](ap[unsafe_offset=row])
            comptime for v in range(vectors):
                acc[row * vectors + v] = s.fma(f[v], acc[row * vectors + v])
        ap = ap.unsafe_offset(rows)
        bp = bp.unsafe_offset(vectors * width)
