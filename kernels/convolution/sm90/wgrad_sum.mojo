"""The path of a wgrad block's sums: through shared memory, to slots in memory, to dw.

Sums travel in register order: one accumulator group, the four sums of each of 128 threads, is 2048 contiguous bytes.
"""

from std.memory import Pointer
from std.utils.static_tuple import StaticTuple

from max.gpu import block_idx, thread_idx

from ...common.arithmetic import divide
from ...common.pointer import Ptr
from ...common.ptx import (
    cluster_arrive,
    cluster_arrive_relaxed,
    cluster_block_rank,
    cluster_wait,
    load_cluster,
    mbarrier_wait,
    named_barrier_sync,
    store_cluster_counted,
    wait_for_prerequisites,
)
from .tile import CONSUMERS
from .wgrad_bias import combine_bias
from .wgrad_plan import MAX_CLUSTER, WorkUnit, WgradPlan, WgradShape
from .wgrad_store import HALF_PANEL_GROUPS, store_group, store_half_panel

comptime COMBINE_THREADS = 128
comptime _COMBINE_UNROLL = 8
"""Slices whose sums a thread loads before it adds the first."""
comptime _GROUP = 512
"""Sums of one accumulator group."""

comptime Sums[shape: WgradShape] = StaticTuple[
    StaticTuple[Float32, shape.columns // 2], shape.row_blocks
]
"""A consumer thread's accumulators."""


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
def _half_panel_sums[
    shape: WgradShape
](sums: Sums[shape], block: Int, half_panel: Int) -> StaticTuple[
    SIMD[DType.float32, 4], HALF_PANEL_GROUPS
]:
    var values = StaticTuple[SIMD[DType.float32, 4], HALF_PANEL_GROUPS](
        fill=SIMD[DType.float32, 4](0)
    )
    comptime for group in range(HALF_PANEL_GROUPS):
        values[group] = _group_sums[shape](
            sums, block, half_panel * HALF_PANEL_GROUPS + group
        )
    return values


@always_inline
def store_sums[
    dtype: DType, shape: WgradShape
](
    plan: WgradPlan,
    dw: Ptr[dtype],
    slots: Ptr[DType.float32],
    unit: WorkUnit,
    sums: Sums[shape],
    first_block: UInt32,
    lane_in_group: UInt32,
):
    """Stores a consumer's rows of a tile: to dw when no other block has sums of it, else to the unit's slot.
    """
    if unit.count == plan.steps.value:
        comptime for block in range(shape.row_blocks):
            comptime for half_panel in range(shape.columns // 32):
                store_half_panel[dtype, shape](
                    plan,
                    dw,
                    unit.tile,
                    Int32(first_block) + Int32(block),
                    Int32(lane_in_group),
                    Int32(half_panel),
                    _half_panel_sums[shape](sums, block, half_panel),
                )
        return
    comptime for block in range(shape.row_blocks):
        comptime for at in range(shape.columns // 8):
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
                _group_sums[shape](sums, block, at),
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
    unit: WorkUnit,
    sums: Sums[shape],
    consumer: Int32,
    lane_in_group: UInt32,
):
    """Adds the sums that the blocks of a cluster have of one tile, each block a share of the accumulator groups.

    Every block lays its sums where the ring was, then reads its groups from all blocks in the order of their ranks.
    Both consumers of every block take part, and the copying warpgroup passes the cluster's two barriers.
    """
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
def swap_halves[
    dtype: DType, shape: WgradShape
](
    plan: WgradPlan,
    dw: Ptr[dtype],
    slots: Ptr[DType.float32],
    ring: UInt32,
    ready: UInt32,
    arrived: UInt32,
    unit: WorkUnit,
    sums: Sums[shape],
    consumer: Int32,
    lane_in_group: UInt32,
):
    """Joins the sums of two blocks: each keeps half of the columns in its registers, and sends the rest to where the
    other block's ring was.

    The other block says on `ready` that its ring is free there, and `arrived` counts the bytes that it sends: a barrier
    of the cluster would wait for all memory of the device first.
    """
    comptime kept = shape.columns // 16
    comptime halves = kept // HALF_PANEL_GROUPS
    comptime ring_bytes = shape.stages * shape.stage_bytes()
    # Of the two blocks' counts of steps the larger is one more: neither's last step lies in the slots after these two.
    comptime assert (
        shape.swap_bytes() <= (shape.stages - 2) * shape.stage_bytes()
    )
    var rank = Int32(cluster_block_rank())
    var start = UInt32(plan.part_steps + 1) % UInt32(shape.stages)
    var place = (
        start * UInt32(shape.stage_bytes())
        + UInt32(consumer) * UInt32(shape.row_blocks * kept * _GROUP * 4)
        + lane_in_group * 16
    )
    mbarrier_wait(ready, 0)
    comptime for block in range(shape.row_blocks):
        comptime for at in range(kept):
            comptime offset = UInt32((block * kept + at) * _GROUP * 4)
            var low = _group_sums[shape](sums, block, at)
            var high = _group_sums[shape](sums, block, kept + at)
            store_cluster_counted(
                ring + _wrapped[ring_bytes](place + offset),
                arrived,
                UInt32(1 - rank),
                high if rank == 0 else low,
            )
    mbarrier_wait(arrived, 0)
    var last = plan.slots_of_tile == 1
    comptime for block in range(shape.row_blocks):
        var row_block = consumer * Int32(shape.row_blocks) + Int32(block)
        comptime for half_panel in range(halves):
            var values = StaticTuple[SIMD[DType.float32, 4], HALF_PANEL_GROUPS](
                fill=SIMD[DType.float32, 4](0)
            )
            comptime for group in range(HALF_PANEL_GROUPS):
                comptime at = half_panel * HALF_PANEL_GROUPS + group
                comptime offset = UInt32((block * kept + at) * _GROUP * 4)
                var low = _group_sums[shape](sums, block, at)
                var high = _group_sums[shape](sums, block, kept + at)
                values[group] = (low if rank == 0 else high) + _shared(
                    ring + _wrapped[ring_bytes](place + offset)
                ).unsafe_load[width=4, alignment=16](0)
            if last:
                store_half_panel[dtype, shape](
                    plan,
                    dw,
                    unit.tile,
                    row_block,
                    Int32(lane_in_group),
                    rank * Int32(halves) + Int32(half_panel),
                    values,
                )
            else:
                comptime for group in range(HALF_PANEL_GROUPS):
                    var at = rank * Int32(kept) + Int32(
                        half_panel * HALF_PANEL_GROUPS + group
                    )
                    slots.unsafe_store[alignment=16](
                        Int(
                            Int64(unit.slot) * Int64(shape.slot_elements())
                            + Int64(
                                (row_block * Int32(shape.columns // 8) + at)
                                * _GROUP
                            )
                            + Int64(lane_in_group * 4)
                        ),
                        values[group],
                    )


@always_inline
def _wrapped[ring_bytes: Int](offset: UInt32) -> UInt32:
    return offset - (UInt32(ring_bytes) if offset >= UInt32(ring_bytes) else 0)


@always_inline
def _join_groups[
    dtype: DType, shape: WgradShape, blocks: Int
](
    plan: WgradPlan,
    dw: Ptr[dtype],
    slots: Ptr[DType.float32],
    ring: UInt32,
    unit: WorkUnit,
    consumer: Int32,
    lane_in_group: UInt32,
):
    comptime groups = shape.slot_elements() // _GROUP
    comptime copies = shape.copies()
    # Loads in flight together: neighbours answer after some hundred cycles.
    comptime batch = max(1, MAX_CLUSTER // (blocks * copies))
    comptime stride = blocks * CONSUMERS
    comptime assert batch == 1 or groups % (batch * stride) == 0
    var last = plan.slots_of_tile == 1
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
                store_group[dtype, shape](
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
    t"conv_implicit_gemm_wgrad_combine_{dtype}_{shape.rows()}x{shape.columns}_s{shape.split_steps}_b{bias}"
)
def combine_kernel[
    dtype: DType, shape: WgradShape, bias: Bool
](
    plan: WgradPlan,
    dw: Ptr[dtype],
    slots: Ptr[DType.float32],
    db: Ptr[dtype],
    bias_sums: Ptr[DType.float32],
    bias_blocks: Int32,
):
    """Adds the slots of each tile in a fixed order; one accumulator group of one 64-row block for each block. The first
    `bias_blocks` add the sums of the `bias` gradient instead.
    """
    comptime groups = shape.columns // 8
    var block = Int32(block_idx.x)
    comptime if bias:
        if block < bias_blocks:
            wait_for_prerequisites()
            combine_bias[dtype, shape](plan, db, bias_sums, block)
            return
        block -= bias_blocks
    var unit, group = divide(block, Int32(groups))
    var tile, row_block = divide(unit, Int32(shape.rows() // 64))
    var thread = Int32(thread_idx.x)
    var first, count, stride = plan.slots_of(tile)
    if count <= 1:
        return
    var base = (
        Int64(row_block) * Int64(64 * shape.columns)
        + Int64(group) * _GROUP
        + Int64(thread) * 4
    )
    wait_for_prerequisites()
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
    store_group[dtype, shape](plan, dw, tile, row_block, thread, group, sum)
