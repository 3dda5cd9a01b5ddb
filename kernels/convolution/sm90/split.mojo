"""The reduction of one tile, cut over the blocks of a cluster: for problems with few tiles.

Every block sums some of the tile's stages and lays its sums where its ring was. Then each takes a share of the tile's
rows, adds what all blocks have of them in the order of their ranks, and stores it behind the epilogue: equal input
gives equal bits. One consumer of each block multiplies, both store.
"""

from std.memory import Pointer
from std.utils.static_tuple import StaticTuple

from ...common.pointer import Ptr
from ...common.ptx import load_cluster, named_barrier_sync
from ...common.warpgroup import vector_of
from . import plan as fields
from .plan import Im2colPlan
from .producer import TileOrigin
from .beside import Epilogue, Reader, read_now
from .store import Consumer, Sums, result_row
from .tile import (
    CONSUMER_BARRIER,
    CONSUMER_THREADS,
    CONSUMERS,
    TileShape,
)

comptime _PAD = 8
"""Floats of padding behind each row: eight rows that are written together lie in different banks."""


@always_inline
def _place[
    shape: TileShape
](ring: UInt32, row: UInt32, column: UInt32) -> UInt32:
    comptime assert (
        shape.rows() * (shape.columns + _PAD) * 4
        <= shape.stages * shape.stage_bytes()
    )
    return ring + (row * UInt32(shape.columns + _PAD) + column) * 4


@always_inline
def lay_sums[
    shape: TileShape
](ring: UInt32, sums: Sums[shape], by: Consumer[shape]):
    """Writes the sums of the consumer that has multiplied to its ring; called by that consumer: a lane has two columns
    of two rows of every 8 columns."""
    # All of them have read the ring.
    named_barrier_sync(CONSUMER_BARRIER, CONSUMER_THREADS)
    comptime for block in range(shape.row_blocks):
        comptime for group in range(shape.columns // 8):
            comptime for half in range(2):
                var row = (
                    UInt32(block * 64 + half * 8)
                    + by.warp() * 16
                    + by.lane() // 4
                )
                var column = UInt32(group * 8) + by.lane() % 4 * 2
                Pointer[
                    Float32, MutAnyOrigin, address_space=AddressSpace.SHARED
                ](
                    unsafe_from_address=Int(_place[shape](ring, row, column))
                ).unsafe_store[
                    alignment=8
                ](
                    0,
                    SIMD[DType.float32, 2](
                        sums[block][group * 4 + half * 2],
                        sums[block][group * 4 + half * 2 + 1],
                    ),
                )


@always_inline
def store_joined[
    dtype: DType,
    phases: Int,
    shape: TileShape,
    read: Optional[Reader[dtype]],
    epilogue: Optional[Epilogue[dtype]],
](
    result: Ptr[dtype],
    plan: Im2colPlan[phases],
    at: TileOrigin,
    ring: UInt32,
    rank: Int32,
    by: Consumer[shape],
):
    """Stores the sums of all blocks of the cluster; called by both consumers of every block, between two barriers of
    the cluster."""
    comptime vector = vector_of[dtype]()
    comptime in_row = shape.columns // vector
    comptime threads = 128 * CONSUMERS
    var parts = 1 << plan.split_bits()
    var share = Int32(shape.rows()) >> plan.split_bits()
    var rows = plan.phase(at.phase, fields.ROWS)
    var end = min(plan.columns(), at.column + plan.column_step())
    var place = by.index * 128 + Int32(by.thread)
    while place < share * Int32(in_row):
        var row = rank * share + place // Int32(in_row)
        var column = place % Int32(in_row) * Int32(vector)
        if at.row + row < rows and at.column + column < end:
            var address = _place[shape](ring, UInt32(row), UInt32(column))
            var total = SIMD[DType.float32, vector](0)
            for part in range(Int(parts)):
                comptime for quarter in range(vector // 4):
                    var theirs = load_cluster(
                        address + UInt32(quarter * 16), UInt32(part)
                    )
                    comptime for i in range(4):
                        total[quarter * 4 + i] += theirs[i]
            var value = total.cast[dtype]()
            var pixel = Int(
                result_row[shape=shape](plan, at.phase, at.row + row)
            )
            var channel = Int(at.column + column)
            comptime if epilogue:
                comptime apply = epilogue.value()
                value = apply[vector, 1](
                    StaticTuple[Int, 1](pixel),
                    channel,
                    value,
                    read_now[dtype, read, shape.slots, vector](pixel, channel),
                )
            result.unsafe_offset(
                pixel * Int(plan.columns()) + channel
            ).unsafe_store[alignment=16](value)
        place += threads
