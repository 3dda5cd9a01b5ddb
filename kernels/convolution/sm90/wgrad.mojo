"""The wgrad kernel: dw[k, (tap, c)] = sum over output pixels of dy[pixel, k] * x[pixel shifted by tap, c].

The reduction runs over N*P*Q, far longer than the result is large, so it is split: every block sums its own range of
pixels for one tile of dw at a time. What becomes of the sums is in `wgrad_sum.mojo`: the blocks of a cluster join
theirs through each other's shared memory; what more than one cluster, or a block by itself, has of a tile goes to
memory, in float32 and in register order, and `combine_kernel` adds it up. Every addition has a fixed place, so the same
input gives the same bits. A tile that one block summed alone is written to dw directly. Without joining, the blocks of
a cluster may take neighbouring tiles of the same pixels instead, and share the copies.

Both operands arrive with the reduction (pixels) along rows and channels along the 128-byte swizzled columns, which
wgmma reads as transposed matrices.
"""

from std.utils.static_tuple import StaticTuple

from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    block_idx,
    thread_idx,
)
from max.gpu.compute.mma import (
    WGMMADescriptor,
    wgmma_async,
    wgmma_commit_group_sync,
    wgmma_fence_aligned,
    wgmma_wait_group_sync,
)
from max.gpu.memory import external_memory

from ...common.pointer import Ptr
from ...common.ptx import (
    claim_registers,
    cluster_arrive_relaxed,
    cluster_block_rank,
    cluster_wait,
    elect_thread,
    fence_mbarrier_init,
    launch_dependents,
    mbarrier_arrive,
    mbarrier_arrive_at,
    mbarrier_arrive_remote,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_wait,
    named_barrier_sync,
    prefetch_tensor_map,
    release_registers,
    syncwarp,
)
from .plan import STAGE_LENGTH
from .tensor_map import TensorMaps
from .tile import (
    CONSUMERS,
    PipelineState,
    THREADS,
    mn_major_descriptor,
)
from .wgrad_bias import (
    BiasSums,
    lay_ones,
    multiply_by_ones,
    store_bias_sums,
)
from .wgrad_plan import PANEL_BYTES, WgradPlan, WgradShape, work_unit_of
from .wgrad_producer import (
    WorkUnitSource,
    copies_of,
    produce_shared,
    receivers,
)
from .wgrad_sum import join, store_sums, swap_halves


@always_inline
def _release[shape: WgradShape](barrier: UInt32, remote: Bool, block: UInt32):
    """Tells a producer, of this block or another one's, that this warpgroup is done with a slot.
    """
    comptime if shape.split_steps:
        mbarrier_arrive(barrier)
    else:
        mbarrier_arrive_at(barrier, remote, block)


@always_inline
def _make_barriers[
    shape: WgradShape
](full: UInt32, empty: UInt32, ready: UInt32, arrived: UInt32, writers: Int32):
    """Initialises the barriers; called by one thread."""
    comptime for i in range(shape.stages):
        mbarrier_init(full + UInt32(8 * i), 1)
        mbarrier_init(
            empty + UInt32(8 * i),
            1 if shape.split_steps else CONSUMERS * Int(writers),
        )
    comptime if not shape.split_steps:
        mbarrier_init(ready, CONSUMERS)
        mbarrier_init(arrived, 1)
        mbarrier_expect(arrived, shape.swap_bytes())
    fence_mbarrier_init()


@always_inline
def _leave_with_consumers(plan: WgradPlan, swaps: Bool):
    """Passes the cluster's barriers that the consumers pass, in their order."""
    if plan.shared.value > 1:
        syncwarp()
        cluster_arrive_relaxed()
        cluster_wait()
    if swaps:
        syncwarp()
        cluster_wait()
    elif plan.cluster > 0:
        # `join` has two barriers, which every thread of the cluster passes.
        syncwarp()
        cluster_arrive_relaxed()
        cluster_wait()
        cluster_arrive_relaxed()
        cluster_wait()


