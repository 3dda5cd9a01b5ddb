"""Hopper's implicit matrix products: the problems that they take, and the launch with the chosen tile."""

from std.math import ceildiv
from std.sys import size_of

from max.gpu.host import DeviceAttribute, DeviceContext

from ...common.pointer import Ptr
from ...common.ptx import compiling_for_hopper
from ...normalization.partials import Slots
from ..kernel import ConvolutionKernel, ConvolutionTensors
from ..passes import DGRAD, FPROP, PRODUCTS, WGRAD
from ..problem import ConvolutionProblem
from .aligned import (
    AS_IT_IS,
    MAX_TRAVERSAL_STRIDE,
    Recast,
    aligned_problem,
    exchanged_beside_filter,
    filter_bytes,
    recast_of,
)
from .choice import (
    TILE_128X128,
    TILE_256X64_OF_TAPS,
    TILE_SHAPES,
    WGRAD_SHAPES,
    Product,
    choose_tile,
    choose_wgrad,
    is_compiled,
    sums_pay,
    takes_strides,
)
from .beside import Epilogue, Factor, Reader
from .copies import (
    AlignedCopies,
    AlignedTensor,
    Extents3,
    Placement,
    bring_back,
)
from .exchanged import can_exchange, exchanged_pass
from .filter_order import exchange_channels
from .launch import (
    launch_dgrad,
    launch_fprop,
    launch_wgrad,
    reads_filter_along_k,
    slots_of,
)
from .plan import stage_length, dgrad_phases, ends_short, fprop_phase
from .tensor_map import SourceView
from .tile import TileShape
from .wgrad_plan import WgradChoice

comptime MAX_PHASES = 16
"""Most phases of a data gradient."""
comptime FEW_PHASES = 8
"""Phases of a data gradient that a kernel has room for, if not for one or for all."""


def compiles_for[dtype: DType, pass_: Int]() -> Bool:
    """Returns whether the kernels exist at all for this accelerator, element type and pass: both operands of a weight
    gradient lie across its reduction, which wgmma reads of elements of 16 bits alone.
    """
    return compiling_for_hopper() and (
        dtype == DType.bfloat16
        or dtype == DType.float16
        or (dtype == DType.float32 and pass_ != WGRAD)
    )


struct Gemm(ConvolutionKernel):
    """Implicit matrix products of convolutions without groups."""

    comptime NAME: StaticString = "implicit_gemm"

    @staticmethod
    def compiles[dtype: DType, pass_: Int, grouping: Int]() -> Bool:
        return compiles_for[dtype, pass_]()

    @staticmethod
    def refusal[
        dtype: DType, pass_: Int
    ](t: ConvolutionTensors[dtype], given: ConvolutionProblem) -> Optional[
        String
    ]:
        if not t.are_aligned():
            return String("a tensor does not begin at a multiple of 16 bytes")
        return gemm_refusal[dtype, pass_](given, recast_of[dtype, pass_](given))

    @staticmethod
    def launch[
        dtype: DType, pass_: Int
    ](
        ctx: DeviceContext, t: ConvolutionTensors[dtype], p: ConvolutionProblem
    ) raises:
        run[dtype, pass_](ctx, t, p, recast_of[dtype, pass_](p))


def reason_not_any(p: ConvolutionProblem) -> Optional[String]:
    """Returns why no kernel for Hopper without groups takes a problem, or None.
    """
    if p.groups != 1:
        return String(t"takes groups = 1, not {p.groups}")
    if p.x_size() == 0 or p.y_size() == 0 or p.w_size() == 0:
        return String("a tensor is empty")
    if max(p.input_pixels(), p.output_pixels()) >= 1 << 31:
        return String("more than 2^31 pixels")
    return None


