"""Host side of the Hopper convolutions: fill the tensor maps and the plan, launch."""

from std.math import ceildiv
from std.utils.index import IndexList

from max.gpu.host import DeviceContext, DeviceAttribute, Dim, FuncAttribute
from max.gpu.primitives.grid_controls import PDLLevel, pdl_launch_attributes

from ...common.arithmetic import Divisor
from ...common.library import scratch
from ...common.pointer import Ptr
from ...normalization.partials import Slots
from ..passes import FPROP, NO_SUMS
from ..problem import ConvolutionProblem
from .choice import cluster_capacity, split_parts
from .beside import Epilogue, Factor, Reader
from .implicit_gemm import implicit_gemm_kernel
from .plan import (
    STAGE_LENGTH,
    Im2colPhase,
    Im2colPlan,
    stage_length,
    dgrad_phases,
    ends_short,
    fprop_phase,
    packed_offsets,
)
from .tensor_map import SourceView, TensorMaps
from .tile import PANEL_COLUMNS, THREADS, TileShape
from .wgrad import wgrad_kernel
from .wgrad_bias import bias_elements
from .wgrad_plan import MAX_CLUSTER, PANEL, WgradChoice, WgradPlan, WgradShape
from .wgrad_sum import COMBINE_THREADS, combine_kernel


def reads_filter_along_k[dtype: DType]() -> Bool:
    """Returns whether dgrad's products want the filter along the reduction: wgmma transposes elements of 16 bits alone.
    """
    return dtype == DType.float32


comptime NOWHERE = Ptr[DType.float32](unsafe_from_address=16)
"""Placeholder for the sums of a launch that makes none."""


def _processors(ctx: DeviceContext) raises -> Int:
    return ctx.get_attribute(DeviceAttribute.MULTIPROCESSOR_COUNT)


