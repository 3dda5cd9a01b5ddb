"""The wgrad kernel: dw[k, (tap, c)] = sum over output pixels of dy[pixel, k] * x[pixel shifted by tap, c].

The reduction runs over N*P*Q, far longer than the result is large, so it is split: every block sums its own range of
pixels for one tile of dw at a time and writes the sums, in float32 and in register order, to a slot of its own.
`combine_kernel` adds the slots of each tile in a fixed order, so the same input gives the same bits. A tile that one
block summed alone is written to dw directly.

Both operands arrive with the reduction (pixels) along rows and channels along the 128-byte swizzled columns, which
wgmma reads as transposed matrices.
"""

from std.builtin.device_passable import DevicePassable, DeviceTypeEncoder
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
from .implicit_gemm import CONSUMERS, THREADS, mn_major_descriptor, pack_pair
from .plan import BLOCK_K
from .ptx import (
    claim_registers,
    divide,
    fence_mbarrier_init,
    load_im2col,
    load_tile_2d,
    mbarrier_arrive,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_wait,
    named_barrier_sync,
    prefetch_tensor_map,
    release_registers,
)
from .tensor_map import TensorMaps

comptime PANEL = 64
"""Channels of one copy: 128 bytes."""
comptime _PANEL_BYTES = BLOCK_K * 128
comptime COMBINE_THREADS = 128
comptime _COMBINE_UNROLL = 8


@fieldwise_init
struct WgradShape(ImplicitlyCopyable, TrivialRegisterPassable):
    """What one compiled kernel computes at a time."""

    var row_blocks: Int
    """64-row blocks (filters) of each consumer warpgroup."""
    var columns: Int
    """Columns of the tile: 64-channel panels of one or several taps."""
    var stages: Int
    var split_steps: Bool
    """Both consumers sum the same tile, each from every other step, into a slot of its own; else they share the
    tile's rows. For results with few filters."""

    def rows(self) -> Int:
        return 64 * self.row_blocks * (1 if self.split_steps else CONSUMERS)

    def panels(self) -> Int:
        return self.columns // PANEL

    def row_panels(self) -> Int:
        return self.rows() // PANEL

    def stage_bytes(self) -> Int:
        return (self.panels() + self.row_panels()) * _PANEL_BYTES

    def accumulators(self) -> Int:
        return self.row_blocks * self.columns // 2

    def shared_bytes(self) -> Int:
        return 1024 + self.stages * self.stage_bytes() + 256

    def slot_elements(self) -> Int:
        """Floats of one slot; with split_steps each consumer has its own slot of this size.
        """
        return self.rows() * self.columns

    def slots_for_unit(self) -> Int:
        return CONSUMERS if self.split_steps else 1


@fieldwise_init
struct WgradPlan(DevicePassable, ImplicitlyCopyable, TrivialRegisterPassable):
    """The integers of one launch."""

    var k: Int32
    var c: Int32
    var p: Int32
    var q: Int32
    var taps: Int32
    var filter_s: Int32
    var stride_h: Int32
    var stride_w: Int32
    var dilation_h: Int32
    var dilation_w: Int32
    var lower_h: Int32
    var lower_w: Int32
    var row_tiles: Int32
    var column_tiles: Int32
    var steps: Int32
    """Pipeline stages of the whole reduction."""
    var splits: Int32
    """Equal parts of every tile's reduction; 0 spreads all tiles' steps evenly over the blocks instead."""
    var blocks: Int32

    comptime device_type: AnyType = Self

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        return "WgradPlan"

    @always_inline
    def tiles(self) -> Int32:
        return self.row_tiles * self.column_tiles

    @always_inline
    def channel_blocks(self) -> Int32:
        return (self.c + PANEL - 1) // PANEL

    @always_inline
    def work(self) -> Int64:
        return Int64(self.tiles()) * Int64(self.steps)

    @always_inline
    def range_start(self, block: Int64) -> Int64:
        """First step, counted through all tiles, of a block's even share."""
        return block * self.work() // Int64(self.blocks)

    @always_inline
    def block_of(self, step: Int64) -> Int64:
        return ((step + 1) * Int64(self.blocks) - 1) // self.work()

    @always_inline
    def units(self) -> Int32:
        """Upper bound of the pieces of work, each with its slot."""
        return (
            self.tiles() * self.splits if self.splits
            > 0 else self.tiles() + self.blocks
        )


