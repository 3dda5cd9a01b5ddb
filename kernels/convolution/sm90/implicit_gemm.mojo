"""The fprop and dgrad kernel: an implicit matrix product on Hopper's tensor cores.

One warpgroup copies (a single thread of it drives the copy engine), two multiply. The copied tiles go round a ring of
`stages` slots in shared memory, each slot with a barrier that says "full" and one that says "empty". Blocks are
persistent and walk the tiles with a fixed step. See docs/hopper.md for the drawing.
"""

from std.memory import Pointer
from std.utils.index import IndexList
from std.utils.static_tuple import StaticTuple

from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    block_idx,
    grid_dim,
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

from ..common import Ptr
from . import plan as fields
from .column_sums import (
    MOMENTS,
    NO_SUMS,
    ColumnSums,
    Factor,
    Products,
)
from .plan import BLOCK_K, Plan
from ...ptx import (
    claim_registers,
    cluster_arrive,
    cluster_block_rank,
    cluster_wait,
    elect_thread,
    fence_mbarrier_init,
    load_im2col,
    load_tile_3d,
    load_tile_3d_multicast,
    made_here,
    mbarrier_arrive,
    mbarrier_arrive_remote,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_wait,
    named_barrier_arrive,
    named_barrier_sync,
    prefetch_tensor_map,
    release_registers,
    store_matrices,
    syncwarp,
)
from .tensor_map import TensorMaps
from .tile import (
    CONSUMERS,
    PANEL_COLUMNS,
    ROW_BYTES,
    RingPlace,
    THREADS,
    TileShape,
    k_major_descriptor,
    mn_major_descriptor,
    pack_pair,
)

comptime Epilogue[dtype: DType] = def[width: Int](
    IndexList[5], SIMD[dtype, width]
) capturing -> SIMD[dtype, width]
"""The elementwise ops that follow, applied to a vector of the result at [n, 0, h, w, c] before it is stored."""


@fieldwise_init
struct _Tile(ImplicitlyCopyable, TrivialRegisterPassable):
    """Where one tile lies."""

    var phase: Int
    var row: Int32
    var column: Int32
    var steps: Int32
    """Pipeline stages of its reduction."""


@always_inline
def _locate[
    phases: Int, rows: Int, columns: Int, cluster: Int
](plan: Plan[phases], tile: Int32, rank: Int32) -> _Tile:
    var phase = 0
    comptime for i in range(1, phases):
        if tile >= plan.phase(i, fields.FIRST_TILE):
            phase = i
    var local = tile - plan.phase(phase, fields.FIRST_TILE)
    var row_tile, column_tile = plan.tile_place(local)
    return _Tile(
        phase,
        (row_tile * Int32(cluster) + rank) * Int32(rows),
        column_tile * Int32(columns),
        plan.phase(phase, fields.TAPS_H)
        * plan.phase(phase, fields.TAPS_W)
        * plan.channel_blocks(),
    )


@fieldwise_init
struct _Copies(ImplicitlyCopyable, TrivialRegisterPassable):
    """A tile, and the source pixel that its first row begins with."""

    var at: _Tile
    var n: Int32
    var h: Int32
    var w: Int32


@always_inline
def _copies_of[
    phases: Int, shape: TileShape
](plan: Plan[phases], tile: Int32, rank: Int32) -> _Copies:
    var at = _locate[phases, shape.rows(), shape.columns, shape.cluster](
        plan, tile, rank
    )
    # The second block of a cluster may stand past the last row: it reads row 0 and stores nothing.
    var row = at.row if at.row < plan.phase(at.phase, fields.ROWS) else 0
    var n, j, i = plan.pixel(at.phase, row)
    at.column = made_here(at.column)
    return _Copies(
        at,
        made_here(n),
        made_here(
            j * plan.source_step_h() + plan.phase(at.phase, fields.LOWER_H)
        ),
        made_here(
            i * plan.source_step_w() + plan.phase(at.phase, fields.LOWER_W)
        ),
    )


