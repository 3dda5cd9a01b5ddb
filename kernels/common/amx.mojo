"""Products of bfloat16 in tile registers: Intel's Advanced Matrix Extensions (AMX).

A register holds 16 rows of 64 bytes. One instruction adds to 16 x 16 float32 sums the product of 16 rows of 32 steps of
the reduction, [row][step], and 32 steps of 16 columns, [step / 2][column][2]. Here two registers of each operand meet
in four of sums. All are wholly used: what has fewer steps has zeros beside them.

Before a process uses the registers, the system must have permitted it (torch_max_backend/torch_compat.py).
"""

from std.sys import CompilationTarget
from std.sys.intrinsics import llvm_intrinsic, masked_store

from .pointer import Ptr
from .vectors import first_lanes

comptime has_tiles[dtype: DType]: Bool = (
    dtype == DType.bfloat16
    and CompilationTarget._has_feature["amx-bf16"]()
    and CompilationTarget._has_feature["avx512bf16"]()
)
"""Whether products of the dtype are made in tile registers."""
comptime TILE = 16
"""Rows of a register, and columns of one of sums."""
comptime TILE_STEPS = 32
"""Steps of the reduction in a register."""
comptime TILE_ELEMENTS = TILE * TILE_STEPS
"""Of an operand in a register."""
comptime ROW_BYTES = 64
comptime _SUMS = 0
comptime _ROWS = 4
comptime _COLUMNS = 6
"""The first registers of the sums and of both operands."""


def configure():
    """Makes eight registers of 16 rows of 64 bytes; for this thread, until `release`.
    """
    var palette = Array[UInt8, 64](fill=0)
    palette[0] = 1
    comptime for register in range(8):
        palette[16 + 2 * register] = ROW_BYTES
        palette[48 + register] = TILE
    llvm_intrinsic["llvm.x86.ldtilecfg", NoneType](palette.unsafe_ptr())
    _ = palette^


def release():
    llvm_intrinsic["llvm.x86.tilerelease", NoneType]()


@always_inline
def _load[register: Int, dtype: DType](at: Ptr[dtype], row_bytes: Int):
    llvm_intrinsic["llvm.x86.tileloadd64", NoneType](
        Int8(register), at, row_bytes
    )


@always_inline
def load_rows[
    number: Int, dtype: DType
](at: Ptr[dtype], row_bytes: Int = ROW_BYTES):
    """Loads 16 rows of the first operand, its `number`-th register."""
    _load[_ROWS + number](at, row_bytes)


@always_inline
def load_columns[
    number: Int, dtype: DType
](at: Ptr[dtype], pair_bytes: Int = ROW_BYTES):
    """Loads 16 columns of the second operand, its `number`-th register; pairs of steps lie `pair_bytes` apart.
    """
    _load[_COLUMNS + number](at, pair_bytes)


@always_inline
def multiply[rows: Int, columns: Int]():
    """Adds the products of so many registers of both operands."""
    comptime for row in range(rows):
        comptime for column in range(columns):
            llvm_intrinsic["llvm.x86.tdpbf16ps", NoneType](
                Int8(_SUMS + 2 * row + column),
                Int8(_ROWS + row),
                Int8(_COLUMNS + column),
            )


@always_inline
def begin_sums[rows: Int, columns: Int]():
    comptime for row in range(rows):
        comptime for column in range(columns):
            llvm_intrinsic["llvm.x86.tilezero", NoneType](
                Int8(_SUMS + 2 * row + column)
            )


@always_inline
def load_sums[rows: Int, columns: Int](at: Ptr[DType.float32], pitch: Int):
    """Loads sums whose rows lie `pitch` elements apart."""
    comptime for row in range(rows):
        comptime for column in range(columns):
            _load[_SUMS + 2 * row + column](
                at.unsafe_offset(TILE * (row * pitch + column)), 4 * pitch
            )


@always_inline
def store_sums[rows: Int, columns: Int](at: Ptr[DType.float32], pitch: Int):
    """Stores sums in rows that lie `pitch` elements apart."""
    comptime for row in range(rows):
        comptime for column in range(columns):
            llvm_intrinsic["llvm.x86.tilestored64", NoneType](
                Int8(_SUMS + 2 * row + column),
                at.unsafe_offset(TILE * (row * pitch + column)),
                4 * pitch,
            )


@always_inline
def write_row[
    dtype: DType, //, columns: Int
](target: Ptr[dtype], sums: Ptr[DType.float32], lanes: Int):
    """Writes one row of stored sums of `columns` registers, rounded; of the last register what is among the row's first
    `lanes` elements."""
    comptime for column in range(columns):
        var at = target.unsafe_offset(column * TILE)
        var value = (
            sums.unsafe_offset(column * TILE)
            .unsafe_load[width=TILE]()
            .cast[dtype]()
        )
        comptime if column + 1 < columns:
            at.unsafe_store(value)
        else:
            masked_store(value, at, first_lanes[TILE](lanes - column * TILE))
