"""Tiles in shared memory, and their products on tensor cores, for elements of two bytes.

A tile of R rows lies in panels of 64 columns: [panel][R][64]. The 16-byte pieces of a row of 128 bytes are exchanged by
an XOR with the row's number modulo 8: neither copies nor reads meet bank conflicts, and it is the order that Hopper's
wgmma reads. Products come in two kinds,

    of rows      sums [16, N] = A [16, D] B [N, D]^T      both tiles in shared memory
    of columns   sums [16, D] += A [16, N] B [N, D]       A in registers: sums of a product of rows, rounded

for each warp, by mma (m16n8k16), or for the four warps of a warpgroup together, by wgmma. Sums lie alike in both: a
lane has rows lane / 4 and lane / 4 + 8, and of every eight columns those from 2 * (lane % 4) on; sum 4 * j + 2 * half +
e is column 8 * j + 2 * (lane % 4) + e of the row + 8 * half.
"""

from std.math import ceildiv
from std.memory import bitcast
from std.sys._assembly import inlined_assembly

from max.gpu import barrier, thread_idx
from max.gpu.compute.mma import (
    WGMMADescriptor,
    mma,
    wgmma_async,
    wgmma_commit_group_sync,
    wgmma_fence_aligned,
)

from ...common.async_copy import copy_elements, wait_for_copies
from ...common.lanes import from_lane
from ...common.pointer import Ptr, Shared
from ...common.ptx import (
    compiling_for_hopper,
    fence_shared_writes,
    load_matrices,
    made_here,
)
from ...common.tensor_cores import pairs_compile
from .wgmma import Sums, add_wgmma

comptime PANEL = 64
"""Elements of a row of 128 bytes, in which the swizzle exchanges pieces."""
comptime PIECE = 8
"""Elements of 16 bytes."""


def by_warpgroups[dtype: DType]() -> Bool:
    """Returns whether wgmma computes the products."""
    return compiling_for_hopper() and pairs_compile[dtype]()


@always_inline
def place[rows: Int](row: Int32, piece: Int32) -> Int32:
    """The element at which a piece of a row begins."""
    return (piece // 8 * Int32(rows) + row) * PANEL + (
        (piece % 8) ^ (row % 8)
    ) * PIECE


@always_inline
def copy_tile[
    dtype: DType, rows: Int, columns: Int, threads: Int
](
    tile: Shared[dtype],
    source: Ptr[dtype],
    step: Int,
    count: Int32,
    size: Int32,
):
    """Starts the copy of rows `step` elements apart; zeros behind the last row and behind a row's `size` elements.
    """
    comptime across = columns // PIECE
    var thread = Int32(thread_idx.x)
    comptime pieces = rows * across
    comptime for i in range(ceildiv(pieces, threads)):
        var index = thread + Int32(i * threads)
        comptime whole = (i + 1) * threads <= pieces
        if whole or index < Int32(pieces):
            var row = index // Int32(across)
            var piece = index % Int32(across)
            copy_elements[PIECE](
                UInt32(Int(tile.unsafe_offset(Int(place[rows](row, piece))))),
                source,
                Int(row) * step + Int(piece * PIECE),
                row < count and piece * PIECE < size,
            )


@always_inline
def _multiply[
    dtype: DType, columns: Int, tile: Int
](mut sums: Sums[columns], left: SIMD[dtype, 8], low: UInt32, high: UInt32,):
    """Adds the product for columns 8 * tile and on."""
    var right = bitcast[dtype, 4](SIMD[DType.uint32, 2](low, high))
    var part = SIMD[DType.float32, 4](
        sums[4 * tile],
        sums[4 * tile + 1],
        sums[4 * tile + 2],
        sums[4 * tile + 3],
    )
    mma(part, left, right, part)
    comptime for e in range(4):
        sums[4 * tile + e] = part[e]


@always_inline
def _descriptor[panel_rows: Int](address: UInt32) -> Int64:
    """Rows of 128 swizzled bytes, groups of 8 rows 1024 bytes apart, panels one behind the other; the distance of
    panels counts only where rows are steps of the reduction.
    """
    return (
        Int64((address & 0x3FFFF) >> 4)
        | Int64(1 << 62)
        | Int64(64 << 32)
        | Int64((panel_rows * 8) << 16)
    )