@fieldwise_init
struct _Unit(ImplicitlyCopyable, TrivialRegisterPassable):
    """One block's piece of one tile."""

    var tile: Int32
    var first: Int32
    var count: Int32
    var slot: Int32


@always_inline
def _unit(plan: WgradPlan, block: Int32, index: Int32) -> _Unit:
    """Piece `index` of a block; `count` is 0 past the last one."""
    if plan.splits > 0:
        var unit = block + index * plan.blocks
        if unit >= plan.units():
            return _Unit(0, 0, 0, 0)
        # Neighbouring blocks take the same pixels of different tiles, so that the second-level cache serves them.
        var split, tile = divide(unit, plan.tiles())
        var first = Int32(
            Int64(split) * Int64(plan.steps) // Int64(plan.splits)
        )
        var last = Int32(
            Int64(split + 1) * Int64(plan.steps) // Int64(plan.splits)
        )
        return _Unit(tile, first, last - first, unit)
    var start = plan.range_start(Int64(block))
    var end = plan.range_start(Int64(block) + 1)
    var tile = Int32(start // Int64(plan.steps)) + index
    var begin = max(start, Int64(tile) * Int64(plan.steps))
    var stop = min(end, Int64(tile + 1) * Int64(plan.steps))
    if begin >= stop:
        return _Unit(0, 0, 0, 0)
    return _Unit(
        tile,
        Int32(begin - Int64(tile) * Int64(plan.steps)),
        Int32(stop - begin),
        tile + block,
    )


@always_inline
def _produce[
    shape: WgradShape
](
    dy_map: TensorMaps[1],
    x_map: TensorMaps[1],
    plan: WgradPlan,
    ring: UInt32,
    full: UInt32,
    empty: UInt32,
):
    var step: UInt32 = 0
    var index: Int32 = 0
    while True:
        var unit = _unit(plan, Int32(block_idx.x), index)
        if unit.count == 0:
            break
        index += 1
        var row_tile, column_tile = divide(unit.tile, plan.column_tiles)
        var row = row_tile * Int32(shape.rows())
        var channel = StaticTuple[Int32, shape.panels()](fill=0)
        var offset_h = StaticTuple[Int32, shape.panels()](fill=0)
        var offset_w = StaticTuple[Int32, shape.panels()](fill=0)
        comptime for panel in range(shape.panels()):
            var at = column_tile * Int32(shape.panels()) + Int32(panel)
            # A panel past the last one reads the first again; nothing of it is stored.
            if at >= plan.taps * plan.channel_blocks():
                at = 0
            var tap, block = divide(at, plan.channel_blocks())
            var tap_h, tap_w = divide(tap, plan.filter_s)
            channel[panel] = block * PANEL
            offset_h[panel] = tap_h * plan.dilation_h
            offset_w[panel] = tap_w * plan.dilation_w
        var dy_address = dy_map.address(0)
        var x_address = x_map.address(0)
        var pixel = unit.first * BLOCK_K
        for _ in range(Int(unit.count)):
            var line, q = divide(pixel, plan.q)
            var n, p = divide(line, plan.p)
            var slot = step % UInt32(shape.stages)
            var parity = (step // UInt32(shape.stages)) & 1
            step += 1
            var barrier = full + slot * 8
            mbarrier_wait(empty + slot * 8, parity ^ 1)
            mbarrier_expect(barrier, shape.stage_bytes())
            var tile = ring + slot * UInt32(shape.stage_bytes())
            comptime for panel in range(shape.row_panels()):
                load_tile_2d(
                    tile + UInt32(panel * _PANEL_BYTES),
                    dy_address,
                    barrier,
                    row + Int32(panel * PANEL),
                    pixel,
                )
            tile += UInt32(shape.row_panels() * _PANEL_BYTES)
            comptime for panel in range(shape.panels()):
                load_im2col(
                    tile + UInt32(panel * _PANEL_BYTES),
                    x_address,
                    barrier,
                    channel[panel],
                    q * plan.stride_w + plan.lower_w,
                    p * plan.stride_h + plan.lower_h,
                    n,
                    UInt16(offset_w[panel]),
                    UInt16(offset_h[panel]),
                )
            pixel += BLOCK_K


@always_inline
def _store_pairs[
    dtype: DType, shape: WgradShape
](
    plan: WgradPlan,
    dw: Ptr[dtype],
    tile: Int32,
    row_block: Int32,
    warp: Int32,
    lane: Int32,
    group: Int,
    values: SIMD[DType.float32, 4],
):
    """Writes the four sums of accumulator group `group` (two rows, two columns) to dw.
    """
    var row_tile, column_tile = divide(tile, plan.column_tiles)
    var row = (
        row_tile * Int32(shape.rows()) + row_block * 64 + warp * 16 + lane // 4
    )
    var panel = column_tile * Int32(shape.panels()) + Int32(group // 8)
    if panel >= plan.taps * plan.channel_blocks():
        return
    var tap, block = divide(panel, plan.channel_blocks())
    var c = block * PANEL + Int32(group % 8) * 8 + (lane % 4) * 2
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


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)),
)
@__llvm_arg_metadata(dy_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(x_map, `nvvm.grid_constant`)
@__name(
    t"conv_wgrad_{dtype}_{shape.rows()}x{shape.columns}x{shape.stages}_s{shape.split_steps}"
)
def wgrad_kernel[
    dtype: DType, shape: WgradShape
](
    dy_map: TensorMaps[1],
    x_map: TensorMaps[1],
    plan: WgradPlan,
    dw: Ptr[dtype],
    slots: Ptr[DType.float32],
):
    comptime stages = shape.stages
    comptime fragment = shape.columns // 2

    var shared = external_memory[
        UInt8, address_space=AddressSpace.SHARED, alignment=1024
    ]()
    var ring = (UInt32(Int(shared)) + 1023) & ~UInt32(1023)
    var full = ring + UInt32(stages * shape.stage_bytes())
    var empty = full + UInt32(8 * stages)
    var thread = UInt32(thread_idx.x)
    var group = thread // 128

    if thread == 0:
        prefetch_tensor_map(dy_map.address(0))
        prefetch_tensor_map(x_map.address(0))
        comptime for i in range(stages):
            mbarrier_init(full + UInt32(8 * i), 1)
            mbarrier_init(
                empty + UInt32(8 * i), 1 if shape.split_steps else CONSUMERS
            )
        fence_mbarrier_init()
    named_barrier_sync(0, Int32(THREADS))

    if group == 0:
        comptime if shape.accumulators() > 64:
            release_registers[40]()
        if thread == 0:
            _produce[shape](dy_map, x_map, plan, ring, full, empty)
        return

    comptime if shape.accumulators() > 64:
        claim_registers[232]()
    var consumer = Int32(group) - 1
    var lane_in_group = thread % 128
    var step: UInt32 = 0
    var index: Int32 = 0
    var first_block = UInt32(0)
    comptime if not shape.split_steps:
        first_block = UInt32(consumer) * UInt32(shape.row_blocks)
    while True:
        var unit = _unit(plan, Int32(block_idx.x), index)
        if unit.count == 0:
            break
        index += 1
        var sums = StaticTuple[
            StaticTuple[Float32, fragment], shape.row_blocks
        ](fill=StaticTuple[Float32, fragment](fill=0))
        var previous = UInt32(0)
        var mine: Int32 = 0
        for k in range(Int(unit.count)):
            var slot = step % UInt32(stages)
            var parity = (step // UInt32(stages)) & 1
            step += 1
            comptime if shape.split_steps:
                if Int32(k) % 2 != consumer:
                    continue
            mbarrier_wait(full + slot * 8, parity)
            var tile = ring + slot * UInt32(shape.stage_bytes())
            var dy_descriptor = mn_major_descriptor(
                tile + first_block * UInt32(_PANEL_BYTES)
            )
            var x_descriptor = mn_major_descriptor(
                tile + UInt32(shape.row_panels() * _PANEL_BYTES)
            )
            wgmma_fence_aligned()
            comptime for kk in range(BLOCK_K // 16):
                comptime for block in range(shape.row_blocks):
                    sums[block] = wgmma_async[
                        64,
                        shape.columns,
                        16,
                        DType.float32,
                        fragment,
                        a_type=dtype,
                        b_type=dtype,
                        layout_a="col",
                        layout_b="row",
                    ](
                        WGMMADescriptor[dtype](
                            dy_descriptor
                            + Int64(kk * 128 + block * _PANEL_BYTES // 16)
                        ),
                        WGMMADescriptor[dtype](x_descriptor + Int64(kk * 128)),
                        sums[block],
                    )
            wgmma_commit_group_sync()
            wgmma_wait_group_sync[1]()
            if mine > 0 and lane_in_group == 0:
                mbarrier_arrive(empty + previous * 8)
            mine += 1
            previous = slot
        wgmma_wait_group_sync[0]()
        if mine > 0 and lane_in_group == 0:
            mbarrier_arrive(empty + previous * 8)

        var alone = not shape.split_steps and unit.count == plan.steps
        comptime for block in range(shape.row_blocks):
            comptime for at in range(fragment // 4):
                var values = SIMD[DType.float32, 4](
                    sums[block][at * 4],
                    sums[block][at * 4 + 1],
                    sums[block][at * 4 + 2],
                    sums[block][at * 4 + 3],
                )
                if alone:
                    _store_pairs[dtype, shape](
                        plan,
                        dw,
                        unit.tile,
                        Int32(first_block) + Int32(block),
                        Int32(lane_in_group // 32),
                        Int32(lane_in_group % 32),
                        at,
                        values,
                    )
                else:
                    # Register order: every store of a warp is 512 contiguous bytes.
                    var base: Int64
                    comptime if shape.split_steps:
                        base = Int64(unit.slot * CONSUMERS + consumer)
                    else:
                        base = Int64(unit.slot)
                    slots.unsafe_store[alignment=16](
                        Int(
                            base * Int64(shape.slot_elements())
                            + Int64(
                                (first_block + UInt32(block))
                                * UInt32(64 * shape.columns)
                            )
                            + Int64(at * 512)
                            + Int64(lane_in_group * 4)
                        ),
                        values,
                    )


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
        count = Int64(plan.splits)
        stride = Int64(plan.tiles())
    else:
        var begin = Int64(tile) * Int64(plan.steps)
        var block = plan.block_of(begin)
        first = Int64(tile) + block
        count = plan.block_of(begin + Int64(plan.steps) - 1) - block + 1
        stride = 1
    comptime copies = shape.slots_for_unit()
    if count * Int64(copies) <= 1:
        return
    var base = (
        Int64(row_block) * Int64(64 * shape.columns)
        + Int64(group) * 512
        + Int64(thread) * 4
    )
    var sum = SIMD[DType.float32, 4](0)
    var i: Int64 = 0
    while i < count:
        # The loads are independent; only the additions wait for each other, in the order of the slots.
        var loaded = StaticTuple[
            SIMD[DType.float32, 4], _COMBINE_UNROLL * copies
        ](fill=SIMD[DType.float32, 4](0))
        comptime for j in range(_COMBINE_UNROLL):
            if i + Int64(j) < count:
                comptime for copy in range(copies):
                    loaded[j * copies + copy] = slots.unsafe_load[
                        width=4, alignment=16
                    ](
                        Int(
                            (
                                (first + (i + Int64(j)) * stride)
                                * Int64(copies)
                                + Int64(copy)
                            )
                            * Int64(shape.slot_elements())
                            + base
                        )
                    )
        comptime for j in range(_COMBINE_UNROLL * copies):
            sum += loaded[j]
        i += _COMBINE_UNROLL
    _store_pairs[dtype, shape](
        plan, dw, tile, row_block, thread // 32, thread % 32, Int(group), sum
    )
