"""Tiled implicit GEMM for any GPU, group count, filter, stride and dilation; sums in float32.

Forward pass and data gradient: rows are the pixels of one phase, columns the result's channels of one group, and the
reduction runs over taps and channels. Weight gradient: rows are dy's channels, columns the filter's taps and channels,
and the reduction over pixels is split into slices that a second kernel adds in order. Tiles live in shared memory; no
column matrix exists.
"""

from std.math import ceildiv
from std.memory import stack_allocation

from max.gpu import barrier, block_idx, thread_idx
from max.gpu.host import DeviceBuffer, DeviceContext
from max.gpu.memory import AddressSpace

from ...common.library import scratch
from ...common.pointer import Ptr
from ..passes import FPROP, WGRAD
from ..gather import Phase, forward_phases, full_tap, gradient_phases
from ..kernel import ConvolutionKernel, ConvolutionTensors
from ..problem import ConvolutionProblem

comptime TILE = 64
"""Rows, and columns, of a block's tile."""
comptime DEPTH = 16
"""Steps of the reduction in shared memory at once."""
comptime SIDE = 16
"""Threads along a side of the tile."""
comptime THREADS = SIDE * SIDE
# Values of a tile row that one thread loads, and results of a row that it owns.
comptime THREAD_RESULTS = TILE // SIDE
comptime Shared = MutPointer[
    Float32, MutUntrackedOrigin, address_space=AddressSpace.SHARED
]

# Blocks that keep a large GPU busy; the weight gradient is split until there are about this many.
comptime SATURATING_BLOCKS = 1024
comptime MIN_SLICE = 256
"""Pixels of a slice of the weight gradient's reduction."""
comptime MAX_SLICES = 256
comptime SUM_COLUMNS = 32


@always_inline
def _multiply(
    mut acc: Array[SIMD[DType.float32, THREAD_RESULTS], THREAD_RESULTS],
    a: Shared,
    b: Shared,
    row: Int,
    column: Int,
):
    """Adds the product of two tiles [DEPTH][TILE] to this thread's results."""
    comptime for k in range(DEPTH):
        var left = a.unsafe_offset(k * TILE + row).unsafe_load[
            width=THREAD_RESULTS
        ]()
        var right = b.unsafe_offset(k * TILE + column).unsafe_load[
            width=THREAD_RESULTS
        ]()
        comptime for i in range(THREAD_RESULTS):
            acc[i] = SIMD[DType.float32, THREAD_RESULTS](left[i]).fma(
                right, acc[i]
            )