@no_inline
def gemm_refusal[
    dtype: DType, pass_: Int
](problem: ConvolutionProblem, recast: Recast) -> Optional[String]:
    """Returns None, or the reason why these kernels do not take a problem whose tensors are aligned.
    """
    var p = problem
    comptime if dtype == DType.float32:
        if not p.allow_tf32:
            return String("TF32 is not allowed")
    var general = reason_not_any(p)
    if general:
        return general
    comptime if pass_ != FPROP:
        if recast.exchanges:
            if not can_exchange(p):
                return String("strides, or pads larger than the filter")
            return gemm_refusal[dtype, exchanged_pass[pass_]()](
                exchanged_beside_filter[dtype](p), recast.once_exchanged()
            )
    var aligned = aligned_problem[dtype, pass_](p, recast)
    var copies = aligned.bytes()
    # The geometry that the copy engine sees.
    p = aligned.problem
    comptime if pass_ == DGRAD and reads_filter_along_k[dtype]():
        copies += filter_bytes[dtype](p)
    if copies > p.workspace_limit:
        return String(
            t"C = {problem.c} and K = {problem.k} need copies of"
            t" {copies} bytes, more than the workspace limit of"
            t" {p.workspace_limit}"
        )
    comptime if pass_ == DGRAD:
        if phases_at_most(p) > MAX_PHASES:
            return String(
                t"stride {p.stride_d}x{p.stride_h}x{p.stride_w} makes more"
                t" than {MAX_PHASES} phases"
            )
        for phase in dgrad_phases(p):
            # A phase without taps copies nothing.
            if phase.taps() > 0 and not phase.fits_copy_engine(p.is_deep()):
                return String(
                    "padding or dilation exceeds what the copy engine encodes"
                )
    else:
        if max(p.stride_d, p.stride_h, p.stride_w) > MAX_TRAVERSAL_STRIDE:
            return String(
                t"stride {p.stride_d}x{p.stride_h}x{p.stride_w} exceeds the"
                t" copy engine's {MAX_TRAVERSAL_STRIDE}"
            )
        if not fprop_phase(p).fits_copy_engine(p.is_deep()):
            return String(
                "padding or dilation exceeds what the copy engine encodes"
            )
    return None


def phases_at_most(p: ConvolutionProblem) -> Int:
    """Returns the product of the strides, which a data gradient's phases do not exceed.
    """
    return (p.stride_d if p.is_deep() else 1) * p.stride_h * p.stride_w


def _products[dtype: DType, pass_: Int](p: ConvolutionProblem) -> List[Product]:
    var products = List[Product]()
    comptime stage = stage_length[dtype]()
    var depth = p.c if pass_ == FPROP else p.k
    var short = 1 if ends_short(depth, stage) else 0
    var phases = [fprop_phase(p)] if pass_ == FPROP else dgrad_phases(p)
    var source_step = p.stride_w if pass_ == FPROP else 1
    for phase in phases:
        var shares = len(phases) == 1 and Bool(
            phase.sharing_taps(p, source_step)
        )
        products.append(
            Product(
                p.n * phase.pixels(),
                phase.taps() * ceildiv(depth, stage),
                phase.taps() * short,
                phase.w.extent,
                phase.w.taps if shares else 1,
            )
        )
    return products^


@no_inline
def run[
    dtype: DType, pass_: Int
](
    ctx: DeviceContext,
    t: ConvolutionTensors[dtype],
    problem: ConvolutionProblem,
    recast: Recast,
    forced: Optional[WgradChoice] = None,
) raises:
    """Runs a problem that `Gemm` takes, taken as `recast` says. A forced choice is for measurements; for fprop and
    dgrad only its shape, an index into TILE_SHAPES, counts."""
    comptime if pass_ != FPROP:
        if recast.exchanges:
            _run_exchanged[dtype, pass_](ctx, t, problem, recast, forced)
            return
    comptime if pass_ == WGRAD:
        run_wgrad[dtype, False](ctx, t, problem, recast, t.result, forced)
    else:
        var aligned = aligned_problem[dtype, pass_](problem, recast)
        var result = aligned.y if pass_ == FPROP else aligned.x
        var operand = aligned.x if pass_ == FPROP else aligned.y
        var scratch = AlignedCopies[dtype]()
        var inner = t
        inner.a = scratch.operand(t.a, operand, ctx)
        inner.b = scratch.operand(t.b, aligned.w, ctx)
        inner.result = scratch.place(t.result, result.bytes(), ctx)
        _run[dtype, pass_](ctx, inner, aligned.problem, aligned.view, forced)
        bring_back[dtype](t.result, result, inner.result, ctx)
        # The copies' memory goes back in stream order.
        _ = scratch^


@no_inline
def _run_exchanged[
    dtype: DType, pass_: Int
](
    ctx: DeviceContext,
    t: ConvolutionTensors[dtype],
    problem: ConvolutionProblem,
    recast: Recast,
    forced: Optional[WgradChoice],
) raises:
    """Runs a gradient by the exchanged problem's pass."""
    var other = exchanged_beside_filter[dtype](problem)
    var scratch = AlignedCopies[dtype]()
    var filter = scratch.place(t.b, filter_bytes[dtype](problem), ctx)
    var inner = t
    comptime if pass_ == DGRAD:
        inner.b = filter
        exchange_channels[dtype](filter, t.b, problem, ctx, reverses=True)
    else:
        inner.result = filter
        inner.a = t.b
        inner.b = t.a
    run[dtype, exchanged_pass[pass_]()](
        ctx, inner, other, recast.once_exchanged(), forced
    )
    comptime if pass_ == WGRAD:
        exchange_channels[dtype](t.result, filter, other, ctx, reverses=True)
    _ = scratch^


