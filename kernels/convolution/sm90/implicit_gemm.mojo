"""The fprop and dgrad kernel: an implicit matrix product on Hopper's tensor cores.

One warpgroup copies (a single thread of it drives the copy engine: producer.mojo), two multiply and store (store.mojo).
The copied tiles go round a ring of `stages` slots in shared memory, each slot with a barrier that says "full" and one
that says "empty". Blocks are persistent and walk the tiles with a fixed step. See docs/internals/hopper.md for the
drawing.
"""

from std.sys import size_of
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

from ...common.pointer import Ptr
from ...common.ptx import (
    claim_registers,
    cluster_arrive,
    cluster_block_rank,
    cluster_wait,
    elect_thread,
    fence_mbarrier_init,
    mbarrier_arrive,
    mbarrier_arrive_remote,
    mbarrier_init,
    mbarrier_wait,
    named_barrier_arrive,
    named_barrier_sync,
    prefetch_tensor_map,
    release_registers,
    syncwarp,
)
from ..passes import NO_SUMS
from .beside import Epilogue, Factor, Reader
from .column_sums import ColumnSums
from .plan import ROW_BYTES, Im2colPlan, stage_length
from .producer import (
    TileSource,
    TileOrigin,
    copies_of,
    locate,
    produce,
    tile_of_block,
)
from .split import lay_sums, store_joined
from .store import Consumer, Sums, read_first, store_tile
from .tensor_map import TensorMaps
from .tile import (
    CONSUMERS,
    PANEL_COLUMNS,
    PipelineState,
    THREADS,
    TileShape,
    k_major_descriptor,
    mn_major_descriptor,
)


comptime _STEP_BYTES = 32
"""Bytes of a row that one wgmma multiplies."""


@fieldwise_init
struct _Ring[shape: TileShape](ImplicitlyCopyable, TrivialRegisterPassable):
    """Layout of shared memory: the slots, the panels that consumers stage, what they read beside, and a barrier of each
    kind for each slot.
    """

    var slots: UInt32

    @always_inline
    def staging(self) -> UInt32:
        return self.slots + UInt32(Self.shape.stages * Self.shape.stage_bytes())

    @always_inline
    def queue(self) -> UInt32:
        return self.staging() + UInt32(Self.shape.staging_bytes())

    @always_inline
    def full(self) -> UInt32:
        return self.queue() + UInt32(Self.shape.queue_bytes())

    @always_inline
    def empty(self) -> UInt32:
        return self.full() + UInt32(8 * Self.shape.stages)

    @always_inline
    def make_barriers(self):
        """Initialises the barriers; called by one thread of the block."""
        comptime for i in range(Self.shape.stages):
            mbarrier_init(self.full() + UInt32(8 * i), 1)
            mbarrier_init(
                self.empty() + UInt32(8 * i),
                Self.shape.cluster * (1 if Self.shape.alternate else CONSUMERS),
            )
        fence_mbarrier_init()

    @always_inline
    def release(self, slot: UInt32, thread: UInt32):
        """Tells every producer that wrote into this slot that this warpgroup is done with it.
        """
        comptime if Self.shape.cluster == 1:
            if thread == 0:
                mbarrier_arrive(self.empty() + slot * 8)
        else:
            if thread < UInt32(Self.shape.cluster):
                mbarrier_arrive_remote(self.empty() + slot * 8, thread)


