"""Depthwise convolution on any GPU: direct kernels over channels-last tensors, 16 bytes of channels to a thread.

Forward pass and data gradient share one kernel over the pixels of a phase; a thread owns a strip of pixels along W,
so a source value that is loaded once serves every tap that reads it where neither stride nor dilation parts them. The
weight gradient keeps its taps in registers over a slice of rows, adds the block's threads in shared memory, then the
slices in order: no atomics, the same bits every time.
"""

from std.math import ceildiv
from std.memory import stack_allocation
from std.sys.info import size_of

from max.gpu import barrier, block_idx, global_idx, thread_idx
from max.gpu.host import DeviceBuffer, DeviceContext
from max.gpu.memory import AddressSpace

from ..common import FPROP, Ptr
from ..gather import Phase, forward_phases, full_tap, gradient_phases
from ..problem import ConvolutionProblem
from .tiled import add_slices, wgrad_slices

# Pixels of one thread's strip.
comptime STRIP = 4
comptime BLOCK = 128
# The weight gradient's blocks: threads along channels, and threads that share a channel's pixels.
comptime WGRAD_LANES = 16
comptime WGRAD_ROWS = 8


@always_inline
def _load[
    dtype: DType, vector: Int
](p: Ptr[dtype], at: Int) -> SIMD[DType.float32, vector]:
    return (
        p.unsafe_offset(at)
        .unsafe_load[width=vector, alignment=vector * size_of[dtype]()]()
        .cast[DType.float32]()
    )