@always_inline
def _produce[
    phases: Int, shape: TileShape, filter_k_major: Bool
](
    source_maps: TensorMaps[phases],
    filter_map: TensorMaps[1],
    plan: Plan[phases],
    ring: UInt32,
    full: UInt32,
    empty: UInt32,
    rank: Int32,
    first: _Copies,
):
    comptime cluster = shape.cluster
    var copies = first
    var ring_at = RingPlace[shape.stages](0, 0)
    var tile = Int32(block_idx.x) // Int32(cluster)
    while tile < plan.tiles():
        var at = copies.at
        var source_map = source_maps.address(at.phase)
        var filter_address = filter_map.address(0)
        var tap_h = plan.phase(at.phase, fields.TAP_H)
        var offset_h = plan.phase(at.phase, fields.OFFSET_H)
        for _ in range(Int(plan.phase(at.phase, fields.TAPS_H))):
            var tap_w = plan.phase(at.phase, fields.TAP_W)
            var offset_w = plan.phase(at.phase, fields.OFFSET_W)
            for _ in range(Int(plan.phase(at.phase, fields.TAPS_W))):
                var tap = tap_h * plan.filter_s() + tap_w
                for block in range(Int(plan.channel_blocks())):
                    var slot = ring_at.slot
                    var barrier = full + slot * 8
                    mbarrier_wait(empty + slot * 8, ring_at.parity ^ 1)
                    mbarrier_expect(barrier, shape.stage_bytes())
                    var source_tile = ring + slot * UInt32(shape.stage_bytes())
                    var filter_tile = source_tile + UInt32(shape.source_bytes())
                    var channel = Int32(block * BLOCK_K)
                    load_im2col(
                        source_tile,
                        source_map,
                        barrier,
                        channel,
                        copies.w,
                        copies.h,
                        copies.n,
                        UInt16(offset_w),
                        UInt16(offset_h),
                    )
                    comptime if filter_k_major:
                        # Channels of one tap for `columns` filters; each block of a cluster brings its share.
                        comptime share = shape.columns // cluster
                        comptime if cluster == 1:
                            load_tile_3d(
                                filter_tile,
                                filter_address,
                                barrier,
                                channel,
                                tap,
                                at.column,
                            )
                        else:
                            load_tile_3d_multicast(
                                filter_tile
                                + UInt32(rank) * UInt32(share * ROW_BYTES),
                                filter_address,
                                barrier,
                                channel,
                                tap,
                                at.column + rank * Int32(share),
                                UInt16((1 << cluster) - 1),
                            )
                    else:
                        # 64 columns (input channels) at a time for BLOCK_K filters (the reduction).
                        comptime share = BLOCK_K // cluster
                        comptime for panel in range(shape.columns // 64):
                            comptime offset = panel * BLOCK_K * ROW_BYTES
                            comptime if cluster == 1:
                                load_tile_3d(
                                    filter_tile + UInt32(offset),
                                    filter_address,
                                    barrier,
                                    at.column + Int32(panel * 64),
                                    tap,
                                    channel,
                                )
                            else:
                                load_tile_3d_multicast(
                                    filter_tile
                                    + UInt32(offset)
                                    + UInt32(rank) * UInt32(share * ROW_BYTES),
                                    filter_address,
                                    barrier,
                                    at.column + Int32(panel * 64),
                                    tap,
                                    channel + rank * Int32(share),
                                    UInt16((1 << cluster) - 1),
                                )
                    ring_at.advance()
                tap_w += plan.phase(at.phase, fields.TAP_STEP_W)
                offset_w += plan.phase(at.phase, fields.OFFSET_STEP_W)
            tap_h += plan.phase(at.phase, fields.TAP_STEP_H)
            offset_h += plan.phase(at.phase, fields.OFFSET_STEP_H)
        tile += Int32(grid_dim.x) // Int32(cluster)
        if tile < plan.tiles():
            copies = _copies_of[phases, shape](plan, tile, rank)


@always_inline
def _release[cluster: Int](empty: UInt32, slot: UInt32, thread: UInt32):
    """Tells every producer that wrote into this slot that this warpgroup is done with it.
    """
    comptime if cluster == 1:
        if thread == 0:
            mbarrier_arrive(empty + slot * 8)
    else:
        if thread < UInt32(cluster):
            mbarrier_arrive_remote(empty + slot * 8, thread)


@always_inline
def _result_pixel[
    phases: Int
](plan: Plan[phases], phase: Int, row: Int32) -> Tuple[Int32, Int32, Int32]:
    """Batch, height and width of a result row."""
    var n, j, i = plan.pixel(phase, row)
    return (
        n,
        j * plan.out_step_h() + plan.phase(phase, fields.FIRST_H),
        i * plan.out_step_w() + plan.phase(phase, fields.FIRST_W),
    )


@always_inline
def _result_offset[
    phases: Int
](plan: Plan[phases], phase: Int, row: Int32) -> Int:
    """Element offset of a result pixel's first channel."""
    comptime if phases == 1:
        return Int(row) * Int(plan.columns())
    else:
        var n, h, w = _result_pixel(plan, phase, row)
        return (
            (Int(n) * Int(plan.out_h()) + Int(h)) * Int(plan.out_w()) + Int(w)
        ) * Int(plan.columns())


@always_inline
def _column[
    staged: Int
](first: Int32, pair: Int, panel: Int, lane: UInt32) -> Int32:
    """First channel of a lane's vector in a staged panel."""
    return (
        first
        + Int32((pair * staged + panel) * PANEL_COLUMNS)
        + Int32(lane % 8) * 8
    )


@always_inline
def _index[
    phases: Int
](plan: Plan[phases], at: _Tile, row: Int32, column: Int32) -> IndexList[5]:
    """Where a vector lies in the result; past the last channel the last vector.
    """
    var n, h, w = _result_pixel(plan, at.phase, row)
    return IndexList[5](
        Int(n), 0, Int(h), Int(w), Int(min(column, plan.columns() - 8))
    )


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)),
    `nvvm.cluster_dim`=StaticTuple[Int32, 3](Int32(shape.cluster), 1, 1),
)
@__llvm_arg_metadata(source_maps, `nvvm.grid_constant`)
@__llvm_arg_metadata(filter_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(plan, `nvvm.grid_constant`)
@__name(
    t"conv_implicit_gemm_{dtype}_{shape.rows()}x{shape.columns}x{shape.stages}_c{shape.cluster}_a{shape.alternate}_k{filter_k_major}_p{phases}_s{kind}"
)
def implicit_gemm_kernel[
    dtype: DType,
    phases: Int,
    shape: TileShape,
    filter_k_major: Bool,
    epilogue: Optional[Epilogue[dtype]] = None,
    kind: Int = NO_SUMS,
    factor: Optional[Factor] = None,
](
    source_maps: TensorMaps[phases],
    filter_map: TensorMaps[1],
    plan: Plan[phases],
    result: Ptr[dtype],
    partials: Ptr[DType.float32],
):
    """With sums of a `kind` over columns (column_sums.mojo), they go to `partials`: to a slot for each of the consumers'
    walks where all tiles of a walk have the same columns, else to one for each tile.
    """
    comptime cluster = shape.cluster
    comptime stages = shape.stages
    comptime fragment = shape.columns // 2

    var shared = external_memory[
        UInt8, address_space=AddressSpace.SHARED, alignment=1024
    ]()
    var ring = (UInt32(Int(shared)) + 1023) & ~UInt32(1023)
    var staging = ring + UInt32(stages * shape.stage_bytes())
    var full = staging + UInt32(shape.staging_bytes())
    var empty = full + UInt32(8 * stages)

    var thread = UInt32(thread_idx.x)
    var group = thread // 128
    var rank = Int32(0)
    comptime if cluster > 1:
        rank = Int32(cluster_block_rank())

    if thread == 64:
        prefetch_tensor_map(source_maps.address(0))
        prefetch_tensor_map(filter_map.address(0))
    if thread == 32:
        comptime for i in range(stages):
            mbarrier_init(full + UInt32(8 * i), 1)
            mbarrier_init(
                empty + UInt32(8 * i),
                cluster * (1 if shape.alternate else CONSUMERS),
            )
        fence_mbarrier_init()

    var first = _Copies(_Tile(0, 0, 0, 0), 0, 0, 0)
    if thread < 32:
        # One warp finds the first copies while another makes the barriers.
        first = _copies_of[phases, shape](
            plan, Int32(block_idx.x) // Int32(cluster), rank
        )
    syncwarp()
    comptime if cluster > 1:
        cluster_arrive()
        cluster_wait()
    else:
        named_barrier_sync(0, Int32(THREADS))

    if group == 0:
        comptime if shape.accumulators() > 64:
            release_registers[40]()
        # Every thread of the first warp asks; one goes on.
        if thread < 32:
            if elect_thread():
                _produce[phases, shape, filter_k_major](
                    source_maps,
                    filter_map,
                    plan,
                    ring,
                    full,
                    empty,
                    rank,
                    first,
                )
    else:
        comptime if shape.accumulators() > 64:
            claim_registers[232]()
        var consumer = Int32(group) - 1
        var lane_in_group = thread % 128
        var warp = lane_in_group // 32
        var lane = thread % 32
        var ring_at = RingPlace[stages](0, 0)
        var tile = Int32(block_idx.x) // Int32(cluster)
        var stride = Int32(grid_dim.x) // Int32(cluster)
        var first_block = UInt32(0)
        comptime if shape.alternate:
            if consumer == 1:
                # Skip what the other warpgroup takes.
                if tile < plan.tiles():
                    ring_at.skip(
                        _locate[phases, shape.rows(), shape.columns, cluster](
                            plan, tile, rank
                        ).steps
                    )
                tile += stride
                named_barrier_arrive(1, 256)
        else:
            first_block = UInt32(consumer) * UInt32(shape.row_blocks)

        # Each warp stages its own 16 rows, so that only the warp has to agree.
        comptime warp_panel = 16 * ROW_BYTES
        comptime warp_bytes = shape.panels_staged() * warp_panel
        var consumer_staging = staging + UInt32(consumer) * UInt32(
            4 * warp_bytes
        )
        var warp_staging = consumer_staging + warp * UInt32(warp_bytes)
        var matrix_row = ((lane // 8) % 2) * 8 + lane % 8

        comptime if kind != NO_SUMS:
            comptime assert (
                shape.alternate
                and shape.columns == PANEL_COLUMNS * shape.panels_staged()
            )
        var column_sums = ColumnSums[dtype, kind, shape.columns]()
        var walk = tile
        var steady = UInt32(2 * stride) % UInt32(plan.column_tiles()) == 0
        var slots = Int(
            min(2 * stride, plan.tiles()) if steady else plan.tiles()
        )

        while tile < plan.tiles():
            var at = _locate[phases, shape.rows(), shape.columns, cluster](
                plan, tile, rank
            )
            var sums = StaticTuple[
                StaticTuple[Float32, fragment], shape.row_blocks
            ](fill=StaticTuple[Float32, fragment](fill=0))
            comptime if shape.alternate:
                named_barrier_sync(1 + consumer, 256)
            var previous = UInt32(0)
            for k in range(Int(at.steps)):
                var slot = ring_at.slot
                mbarrier_wait(full + slot * 8, ring_at.parity)
                ring_at.advance()
                var source_tile = (
                    ring
                    + slot * UInt32(shape.stage_bytes())
                    + first_block * UInt32(64 * ROW_BYTES)
                )
                var filter_tile = (
                    ring
                    + slot * UInt32(shape.stage_bytes())
                    + UInt32(shape.source_bytes())
                )
                var source_descriptor = k_major_descriptor(source_tile)
                var filter_descriptor = k_major_descriptor(
                    filter_tile
                ) if filter_k_major else mn_major_descriptor(filter_tile)
                wgmma_fence_aligned()
                comptime for kk in range(BLOCK_K // 16):
                    comptime filter_step = kk * 2 if filter_k_major else kk * 128
                    comptime for block in range(shape.row_blocks):
                        sums[block] = wgmma_async[
                            64,
                            shape.columns,
                            16,
                            DType.float32,
                            fragment,
                            a_type=dtype,
                            b_type=dtype,
                            layout_a="row",
                            layout_b="col" if filter_k_major else "row",
                        ](
                            WGMMADescriptor[dtype](
                                source_descriptor
                                + Int64(kk * 2 + block * 64 * ROW_BYTES // 16)
                            ),
                            WGMMADescriptor[dtype](
                                filter_descriptor + Int64(filter_step)
                            ),
                            sums[block],
                        )
                wgmma_commit_group_sync()
                wgmma_wait_group_sync[1]()
                if k > 0:
                    _release[cluster](empty, previous, lane_in_group)
                previous = slot
            comptime if shape.alternate:
                named_barrier_arrive(2 - consumer, 256)
            wgmma_wait_group_sync[0]()
            if at.steps > 0:
                _release[cluster](empty, previous, lane_in_group)

            var rows = plan.phase(at.phase, fields.ROWS)
            comptime staged = shape.panels_staged()
            comptime for block in range(shape.row_blocks):
                var first_row = (
                    at.row
                    + Int32((first_block + UInt32(block)) * 64 + warp * 16)
                    + Int32(lane // 8)
                )
                comptime for pair in range(
                    shape.columns // (PANEL_COLUMNS * staged)
                ):
                    syncwarp()
                    comptime for p in range(staged):
                        comptime for q in range(4):
                            comptime base = (
                                (pair * staged + p) * 8 + q * 2
                            ) * 4
                            var chunk = UInt32(q * 2) + lane // 16
                            store_matrices(
                                warp_staging
                                + UInt32(p * warp_panel)
                                + matrix_row * ROW_BYTES
                                + ((chunk ^ (lane % 8)) * 16),
                                pack_pair[dtype](
                                    sums[block][base], sums[block][base + 1]
                                ),
                                pack_pair[dtype](
                                    sums[block][base + 2], sums[block][base + 3]
                                ),
                                pack_pair[dtype](
                                    sums[block][base + 4], sums[block][base + 5]
                                ),
                                pack_pair[dtype](
                                    sums[block][base + 6], sums[block][base + 7]
                                ),
                            )
                    syncwarp()
                    # All vectors of a part are made before any is stored, so that what an epilogue reads is in flight together.
                    # With a factor too there would be no room for the whole in the registers.
                    comptime panels = 1 if factor else staged
                    comptime for part in range(staged // panels):
                        var values = StaticTuple[SIMD[dtype, 8], 4 * panels](
                            fill=SIMD[dtype, 8](0)
                        )
                        var products = Products(0, 0)
                        comptime for it in range(4):
                            var row = first_row + Int32(it * 4)
                            var in_warp = UInt32(it * 4) + lane // 8
                            comptime for n in range(panels):
                                comptime p = part * panels + n
                                var value = Pointer[
                                    Scalar[dtype],
                                    MutAnyOrigin,
                                    address_space=AddressSpace.SHARED,
                                ](
                                    unsafe_from_address=Int(
                                        warp_staging
                                        + UInt32(p * warp_panel)
                                        + in_warp * ROW_BYTES
                                        + (((lane % 8) ^ (in_warp % 8)) * 16)
                                    )
                                ).unsafe_load[
                                    width=8, alignment=16
                                ]()
                                # Past the edge the last vector stands in: no branch keeps the loads apart.
                                var index = _index(
                                    plan,
                                    at,
                                    min(row, rows - 1),
                                    _column[staged](at.column, pair, p, lane),
                                )
                                comptime if epilogue:
                                    comptime apply = epilogue.value()
                                    value = apply[8](index, value)
                                comptime if factor:
                                    comptime factor_at = factor.value()
                                    products.add(
                                        value if row
                                        < rows else SIMD[dtype, 8](0),
                                        factor_at[8](index),
                                    )
                                values[it * panels + n] = value
                        comptime for it in range(4):
                            var row = first_row + Int32(it * 4)
                            if row < rows:
                                var target = result.unsafe_offset(
                                    _result_offset(plan, at.phase, row)
                                )
                                comptime for n in range(panels):
                                    comptime p = part * panels + n
                                    var column = _column[staged](
                                        at.column, pair, p, lane
                                    )
                                    if column < plan.columns():
                                        target.unsafe_store[alignment=16](
                                            Int(column),
                                            values[it * panels + n],
                                        )
                                    comptime if kind == MOMENTS:
                                        column_sums.add_moments[p, it == 0](
                                            values[it * panels + n]
                                        )
                                comptime if kind == MOMENTS:
                                    column_sums.count += 1
                        comptime if factor:
                            column_sums.add_products[part](products, lane)

            comptime if kind != NO_SUMS:
                if not steady:
                    column_sums.flush(
                        partials,
                        Int(tile),
                        slots,
                        consumer_staging,
                        warp_bytes,
                        consumer,
                        lane_in_group,
                    )
            comptime if shape.alternate:
                if tile + stride < plan.tiles():
                    ring_at.skip(
                        _locate[phases, shape.rows(), shape.columns, cluster](
                            plan, tile + stride, rank
                        ).steps
                    )
                tile += 2 * stride
            else:
                tile += stride

        comptime if kind != NO_SUMS:
            if steady and walk < plan.tiles():
                column_sums.flush(
                    partials,
                    Int(walk),
                    slots,
                    consumer_staging,
                    warp_bytes,
                    consumer,
                    lane_in_group,
                )

    comptime if cluster > 1:
        # No block may leave while a neighbour still sends into its shared memory or arrives on its barriers.
        cluster_arrive()
        cluster_wait()