@always_inline
def _multiply_stage[
    dtype: DType,
    shape: TileShape,
    filter_k_major: Bool,
    count: Int,
    begins: Bool,
](source_tile: UInt32, filter_tile: UInt32, mut sums: Sums[shape]):
    """Begins the products of a slot with rows of `count` times _STEP_BYTES, as a group; where it `begins`, the sums are
    theirs alone."""
    comptime row_bytes = count * _STEP_BYTES
    var source = k_major_descriptor[row_bytes](source_tile)
    var filter = k_major_descriptor[row_bytes](
        filter_tile
    ) if filter_k_major else mn_major_descriptor(filter_tile)
    wgmma_fence_aligned()
    comptime for kk in range(count):
        comptime filter_step = kk * 2 if filter_k_major else kk * 128
        var filters = WGMMADescriptor[dtype](filter + Int64(filter_step))
        comptime for block in range(shape.products()):
            var rows = WGMMADescriptor[dtype](
                source + Int64(kk * 2 + block * 64 * row_bytes // 16)
            )
            # Operands along the reduction are rows of the first one and columns of the second.
            comptime along = "row" if shape.filter_first() else "col"
            comptime across = "col" if shape.filter_first() else "row"
            comptime filter_layout = along if filter_k_major else across
            sums[block] = wgmma_async[
                64,
                shape.product_columns(),
                _STEP_BYTES // size_of[dtype](),
                DType.float32,
                shape.fragment(),
                scale_d=0 if begins and kk == 0 else 1,
                a_type=dtype,
                b_type=dtype,
                layout_a=filter_layout if shape.filter_first() else "row",
                layout_b="col" if shape.filter_first() else filter_layout,
            ](
                filters if shape.filter_first() else rows,
                rows if shape.filter_first() else filters,
                sums[block],
            )
    wgmma_commit_group_sync()


@always_inline
def _multiply[
    dtype: DType,
    phases: Int,
    shape: TileShape,
    filter_k_major: Bool,
    with_sums: Bool,
](
    plan: Im2colPlan[phases],
    first: Int32,
    steps: Int32,
    ring: _Ring[shape],
    mut place: PipelineState[shape.stages],
    by: Consumer[shape],
) -> Sums[shape]:
    """Multiplies one tile, or the `steps` stages of it from the `first` on: slots of the ring from `place` on. A slot
    is released when the products of the next one are under way."""
    var sums = Sums[shape](fill=StaticTuple[Float32, shape.fragment()](fill=0))
    var previous = UInt32(0)
    # Stages until the tap's last one.
    var left = plan.channel_blocks()
    comptime if shape.may_split(phases, with_sums):
        left -= first % left

    @__parameter
    @always_inline
    def multiply_next[begins: Bool]():
        var slot = place.slot
        mbarrier_wait(ring.full() + slot * 8, place.parity)
        place.advance()
        var short = False
        comptime if shape.has_short_stages(phases, with_sums):
            left -= 1
            if left == 0:
                short = plan.ends_short()
                left = plan.channel_blocks()
        var source_tile = (
            ring.slots
            + slot * UInt32(shape.stage_bytes())
            + by.first_block()
            * UInt32(32 * ROW_BYTES if short else 64 * ROW_BYTES)
        )
        var filter_tile = (
            ring.slots
            + slot * UInt32(shape.stage_bytes())
            + UInt32(shape.source_bytes())
        )
        comptime in_row = ROW_BYTES // _STEP_BYTES
        # Each way ends its own group of products: behind a branch ptxas would wait for all of them. So does each tap.
        if short:
            _multiply_stage[dtype, shape, filter_k_major, in_row // 2, begins](
                source_tile, filter_tile, sums
            )
        else:
            _multiply_stage[dtype, shape, filter_k_major, in_row, begins](
                source_tile, filter_tile, sums
            )
        comptime if not begins:
            wgmma_wait_group_sync[1]()
            ring.release(previous, by.thread)
        comptime if shape.taps > 1:
            for _ in range(1, Int(plan.shared_taps())):
                # One pixel on. A descriptor may begin inside the swizzle's 8 rows, without a base offset: what is
                # swizzled are addresses, and the copy begins at a multiple of 8 rows.
                source_tile += ROW_BYTES
                filter_tile += UInt32(shape.filter_bytes())
                _multiply_stage[dtype, shape, filter_k_major, in_row, False](
                    source_tile, filter_tile, sums
                )
        previous = slot

    comptime if phases == 1:
        multiply_next[True]()
    else:
        # Of a phase without taps the sums stay zero.
        if steps > 0:
            multiply_next[True]()
    for _ in range(1, Int(steps)):
        multiply_next[False]()
    comptime if shape.alternate:
        named_barrier_arrive(2 - by.index, 256)
    wgmma_wait_group_sync[0]()
    if phases == 1 or steps > 0:
        ring.release(previous, by.thread)
    return sums


@always_inline
def _consume[
    dtype: DType,
    phases: Int,
    shape: TileShape,
    filter_k_major: Bool,
    read: Optional[Reader[dtype]],
    epilogue: Optional[Epilogue[dtype]],
    kind: Int,
    factor: Optional[Factor[dtype]],
](
    plan: Im2colPlan[phases],
    result: Ptr[dtype],
    partials: Ptr[DType.float32],
    ring: _Ring[shape],
    rank: Int32,
    by: Consumer[shape],
):
    """Runs the walk of a warpgroup that multiplies and stores."""
    var place = PipelineState[shape.stages](0, 0)
    comptime with_sums = kind != NO_SUMS
    comptime splits = shape.may_split(phases, with_sums)
    var tile = tile_of_block[phases, shape, with_sums](plan, Int32(block_idx.x))
    var stride = tile_of_block[phases, shape, with_sums](
        plan, Int32(grid_dim.x)
    )
    comptime if shape.alternate:
        if by.index == 1:
            # Skip what the other warpgroup takes.
            if tile < plan.tiles():
                place.skip(
                    locate[phases, shape, with_sums](plan, tile, rank).steps
                )
            tile += stride
            named_barrier_arrive(1, 256)

    comptime if kind != NO_SUMS:
        comptime assert (
            shape.alternate
            and shape.columns == PANEL_COLUMNS * shape.panels_staged()
        )
    var column_sums = ColumnSums[dtype, kind, shape.columns]()
    var walk = tile
    var steady = UInt32(2 * stride) % UInt32(plan.column_tiles()) == 0
    var slots = Int(min(2 * stride, plan.tiles()) if steady else plan.tiles())

    while tile < plan.tiles():
        var at = locate[phases, shape, with_sums](plan, tile, rank)
        read_first[dtype, phases, shape, read](plan, at, by)
        comptime if shape.alternate:
            named_barrier_sync(1 + by.index, 256)
        var sums = _multiply[dtype, phases, shape, filter_k_major, with_sums](
            plan, at.first, at.steps, ring, place, by
        )
        comptime if splits:
            if plan.split_bits() > 0:
                lay_sums[shape](ring.slots, sums, by)
                break
        store_tile[dtype, phases, shape, read, epilogue, kind, factor](
            result, plan, at, sums, by, column_sums
        )
        comptime if kind != NO_SUMS:
            if not steady:
                column_sums.flush(
                    partials,
                    Int(tile),
                    slots,
                    plan.column_step(),
                    by.staging,
                    by.warp_bytes,
                    by.index,
                    by.thread,
                )
        comptime if shape.alternate:
            if tile + stride < plan.tiles():
                place.skip(
                    locate[phases, shape, with_sums](
                        plan, tile + stride, rank
                    ).steps
                )
            tile += 2 * stride
        else:
            tile += stride

    comptime if splits:
        if plan.split_bits() > 0:
            cluster_arrive()
            cluster_wait()
            store_joined[dtype, phases, shape, read, epilogue](
                result,
                plan,
                locate[phases, shape, with_sums](
                    plan,
                    tile_of_block[phases, shape, with_sums](
                        plan, Int32(block_idx.x)
                    ),
                    rank,
                ),
                ring.slots,
                rank,
                by,
            )
            # No block may leave while others read its sums.
            cluster_arrive()
            cluster_wait()

    comptime if kind != NO_SUMS:
        if steady and walk < plan.tiles():
            column_sums.flush(
                partials,
                Int(walk),
                slots,
                plan.column_step(),
                by.staging,
                by.warp_bytes,
                by.index,
                by.thread,
            )


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)),
)
@__llvm_arg_metadata(source_maps, `nvvm.grid_constant`)
@__llvm_arg_metadata(filter_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(short_maps, `nvvm.grid_constant`)
@__llvm_arg_metadata(plan, `nvvm.grid_constant`)
@__name(
    t"conv_implicit_gemm_{dtype}_{shape.rows()}x{shape.columns}x{shape.stages}_c{shape.cluster}_a{shape.alternate}_k{filter_k_major}_p{phases}_s{kind}"
)
def implicit_gemm_kernel[
    dtype: DType,
    phases: Int,
    shape: TileShape,
    filter_k_major: Bool,
    read: Optional[Reader[dtype]] = None,
    epilogue: Optional[Epilogue[dtype]] = None,
    kind: Int = NO_SUMS,
    factor: Optional[Factor[dtype]] = None,
](
    source_maps: TensorMaps[phases],
    filter_map: TensorMaps[1],
    short_maps: TensorMaps[2],
    plan: Im2colPlan[phases],
    result: Ptr[dtype],
    partials: Ptr[DType.float32],
):
    """Computes fprop or dgrad. Sums of a `kind` over columns (column_sums.mojo) go to `partials`: to a slot for each of
    the consumers' walks where all tiles of a walk have the same columns, else to one for each tile.
    """
    comptime with_sums = kind != NO_SUMS
    comptime splits = shape.may_split(phases, with_sums)
    comptime cluster = shape.cluster
    var shared = external_memory[
        UInt8, address_space=AddressSpace.SHARED, alignment=1024
    ]()
    var ring = _Ring[shape]((UInt32(Int(shared)) + 1023) & ~UInt32(1023))
    var thread = UInt32(thread_idx.x)
    var group = thread // 128
    var rank = Int32(0)
    comptime if cluster > 1 or splits:
        rank = Int32(cluster_block_rank())

    if thread == 64:
        prefetch_tensor_map(source_maps.address(0))
        prefetch_tensor_map(filter_map.address(0))
    if thread == 32:
        ring.make_barriers()

    var first = TileSource(TileOrigin(0, 0, 0, 0, 0), 0, 0, 0, 0)
    if thread < 32:
        # One warp finds the first copies while another makes the barriers.
        first = copies_of[phases, shape, with_sums](
            plan,
            tile_of_block[phases, shape, with_sums](plan, Int32(block_idx.x)),
            rank,
        )
    syncwarp()
    comptime if cluster > 1:
        cluster_arrive()
        cluster_wait()
    else:
        named_barrier_sync(0, Int32(THREADS))

    # Two warpgroups take what the third one gives.
    comptime copying = 40 if with_sums else 56
    comptime multiplying = 168 + (168 - copying) // 2
    if group == 0:
        comptime if shape.accumulators() > 64:
            release_registers[copying]()
        # Every thread of the first warp asks; one goes on.
        if thread < 32:
            if elect_thread():
                produce[
                    phases,
                    shape,
                    filter_k_major,
                    with_sums,
                    stage_length[dtype](),
                ](
                    source_maps,
                    filter_map,
                    short_maps,
                    plan,
                    ring.slots,
                    ring.full(),
                    ring.empty(),
                    rank,
                    first,
                )
        comptime if splits:
            if plan.split_bits() > 0:
                # The two barriers of the consumers.
                cluster_arrive()
                cluster_wait()
                cluster_arrive()
                cluster_wait()
    else:
        comptime if shape.accumulators() > 64:
            claim_registers[multiplying]()
        var index = Int32(group) - 1
        comptime bytes = 4 * Consumer[shape].warp_bytes
        var staging = ring.staging() + UInt32(index) * UInt32(bytes)
        comptime queue_bytes = shape.queue_bytes() // CONSUMERS
        var queue = ring.queue() + UInt32(index) * UInt32(queue_bytes)
        _consume[
            dtype, phases, shape, filter_k_major, read, epilogue, kind, factor
        ](
            plan,
            result,
            partials,
            ring,
            rank,
            Consumer[shape](index, thread % 128, staging, queue),
        )

    comptime if cluster > 1:
        # No block may leave while a neighbour still sends into its shared memory or arrives on its barriers.
        cluster_arrive()
        cluster_wait()