@no_inline
def _run[
    dtype: DType, pass_: Int
](
    ctx: DeviceContext,
    t: ConvolutionTensors[dtype],
    problem: ConvolutionProblem,
    view: SourceView,
    forced: Optional[WgradChoice],
) raises:
    var processors = ctx.get_attribute(DeviceAttribute.MULTIPROCESSOR_COUNT)
    var columns = problem.k if pass_ == FPROP else problem.c
    var chosen = forced.value().shape if forced else choose_tile[dtype](
        _products[dtype, pass_](problem),
        columns,
        problem,
        processors,
        strided=pass_ == DGRAD and phases_at_most(problem) > 1,
    )
    if not is_compiled[dtype](chosen):
        raise Error(t"Hopper convolution: no tile shape {chosen}")
    var copies = AlignedCopies[dtype]()
    var filter = t.b
    comptime if pass_ == DGRAD and reads_filter_along_k[dtype]():
        filter = copies.place(t.b, filter_bytes[dtype](problem), ctx)
        exchange_channels[dtype](filter, t.b, problem, ctx)
    comptime for i in range(len(TILE_SHAPES)):
        comptime if is_compiled[dtype](i):
            comptime shape = TILE_SHAPES[i]
            if chosen == i:
                comptime if pass_ == FPROP:
                    launch_fprop[dtype, shape](
                        t.result, t.a, filter, problem, view, ctx
                    )
                else:
                    _launch_dgrad[dtype, shape, takes_strides(i)](
                        t.result, t.a, filter, problem, ctx
                    )
    _ = copies^


@no_inline
def run_wgrad[
    dtype: DType, bias: Bool
](
    ctx: DeviceContext,
    t: ConvolutionTensors[dtype],
    problem: ConvolutionProblem,
    recast: Recast,
    db: Ptr[dtype],
    forced: Optional[WgradChoice] = None,
) raises:
    """Runs wgrad as `run` does, not exchanged, with `bias` also of the bias, to `db`.
    """
    var aligned = aligned_problem[dtype, WGRAD](problem, recast)
    var p = aligned.problem
    # What the copies take is not there for sums.
    p.workspace_limit -= aligned.bytes()
    var scratch = AlignedCopies[dtype]()
    var dw = scratch.place(t.result, aligned.w.bytes(), ctx)
    var x = scratch.operand(t.a, aligned.x, ctx)
    var dy = scratch.operand(t.b, aligned.y, ctx)
    var parts = aligned.block
    # As float32 where parts are added up; the columns of a copy of dy may be more.
    var filters = AlignedTensor(
        Extents3(p.k, 1, 1),
        Extents3(problem.k, 1, 1),
        Placement(parts, 0, 0),
        4,
    )
    var places = db
    comptime if bias:
        places = scratch.place(db, filters.bytes(), ctx)
    var choice = forced.value() if forced else choose_wgrad(
        p, ctx.get_attribute(DeviceAttribute.MULTIPROCESSOR_COUNT)
    )
    comptime for i in range(len(WGRAD_SHAPES)):
        if choice.shape == i:
            launch_wgrad[dtype, WGRAD_SHAPES[i], bias](
                dw,
                dy,
                x,
                p,
                aligned.view,
                choice,
                ctx,
                places,
                makes_float32=parts > 1,
            )
    bring_back[dtype](t.result, aligned.w, dw, ctx)
    comptime if bias:
        bring_back[dtype](db, filters, places, ctx)
    # The copies' memory goes back in stream order.
    _ = scratch^


@no_inline
def _launch_dgrad[
    dtype: DType, shape: TileShape, strided: Bool
](
    dx: Ptr[dtype],
    dy: Ptr[dtype],
    w: Ptr[dtype],
    problem: ConvolutionProblem,
    ctx: DeviceContext,
) raises:
    """Launches the kernel with room for the problem's phases, in another shape where this one is not `strided`.
    """
    comptime other = shape if strided else TILE_SHAPES[TILE_128X128]
    var phases = phases_at_most(problem)
    if phases == 1:
        launch_dgrad[dtype, shape, 1](dx, dy, w, problem, ctx)
    elif phases <= FEW_PHASES:
        launch_dgrad[dtype, other, FEW_PHASES](dx, dy, w, problem, ctx)
    else:
        # Rare strides: one shape is compiled for them.
        launch_dgrad[dtype, TILE_SHAPES[TILE_128X128], MAX_PHASES](
            dx, dy, w, problem, ctx
        )


