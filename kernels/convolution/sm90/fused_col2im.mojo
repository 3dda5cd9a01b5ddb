"""The dgrad of an image's few channels: a product and col2im in one kernel.

The product with one column of dx for each channel would multiply 64 columns to keep three, and read dy once for every
tap. Here columns are (tap, channel) pairs instead, and dy is read once:

    z[pixel of dy, (tap, c)] = sum over k  dy[pixel, k] * w[k, tap, c]         wgmma, all taps of one phase
    dx[h, w, c]              = sum over taps  z[the pixel that the tap connects, (tap, c)]

A block holds z of a window of dy, with the rim that the taps reach over, in shared memory; no sum leaves it before it
is whole, and every addition has its place. One warpgroup copies windows, three take turns at them: while one
multiplies, another gathers.

convolution_by_kernel.json has times beside cuDNN's for drawn problems.
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
from max.gpu.host import DeviceAttribute, DeviceContext, FuncAttribute
from max.gpu.memory import external_memory

from ...common.arithmetic import divide
from ...common.pointer import Ptr
from ...common.ptx import (
    elect_thread,
    fence_mbarrier_init,
    fence_shared_writes,
    load_tile_4d,
    mbarrier_arrive,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_wait,
    named_barrier_sync,
    prefetch_tensor_map,
)
from ..kernel import ConvolutionKernel, ConvolutionTensors
from ..passes import DGRAD
from ..problem import ConvolutionProblem
from . import plan as fields
from .fused_col2im_plan import (
    COLUMNS,
    FILTER_BYTES,
    MAX_CHANNELS,
    WINDOW_PHASES,
    MAX_STAGES,
    PIXELS,
    RING_BYTES,
    STAGE_BYTES,
    WINDOW_H,
    WINDOW_W,
    Window,
    plan_of,
    reason_against,
)
from .gemm import compiles_for, reason_not_any
from .plan import AXIS_H, AXIS_W, STAGE_LENGTH, Im2colPlan
from .tensor_map import TensorMaps
from .tile import k_major_descriptor

comptime _CONSUMERS = 3
"""Warpgroups that multiply."""
comptime _THREADS = 128 * (1 + _CONSUMERS)
"""Of a block: one more warpgroup copies."""
comptime _PITCH = COLUMNS + 4
"""Floats from one pixel of z to the next: neighbours lie 4 banks apart, so that 16-byte reads of eight don't
collide."""
comptime _Z_BYTES = PIXELS * _PITCH * 4
"""Of a consumer's products in shared memory, float32."""
comptime _SHARED_BYTES = 1024 + RING_BYTES + _CONSUMERS * _Z_BYTES + 256


@always_inline
def _produce(
    dy_map: TensorMaps[1],
    plan: Im2colPlan[WINDOW_PHASES],
    window: Window,
    ring: UInt32,
    full: UInt32,
    empty: UInt32,
):
    var slot: Int32 = 0
    var parity: UInt32 = 0
    var tile = Int32(block_idx.x)
    while tile < plan.tiles():
        var line, j = divide(tile, plan.column_tiles())
        var n, i = divide(line, window.tiles_h)
        for chunk in range(Int(plan.channel_blocks())):
            var barrier = full + UInt32(slot) * 8
            mbarrier_wait(empty + UInt32(slot) * 8, parity ^ 1)
            mbarrier_expect(barrier, STAGE_BYTES)
            load_tile_4d(
                ring + UInt32(slot) * STAGE_BYTES,
                dy_map.address(0),
                barrier,
                Int32(chunk * STAGE_LENGTH),
                j * window.inner_w + window.lower_w,
                i * window.inner_h + window.lower_h,
                n,
            )
            slot += 1
            if slot == window.stages:
                slot = 0
                parity ^= 1
        tile += Int32(grid_dim.x)


