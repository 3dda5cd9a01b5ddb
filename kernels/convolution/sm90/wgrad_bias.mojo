"""The bias gradient of a wgrad launch: db[k] = sum over output pixels of dy[pixel, k].

The wgrad kernel has dy in shared memory already. Each block multiplies it by a column of ones besides, in one stage of
as many as there are tiles in a row of them: these tiles read the same dy, so that each element counts once. What a
block has summed goes to memory, and blocks of the combine kernel add it up in a fixed order.
"""

from std.math import ceildiv
from std.memory import Pointer
from std.utils.static_tuple import StaticTuple

from max.gpu import block_dim, block_idx, thread_idx
from max.gpu.compute.mma import WGMMADescriptor, wgmma_async

from ...common.arithmetic import divide
from ...common.pointer import Ptr
from ...common.ptx import fence_shared_writes
from .plan import STAGE_LENGTH
from .tile import mn_major_descriptor
from .wgrad_plan import ONES_BYTES, PANEL_BYTES, WgradPlan, WgradShape, WorkUnit

comptime _UNROLL = 8
"""Sums that a thread loads before it adds the first."""

comptime BiasSums[shape: WgradShape] = StaticTuple[
    StaticTuple[Float32, 4], shape.row_blocks
]
"""A consumer thread's accumulators: in each 64-row block two columns of two rows."""


@always_inline
def lay_ones[dtype: DType](address: UInt32, thread: UInt32):
    """Writes the column of ones; every thread of the block takes part, and the block meets afterwards.
    """
    if thread < ONES_BYTES // 16:
        Pointer[Scalar[dtype], MutAnyOrigin, address_space=AddressSpace.SHARED](
            unsafe_from_address=Int(address + thread * 16)
        ).unsafe_store[alignment=16](0, SIMD[dtype, 8](1))
    fence_shared_writes()


@always_inline
def multiply_by_ones[
    dtype: DType, shape: WgradShape
](mut sums: BiasSums[shape], tile: UInt32, first_block: UInt32, ones: UInt32):
    """Begins the products of one stage's dy with the ones, in the group that is being made.
    """
    var dy_descriptor = mn_major_descriptor(
        tile + first_block * UInt32(PANEL_BYTES)
    )
    # Two blocks of 8 pixels by 8 columns, 128 bytes each, without swizzle.
    var ones_descriptor = (
        Int64((ones & 0x3FFFF) >> 4) | Int64(8 << 16) | Int64(8 << 32)
    )
    comptime for kk in range(STAGE_LENGTH // 16):
        comptime for block in range(shape.row_blocks):
            sums[block] = wgmma_async[
                64,
                8,
                16,
                DType.float32,
                4,
                a_type=dtype,
                b_type=dtype,
                layout_a="col",
                layout_b="col",
            ](
                WGMMADescriptor[dtype](
                    dy_descriptor + Int64(kk * 128 + block * PANEL_BYTES // 16)
                ),
                WGMMADescriptor[dtype](ones_descriptor),
                sums[block],
            )


@always_inline
def bias_elements[shape: WgradShape](plan: WgradPlan) -> Int:
    """Returns the number of floats that all blocks' sums take."""
    return (
        Int(plan.units())
        * Int(plan.joined.value)
        * shape.copies()
        * shape.rows()
    )


@always_inline
def store_bias_sums[
    shape: WgradShape
](
    plan: WgradPlan,
    bias_sums: Ptr[DType.float32],
    unit: WorkUnit,
    sums: BiasSums[shape],
    consumer: Int32,
    first_block: UInt32,
    lane_in_group: UInt32,
):
    """Stores a consumer's sums of its rows of a piece."""
    var lane = lane_in_group % 32
    if lane % 4 != 0:
        return
    var _, rank = plan.joined.divide(Int32(block_idx.x))
    var copy = Int64(unit.slot) * Int64(plan.joined.value) + Int64(rank)
    comptime if shape.split_steps:
        copy = copy * Int64(shape.copies()) + Int64(consumer)
    var row = Int64(
        first_block * 64 + lane_in_group // 32 * 16 + lane // 4
    ) + copy * Int64(shape.rows())
    comptime for block in range(shape.row_blocks):
        comptime for half in range(2):
            bias_sums.unsafe_store(
                Int(row) + block * 64 + half * 8, sums[block][half * 2]
            )


@always_inline
def combine_bias[
    dtype: DType, shape: WgradShape
](
    plan: WgradPlan,
    db: Ptr[dtype],
    bias_sums: Ptr[DType.float32],
    block: Int32,
):
    """Adds the sums of some filters, one a thread, in the order of tiles and slots.
    """
    var row_tile, part = divide(
        block, Int32(ceildiv(shape.rows(), Int(block_dim.x)))
    )
    var row = part * Int32(block_dim.x) + Int32(thread_idx.x)
    var _, filter = plan.filters(row_tile, shape.rows())
    filter += row
    if row >= Int32(shape.rows()) or filter >= plan.k:
        return
    var copies = plan.joined.value * Int32(shape.copies())
    var sum = Float32(0)
    for column_tile in range(Int(plan.column_tiles.value)):
        var tile = row_tile * plan.column_tiles.value + Int32(column_tile)
        var first, count, stride = plan.slots_of(tile)
        var all = Int32(count) * copies
        var i: Int32 = 0
        while i < all:
            var loaded = StaticTuple[Float32, _UNROLL](fill=0)
            comptime for j in range(_UNROLL):
                if i + Int32(j) < all:
                    var slot, copy = divide(i + Int32(j), copies)
                    var at = first + Int64(slot) * stride
                    loaded[j] = bias_sums[
                        Int(
                            (at * Int64(copies) + Int64(copy))
                            * Int64(shape.rows())
                            + Int64(row)
                        )
                    ]
            comptime for j in range(_UNROLL):
                sum += loaded[j]
            i += _UNROLL
    if plan.makes_float32:
        Ptr[DType.float32](unsafe_from_address=Int(db)).unsafe_store(
            Int(filter), sum
        )
    else:
        db.unsafe_store(Int(filter), sum.cast[dtype]())
