"""Groups of many channels. In the forward pass and the data gradient each group is a phase of one implicit matrix
product; in the weight gradient a tile belongs to one group (`WgradPlan.filters`).

The kernel knows phases: products with a tensor map, a first tap and places in the result of their own. For a group
these are

    source   its channels of every pixel. What lies past them is zeros, as past any tensor's last channel, and never channels of
             another group: zeros of the filter times infinity would be NaN
    filter   [K / G][K * T * R * S][C / G]: the rows of a group begin with another "tap"
    result   [N, D, H, W * G, channels / G]: a pixel of the group is every G-th one along W

Drawn problems on an H200 take 0.38 to 0.59 of cuDNN's time (convolution_by_kernel.json).
"""

from std.math import ceildiv
from std.utils.index import IndexList

from max.gpu.host import DeviceContext, FuncAttribute

from ...common.pointer import Ptr
from ..kernel import ConvolutionKernel, ConvolutionTensors
from ..passes import FPROP, ONE_GROUP, WGRAD
from ..problem import ConvolutionProblem
from .aligned import AS_IT_IS
from .choice import TILE_128X128, TILE_256X64, TILE_SHAPES
from .gemm import MAX_PHASES, compiles_for, gemm_refusal, run
from .implicit_gemm import implicit_gemm_kernel
from .launch import NOWHERE, blocks_of
from .plan import (
    STAGE_LENGTH,
    Im2colPhase,
    Im2colPlan,
    dgrad_phases,
    fprop_phase,
)
from .tensor_map import SourceView, TensorMaps
from .tile import THREADS, TileShape

comptime _WIDE = TILE_SHAPES[TILE_128X128]
comptime _NARROW = TILE_SHAPES[TILE_256X64]


def problem_of_group(p: ConvolutionProblem) -> ConvolutionProblem:
    """Returns the problem of one group by itself."""
    var problem = p
    problem.c = p.group_c()
    problem.k = p.group_k()
    problem.groups = 1
    return problem


@fieldwise_init
struct GroupPhase(ImplicitlyCopyable):
    """A phase of one group."""

    var phase: Im2colPhase
    var group: Int


def group_phases[pass_: Int](p: ConvolutionProblem) -> List[GroupPhase]:
    """Returns the phases of all groups, long reductions first."""
    var group = problem_of_group(p)
    var phases = List[Im2colPhase]()
    comptime if pass_ == FPROP:
        phases.append(fprop_phase(group))
    else:
        phases = dgrad_phases(group)
    var result = List[GroupPhase]()
    for phase in phases:
        for i in range(p.groups):
            result.append(GroupPhase(phase, i))
    return result^


def set_group_phase(
    mut plan: Im2colPlan[MAX_PHASES],
    index: Int,
    p: ConvolutionProblem,
    at: GroupPhase,
    first_tile: Int,
):
    plan.set_phase(index, problem_of_group(p), at.phase, first_tile)
    plan.set_group(index, at.group, p.groups, p.group_k() * p.taps())


struct GroupedGemm(ConvolutionKernel):
    comptime NAME: StaticString = "implicit_gemm_groups"

    @staticmethod
    def compiles[dtype: DType, pass_: Int, grouping: Int]() -> Bool:
        return (
            grouping != ONE_GROUP
            and compiles_for[dtype, pass_]()
            and dtype != DType.float32
        )

    @staticmethod
    def refusal[
        dtype: DType, pass_: Int
    ](t: ConvolutionTensors[dtype], p: ConvolutionProblem) -> Optional[String]:
        if not t.are_aligned():
            return String("a tensor does not begin at a multiple of 16 bytes")
        if p.groups == 1:
            return String("takes groups")
        if p.group_c() % 8 != 0 or p.group_k() % 8 != 0:
            return String(
                t"{p.group_c()} and {p.group_k()} channels in a group; takes"
                t" multiples of 8"
            )
        if max(p.input_pixels(), p.output_pixels()) * p.groups >= 1 << 31:
            return String("more than 2^31 pixels of all groups")
        # A tile of the weight gradient may read another group's channels, and stores nothing of them.
        return gemm_refusal[dtype, pass_](problem_of_group(p), AS_IT_IS)

    @staticmethod
    @no_inline
    def launch[
        dtype: DType, pass_: Int
    ](
        ctx: DeviceContext, t: ConvolutionTensors[dtype], p: ConvolutionProblem
    ) raises:
        comptime if pass_ == WGRAD:
            run[dtype, pass_](ctx, t, p, AS_IT_IS)
        else:
            var columns = p.group_k() if pass_ == FPROP else p.group_c()
            if columns <= _NARROW.columns:
                _launch[dtype, pass_, _NARROW](t.result, t.a, t.b, p, ctx)
            else:
                _launch[dtype, pass_, _WIDE](t.result, t.a, t.b, p, ctx)