@always_inline
def loaded_sums[
    dtype: DType, columns: Int
](
    source: Ptr[dtype],
    row: Int32,
    rows: Int32,
    row_step: Int,
    column: Int32,
    column_count: Int32,
    column_step: Int,
    factor: Float32,
) -> Sums[columns]:
    """Returns a lane's elements of a matrix times a factor, as the sums that a product is added to. The lane has row
    `row` and a second one, and two of every eight columns, from `column` on.

    Behind the last row or column, elements of the last one are read instead: no load waits for a comparison, so all are
    in flight at once.
    """
    var sums = Sums[columns](0)
    comptime for half in range(2):
        var at_row = min(row + Int32(8 * half), rows - 1)
        var line = source.unsafe_offset(Int(at_row) * row_step)
        comptime for j in range(columns // 8):
            comptime for e in range(2):
                var at = min(column + Int32(8 * j + e), column_count - 1)
                # A product of 32 bits each, which is one instruction.
                var offset = Int64(at) * Int64(Int32(column_step))
                sums[4 * j + 2 * half + e] = line[
                    unsafe_offset=Int(offset)
                ].cast[DType.float32]()
    sums *= factor
    return sums


@always_inline
def product_of_rows[
    dtype: DType, depth: Int, columns: Int, a_rows: Int, begun: Bool = False
](
    a: Shared[dtype],
    b: Shared[dtype],
    warp: Int32,
    lane: Int32,
    start: Sums[columns] = 0,
) -> Sums[columns]:
    """Rows 16 * warp and on of A [a_rows, depth] times all rows of B [columns, depth], added to `start` where it is
    `begun`.
    """
    var sums = start
    comptime if by_warpgroups[dtype]():
        comptime steps = depth // 16
        var a_at = _descriptor[a_rows](
            UInt32(Int(a)) + UInt32(warp // 4) * UInt32(64 * 128)
        )
        var b_at = _descriptor[columns](UInt32(Int(b)))
        comptime if begun:
            # In their registers before the fence.
            comptime for i in range(columns // 2):
                sums[i] = bitcast[DType.float32, 1](
                    made_here(bitcast[DType.int32, 1](sums[i]))
                )
        wgmma_fence_aligned()
        comptime for k in range(steps):
            # In units of 16 bytes.
            comptime inside = k % 4 * 2
            comptime panel = k // 4
            sums = wgmma_async[
                64,
                columns,
                16,
                DType.float32,
                columns // 2,
                a_type=dtype,
                b_type=dtype,
                layout_a="row",
                layout_b="col",
                scale_d=0 if k == 0 and not begun else 1,
            ](
                WGMMADescriptor[dtype](
                    a_at + Int64(inside + panel * a_rows * 8)
                ),
                WGMMADescriptor[dtype](
                    b_at + Int64(inside + panel * columns * 8)
                ),
                sums,
            )
        wgmma_commit_group_sync()
    else:
        comptime for k in range(depth // 16):
            var left = bitcast[dtype, 8](
                load_matrices[4](
                    UInt32(
                        Int(
                            a.unsafe_offset(
                                Int(
                                    place[a_rows](
                                        warp * 16 + lane % 16,
                                        Int32(2 * k) + lane // 16,
                                    )
                                )
                            )
                        )
                    )
                )
            )
            comptime for n in range(columns // 16):
                var right = load_matrices[4](
                    UInt32(
                        Int(
                            b.unsafe_offset(
                                Int(
                                    place[columns](
                                        Int32(16 * n)
                                        + lane // 16 * 8
                                        + lane % 8,
                                        Int32(2 * k) + lane // 8 % 2,
                                    )
                                )
                            )
                        )
                    )
                )
                _multiply[dtype, columns, 2 * n](sums, left, right[0], right[1])
                _multiply[dtype, columns, 2 * n + 1](
                    sums, left, right[2], right[3]
                )
    return sums


@always_inline
def add_product_of_columns[
    dtype: DType, depth: Int, columns: Int
](mut sums: Sums[columns], a: Sums[depth], b: Shared[dtype], lane: Int32,):
    """Adds A [16, depth], rounded, times B [depth, columns]."""
    comptime steps = depth // 16
    var lefts = Array[SIMD[dtype, 8], steps](fill=0)
    comptime for k in range(steps):
        var words = SIMD[DType.int32, 4](0)
        comptime for e in range(4):
            var word = bitcast[DType.int32, 1](
                SIMD[DType.float32, 2](
                    a[8 * k + 2 * e], a[8 * k + 2 * e + 1]
                ).cast[dtype]()
            )
            comptime if by_warpgroups[dtype]():
                word = made_here(word)
            words[e] = word
        lefts[k] = bitcast[dtype, 8](words)
    comptime if by_warpgroups[dtype]():
        var b_at = _descriptor[depth](UInt32(Int(b)))
        # All left operands are in their registers by now: one written behind the fence would need another fence.
        wgmma_fence_aligned()
        comptime for k in range(steps):
            sums = add_wgmma[dtype, columns](
                sums, bitcast[DType.uint32, 4](lefts[k]), b_at + Int64(k * 128)
            )
        wgmma_commit_group_sync()
    else:
        comptime for k in range(steps):
            comptime for n in range(columns // 16):
                var right = load_matrices[4, True](
                    UInt32(
                        Int(
                            b.unsafe_offset(
                                Int(
                                    place[depth](
                                        Int32(16 * k) + lane % 16,
                                        Int32(2 * n) + lane // 16,
                                    )
                                )
                            )
                        )
                    )
                )
                _multiply[dtype, columns, 2 * n](
                    sums, lefts[k], right[0], right[1]
                )
                _multiply[dtype, columns, 2 * n + 1](
                    sums, lefts[k], right[2], right[3]
                )


@always_inline
def wait_for_tiles[dtype: DType, newer: Int = 0]():
    """Waits until all but the `newer` last groups of the block's copies are visible to every thread; after it, tiles
    that all threads have read may be overwritten."""
    wait_for_copies[newer]()
    comptime if by_warpgroups[dtype]():
        fence_shared_writes()
    barrier()


@always_inline
def finish_products[dtype: DType, newer: Int = 0]():
    """Waits until all products but the `newer` last ones are done: then their sums may be read, and after a barrier
    their tiles overwritten."""
    comptime if by_warpgroups[dtype]():
        comptime text = "wgmma.wait_group.sync.aligned " + String(newer) + ";"
        inlined_assembly[text, NoneType, constraints="~{memory}"]()


@always_inline
def power_of_two(x: Float32) -> Float32:
    """2^x, 0 for -inf."""
    return inlined_assembly[
        "ex2.approx.ftz.f32 $0, $1;",
        Float32,
        constraints="=f,f",
        has_side_effect=False,
    ](x)


@always_inline
def across_row[largest: Bool](value: Float32) -> Float32:
    """The maximum or the sum over the four lanes that share a row."""
    var result = value
    comptime for distance in [1, 2]:
        var other = from_lane(result, distance)
        comptime if largest:
            result = max(result, other)
        else:
            result += other
    return result


@always_inline
def aligned_base[dtype: DType](shared: Shared[dtype]) -> Shared[dtype]:
    """The next multiple of 1024 bytes, as the swizzle wants."""
    var address = Int(shared)
    return shared.unsafe_offset((1024 - address % 1024) % 1024 // 2)


@always_inline
def write_sums[
    dtype: DType, columns: Int
](
    target: Ptr[dtype],
    step: Int,
    count: Int32,
    size: Int32,
    sums: Sums[columns],
    upper: Float32,
    lower: Float32,
    row: Int32,
    lane: Int32,
):
    """Writes a lane's sums, its two rows multiplied by `upper` and `lower`; `row` is the first of the two.
    """
    comptime for half in range(2):
        var at_row = row + Int32(8 * half)
        var scale = upper if half == 0 else lower
        if at_row < count:
            var line = target.unsafe_offset(
                Int(at_row) * step + Int(lane % 4 * 2)
            )
            comptime for j in range(columns // 8):
                if Int32(8 * j) < size:
                    line.unsafe_offset(8 * j).unsafe_store[alignment=4](
                        (
                            SIMD[DType.float32, 2](
                                sums[4 * j + 2 * half],
                                sums[4 * j + 2 * half + 1],
                            )
                            * scale
                        ).cast[dtype]()
                    )
