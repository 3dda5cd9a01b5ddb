"""Groups of many channels. In the forward pass and the data gradient each group is a phase of one implicit matrix
product; in the weight gradient a tile belongs to one group (`WgradPlan.filters`).

The kernel knows phases: products with a tensor map, a first tap and places in the result of their own. For a group
these are

    source   its channels of every pixel. What lies past them is zeros, as past any tensor's last channel, and never channels of
             another group: zeros of the filter times infinity would be NaN
    filter   [K / G][K * T * R * S][C / G]: the rows of a group begin with another "tap"; for float32's data gradient
             [C / G][C * T * R * S][K / G], a copy
    result   [N, D, H, W * G, channels / G]: a pixel of the group is every G-th one along W

convolution_by_kernel.json has times beside cuDNN's for drawn problems.
"""

from std.math import ceildiv
from std.sys import size_of
from std.utils.index import IndexList

from max.gpu.host import DeviceContext, FuncAttribute

from ...common.pointer import Ptr
from ..kernel import ConvolutionKernel, ConvolutionTensors
from ..passes import DGRAD, FPROP, ONE_GROUP, WGRAD
from ..problem import ConvolutionProblem
from .aligned import AS_IT_IS, filter_bytes
from .copies import AlignedCopies
from .choice import TILE_128X128, TILE_256X64, TILE_SHAPES
from .filter_order import MAX_FILTERS, exchange_channels
from .gemm import MAX_PHASES, compiles_for, gemm_refusal, run
from .implicit_gemm import implicit_gemm_kernel
from .launch import NOWHERE, blocks_of, reads_filter_along_k
from .plan import (
    Im2colPhase,
    Im2colPlan,
    dgrad_phases,
    fprop_phase,
    stage_length,
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
    filter_rows: Int,
):
    """Sets a phase of a group; a group's filter has `filter_rows` rows of each tap.
    """
    plan.set_phase(index, problem_of_group(p), at.phase, first_tile)
    plan.set_group(index, at.group, p.groups, filter_rows * p.taps())


struct GroupedGemm(ConvolutionKernel):
    comptime NAME: StaticString = "implicit_gemm_groups"

    @staticmethod
    def compiles[dtype: DType, pass_: Int, grouping: Int]() -> Bool:
        return grouping != ONE_GROUP and compiles_for[dtype, pass_]()

    @staticmethod
    def refusal[
        dtype: DType, pass_: Int
    ](t: ConvolutionTensors[dtype], p: ConvolutionProblem) -> Optional[String]:
        if not t.are_aligned():
            return String("a tensor does not begin at a multiple of 16 bytes")
        if p.groups == 1:
            return String("takes groups")
        comptime vector = 16 // size_of[dtype]()
        if p.group_c() % vector != 0 or p.group_k() % vector != 0:
            return String(
                t"{p.group_c()} and {p.group_k()} channels in a group; takes"
                t" multiples of {vector}"
            )
        comptime if pass_ == DGRAD and reads_filter_along_k[dtype]():
            if filter_bytes[dtype](p) > p.workspace_limit:
                return String("the filter's copy exceeds the workspace limit")
            if p.groups > MAX_FILTERS:
                return String(t"takes up to {MAX_FILTERS} groups")
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
            var copies = AlignedCopies[dtype]()
            var filter = t.b
            comptime if pass_ == DGRAD and reads_filter_along_k[dtype]():
                filter = copies.place(t.b, filter_bytes[dtype](p), ctx)
                exchange_channels[dtype](
                    filter, t.b, problem_of_group(p), ctx, filters=p.groups
                )
            if columns <= _NARROW.columns:
                _launch[dtype, pass_, _NARROW](t.result, t.a, filter, p, ctx)
            else:
                _launch[dtype, pass_, _WIDE](t.result, t.a, filter, p, ctx)
            # The copy's memory goes back in stream order.
            _ = copies^


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
    comptime length = stage_length[dtype]()
    comptime filter_k_major = forward or reads_filter_along_k[dtype]()
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
    var filter_depth, filter_rows = (p.group_c(), p.group_k())
    comptime if filter_k_major and not forward:
        filter_depth, filter_rows = (p.group_k(), p.group_c())
    filter_map.encode_tile[dtype, 3](
        0,
        ctx,
        w,
        IndexList[3](filter_depth, p.taps(), filter_rows),
        IndexList[3](length, 1, shape.columns if filter_k_major else length),
        p.groups * filter_rows * p.taps(),
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
            set_group_phase(plan, i, p, at, tiles, filter_rows)
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
                    length,
                )
            tiles += (
                ceildiv(p.n * at.phase.pixels(), shape.rows()) * column_tiles
            )
        plan.set_launch(
            problem_of_group(p),
            dgrad=not forward,
            tiles=tiles,
            column_tiles=column_tiles,
            stage_length=length,
            column_step=shape.columns,
        )
        plan.set_groups(p.groups)
        comptime kernel = implicit_gemm_kernel[
            dtype, MAX_PHASES, shape, filter_k_major
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