@always_inline
def _tells_block(plan: WgradPlan, lane: UInt32) -> Bool:
    """Returns whether the block whose rank is `lane` sends into this one's ring.
    """
    var _, rank = plan.shared.divide(Int32(block_idx.x))
    var rank_row, rank_column = plan.share_columns.divide(rank)
    var row_mask, column_mask = receivers(plan, rank_row, rank_column)
    return (
        lane < UInt32(plan.shared.value)
        and ((UInt32(row_mask | column_mask) >> lane) & 1) == 1
    )


@always_inline
def _multiply_stage[
    dtype: DType, shape: WgradShape, turn: Bool
](
    mut sums: StaticTuple[
        StaticTuple[Float32, shape.columns // 2], shape.row_blocks
    ],
    mut bias_sums: BiasSums[shape],
    tile: UInt32,
    first_block: UInt32,
    ones: UInt32,
):
    """Begins the products of one stage, as a group; with those for the bias gradient if it is this block's `turn`.
    """
    var dy_descriptor = mn_major_descriptor(
        tile + first_block * UInt32(PANEL_BYTES)
    )
    var x_descriptor = mn_major_descriptor(
        tile + UInt32(shape.row_panels() * PANEL_BYTES)
    )
    wgmma_fence_aligned()
    comptime for kk in range(STAGE_LENGTH // 16):
        comptime for block in range(shape.row_blocks):
            sums[block] = wgmma_async[
                64,
                shape.columns,
                16,
                DType.float32,
                shape.columns // 2,
                a_type=dtype,
                b_type=dtype,
                layout_a="col",
                layout_b="row",
            ](
                WGMMADescriptor[dtype](
                    dy_descriptor + Int64(kk * 128 + block * PANEL_BYTES // 16)
                ),
                WGMMADescriptor[dtype](x_descriptor + Int64(kk * 128)),
                sums[block],
            )
    comptime if turn:
        multiply_by_ones[dtype, shape](bias_sums, tile, first_block, ones)
    wgmma_commit_group_sync()


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)),
)
@__llvm_arg_metadata(dy_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(x_map, `nvvm.grid_constant`)
@__name(
    t"conv_implicit_gemm_wgrad_{dtype}_{shape.rows()}x{shape.columns}x{shape.stages}_s{shape.split_steps}_b{bias}"
)
def wgrad_kernel[
    dtype: DType, shape: WgradShape, bias: Bool
](
    dy_map: TensorMaps[1],
    x_map: TensorMaps[1],
    plan: WgradPlan,
    dw: Ptr[dtype],
    slots: Ptr[DType.float32],
    partials: Ptr[DType.float32],
):
    """Sums each block's pieces of tiles; with `bias` it also sums dy, into `partials`.
    """
    comptime stages = shape.stages
    comptime fragment = shape.columns // 2

    var shared = external_memory[
        UInt8, address_space=AddressSpace.SHARED, alignment=1024
    ]()
    var ring = (UInt32(Int(shared)) + 1023) & ~UInt32(1023)
    var full = ring + UInt32(stages * shape.stage_bytes())
    var empty = full + UInt32(8 * stages)
    # Two blocks that join: the other one's consumers are through with its ring; its sums are here.
    var ready = empty + UInt32(8 * stages)
    var arrived = ready + 8
    var ones = ring + UInt32(shape.ones_offset())
    var swaps = False
    comptime if not shape.split_steps:
        swaps = plan.cluster == 2
    var thread = UInt32(thread_idx.x)
    var group = thread // 128

    # Blocks that send into this one's ring: those of its row and of its column.
    var writers = plan.share_rows.value + plan.share_columns.value - 1
    comptime assert not shape.split_steps or stages % 2 == 0
    if thread == 64:
        prefetch_tensor_map(dy_map.address(0))
        prefetch_tensor_map(x_map.address(0))
    if thread == 32:
        _make_barriers[shape](full, empty, ready, arrived, writers)

    var first = WorkUnitSource[shape.panels()](
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        StaticTuple[UInt32, shape.panels()](fill=0),
    )
    if thread < 32:
        # One warp finds the first copies while another makes the barriers.
        first = copies_of[shape](plan, 0)
    comptime if bias:
        lay_ones[dtype](ones, thread)
    # What adds the slots up may come as soon as a multiprocessor has room for it.
    launch_dependents()
    syncwarp()
    if plan.shared.value > 1:
        # Neighbours send into this block's ring, and arrive on its barriers.
        cluster_arrive_relaxed()
        cluster_wait()
    else:
        if swaps:
            # The other block's barriers are needed at the end.
            cluster_arrive_relaxed()
        named_barrier_sync(0, Int32(THREADS))

    if group == 0:
        comptime if shape.accumulators() > 64:
            release_registers[40]()
        # Every thread of the first warp asks; one goes on.
        if thread < 32:
            if elect_thread():
                produce_shared[shape](
                    dy_map, x_map, plan, first, ring, full, empty
                )
        _leave_with_consumers(plan, swaps)
        return

    comptime if shape.accumulators() > 64:
        claim_registers[232]()
    var consumer = Int32(group) - 1
    var lane_in_group = thread % 128
    var place = PipelineState[stages](0, 0)
    var index: Int32 = 0
    var first_block = UInt32(0)
    comptime if not shape.split_steps:
        first_block = UInt32(consumer) * UInt32(shape.row_blocks)
    # One thread tells one of the blocks that send here.
    var tells = lane_in_group == 0
    var remote = False
    comptime if not shape.split_steps:
        remote = plan.shared.value > 1
        if remote:
            tells = _tells_block(plan, lane_in_group)
    while True:
        var unit = work_unit_of(plan, Int32(block_idx.x), index)
        if unit.count == 0:
            break
        index += 1
        var sums = StaticTuple[
            StaticTuple[Float32, fragment], shape.row_blocks
        ](fill=StaticTuple[Float32, fragment](fill=0))
        var bias_sums = BiasSums[shape](fill=StaticTuple[Float32, 4](fill=0))
        var _, column_tile = plan.column_tiles.divide(unit.tile)
        # Of the tiles that read the same dy, the one whose turn it is.
        var _, turn = plan.column_tiles.divide(unit.first)
        var previous = UInt32(0)
        var mine: Int32 = 0
        for k in range(Int(unit.count)):
            var slot = place.slot
            var parity = place.parity
            place.advance()
            var has_turn = False
            comptime if bias:
                has_turn = turn == column_tile
                turn += 1
                if turn == plan.column_tiles.value:
                    turn = 0
            comptime if shape.split_steps:
                if Int32(k) % 2 != consumer:
                    continue
            mbarrier_wait(full + slot * 8, parity)
            var tile = ring + slot * UInt32(shape.stage_bytes())
            # Each way ends its own group of products: behind a branch ptxas would wait for all of them.
            if has_turn:
                _multiply_stage[dtype, shape, bias](
                    sums, bias_sums, tile, first_block, ones
                )
            else:
                _multiply_stage[dtype, shape, False](
                    sums, bias_sums, tile, first_block, ones
                )
            wgmma_wait_group_sync[1]()
            if mine > 0 and tells:
                _release[shape](empty + previous * 8, remote, lane_in_group)
            mine += 1
            previous = slot
        if swaps:
            # Every slot but the last one is read.
            cluster_wait()
            if lane_in_group == 0:
                mbarrier_arrive_remote(ready, 1 - cluster_block_rank())
        wgmma_wait_group_sync[0]()
        if mine > 0 and tells:
            _release[shape](empty + previous * 8, remote, lane_in_group)

        comptime if bias:
            store_bias_sums[shape](
                plan,
                partials,
                unit,
                bias_sums,
                consumer,
                first_block,
                lane_in_group,
            )
        if swaps:
            comptime if not shape.split_steps:
                swap_halves[dtype, shape](
                    plan,
                    dw,
                    slots,
                    ring,
                    ready,
                    arrived,
                    unit,
                    sums,
                    consumer,
                    lane_in_group,
                )
        elif plan.cluster > 0:
            join[dtype, shape](
                plan, dw, slots, ring, unit, sums, consumer, lane_in_group
            )
        else:
            store_sums[dtype, shape](
                plan, dw, slots, unit, sums, first_block, lane_in_group
            )
    if remote:
        # No block may leave while a neighbour still arrives on its barriers.
        cluster_arrive_relaxed()
        cluster_wait()