@__name(t"conv_tiled_gather_{dtype}_p{pass_}")
def convolution_tiled_gather_kernel[
    dtype: DType, pass_: Int
](
    result: Ptr[dtype],
    source: Ptr[dtype],
    w: Ptr[dtype],
    problem: ConvolutionProblem,
    phase: Phase,
):
    """Computes one TILE x TILE tile of y or of one phase of dx."""
    comptime forward = pass_ == FPROP
    var channels = problem.c if forward else problem.k
    var result_channels = problem.k if forward else problem.c
    var depth = channels // problem.groups
    var columns = result_channels // problem.groups
    var taps = phase.taps()
    var rows = phase.rows(problem.n)
    var a = stack_allocation[
        DEPTH * TILE, Float32, address_space=AddressSpace.SHARED
    ]()
    var b = stack_allocation[
        DEPTH * TILE, Float32, address_space=AddressSpace.SHARED
    ]()
    var thread = thread_idx.x
    var group = block_idx.z
    # Loading: one row of pixels and one column of the filter, PER neighbouring values of the reduction.
    var line = thread // (DEPTH // THREAD_RESULTS)
    var inner = thread % (DEPTH // THREAD_RESULTS) * THREAD_RESULTS
    var row = block_idx.x * TILE + line
    var column = block_idx.y * TILE + line
    var q = row % phase.w.rows
    var rest = row // phase.w.rows
    var p = rest % phase.h.rows
    rest //= phase.h.rows
    var o = rest % phase.d.rows
    var n = rest // phase.d.rows

    var acc = Array[SIMD[DType.float32, THREAD_RESULTS], THREAD_RESULTS](fill=0)
    var tap = inner // depth
    var c = inner % depth
    for _ in range(0, taps * depth, DEPTH):
        var tap_i = tap
        var c_i = c
        comptime for i in range(THREAD_RESULTS):
            var left = Float32(0)
            var right = Float32(0)
            if tap_i < taps:
                var s = tap_i % phase.w.taps
                var outer = tap_i // phase.w.taps
                var d = o * phase.d.step + phase.d.offset(outer // phase.h.taps)
                var h = p * phase.h.step + phase.h.offset(outer % phase.h.taps)
                var x = q * phase.w.step + phase.w.offset(s)
                if (
                    row < rows
                    and d >= 0
                    and d < phase.d.source
                    and h >= 0
                    and h < phase.h.source
                    and x >= 0
                    and x < phase.w.source
                ):
                    var pixel = (
                        (n * phase.d.source + d) * phase.h.source + h
                    ) * phase.w.source + x
                    left = source[
                        unsafe_offset=pixel * channels + group * depth + c_i
                    ].cast[DType.float32]()
                if column < columns:
                    var full = full_tap(problem, phase, tap_i)
                    var k = group * problem.group_k()
                    var at: Int
                    comptime if forward:
                        at = (
                            (k + column) * problem.taps() + full
                        ) * depth + c_i
                    else:
                        at = (
                            (k + c_i) * problem.taps() + full
                        ) * columns + column
                    right = w[unsafe_offset=at].cast[DType.float32]()
            a[unsafe_offset=(inner + i) * TILE + line] = left
            b[unsafe_offset=(inner + i) * TILE + line] = right
            c_i += 1
            if c_i == depth:
                c_i = 0
                tap_i += 1
        barrier()
        _multiply(
            acc,
            a,
            b,
            thread // SIDE * THREAD_RESULTS,
            thread % SIDE * THREAD_RESULTS,
        )
        barrier()
        c += DEPTH
        while c >= depth:
            c -= depth
            tap += 1

    comptime for i in range(THREAD_RESULTS):
        var m = block_idx.x * TILE + thread // SIDE * THREAD_RESULTS + i
        if m < rows:
            var mq = m % phase.w.rows
            var mr = m // phase.w.rows
            var mp = mr % phase.h.rows
            mr //= phase.h.rows
            var mo = mr % phase.d.rows
            var pixel = (
                (
                    (
                        mr // phase.d.rows * phase.d.out_extent
                        + phase.d.out_first
                        + mo * phase.d.out_step
                    )
                    * phase.h.out_extent
                    + phase.h.out_first
                    + mp * phase.h.out_step
                )
                * phase.w.out_extent
                + phase.w.out_first
                + mq * phase.w.out_step
            )
            comptime for j in range(THREAD_RESULTS):
                var k = block_idx.y * TILE + thread % SIDE * THREAD_RESULTS + j
                if k < columns:
                    result[
                        unsafe_offset=pixel * result_channels
                        + group * columns
                        + k
                    ] = acc[i][j].cast[dtype]()


@__name(t"conv_tiled_wgrad_{dtype}")
def convolution_tiled_wgrad_kernel[
    dtype: DType
](
    partials: Ptr[DType.float32],
    x: Ptr[dtype],
    dy: Ptr[dtype],
    problem: ConvolutionProblem,
    slice_pixels: Int64,
    slices: Int64,
):
    """Computes one TILE x TILE tile of one slice's partial dw."""
    var kg = problem.group_k()
    var cg = problem.group_c()
    var columns = problem.taps() * cg
    var pixels = problem.output_pixels()
    var a = stack_allocation[
        DEPTH * TILE, Float32, address_space=AddressSpace.SHARED
    ]()
    var b = stack_allocation[
        DEPTH * TILE, Float32, address_space=AddressSpace.SHARED
    ]()
    var thread = thread_idx.x
    var group = block_idx.z // Int(slices)
    var slice = block_idx.z % Int(slices)
    # Loading: one pixel, PER neighbouring channels of dy and PER neighbouring columns.
    var line = thread // SIDE
    var inner = thread % SIDE * THREAD_RESULTS
    var first_k = block_idx.y * TILE + inner
    var first_column = block_idx.x * TILE + inner
    var first = slice * Int(slice_pixels)
    var last = min(pixels, first + Int(slice_pixels))

    var acc = Array[SIMD[DType.float32, THREAD_RESULTS], THREAD_RESULTS](fill=0)
    for start in range(first, last, DEPTH):
        var pixel = start + line
        var q = pixel % problem.q
        var rest = pixel // problem.q
        var p = rest % problem.p
        rest //= problem.p
        var o = rest % problem.o
        var n = rest // problem.o
        comptime for i in range(THREAD_RESULTS):
            var left = Float32(0)
            var right = Float32(0)
            if pixel < last:
                if first_k + i < kg:
                    left = dy[
                        unsafe_offset=pixel * problem.k
                        + group * kg
                        + first_k
                        + i
                    ].cast[DType.float32]()
                var column = first_column + i
                if column < columns:
                    var tap = column // cg
                    var s = tap % problem.s
                    var outer = tap // problem.s
                    var d = (
                        o * problem.stride_d
                        + outer // problem.r * problem.dilation_d
                        - problem.pad_d
                    )
                    var h = (
                        p * problem.stride_h
                        + outer % problem.r * problem.dilation_h
                        - problem.pad_h
                    )
                    var at = (
                        q * problem.stride_w
                        + s * problem.dilation_w
                        - problem.pad_w
                    )
                    if (
                        d >= 0
                        and d < problem.d
                        and h >= 0
                        and h < problem.h
                        and at >= 0
                        and at < problem.w
                    ):
                        right = x[
                            unsafe_offset=(
                                ((n * problem.d + d) * problem.h + h)
                                * problem.w
                                + at
                            )
                            * problem.c
                            + group * cg
                            + column % cg
                        ].cast[DType.float32]()
            a[unsafe_offset=line * TILE + inner + i] = left
            b[unsafe_offset=line * TILE + inner + i] = right
        barrier()
        _multiply(
            acc,
            a,
            b,
            thread // SIDE * THREAD_RESULTS,
            thread % SIDE * THREAD_RESULTS,
        )
        barrier()

    var base = partials.unsafe_offset(slice * problem.w_size())
    comptime for i in range(THREAD_RESULTS):
        var k = block_idx.y * TILE + thread // SIDE * THREAD_RESULTS + i
        comptime for j in range(THREAD_RESULTS):
            var column = block_idx.x * TILE + thread % SIDE * THREAD_RESULTS + j
            if k < kg and column < columns:
                base[unsafe_offset=(group * kg + k) * columns + column] = acc[
                    i
                ][j]


@__name(t"conv_slice_sum_{dtype}_{sum_rows}")
def slice_sum_kernel[
    dtype: DType, sum_rows: Int
](
    result: Ptr[dtype],
    partials: Ptr[DType.float32],
    size: Int64,
    slices: Int64,
):
    """Writes the sums of the slices' partial sums; `sum_rows` threads share a result and add in a fixed order.
    """
    var shared = stack_allocation[
        SUM_COLUMNS * sum_rows, Float32, address_space=AddressSpace.SHARED
    ]()
    var i = block_idx.x * SUM_COLUMNS + thread_idx.x
    var total = Float32(0)
    if i < Int(size):
        for slice in range(thread_idx.y, Int(slices), sum_rows):
            total += partials[unsafe_offset=slice * Int(size) + i]
    shared[unsafe_offset=thread_idx.y * SUM_COLUMNS + thread_idx.x] = total
    barrier()
    if thread_idx.y == 0 and i < Int(size):
        total = 0
        comptime for row in range(sum_rows):
            total += shared[unsafe_offset=row * SUM_COLUMNS + thread_idx.x]
        result[unsafe_offset=i] = total.cast[dtype]()


@no_inline
def tiled_gather_gpu[
    dtype: DType, pass_: Int
](
    result: Ptr[dtype],
    source: Ptr[dtype],
    w: Ptr[dtype],
    p: ConvolutionProblem,
    ctx: DeviceContext,
) raises:
    """Computes the forward pass (source x, result y) or the data gradient (source dy, result dx).
    """
    var phases: List[Phase]
    comptime if pass_ == FPROP:
        phases = forward_phases(p)
    else:
        phases = gradient_phases(p, 0)
    var columns = p.group_k() if pass_ == FPROP else p.group_c()
    for phase in phases:
        var rows = phase.rows(p.n)
        if rows == 0:
            continue
        ctx.enqueue_function[convolution_tiled_gather_kernel[dtype, pass_]](
            result,
            source,
            w,
            p,
            phase,
            grid_dim=(ceildiv(rows, TILE), ceildiv(columns, TILE), p.groups),
            block_dim=THREADS,
        )


@no_inline
def tiled_wgrad_gpu[
    dtype: DType
](
    dw: Ptr[dtype],
    x: Ptr[dtype],
    dy: Ptr[dtype],
    p: ConvolutionProblem,
    ctx: DeviceContext,
) raises:
    """Computes the weight gradient; its partial sums stay within the workspace limit.
    """
    var size = p.w_size()
    var tiles_k = ceildiv(p.group_k(), TILE)
    var tiles_c = ceildiv(p.taps() * p.group_c(), TILE)
    var slices = wgrad_slices(p, tiles_k * tiles_c * p.groups, MIN_SLICE)
    # The grid's third extent is at most 65535.
    slices = max(1, min(slices, 65535 // p.groups))
    var partials = scratch[DType.float32](ctx, slices * size)
    ctx.enqueue_function[convolution_tiled_wgrad_kernel[dtype]](
        partials,
        x,
        dy,
        p,
        Int64(ceildiv(p.output_pixels(), slices)),
        Int64(slices),
        grid_dim=(tiles_c, tiles_k, p.groups * slices),
        block_dim=THREADS,
    )
    add_slices(dw, partials, size, slices, ctx)


def wgrad_slices(p: ConvolutionProblem, blocks: Int, least: Int) -> Int:
    """Returns the number of slices of pixels that fill the GPU within the workspace limit, at least one.
    """
    var wanted = min(
        ceildiv(SATURATING_BLOCKS, max(1, blocks)),
        ceildiv(p.output_pixels(), least),
    )
    var fit = p.workspace_limit // max(1, 4 * p.w_size())
    return max(1, min(min(wanted, fit), MAX_SLICES))


@no_inline
def add_slices[
    dtype: DType
](
    result: Ptr[dtype],
    partials: DeviceBuffer[DType.float32],
    size: Int,
    slices: Int,
    ctx: DeviceContext,
) raises:
    # Many slices of few sums want many threads for each: their loads are the time.
    comptime for sum_rows in [8, 32]:
        if sum_rows == 32 or slices <= 64:
            ctx.enqueue_function[slice_sum_kernel[dtype, sum_rows]](
                result,
                partials,
                Int64(size),
                Int64(slices),
                grid_dim=ceildiv(size, SUM_COLUMNS),
                block_dim=(SUM_COLUMNS, sum_rows),
            )
            return


struct Tiled(ConvolutionKernel):
    comptime NAME: StaticString = "tiled"

    @staticmethod
    def compiles[dtype: DType, pass_: Int, grouping: Int]() -> Bool:
        return dtype != DType.float64

    @staticmethod
    def refusal[
        dtype: DType, pass_: Int
    ](t: ConvolutionTensors[dtype], p: ConvolutionProblem) -> Optional[String]:
        if p.groups > 65535:
            return String(t"groups = {p.groups}; the grid takes at most 65535")
        comptime if pass_ == WGRAD:
            var bytes = 4 * p.w_size()
            if bytes > p.workspace_limit:
                return String(
                    t"the sums take {bytes} bytes, the workspace limit is"
                    t" {p.workspace_limit}"
                )
            if ceildiv(p.group_k(), TILE) > 65535:
                return String(t"K = {p.k}; the grid takes at most 65535 tiles")
        return None

    @staticmethod
    def launch[
        dtype: DType, pass_: Int
    ](
        ctx: DeviceContext, t: ConvolutionTensors[dtype], p: ConvolutionProblem
    ) raises:
        comptime if pass_ == WGRAD:
            tiled_wgrad_gpu[dtype](t.result, t.a, t.b, p, ctx)
        else:
            tiled_gather_gpu[dtype, pass_](t.result, t.a, t.b, p, ctx)