@always_inline
def _launch[
    dtype: DType, pass_: Int, shape: TileShape
](
    result: Ptr[dtype],
    source: Ptr[dtype],
    w: Ptr[dtype],
    p: ConvolutionProblem,
    ctx: DeviceContext,
) raises:
    comptime forward = pass_ == FPROP
    comptime assert shape.cluster == 1
    var deep = p.is_deep()
    var depth = p.group_c() if forward else p.group_k()
    var columns = p.group_k() if forward else p.group_c()
    var column_tiles = ceildiv(columns, shape.columns)
    var extents = IndexList[4](p.n, p.d, p.h, p.w)
    var steps = IndexList[3](p.stride_d, p.stride_h, p.stride_w)
    comptime if not forward:
        extents = IndexList[4](p.n, p.o, p.p, p.q)
        steps = IndexList[3](1, 1, 1)
    var pixel = depth * p.groups
    var view = SourceView.of_rows(
        depth, pixel, extents[3] * pixel, extents[2], extents[1]
    )
    var filter_map = TensorMaps[1]()
    filter_map.encode_tile[dtype, 3](
        0,
        ctx,
        w,
        IndexList[3](p.group_c(), p.taps(), p.group_k()),
        IndexList[3](
            STAGE_LENGTH, 1, shape.columns if forward else STAGE_LENGTH
        ),
        p.k * p.taps(),
    )
    var phases = group_phases[pass_](p)
    # Each launch ends with a round of few blocks: as few of them as can be.
    var first = 0
    while first < len(phases):
        var source_maps = TensorMaps[MAX_PHASES]()
        var plan = Im2colPlan[MAX_PHASES]()
        var tiles = 0
        for i in range(MAX_PHASES):
            if first + i >= len(phases):
                plan.set_first_tile(i, Int(Int32.MAX))
                continue
            var at = phases[first + i]
            set_group_phase(plan, i, p, at, tiles)
            if at.phase.taps() > 0:
                source_maps.encode_im2col[dtype](
                    i,
                    ctx,
                    source.unsafe_offset(at.group * depth),
                    extents,
                    view,
                    at.phase,
                    steps,
                    deep,
                    shape.rows(),
                    STAGE_LENGTH,
                )
            tiles += (
                ceildiv(p.n * at.phase.pixels(), shape.rows()) * column_tiles
            )
        plan.set_launch(
            problem_of_group(p),
            dgrad=not forward,
            tiles=tiles,
            column_tiles=column_tiles,
            stage_length=STAGE_LENGTH,
            column_step=shape.columns,
        )
        plan.set_groups(p.groups)
        comptime kernel = implicit_gemm_kernel[
            dtype, MAX_PHASES, shape, forward
        ]
        ctx.enqueue_function[kernel](
            source_maps,
            filter_map,
            TensorMaps[2](),
            plan,
            result,
            NOWHERE,
            grid_dim=(blocks_of(ctx, 1, tiles),),
            block_dim=(THREADS,),
            shared_mem_bytes=shape.shared_bytes(),
            func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(
                UInt32(shape.shared_bytes())
            ),
        )
        first += MAX_PHASES