@always_inline
def _lay_filter[
    dtype: DType
](
    w: Ptr[dtype],
    plan: Im2colPlan[WINDOW_PHASES],
    window: Window,
    filters: UInt32,
    taps_of_filter: Int32,
):
    """Brings the filter of every phase into swizzled rows of 64 elements of k, one row for each (tap, channel).
    """
    var thread = Int32(thread_idx.x)
    var column = thread % COLUMNS
    var channel = column % MAX_CHANNELS
    for phase in range(Int(window.phases)):
        var taps_w = plan.phase(phase, fields.TAPS + AXIS_W)
        var taps = plan.phase(phase, fields.TAPS + AXIS_H) * taps_w
        var th, tw = divide(column // MAX_CHANNELS, max(taps_w, 1))
        var tap = (
            plan.phase(phase, fields.TAP)
            + th * plan.tap_step(AXIS_H)
            + tw * plan.tap_step(AXIS_W)
        )
        var exists = column // MAX_CHANNELS < taps and channel < plan.columns()
        for chunk in range(Int(plan.channel_blocks())):
            var target = (
                filters
                + UInt32(phase * Int(plan.channel_blocks()) + chunk)
                * FILTER_BYTES
            )
            var first = thread // COLUMNS
            comptime for step in range(STAGE_LENGTH * COLUMNS // _THREADS):
                var inner = first + Int32(step * (_THREADS // COLUMNS))
                var k = Int32(chunk * STAGE_LENGTH) + inner
                var value = Scalar[dtype](0)
                if exists and k < window.k:
                    value = w.unsafe_load(
                        (Int(k) * Int(taps_of_filter) + Int(tap))
                        * Int(plan.columns())
                        + Int(channel)
                    )
                Pointer[
                    Scalar[dtype],
                    MutAnyOrigin,
                    address_space=AddressSpace.SHARED,
                ](
                    unsafe_from_address=Int(
                        target
                        + UInt32(column) * 128
                        + UInt32(((inner // 8) ^ (column % 8)) * 16)
                        + UInt32(inner % 8 * 2)
                    )
                ).unsafe_store(
                    0, value
                )


@always_inline
def _floats(
    address: UInt32,
) -> Pointer[Float32, MutAnyOrigin, address_space=AddressSpace.SHARED]:
    return Pointer[Float32, MutAnyOrigin, address_space=AddressSpace.SHARED](
        unsafe_from_address=Int(address)
    )


@always_inline
def _gather[
    dtype: DType
](
    dx: Ptr[dtype],
    plan: Im2colPlan[WINDOW_PHASES],
    window: Window,
    phase: Int,
    z: UInt32,
    n: Int32,
    first_i: Int32,
    first_j: Int32,
    thread: Int32,
):
    """Adds the taps of each of the window's result pixels of one phase."""
    var taps_h = plan.phase(phase, fields.TAPS + AXIS_H)
    var taps_w = plan.phase(phase, fields.TAPS + AXIS_W)
    # Packed, 8 bits for each axis.
    var offsets = plan.phase(phase, fields.OFFSETS)
    var step_h = (plan.offset_step(AXIS_H) >> 8) * WINDOW_W * _PITCH
    var step_w = plan.offset_step(AXIS_W) * _PITCH + MAX_CHANNELS
    var base_h = (
        plan.phase(phase, fields.LOWER + AXIS_H)
        + (offsets >> 8)
        - window.lower_h
    )
    var base_w = (
        plan.phase(phase, fields.LOWER + AXIS_W)
        + (offsets & 255)
        - window.lower_w
    )
    var pixel = thread
    while pixel < window.inner_h * window.inner_w:
        var i, j = divide(pixel, window.inner_w)
        var sum = SIMD[DType.float32, MAX_CHANNELS](0)
        var line = ((i + base_h) * WINDOW_W + j + base_w) * _PITCH
        for _ in range(Int(taps_h)):
            var at = line
            for _ in range(Int(taps_w)):
                sum += _floats(z + UInt32(at) * 4).unsafe_load[
                    width=MAX_CHANNELS, alignment=16
                ]()
                at += step_w
            # The next row's columns follow this row's.
            line += step_h + taps_w * MAX_CHANNELS
        if first_i + i < plan.extent(
            phase, AXIS_H
        ) and first_j + j < plan.extent(phase, AXIS_W):
            var h = (first_i + i) * plan.out_step(AXIS_H) + plan.phase(
                phase, fields.FIRST + AXIS_H
            )
            var w = (first_j + j) * plan.out_step(AXIS_W) + plan.phase(
                phase, fields.FIRST + AXIS_W
            )
            var target = (
                (Int(n) * Int(plan.out_extent(AXIS_H)) + Int(h))
                * Int(plan.out_extent(AXIS_W))
                + Int(w)
            ) * Int(plan.columns())
            comptime for c in range(MAX_CHANNELS):
                if Int32(c) < plan.columns():
                    dx.unsafe_store(target + c, sum[c].cast[dtype]())
        pixel += 128


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(_THREADS)),
)
@__llvm_arg_metadata(dy_map, `nvvm.grid_constant`)
@__llvm_arg_metadata(plan, `nvvm.grid_constant`)
@__name(t"conv_fused_col2im_{dtype}")
def fused_col2im_kernel[
    dtype: DType
](
    dy_map: TensorMaps[1],
    plan: Im2colPlan[WINDOW_PHASES],
    window: Window,
    dx: Ptr[dtype],
    w: Ptr[dtype],
    taps_of_filter: Int32,
):
    comptime fragment = COLUMNS // 2
    comptime row_blocks = PIXELS // 64

    var shared = external_memory[
        UInt8, address_space=AddressSpace.SHARED, alignment=1024
    ]()
    var filters = (UInt32(Int(shared)) + 1023) & ~UInt32(1023)
    var filter_tiles = window.phases * plan.channel_blocks()
    var ring = filters + UInt32(filter_tiles) * FILTER_BYTES
    var sums_of_windows = filters + RING_BYTES
    var full = sums_of_windows + _CONSUMERS * _Z_BYTES
    var empty = full + 8 * MAX_STAGES

    var thread = UInt32(thread_idx.x)
    var group = thread // 128
    if thread == 0:
        prefetch_tensor_map(dy_map.address(0))
        comptime for i in range(MAX_STAGES):
            mbarrier_init(full + UInt32(8 * i), 1)
            mbarrier_init(empty + UInt32(8 * i), 1)
        fence_mbarrier_init()
    _lay_filter[dtype](w, plan, window, filters, taps_of_filter)
    fence_shared_writes()
    named_barrier_sync(0, Int32(_THREADS))

    if group == 0:
        # Every thread of the first warp asks; one goes on.
        if thread < 32:
            if elect_thread():
                _produce(dy_map, plan, window, ring, full, empty)
        return

    var consumer = Int32(group) - 1
    var in_group = Int32(thread % 128)
    var warp = in_group // 32
    var lane = in_group % 32
    var z = sums_of_windows + UInt32(consumer) * _Z_BYTES
    # The four sums of an accumulator group lie in two rows, 8 apart.
    var place = z + UInt32(
        ((warp * 16 + lane // 4) * _PITCH + lane % 4 * 2) * 4
    )
    var tile = Int32(block_idx.x) + consumer * Int32(grid_dim.x)
    var turn = consumer
    while tile < plan.tiles():
        var line, j = divide(tile, plan.column_tiles())
        var n, i = divide(line, window.tiles_h)
        var step = turn * plan.channel_blocks()
        for chunk in range(Int(plan.channel_blocks())):
            var round, slot = divide(step + Int32(chunk), window.stages)
            var parity = UInt32(round) & 1
            # Another warpgroup may have had this slot before, and its copy may still be under way: a barrier tells even
            # rounds from odd ones only, so this one's could not be told from the one before that.
            mbarrier_wait(empty + UInt32(slot) * 8, parity ^ 1)
            mbarrier_wait(full + UInt32(slot) * 8, parity)
        for phase in range(Int(window.phases)):
            var taps = plan.phase(phase, fields.TAPS + AXIS_H) * plan.phase(
                phase, fields.TAPS + AXIS_W
            )
            var sums = StaticTuple[StaticTuple[Float32, fragment], row_blocks](
                fill=StaticTuple[Float32, fragment](fill=0)
            )
            for chunk in range(Int(plan.channel_blocks())):
                var round, slot = divide(step + Int32(chunk), window.stages)
                var dy_descriptor = k_major_descriptor(
                    ring + UInt32(slot) * STAGE_BYTES
                )
                var filter_descriptor = k_major_descriptor(
                    filters
                    + UInt32(phase * Int(plan.channel_blocks()) + chunk)
                    * FILTER_BYTES
                )
                wgmma_fence_aligned()
                comptime for kk in range(STAGE_LENGTH // 16):
                    comptime for block in range(row_blocks):
                        sums[block] = wgmma_async[
                            64,
                            COLUMNS,
                            16,
                            DType.float32,
                            fragment,
                            a_type=dtype,
                            b_type=dtype,
                            layout_a="row",
                            layout_b="col",
                        ](
                            WGMMADescriptor[dtype](
                                dy_descriptor
                                + Int64(kk * 2 + block * 64 * 128 // 16)
                            ),
                            WGMMADescriptor[dtype](
                                filter_descriptor + Int64(kk * 2)
                            ),
                            sums[block],
                        )
                wgmma_commit_group_sync()
            wgmma_wait_group_sync[0]()
            comptime for block in range(row_blocks):
                comptime for at in range(COLUMNS // 8):
                    if Int32(at * 8) < taps * MAX_CHANNELS:
                        comptime for half in range(2):
                            comptime offset = (
                                (block * 64 + half * 8) * _PITCH + at * 8
                            ) * 4
                            _floats(place + UInt32(offset)).unsafe_store[
                                alignment=8
                            ](
                                0,
                                SIMD[DType.float32, 2](
                                    sums[block][at * 4 + half * 2],
                                    sums[block][at * 4 + half * 2 + 1],
                                ),
                            )
            # z is whole, and every warp is past its products.
            named_barrier_sync(1 + consumer, 128)
            if phase == Int(window.phases) - 1 and in_group == 0:
                for chunk in range(Int(plan.channel_blocks())):
                    var round, slot = divide(step + Int32(chunk), window.stages)
                    mbarrier_arrive(empty + UInt32(slot) * 8)
            _gather[dtype](
                dx,
                plan,
                window,
                phase,
                z,
                n,
                i * window.inner_h,
                j * window.inner_w,
                in_group,
            )
            named_barrier_sync(1 + consumer, 128)
        tile += _CONSUMERS * Int32(grid_dim.x)
        turn += _CONSUMERS


@no_inline
def launch_fused_col2im[
    dtype: DType
](
    dx: Ptr[dtype],
    dy: Ptr[dtype],
    w: Ptr[dtype],
    p: ConvolutionProblem,
    ctx: DeviceContext,
) raises:
    """Of what `FusedCol2im` takes."""
    var plan, window = plan_of(p)
    var dy_map = TensorMaps[1]()
    dy_map.encode_tile[dtype, 4](
        0,
        ctx,
        dy,
        IndexList[4](p.k, p.q, p.p, p.n),
        IndexList[4](STAGE_LENGTH, WINDOW_W, WINDOW_H, 1),
    )
    var processors = ctx.get_attribute(DeviceAttribute.MULTIPROCESSOR_COUNT)
    comptime kernel = fused_col2im_kernel[dtype]
    ctx.enqueue_function[kernel](
        dy_map,
        plan,
        window,
        dx,
        w,
        Int32(p.r * p.s),
        grid_dim=(min(processors, Int(plan.tiles())),),
        block_dim=(_THREADS,),
        shared_mem_bytes=_SHARED_BYTES,
        func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(
            UInt32(_SHARED_BYTES)
        ),
    )


struct FusedCol2im(ConvolutionKernel):
    """Few channels and taps, windows that are not mostly rim."""

    comptime NAME: StaticString = "fused_col2im"

    @staticmethod
    def compiles[dtype: DType, pass_: Int, grouping: Int]() -> Bool:
        return (
            pass_ == DGRAD
            and compiles_for[dtype, pass_]()
            and dtype != DType.float32
        )

    @staticmethod
    def refusal[
        dtype: DType, pass_: Int
    ](t: ConvolutionTensors[dtype], p: ConvolutionProblem) -> Optional[String]:
        if not t.are_aligned():
            return String("a tensor does not begin at a multiple of 16 bytes")
        var reason = reason_not_any(p)
        return reason if reason else reason_against(p)

    @staticmethod
    def launch[
        dtype: DType, pass_: Int
    ](
        ctx: DeviceContext, t: ConvolutionTensors[dtype], p: ConvolutionProblem
    ) raises:
        launch_fused_col2im[dtype](t.result, t.a, t.b, p, ctx)