def compiles_fused[dtype: DType, pass_: Int]() -> Bool:
    """Returns whether `run_fused` exists: of float32 a data gradient would need a copy of the filter.
    """
    return compiles_for[dtype, pass_]() and dtype != DType.float32


def _fused_shape(narrow: Int, taps: Int, heavy: Bool, slots: Int) -> TileShape:
    """Returns the one shape for narrow results, that for narrow ones of stages that serve some taps, or that for the
    rest: every op with an epilogue of its own is compiled for itself. In all of them a warpgroup multiplies while the
    other stores. Where the store reads `slots` tensors, what is under way of them takes the room of two stages, or what
    stages of several taps leave.
    """
    comptime of_taps = TILE_SHAPES[TILE_256X64_OF_TAPS]
    comptime wide = TILE_SHAPES[TILE_128X128]
    var shape = of_taps if taps > 1 else wide
    if narrow > 0 and taps == 1:
        shape.columns = narrow
        shape.stages = 8
    if slots > 0 and taps == 1:
        shape.stages -= 2
    shape.heavy = heavy
    shape.slots = slots
    return shape


def run_fused[
    dtype: DType,
    pass_: Int,
    narrow: Int,
    taps: Int,
    max_phases: Int,
    heavy: Bool,
    slots: Int,
    read: Optional[Reader[dtype]],
    epilogue: Optional[Epilogue[dtype]],
    sums: Int,
    factor: Optional[Factor[dtype]],
](
    result: Ptr[dtype],
    a: Ptr[dtype],
    b: Ptr[dtype],
    partials: Ptr[DType.float32],
    problem: ConvolutionProblem,
    recast: Recast,
    ctx: DeviceContext,
) raises:
    """Runs fprop or dgrad as `run` does, with the result handed to an epilogue before it is stored, and with `sums`
    over what is stored in each column (column_sums.mojo): for all problems of a kind.

    `narrow` is 0, or how many channels a result has at most; `taps` along W may share a stage. A dgrad's product of
    strides is `max_phases` at most. A `heavy` epilogue needs many registers for a vector. Where the problem is `recast`,
    an epilogue and sums have the columns of a block.
    """
    comptime shape = _fused_shape(narrow, taps, heavy, slots)
    comptime if pass_ == FPROP:
        var aligned = aligned_problem[dtype, FPROP](problem, recast)
        var scratch = AlignedCopies[dtype]()
        launch_fprop[dtype, shape, read, epilogue, sums, factor](
            result,
            scratch.operand(a, aligned.x, ctx),
            scratch.operand(b, aligned.w, ctx),
            aligned.problem,
            aligned.view,
            ctx,
            partials,
        )
        # The copies' memory goes back in stream order.
        _ = scratch^
    else:
        launch_dgrad[dtype, shape, max_phases, read, epilogue, sums, factor](
            result, a, b, problem, ctx, partials
        )


def fused_recast[
    dtype: DType, pass_: Int, narrow: Int, sums: Int
](problem: ConvolutionProblem) -> Recast:
    """Returns how `run_fused` takes a problem: in columns of one tile, without blocks where a factor of each channel is
    asked for."""
    comptime if pass_ == FPROP:
        comptime columns = _fused_shape(narrow, 1, False, 0).columns
        return recast_of[dtype, FPROP](
            problem, most_columns=0 if sums == PRODUCTS else columns
        )
    else:
        return AS_IT_IS


def sums_are_worth_it[
    pass_: Int, narrow: Int
](
    problem: ConvolutionProblem, recast: Recast, ctx: DeviceContext
) raises -> Bool:
    """Returns whether a plain convolution with sums over columns, in the one tile shape that makes them, is expected to
    be faster than the convolution in its best shape and a pass over its result.
    """
    comptime if narrow > 0:
        return True
    else:
        var p = aligned_problem[DType.bfloat16, pass_](problem, recast).problem
        return sums_pay(
            TILE_128X128,
            _products[DType.bfloat16, pass_](p),
            p.k if pass_ == FPROP else p.c,
            p.y_size() if pass_ == FPROP else p.x_size(),
            p,
            ctx.get_attribute(DeviceAttribute.MULTIPROCESSOR_COUNT),
        )


def slots_of_sums[
    pass_: Int, narrow: Int, taps: Int
](
    problem: ConvolutionProblem, recast: Recast, ctx: DeviceContext
) raises -> Slots:
    """Returns the slots where `run_fused` leaves its sums."""
    comptime shape = _fused_shape(narrow, taps, False, 0)
    var p = aligned_problem[DType.bfloat16, pass_](problem, recast).problem
    return slots_of[pass_, shape](p, recast.block, ctx)