def depthwise_filter_kernel[
    dtype: DType
](
    packed: Ptr[DType.float32],
    w: Ptr[dtype],
    g: ConvolutionProblem,
    phase: Phase,
):
    """The phase's taps as [tap][channel] in float32."""
    var i = global_idx.x
    if i >= phase.taps() * g.c:
        return
    packed[unsafe_offset=phase.filter_offset + i] = w[
        unsafe_offset=i % g.c * g.taps() + full_tap(g, phase, i // g.c)
    ].cast[DType.float32]()


def depthwise_gather_kernel[
    dtype: DType, vector: Int, unit_taps: Int
](
    result: Ptr[dtype],
    source: Ptr[dtype],
    packed: Ptr[DType.float32],
    phase: Phase,
    batch: Int64,
    channels_: Int64,
):
    """A strip of pixels by `vector` channels; `unit_taps` > 0 says that many taps along W are neighbours.
    """
    comptime T = SIMD[DType.float32, vector]
    var channels = Int(channels_)
    var lanes = channels // vector
    var strips = ceildiv(phase.w.rows, STRIP)
    var index = global_idx.x
    var c = index % lanes * vector
    var rest = index // lanes
    var q0 = rest % strips * STRIP
    rest //= strips
    var p = rest % phase.h.rows
    rest //= phase.h.rows
    var o = rest % phase.d.rows
    var n = rest // phase.d.rows
    if n >= Int(batch):
        return
    var acc = Array[T, STRIP](fill=0)
    var filter = packed.unsafe_offset(phase.filter_offset + c)
    for t in range(phase.d.taps):
        var d = o * phase.d.step + phase.d.offset(t)
        if d < 0 or d >= phase.d.source:
            continue
        for r in range(phase.h.taps):
            var h = p * phase.h.step + phase.h.offset(r)
            if h < 0 or h >= phase.h.source:
                continue
            var row = source.unsafe_offset(
                ((n * phase.d.source + d) * phase.h.source + h)
                * phase.w.source
                * channels
                + c
            )
            var taps = filter.unsafe_offset(
                (t * phase.h.taps + r) * phase.w.taps * channels
            )
            comptime if unit_taps > 0:
                # Offsets rise (forward) or fall (gradient) by one: visit columns from the lowest.
                var rising = phase.w.offset_step > 0
                var lowest = q0 + (
                    phase.w.first_offset if rising else phase.w.first_offset
                    - (unit_taps - 1)
                )
                var f = Array[T, unit_taps](fill=0)
                comptime for s in range(unit_taps):
                    f[s] = _load[DType.float32, vector](
                        taps, (s if rising else unit_taps - 1 - s) * channels
                    )
                comptime for j in range(STRIP + unit_taps - 1):
                    var column = lowest + j
                    var value = T(0)
                    if column >= 0 and column < phase.w.source:
                        value = _load[dtype, vector](row, column * channels)
                    comptime for s in range(unit_taps):
                        comptime if j - s >= 0 and j - s < STRIP:
                            acc[j - s] = value.fma(f[s], acc[j - s])
            else:
                for s in range(phase.w.taps):
                    var f = _load[DType.float32, vector](taps, s * channels)
                    comptime for i in range(STRIP):
                        var column = (q0 + i) * phase.w.step + phase.w.offset(s)
                        if column >= 0 and column < phase.w.source:
                            acc[i] = _load[dtype, vector](
                                row, column * channels
                            ).fma(f, acc[i])
    var pixel = (
        (n * phase.d.out_extent + phase.d.out_first + o * phase.d.out_step)
        * phase.h.out_extent
        + phase.h.out_first
        + p * phase.h.out_step
    ) * phase.w.out_extent + phase.w.out_first
    comptime for i in range(STRIP):
        if q0 + i < phase.w.rows:
            result.unsafe_offset(
                (pixel + (q0 + i) * phase.w.out_step) * channels + c
            ).unsafe_store[alignment=vector * size_of[dtype]()](
                acc[i].cast[dtype]()
            )


def depthwise_wgrad_kernel[
    dtype: DType, vector: Int, tap_rows: Int, tap_columns: Int
](
    partials: Ptr[DType.float32],
    x: Ptr[dtype],
    dy: Ptr[dtype],
    g: ConvolutionProblem,
    slices: Int64,
):
    """Partial dw [tap][channel] of one slice of dy's rows, for one patch of taps and one block of channels.
    """
    comptime T = SIMD[DType.float32, vector]
    comptime size = tap_rows * tap_columns
    var lane = thread_idx.x
    var channel_blocks = ceildiv(g.c // vector, WGRAD_LANES)
    # Patches of taps run fastest: blocks that read the same rows run together and share them in the cache.
    var patches_w = g.s // tap_columns
    var patches_h = g.r // tap_rows
    var patch = block_idx.x
    var s0 = patch % patches_w * tap_columns
    patch //= patches_w
    var r0 = patch % patches_h * tap_rows
    var t = patch // patches_h
    var slice = block_idx.y // channel_blocks
    var c = (block_idx.y % channel_blocks * WGRAD_LANES + lane) * vector
    var live = c < g.c
    var acc = Array[T, size](fill=0)
    var rows = g.n * g.o * g.p
    var first = rows * slice // Int(slices)
    var last = rows * (slice + 1) // Int(slices)
    # Threads of a block take neighbouring pixels of the slice.
    var pixels = (last - first) * g.q
    if live:
        for at in range(thread_idx.y, pixels, WGRAD_ROWS):
            var index = first + at // g.q
            var q = at % g.q
            var p = index % g.p
            var outer = index // g.p
            var n = outer // g.o
            var d = outer % g.o * g.stride_d + t * g.dilation_d - g.pad_d
            if d < 0 or d >= g.d:
                continue
            var value = _load[dtype, vector](dy, (index * g.q + q) * g.c + c)
            comptime for r in range(tap_rows):
                var h = p * g.stride_h + (r0 + r) * g.dilation_h - g.pad_h
                if h >= 0 and h < g.h:
                    var row = ((n * g.d + d) * g.h + h) * g.w
                    comptime for s in range(tap_columns):
                        var column = (
                            q * g.stride_w + (s0 + s) * g.dilation_w - g.pad_w
                        )
                        if column >= 0 and column < g.w:
                            acc[r * tap_columns + s] = _load[dtype, vector](
                                x, (row + column) * g.c + c
                            ).fma(value, acc[r * tap_columns + s])
    var shared = stack_allocation[
        WGRAD_LANES * WGRAD_ROWS * vector,
        Float32,
        address_space=AddressSpace.SHARED,
    ]()
    var mine = (thread_idx.y * WGRAD_LANES + lane) * vector
    comptime for i in range(size):
        barrier()
        shared.unsafe_offset(mine).unsafe_store(acc[i])
        barrier()
        if thread_idx.y == 0 and live:
            var total = T(0)
            comptime for row in range(WGRAD_ROWS):
                total += shared.unsafe_offset(
                    (row * WGRAD_LANES + lane) * vector
                ).unsafe_load[width=vector]()
            # dw is [channel][tap].
            var tap = (
                (t * g.r + r0 + i // tap_columns) * g.s + s0 + i % tap_columns
            )
            comptime for j in range(vector):
                partials[
                    unsafe_offset=(slice * g.c + c + j) * g.taps() + tap
                ] = total[j]


@always_inline
def _launch_gather[
    dtype: DType, vector: Int
](
    result: DeviceBuffer[dtype],
    source: DeviceBuffer[dtype],
    packed: DeviceBuffer[DType.float32],
    g: ConvolutionProblem,
    phase: Phase,
    ctx: DeviceContext,
) raises:
    var threads = (
        g.n
        * phase.d.rows
        * phase.h.rows
        * ceildiv(phase.w.rows, STRIP)
        * (g.c // vector)
    )
    var unit = phase.w.step == 1 and abs(phase.w.offset_step) == 1
    if unit and phase.w.taps == 3:
        ctx.enqueue_function[depthwise_gather_kernel[dtype, vector, 3]](
            result,
            source,
            packed,
            phase,
            Int64(g.n),
            Int64(g.c),
            grid_dim=ceildiv(threads, BLOCK),
            block_dim=BLOCK,
        )
    else:
        ctx.enqueue_function[depthwise_gather_kernel[dtype, vector, 0]](
            result,
            source,
            packed,
            phase,
            Int64(g.n),
            Int64(g.c),
            grid_dim=ceildiv(threads, BLOCK),
            block_dim=BLOCK,
        )


@always_inline
def _is_aligned[dtype: DType](buffer: DeviceBuffer[dtype]) -> Bool:
    return Int(buffer.unsafe_ptr()) % 16 == 0


@no_inline
def depthwise_gather_gpu[
    dtype: DType, pass_: Int
](
    result: DeviceBuffer[dtype],
    source: DeviceBuffer[dtype],
    w: DeviceBuffer[dtype],
    g: ConvolutionProblem,
    ctx: DeviceContext,
) raises:
    """The forward pass (source x, result y) or the data gradient (source dy, result dx).
    """
    comptime vector = 16 // size_of[dtype]()
    var wide = g.c % vector == 0 and _is_aligned(result) and _is_aligned(source)
    var phases: List[Phase]
    comptime if pass_ == FPROP:
        phases = forward_phases(g)
    else:
        phases = gradient_phases(g, g.c)
    var packed = ctx.enqueue_create_buffer[DType.float32](
        max(1, g.taps() * g.c)
    )
    for phase in phases:
        if phase.taps() > 0:
            ctx.enqueue_function[depthwise_filter_kernel[dtype]](
                packed,
                w,
                g,
                phase,
                grid_dim=ceildiv(phase.taps() * g.c, BLOCK),
                block_dim=BLOCK,
            )
        if phase.rows(g.n) == 0:
            continue
        if wide:
            _launch_gather[dtype, vector](result, source, packed, g, phase, ctx)
        else:
            _launch_gather[dtype, 1](result, source, packed, g, phase, ctx)


@always_inline
def _launch_wgrad[
    dtype: DType, vector: Int, tap_rows: Int, tap_columns: Int
](
    partials: DeviceBuffer[DType.float32],
    x: DeviceBuffer[dtype],
    dy: DeviceBuffer[dtype],
    g: ConvolutionProblem,
    slices: Int,
    ctx: DeviceContext,
) raises:
    ctx.enqueue_function[
        depthwise_wgrad_kernel[dtype, vector, tap_rows, tap_columns]
    ](
        partials,
        x,
        dy,
        g,
        Int64(slices),
        grid_dim=(
            g.t * (g.r // tap_rows) * (g.s // tap_columns),
            ceildiv(g.c // vector, WGRAD_LANES) * slices,
        ),
        block_dim=(WGRAD_LANES, WGRAD_ROWS),
    )


@no_inline
def depthwise_wgrad_gpu[
    dtype: DType
](
    dw: DeviceBuffer[dtype],
    x: DeviceBuffer[dtype],
    dy: DeviceBuffer[dtype],
    g: ConvolutionProblem,
    ctx: DeviceContext,
) raises:
    comptime vector = 16 // size_of[dtype]()
    var wide = g.c % vector == 0 and _is_aligned(x) and _is_aligned(dy)
    var lanes = g.c // vector if wide else g.c
    var blocks = ceildiv(lanes, WGRAD_LANES)
    # Each block reduces at least 64 pixels for each of its threads; the grid's second extent is at most 65535.
    var slices = wgrad_slices(g, 1, 64 * WGRAD_ROWS)
    slices = max(1, min(slices, 65535 // blocks))
    var partials = ctx.enqueue_create_buffer[DType.float32](slices * g.w_size())
    var square = g.r % 3 == 0 and g.s % 3 == 0
    if wide and square:
        _launch_wgrad[dtype, vector, 3, 3](partials, x, dy, g, slices, ctx)
    elif wide:
        _launch_wgrad[dtype, vector, 1, 1](partials, x, dy, g, slices, ctx)
    else:
        _launch_wgrad[dtype, 1, 1, 1](partials, x, dy, g, slices, ctx)
    add_slices(dw, partials, g.w_size(), slices, ctx)


def depthwise_gpu_can_implement(g: ConvolutionProblem) -> Optional[String]:
    """None, or why these kernels do not take the problem."""
    if g.groups != g.c or g.groups != g.k:
        return String(t"C = {g.c}, K = {g.k} and groups = {g.groups} differ")
    if 4 * g.w_size() > g.workspace_limit:
        return String(
            t"the filter takes {4 * g.w_size()} bytes, the workspace limit is"
            t" {g.workspace_limit}"
        )
    if g.c > 16 * 65535:
        return String(t"C = {g.c}; the grid takes at most {16 * 65535}")
    return None
