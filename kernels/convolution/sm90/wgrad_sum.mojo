"""Where a wgrad block's sums go: through shared memory, to slots in memory, to dw.

Sums travel in register order: one accumulator group, the four sums of each of 128 threads, is 2048 contiguous bytes.
"""

from std.memory import Pointer
from std.utils.static_tuple import StaticTuple

from max.gpu import block_idx, thread_idx

from ..common import Ptr
from .ptx import (
    cluster_arrive,
    cluster_arrive_relaxed,
    cluster_block_rank,
    cluster_wait,
    divide,
    load_cluster,
    named_barrier_sync,
    store_cluster,
)
from .tile import CONSUMERS
from .wgrad_plan import MAX_CLUSTER, PANEL, Unit, WgradPlan, WgradShape

comptime COMBINE_THREADS = 128
comptime _COMBINE_UNROLL = 8
comptime _GROUP = 512
"""Sums of one accumulator group."""

comptime Sums[shape: WgradShape] = StaticTuple[
    StaticTuple[Float32, shape.columns // 2], shape.row_blocks
]
"""A consumer thread's accumulators."""


@always_inline
def _store_group[
    dtype: DType, shape: WgradShape
](
    plan: WgradPlan,
    dw: Ptr[dtype],
    tile: Int32,
    row_block: Int32,
    lane_in_group: Int32,
    group: Int32,
    values: SIMD[DType.float32, 4],
):
    """Writes one thread's four sums of accumulator group `group` (two rows, two columns) to dw.
    """
    var warp = lane_in_group // 32
    var lane = lane_in_group % 32
    var row_tile, column_tile = plan.column_tiles.divide(tile)
    var row = (
        row_tile * Int32(shape.rows()) + row_block * 64 + warp * 16 + lane // 4
    )
    var panel = column_tile * Int32(shape.panels()) + group // 8
    if panel >= plan.taps * plan.channel_blocks.value:
        return
    var tap, block = plan.channel_blocks.divide(panel)
    var c = block * PANEL + group % 8 * 8 + (lane % 4) * 2
    if c >= plan.c:
        return
    comptime for half in range(2):
        if row + Int32(half * 8) < plan.k:
            var offset = (
                Int64(row + Int32(half * 8)) * Int64(plan.taps) + Int64(tap)
            ) * Int64(plan.c) + Int64(c)
            dw.unsafe_store[alignment=4](
                Int(offset),
                SIMD[DType.float32, 2](
                    values[half * 2], values[half * 2 + 1]
                ).cast[dtype](),
            )


@always_inline
def _group_sums[
    shape: WgradShape
](sums: Sums[shape], block: Int, at: Int) -> SIMD[DType.float32, 4]:
    return SIMD[DType.float32, 4](
        sums[block][at * 4],
        sums[block][at * 4 + 1],
        sums[block][at * 4 + 2],
        sums[block][at * 4 + 3],
    )


@always_inline
def store_sums[
    dtype: DType, shape: WgradShape
](
    plan: WgradPlan,
    dw: Ptr[dtype],
    slots: Ptr[DType.float32],
    unit: Unit,
    sums: Sums[shape],
    first_block: UInt32,
    lane_in_group: UInt32,
):
    """A consumer's rows of a tile: to dw when nobody else has sums of it, else to the unit's slot.
    """
    var alone = unit.count == plan.steps
    comptime for block in range(shape.row_blocks):
        comptime for at in range(shape.columns // 8):
            var values = _group_sums[shape](sums, block, at)
            if alone:
                _store_group[dtype, shape](
                    plan,
                    dw,
                    unit.tile,
                    Int32(first_block) + Int32(block),
                    Int32(lane_in_group),
                    Int32(at),
                    values,
                )
            else:
                slots.unsafe_store[alignment=16](
                    Int(
                        Int64(unit.slot) * Int64(shape.slot_elements())
                        + Int64(
                            (first_block + UInt32(block))
                            * UInt32(64 * shape.columns)
                        )
                        + Int64(at * _GROUP)
                        + Int64(lane_in_group * 4)
                    ),
                    values,
                )


@always_inline
def _shared(
    address: UInt32,
) -> Pointer[Float32, MutAnyOrigin, address_space=AddressSpace.SHARED]:
    return Pointer[Float32, MutAnyOrigin, address_space=AddressSpace.SHARED](
        unsafe_from_address=Int(address)
    )


@always_inline
def join[
    dtype: DType, shape: WgradShape
](
    plan: WgradPlan,
    dw: Ptr[dtype],
    slots: Ptr[DType.float32],
    ring: UInt32,
    unit: Unit,
    sums: Sums[shape],
    consumer: Int32,
    lane_in_group: UInt32,
):
    """Adds the sums that the blocks of a cluster have of one tile, each block a share of the accumulator groups.

    Every block lays its sums where the ring was, then reads its groups from all blocks in the order of their ranks. Two blocks
    send each other half of theirs instead. Both consumers of every block take part, and the copying warpgroup passes the
    cluster's two barriers.
    """
    comptime if not shape.split_steps:
        if plan.cluster == 2:
            _swap_halves[dtype, shape](
                plan, dw, slots, ring, unit, sums, consumer, lane_in_group
            )
            return
    comptime copy_bytes = shape.slot_elements() * 4
    comptime assert (
        shape.copies() * copy_bytes <= shape.stages * shape.stage_bytes()
    )
    # The other consumer may still be reading the ring.
    named_barrier_sync(2, Int32(CONSUMERS * 128))
    var place = ring + lane_in_group * 16
    comptime if shape.split_steps:
        place += UInt32(consumer) * UInt32(copy_bytes)
    else:
        place += UInt32(consumer) * UInt32(copy_bytes // CONSUMERS)
    comptime for block in range(shape.row_blocks):
        comptime for at in range(shape.columns // 8):
            comptime offset = (block * (shape.columns // 8) + at) * _GROUP * 4
            _shared(place + UInt32(offset)).unsafe_store[alignment=16](
                0, _group_sums[shape](sums, block, at)
            )
    cluster_arrive()
    cluster_wait()
    comptime for log in range(4):
        comptime blocks = 1 << log
        if plan.cluster == Int32(blocks):
            _join_groups[dtype, shape, blocks](
                plan, dw, slots, ring, unit, consumer, lane_in_group
            )
    # No block may leave while a neighbour still reads its shared memory.
    cluster_arrive_relaxed()
    cluster_wait()


@always_inline
def _swap_halves[
    dtype: DType, shape: WgradShape
](
    plan: WgradPlan,
    dw: Ptr[dtype],
    slots: Ptr[DType.float32],
    ring: UInt32,
    unit: Unit,
    sums: Sums[shape],
    consumer: Int32,
    lane_in_group: UInt32,
):
    """The join of two blocks: each keeps every other accumulator group in its registers, and sends the rest to where the
    other block's ring was.
    """
    comptime pairs = shape.columns // 16
    comptime assert (
        shape.slot_elements() * 2 <= shape.stages * shape.stage_bytes()
    )
    var rank = Int32(cluster_block_rank())
    var place = (
        ring
        + UInt32(consumer) * UInt32(shape.row_blocks * pairs * _GROUP * 4)
        + lane_in_group * 16
    )
    # The other block's products must be through with its ring.
    cluster_arrive_relaxed()
    cluster_wait()
    comptime for block in range(shape.row_blocks):
        comptime for pair in range(pairs):
            comptime offset = (block * pairs + pair) * _GROUP * 4
            var even = _group_sums[shape](sums, block, 2 * pair)
            var odd = _group_sums[shape](sums, block, 2 * pair + 1)
            store_cluster(
                place + UInt32(offset),
                UInt32(1 - rank),
                odd if rank == 0 else even,
            )
    cluster_arrive()
    cluster_wait()
    var last = plan.slots_of_tile() == 1
    comptime for block in range(shape.row_blocks):
        var row_block = consumer * Int32(shape.row_blocks) + Int32(block)
        comptime for pair in range(pairs):
            comptime offset = (block * pairs + pair) * _GROUP * 4
            var even = _group_sums[shape](sums, block, 2 * pair)
            var odd = _group_sums[shape](sums, block, 2 * pair + 1)
            var sum = (even if rank == 0 else odd) + _shared(
                place + UInt32(offset)
            ).unsafe_load[width=4, alignment=16](0)
            var at = Int32(2 * pair) + rank
            if last:
                _store_group[dtype, shape](
                    plan,
                    dw,
                    unit.tile,
                    row_block,
                    Int32(lane_in_group),
                    at,
                    sum,
                )
            else:
                slots.unsafe_store[alignment=16](
                    Int(
                        Int64(unit.slot) * Int64(shape.slot_elements())
                        + Int64(
                            (row_block * Int32(shape.columns // 8) + at)
                            * _GROUP
                        )
                        + Int64(lane_in_group * 4)
                    ),
                    sum,
                )


@always_inline
def _join_groups[
    dtype: DType, shape: WgradShape, blocks: Int
](
    plan: WgradPlan,
    dw: Ptr[dtype],
    slots: Ptr[DType.float32],
    ring: UInt32,
    unit: Unit,
    consumer: Int32,
    lane_in_group: UInt32,
):
    comptime groups = shape.slot_elements() // _GROUP
    comptime copies = shape.copies()
    # Loads in flight together: neighbours answer after some hundred cycles.
    comptime batch = max(1, MAX_CLUSTER // (blocks * copies))
    comptime stride = blocks * CONSUMERS
    comptime assert batch == 1 or groups % (batch * stride) == 0
    var last = plan.slots_of_tile() == 1
    var group = Int32(cluster_block_rank()) + consumer * Int32(blocks)
    while group < Int32(groups):
        var loaded = StaticTuple[
            SIMD[DType.float32, 4], batch * blocks * copies
        ](fill=SIMD[DType.float32, 4](0))
        comptime for b in range(batch):
            var address = (
                ring
                + UInt32(group + Int32(b * stride)) * (_GROUP * 4)
                + lane_in_group * 16
            )
            comptime for block in range(blocks):
                comptime for copy in range(copies):
                    loaded[(b * blocks + block) * copies + copy] = load_cluster(
                        address + UInt32(copy * shape.slot_elements() * 4),
                        UInt32(block),
                    )
        comptime for b in range(batch):
            var at = group + Int32(b * stride)
            var sum = loaded[b * blocks * copies]
            comptime for i in range(1, blocks * copies):
                sum += loaded[b * blocks * copies + i]
            if last:
                var row_block, column = divide(at, Int32(shape.columns // 8))
                _store_group[dtype, shape](
                    plan,
                    dw,
                    unit.tile,
                    row_block,
                    Int32(lane_in_group),
                    column,
                    sum,
                )
            else:
                slots.unsafe_store[alignment=16](
                    Int(
                        Int64(unit.slot) * Int64(shape.slot_elements())
                        + Int64(at * _GROUP)
                        + Int64(lane_in_group * 4)
                    ),
                    sum,
                )
        group += Int32(batch * stride)


@__name(
    t"conv_wgrad_combine_{dtype}_{shape.rows()}x{shape.columns}_s{shape.split_steps}"
)
def combine_kernel[
    dtype: DType, shape: WgradShape
](plan: WgradPlan, dw: Ptr[dtype], slots: Ptr[DType.float32]):
    """Adds the slots of each tile in a fixed order; one accumulator group of one 64-row block for each block.
    """
    comptime groups = shape.columns // 8
    var unit, group = divide(Int32(block_idx.x), Int32(groups))
    var tile, row_block = divide(unit, Int32(shape.rows() // 64))
    var thread = Int32(thread_idx.x)
    var first: Int64
    var count: Int64
    var stride: Int64
    if plan.splits > 0:
        first = Int64(tile)
        count = Int64(plan.slots_of_tile())
        stride = Int64(plan.tiles.value)
    else:
        var group, rank = plan.group_of(tile)
        stride = Int64(plan.shared())
        var begin = Int64(group) * Int64(plan.steps)
        var walker = plan.walker_of(begin)
        first = (Int64(group) + walker) * stride + Int64(rank)
        count = plan.walker_of(begin + Int64(plan.steps) - 1) - walker + 1
    if count <= 1:
        return
    var base = (
        Int64(row_block) * Int64(64 * shape.columns)
        + Int64(group) * _GROUP
        + Int64(thread) * 4
    )
    var sum = SIMD[DType.float32, 4](0)
    var i: Int64 = 0
    while i < count:
        # The loads are independent; only the additions wait for each other, in the order of the slots.
        var loaded = StaticTuple[SIMD[DType.float32, 4], _COMBINE_UNROLL](
            fill=SIMD[DType.float32, 4](0)
        )
        comptime for j in range(_COMBINE_UNROLL):
            if i + Int64(j) < count:
                loaded[j] = slots.unsafe_load[width=4, alignment=16](
                    Int(
                        (first + (i + Int64(j)) * stride)
                        * Int64(shape.slot_elements())
                        + base
                    )
                )
        comptime for j in range(_COMBINE_UNROLL):
            sum += loaded[j]
        i += _COMBINE_UNROLL
    _store_group[dtype, shape](plan, dw, tile, row_block, thread, group, sum)