def blocks_of(ctx: DeviceContext, cluster: Int, tiles: Int) raises -> Int:
    """Returns the number of blocks of a persistent grid: one for each multiprocessor, fewer when there are fewer tiles.
    """
    return min(_processors(ctx) // cluster, tiles) * cluster


def _encode_filter[
    dtype: DType, filter_k_major: Bool
](
    mut maps: TensorMaps,
    index: Int,
    ctx: DeviceContext,
    w: Ptr[dtype],
    sizes: IndexList[3],
    columns: Int,
    depth: Int,
) raises:
    """Encodes boxes of the filter for one stage: `depth` elements of the reduction for `columns` columns of the result,
    or, where they lie across the reduction, for one panel of them."""
    var box = IndexList[3](depth, 1, columns) if filter_k_major else IndexList[
        3
    ](PANEL_COLUMNS, 1, depth)
    maps.encode_tile[dtype, 3](index, ctx, w, sizes, box)


def _with_taps[
    shape: TileShape
](p: ConvolutionProblem, phase: Im2colPhase, source_step: Int) -> Tuple[
    Im2colPhase, Int
]:
    """Returns the phase as a kernel walks it, and the number of taps along W that its stages serve.
    """
    comptime if shape.taps > 1:
        var wider = phase.sharing_taps(p, source_step)
        if wider:
            return wider.value(), phase.w.taps
    return phase, 1


def slots_of[
    pass_: Int, shape: TileShape
](problem: ConvolutionProblem, block: Int, ctx: DeviceContext) raises -> Slots:
    """Returns the slots where a launch with sums over columns puts them; `block` pixels of the result are one of the
    problem's."""
    var p = problem
    var columns = p.k if pass_ == FPROP else p.c
    var step = shape.column_step(columns, pass_ == FPROP)
    var column_tiles = ceildiv(columns, step)
    var tiles = 0
    comptime if pass_ == FPROP:
        var phase, _ = _with_taps[shape](p, fprop_phase(p), p.stride_w)
        tiles = ceildiv(p.n * phase.pixels(), shape.rows())
    else:
        for each in dgrad_phases(p):
            var phase, _ = _with_taps[shape](p, each, 1)
            tiles += ceildiv(p.n * phase.pixels(), shape.rows())
    tiles *= column_tiles
    var walks = 2 * blocks_of(ctx, shape.cluster, tiles)
    var slots = min(walks, tiles) if walks % column_tiles == 0 else tiles
    return Slots(
        Int64(slots),
        Int64(column_tiles),
        Int64(step),
        channels=Int64(columns // block),
        fold=Int64(block),
    )


@no_inline
def launch_fprop[
    dtype: DType,
    shape: TileShape,
    read: Optional[Reader[dtype]] = None,
    epilogue: Optional[Epilogue[dtype]] = None,
    kind: Int = NO_SUMS,
    factor: Optional[Factor[dtype]] = None,
](
    y: Ptr[dtype],
    x: Ptr[dtype],
    w: Ptr[dtype],
    problem: ConvolutionProblem,
    view: SourceView,
    ctx: DeviceContext,
    partials: Ptr[DType.float32] = NOWHERE,
) raises:
    """Launches fprop. Sums of a `kind` over columns go to `partials`, which has room for all of `slots_of`.
    """
    var p = problem
    var phase, taps = _with_taps[shape](p, fprop_phase(p), p.stride_w)
    var step = shape.column_step(p.k, True)
    var sizes = IndexList[3](p.c, p.taps(), p.k)
    comptime depth = stage_length[dtype]()
    comptime short_stages = shape.has_short_stages(1, kind != NO_SUMS)
    var source_maps = TensorMaps[1]()
    var filter_map = TensorMaps[1]()
    var short_maps = TensorMaps[2]()

    @__parameter
    def encode_source[
        count: Int
    ](mut maps: TensorMaps[count], channels: Int) raises:
        maps.encode_im2col[dtype](
            0,
            ctx,
            x,
            IndexList[4](p.n, p.d, p.h, p.w),
            view,
            phase,
            IndexList[3](p.stride_d, p.stride_h, p.stride_w),
            p.is_deep(),
            shape.rows() + taps - 1,
            channels,
        )

    encode_source(source_maps, depth)
    _encode_filter[dtype, True](
        filter_map, 0, ctx, w, sizes, step // shape.cluster, depth
    )
    if short_stages and ends_short(p.c, depth):
        encode_source(short_maps, depth // 2)
        _encode_filter[dtype, True](
            short_maps, 1, ctx, w, sizes, step, depth // 2
        )
    var column_tiles = ceildiv(p.k, step)
    var rows = p.n * phase.pixels()
    var tiles = (
        ceildiv(ceildiv(rows, shape.rows()), shape.cluster) * column_tiles
    )
    var plan = Im2colPlan[1]()
    plan.set_launch(
        p,
        dgrad=False,
        tiles=tiles,
        column_tiles=column_tiles,
        stage_length=depth,
        column_step=step,
        short_stages=short_stages,
    )
    plan.set_phase(0, p, phase, 0)
    plan.set_shared_taps(taps)
    var parts = 1
    comptime if shape.may_split(1, kind != NO_SUMS):
        parts = split_parts(
            tiles, phase.taps() * ceildiv(p.c, depth), _processors(ctx)
        )
    plan.set_parts(parts)
    comptime kernel = implicit_gemm_kernel[
        dtype, 1, shape, True, read, epilogue, kind, factor
    ]
    ctx.enqueue_function[kernel](
        source_maps,
        filter_map,
        short_maps,
        plan,
        y,
        partials,
        grid_dim=(
            tiles * parts if parts
            > 1 else blocks_of(ctx, shape.cluster, tiles),
        ),
        block_dim=(THREADS,),
        cluster_dim=Dim(max(parts, shape.cluster)),
        shared_mem_bytes=shape.shared_bytes(),
        func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(
            UInt32(shape.shared_bytes())
        ),
    )


@no_inline
def launch_dgrad[
    dtype: DType,
    shape: TileShape,
    phases: Int,
    read: Optional[Reader[dtype]] = None,
    epilogue: Optional[Epilogue[dtype]] = None,
    kind: Int = NO_SUMS,
    factor: Optional[Factor[dtype]] = None,
](
    dx: Ptr[dtype],
    dy: Ptr[dtype],
    w: Ptr[dtype],
    problem: ConvolutionProblem,
    ctx: DeviceContext,
    partials: Ptr[DType.float32] = NOWHERE,
) raises:
    """Launches dgrad, whose product of strides must be `phases` at most. Sums are as in `launch_fprop`.

    float32 takes the filter as `reads_filter_along_k` says, [C, T, R, S, K].
    """
    comptime filter_k_major = reads_filter_along_k[dtype]()
    var p = problem
    var products = dgrad_phases(p)
    var taps = 1
    comptime if phases == 1:
        products[0], taps = _with_taps[shape](p, products[0], 1)
    else:
        comptime assert shape.taps == 1
    var deep = p.is_deep()
    var step = shape.column_step(p.c, filter_k_major)
    var sizes = IndexList[3](
        p.k, p.taps(), p.c
    ) if filter_k_major else IndexList[3](p.c, p.taps(), p.k)
    comptime depth = stage_length[dtype]()
    comptime share = 1 if filter_k_major else shape.cluster
    comptime short_stages = shape.has_short_stages(phases, kind != NO_SUMS)
    var source_maps = TensorMaps[phases]()
    var filter_map = TensorMaps[1]()
    var short_maps = TensorMaps[2]()

    @__parameter
    def encode_source[
        count: Int
    ](mut maps: TensorMaps[count], i: Int, channels: Int) raises:
        maps.encode_im2col[dtype](
            i,
            ctx,
            dy,
            IndexList[4](p.n, p.o, p.p, p.q),
            SourceView.dense_y(p),
            products[i],
            IndexList[3](1, 1, 1),
            deep,
            shape.rows() + taps - 1,
            channels,
        )

    _encode_filter[dtype, filter_k_major](
        filter_map, 0, ctx, w, sizes, step // shape.cluster, depth // share
    )
    if short_stages and ends_short(p.k, depth):
        if products[0].taps() > 0:
            encode_source(short_maps, 0, depth // 2)
        _encode_filter[dtype, filter_k_major](
            short_maps, 1, ctx, w, sizes, step, depth // 2
        )
    var plan = Im2colPlan[phases]()
    plan.set_shared_taps(taps)
    var column_tiles = ceildiv(p.c, step)
    var tiles = 0
    for i in range(phases):
        if i < len(products):
            var phase = products[i]
            plan.set_phase(i, p, phase, tiles)
            if phase.taps() > 0:
                encode_source(source_maps, i, depth)
            var rows = p.n * phase.pixels()
            tiles += (
                ceildiv(ceildiv(rows, shape.rows()), shape.cluster)
                * column_tiles
            )
        else:
            plan.set_first_tile(i, Int(Int32.MAX))
    plan.set_launch(
        p,
        dgrad=True,
        tiles=tiles,
        column_tiles=column_tiles,
        stage_length=depth,
        column_step=step,
        short_stages=short_stages,
    )
    var parts = 1
    comptime if shape.may_split(phases, kind != NO_SUMS):
        parts = split_parts(
            tiles,
            products[0].taps() * ceildiv(p.k, depth),
            _processors(ctx),
        )
    plan.set_parts(parts)
    comptime kernel = implicit_gemm_kernel[
        dtype, phases, shape, filter_k_major, read, epilogue, kind, factor
    ]
    ctx.enqueue_function[kernel](
        source_maps,
        filter_map,
        short_maps,
        plan,
        dx,
        partials,
        grid_dim=(
            tiles * parts if parts
            > 1 else blocks_of(ctx, shape.cluster, tiles),
        ),
        block_dim=(THREADS,),
        cluster_dim=Dim(max(parts, shape.cluster)),
        shared_mem_bytes=shape.shared_bytes(),
        func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(
            UInt32(shape.shared_bytes())
        ),
    )


def _plan_wgrad[
    shape: WgradShape
](
    problem: ConvolutionProblem,
    choice: WgradChoice,
    phase: Im2colPhase,
    makes_float32: Bool,
    ctx: DeviceContext,
) raises -> WgradPlan:
    """Plans who computes which steps of which tile. The choice's shape is not looked at.
    """
    var p = problem
    if choice.cluster not in (0, 1, 2, 4, MAX_CLUSTER):
        raise Error(t"Hopper convolution: clusters of {choice.cluster} blocks")
    # Consumers that sum the same tile always join.
    var joined = max(choice.cluster, 1) if shape.split_steps else choice.cluster
    var share_rows = choice.share_rows if joined == 0 else 1
    var share_columns = choice.share_columns if joined == 0 else 1
    if share_rows not in (1, 2, 4) or share_columns not in (1, 2, 4):
        raise Error(
            t"Hopper convolution: {share_rows}x{share_columns} blocks that"
            t" share tiles"
        )
    var pixels = p.output_pixels()
    var group_rows = (
        ceildiv(ceildiv(p.group_k(), shape.rows()), share_rows) * share_rows
    )
    var row_tiles = group_rows * p.groups
    var panels = p.taps() * ceildiv(p.group_c(), PANEL)
    var column_tiles = (
        ceildiv(ceildiv(panels, shape.panels()), share_columns) * share_columns
    )
    var steps = ceildiv(pixels, STAGE_LENGTH)
    var tiles = row_tiles * column_tiles
    while joined > steps:
        joined //= 2
    var parts = min(choice.splits, steps)
    var shared = share_rows * share_columns
    var blocks: Int
    if joined > 0:
        parts = max(parts // joined, 1) * joined
        blocks = tiles * parts
    else:
        var processors = ctx.get_attribute(DeviceAttribute.MULTIPROCESSOR_COUNT)
        if steps * (processors + 1) >= 1 << 31:
            # The even spread counts steps in 32 bits.
            parts = max(parts, 1)
        blocks = min(
            cluster_capacity(shared, processors),
            tiles * (parts if parts > 0 else steps),
        )
    var walkers = blocks // shared
    var share = tiles // shared * steps // walkers
    return WgradPlan(
        k=Int32(p.group_k()),
        c=Int32(p.group_c()),
        group_rows=Divisor(group_rows),
        deep=p.is_deep(),
        makes_float32=makes_float32,
        o=Divisor(p.o),
        p=Divisor(p.p),
        q=Divisor(p.q),
        taps=Int32(p.taps()),
        filter_r=Divisor(p.r),
        filter_s=Divisor(p.s),
        channel_blocks=Divisor(ceildiv(p.group_c(), PANEL)),
        stride_d=Int32(p.stride_d),
        stride_h=Int32(p.stride_h),
        stride_w=Int32(p.stride_w),
        offset_step_d=Int32(packed_offsets(p.is_deep(), p.dilation_d, 0, 0)),
        offset_step_h=Int32(packed_offsets(p.is_deep(), 0, p.dilation_h, 0)),
        dilation_w=Int32(p.dilation_w),
        lower_d=Int32(phase.d.lower),
        lower_h=Int32(phase.h.lower),
        lower_w=Int32(phase.w.lower),
        column_tiles=Divisor(column_tiles),
        tiles=Divisor(tiles),
        steps=Divisor(steps),
        splits=Int32(parts),
        part_steps=Int32(steps // max(parts, 1)),
        part_rest=Int32(steps % max(parts, 1)),
        cluster=Int32(joined),
        joined=Divisor(max(joined, 1)),
        share_rows=Divisor(share_rows),
        share_columns=Divisor(share_columns),
        shared=Divisor(shared),
        column_groups=Divisor(column_tiles // share_columns),
        groups=Int32(tiles // shared),
        blocks=Int32(blocks),
        walkers=Divisor(walkers),
        range_groups=Int32(share // steps),
        range_steps=Int32(share % steps),
        range_rest=Int32(tiles // shared * steps % walkers),
        slots_of_tile=Int32(parts // max(joined, 1)),
    )


@no_inline
def launch_wgrad[
    dtype: DType, shape: WgradShape, bias: Bool
](
    dw: Ptr[dtype],
    dy: Ptr[dtype],
    x: Ptr[dtype],
    problem: ConvolutionProblem,
    view: SourceView,
    choice: WgradChoice,
    ctx: DeviceContext,
    db: Ptr[dtype],
    makes_float32: Bool = False,
) raises:
    """Launches wgrad, with `bias` also of the bias, to `db`; `dw` may be the address of float32. The choice's shape is
    not looked at."""
    var p = problem
    var phase = fprop_phase(p)
    var plan = _plan_wgrad[shape](p, choice, phase, makes_float32, ctx)
    var x_map = TensorMaps[1]()
    x_map.encode_im2col[dtype](
        0,
        ctx,
        x,
        IndexList[4](p.n, p.d, p.h, p.w),
        view,
        phase,
        IndexList[3](p.stride_d, p.stride_h, p.stride_w),
        p.is_deep(),
        STAGE_LENGTH // Int(plan.share_rows.value),
        PANEL,
    )
    var dy_map = TensorMaps[1]()
    dy_map.encode_tile[dtype, 2](
        0,
        ctx,
        dy,
        IndexList[2](p.k, p.output_pixels()),
        IndexList[2](PANEL, STAGE_LENGTH // Int(plan.share_columns.value)),
    )
    var combines = plan.splits == 0 or plan.slots_of_tile > 1
    var elements = Int(plan.units()) * shape.slot_elements() if combines else 0
    var slots = scratch[DType.float32](
        ctx, max(elements + (bias_elements[shape](plan) if bias else 0), 1)
    )
    var bias_sums = Ptr[DType.float32](
        unsafe_from_address=Int(slots.unsafe_ptr()) + 4 * elements
    )
    comptime kernel = wgrad_kernel[dtype, shape, bias]
    comptime shared_bytes = shape.shared_bytes(bias)
    ctx.enqueue_function[kernel](
        dy_map,
        x_map,
        plan,
        dw,
        slots,
        bias_sums,
        grid_dim=(Int(plan.blocks),),
        block_dim=(THREADS,),
        cluster_dim=Dim(max(Int(plan.cluster), Int(plan.shared.value))),
        shared_mem_bytes=shared_bytes,
        func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(
            UInt32(shared_bytes)
        ),
    )
    var groups = (
        Int(plan.tiles.value) * (shape.rows() // 64) * (shape.columns // 8)
    ) if combines else 0
    var bias_blocks = (
        Int(plan.tiles.value) // Int(plan.column_tiles.value)
    ) if bias else 0
    if groups + bias_blocks > 0:
        comptime combine = combine_kernel[dtype, shape, bias]
        ctx.enqueue_function[combine](
            plan,
            dw,
            slots,
            db,
            bias_sums,
            Int32(bias_blocks),
            grid_dim=(groups + bias_blocks,),
            block_dim=(COMBINE_THREADS,),
            # Its blocks may come while the last ones of the first stage still run; they wait for all of its writes.
            attributes=pdl_launch_attributes(PDLLevel.ON),
        )
    # The buffer goes back in stream order, after both kernels.
    _ = slots^
