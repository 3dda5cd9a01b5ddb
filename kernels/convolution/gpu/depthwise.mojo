"""Depthwise convolution on any GPU: direct kernels over channels-last tensors, VECTOR channels to a thread.

A thread owns a narrow strip of columns and marches down its rows, so that a source row, loaded once, serves every tap
row; neighbouring threads own neighbouring strips and share the columns between them in the first-level cache. The
weight gradient marches alike, keeps its taps in registers, adds the block's threads in shared memory, then the slices
in order: no atomics, the same bits every time. Rows are a run-time loop on purpose: unrolled, every load of the tile
moves to the front and registers spill.
"""

from std.math import ceildiv
from std.memory import stack_allocation
from std.sys.info import size_of
from std.utils.static_tuple import StaticTuple

from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    barrier,
    block_idx,
    global_idx,
    thread_idx,
)
from max.gpu.host import DeviceAttribute, DeviceBuffer, DeviceContext
from max.gpu.memory import AddressSpace

from ..common import FPROP, Ptr
from ..gather import Axis, Phase, forward_phases, full_tap, gradient_phases
from ..problem import ConvolutionProblem
from .pipeline import divide
from .tiled import add_slices

# Channels of a thread. Eight of them, 16 bytes of bfloat16, would want more registers than a thread has.
comptime VECTOR = 4
# Columns of a thread's strip, and rows that it marches at most.
comptime STRIP = 2
comptime MARCH = 16
comptime BLOCK = 128
# Threads of a multiprocessor that registers must suffice for.
comptime RESIDENT = 512
# The weight gradient's blocks: at most so many threads along channels, the rest share a channel's pixels.
comptime WGRAD_THREADS = 128
comptime WGRAD_LANES = 32
# Blocks for each multiprocessor: as many as registers let run together.
comptime WGRAD_BLOCKS = 4


def _march(rows: Int) -> Int:
    """Rows of each march: equal ones, not many more than it takes."""
    return ceildiv(rows, max(1, ceildiv(rows, MARCH)))


@always_inline
def _load[
    dtype: DType, vector: Int
](p: Ptr[dtype], at: Int) -> SIMD[dtype, vector]:
    return p.unsafe_offset(at).unsafe_load[
        width=vector, alignment=vector * size_of[dtype]()
    ]()


@always_inline
def _load_inside[
    dtype: DType, vector: Int
](p: Ptr[dtype], at: Int, inside: Bool) -> SIMD[dtype, vector]:
    """Zeros where not `inside`."""
    var value = SIMD[dtype, vector](0)
    if inside:
        value = _load[dtype, vector](p, at)
    return value


def depthwise_filter_kernel[
    dtype: DType
](packed: Ptr[dtype], w: Ptr[dtype], g: ConvolutionProblem, phase: Phase,):
    """The phase's taps as [tap][channel]."""
    var i = global_idx.x
    if i >= phase.taps() * g.c:
        return
    packed[unsafe_offset=phase.filter_offset + i] = w[
        unsafe_offset=i % g.c * g.taps() + full_tap(g, phase, i // g.c)
    ]


@fieldwise_init
struct Strip(ImplicitlyCopyable, TrivialRegisterPassable):
    """A thread's pixels of one phase: its first channel, and the first pixel of its strip.
    """

    var c: Int
    var n: Int
    var o: Int
    var p: Int32
    var q: Int32

    @staticmethod
    @always_inline
    def of(
        index: Int32, phase: Phase, channels: Int, vector: Int, march: Int32
    ) -> Self:
        """Channels run fastest, then strips along W, marches along H, pixels along D, images.
        """
        var rest, lane = divide(index, Int32(channels // vector))
        var down, q = divide(rest, Int32(ceildiv(phase.w.rows, STRIP)))
        var deep, p = divide(down, ceildiv(Int32(phase.h.rows), march))
        var n, o = divide(deep, Int32(phase.d.rows))
        return Self(
            Int(lane) * vector, Int(n), Int(o), p * march, q * Int32(STRIP)
        )

    @always_inline
    def source_row(self, phase: Phase, d: Int, h: Int32) -> Int:
        """Of the row's first pixel, in pixels."""
        return (
            (self.n * phase.d.source + d) * phase.h.source + Int(h)
        ) * phase.w.source

    @always_inline
    def result_row(self, phase: Phase, p: Int32) -> Int:
        """Of the first pixel of the phase in row p, in pixels."""
        return (
            (
                self.n * phase.d.out_extent
                + phase.d.out_first
                + self.o * phase.d.out_step
            )
            * phase.h.out_extent
            + phase.h.out_first
            + Int(p) * phase.h.out_step
        ) * phase.w.out_extent + phase.w.out_first


@always_inline
def _store_strip[
    dtype: DType, vector: Int
](
    result: Ptr[dtype],
    phase: Phase,
    strip: Strip,
    p: Int32,
    channels: Int,
    values: Array[SIMD[DType.float32, vector], STRIP],
):
    var pixel = strip.result_row(phase, p)
    comptime for i in range(STRIP):
        if strip.q + Int32(i) < Int32(phase.w.rows):
            result.unsafe_offset(
                (pixel + Int(strip.q + Int32(i)) * phase.w.out_step) * channels
                + strip.c
            ).unsafe_store[alignment=vector * size_of[dtype]()](
                values[i].cast[dtype]()
            )


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(RESIDENT)),
)
@__name(t"conv_depthwise_march_{dtype}_v{vector}_{taps_h}x{taps_w}_s{step}")
def depthwise_march_kernel[
    dtype: DType, vector: Int, taps_h: Int, taps_w: Int, step: Int
](
    result: Ptr[dtype],
    source: Ptr[dtype],
    packed: Ptr[dtype],
    phase: Phase,
    batch: Int32,
    channels_: Int32,
    march: Int32,
):
    """A strip of columns by up to `march` rows by `vector` channels, for taps_h x taps_w taps that are neighbours in
    the source along both axes and one tap along D, with `step` source pixels from one pixel to the next.
    """
    comptime T = SIMD[DType.float32, vector]
    comptime columns = (STRIP - 1) * step + taps_w
    var channels = Int(channels_)
    var strip = Strip.of(Int32(global_idx.x), phase, channels, vector, march)
    if strip.n >= Int(batch):
        return
    # Offsets rise (forward) or fall (gradient) by one: the lowest tap is the first or the last.
    var rising_h = phase.h.offset_step > 0
    var rising_w = phase.w.offset_step > 0
    var h = (
        strip.p * Int32(step)
        + Int32(phase.h.first_offset)
        - (Int32(0) if rising_h else Int32(taps_h - 1))
    )
    var w = (
        strip.q * Int32(step)
        + Int32(phase.w.first_offset)
        - (Int32(0) if rising_w else Int32(taps_w - 1))
    )
    var d = strip.o * phase.d.step + phase.d.first_offset
    var inside_d = d >= 0 and d < phase.d.source
    var taps = packed.unsafe_offset(phase.filter_offset + strip.c)
    var filter = Array[SIMD[dtype, vector], taps_h * taps_w](fill=0)
    comptime for r in range(taps_h):
        comptime for s in range(taps_w):
            var row = r if rising_h else taps_h - 1 - r
            var column = s if rising_w else taps_w - 1 - s
            filter[r * taps_w + s] = _load[dtype, vector](
                taps, (row * taps_w + column) * channels
            )
    # Two rows of pointers' worth of arithmetic saved for each load: the strip's first column in row zero.
    var base = source.unsafe_offset(
        (strip.source_row(phase, d, 0) + Int(w)) * channels + strip.c
    )
    var pitch = phase.w.source * channels

    @always_inline
    def load_row(
        row: Int32, wanted: Bool
    ) {imm} -> Array[SIMD[dtype, vector], columns]:
        var values = Array[SIMD[dtype, vector], columns](fill=0)
        var inside = (
            wanted and inside_d and UInt32(row) < UInt32(phase.h.source)
        )
        var line = base.unsafe_offset(Int(row) * pitch)
        comptime for i in range(columns):
            values[i] = _load_inside[dtype, vector](
                line,
                i * channels,
                inside and UInt32(w + Int32(i)) < UInt32(phase.w.source),
            )
        return values^

    var rows = min(march, Int32(phase.h.rows) - strip.p)
    comptime if step == 1:
        # Sums of the rows that the source row at hand contributes to, in a ring.
        var sums = Array[Array[T, STRIP], taps_h](fill=Array[T, STRIP](fill=0))
        var count = rows + Int32(taps_h - 1)
        var values = load_row(h, True)
        for first in range(Int32(0), count, Int32(taps_h)):
            comptime for u in range(taps_h):
                var at = first + Int32(u)
                if at < count:
                    var next = load_row(h + 1, at + 1 < count)
                    comptime for i in range(columns):
                        var value = values[i].cast[DType.float32]()
                        comptime for r in range(taps_h):
                            comptime slot = (u - r + taps_h) % taps_h
                            comptime for j in range(STRIP):
                                comptime s = i - j
                                comptime if s >= 0 and s < taps_w:
                                    sums[slot][j] = value.fma(
                                        filter[r * taps_w + s].cast[
                                            DType.float32
                                        ](),
                                        sums[slot][j],
                                    )
                    comptime done = (u + 1) % taps_h
                    if at >= Int32(taps_h - 1):
                        _store_strip[dtype, vector](
                            result,
                            phase,
                            strip,
                            strip.p + at - Int32(taps_h - 1),
                            channels,
                            sums[done],
                        )
                    comptime for j in range(STRIP):
                        sums[done][j] = 0
                    values = next^
                    h += 1
    else:
        for at in range(rows):
            var sums = Array[T, STRIP](fill=0)
            comptime for r in range(taps_h):
                var values = load_row(h + Int32(r), True)
                comptime for i in range(columns):
                    var value = values[i].cast[DType.float32]()
                    comptime for j in range(STRIP):
                        comptime s = i - j * step
                        comptime if s >= 0 and s < taps_w:
                            sums[j] = value.fma(
                                filter[r * taps_w + s].cast[DType.float32](),
                                sums[j],
                            )
            _store_strip[dtype, vector](
                result, phase, strip, strip.p + at, channels, sums
            )
            h += Int32(step)


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(RESIDENT)),
)
@__name(t"conv_depthwise_gather_{dtype}_v{vector}")
def depthwise_gather_kernel[
    dtype: DType, vector: Int
](
    result: Ptr[dtype],
    source: Ptr[dtype],
    packed: Ptr[dtype],
    phase: Phase,
    batch: Int32,
    channels_: Int32,
):
    """A strip of one row by `vector` channels, for any taps."""
    comptime T = SIMD[DType.float32, vector]
    var channels = Int(channels_)
    var strip = Strip.of(Int32(global_idx.x), phase, channels, vector, 1)
    if strip.n >= Int(batch):
        return
    var sums = Array[T, STRIP](fill=0)
    var filter = packed.unsafe_offset(phase.filter_offset + strip.c)
    for t in range(phase.d.taps):
        var d = strip.o * phase.d.step + phase.d.offset(t)
        if d < 0 or d >= phase.d.source:
            continue
        for r in range(phase.h.taps):
            var h = Int(strip.p) * phase.h.step + phase.h.offset(r)
            if h < 0 or h >= phase.h.source:
                continue
            var row = source.unsafe_offset(
                strip.source_row(phase, d, Int32(h)) * channels + strip.c
            )
            var taps = filter.unsafe_offset(
                (t * phase.h.taps + r) * phase.w.taps * channels
            )
            for s in range(phase.w.taps):
                var f = _load[dtype, vector](taps, s * channels).cast[
                    DType.float32
                ]()
                comptime for i in range(STRIP):
                    var column = (
                        Int(strip.q) + i
                    ) * phase.w.step + phase.w.offset(s)
                    sums[i] = (
                        _load_inside[dtype, vector](
                            row,
                            column * channels,
                            column >= 0 and column < phase.w.source,
                        )
                        .cast[DType.float32]()
                        .fma(f, sums[i])
                    )
    _store_strip[dtype, vector](result, phase, strip, strip.p, channels, sums)


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(RESIDENT)),
)
@__name(
    t"conv_depthwise_wgrad_{dtype}_v{vector}_{tap_rows}x{tap_columns}_s{step}"
)
def depthwise_wgrad_kernel[
    dtype: DType, vector: Int, tap_rows: Int, tap_columns: Int, step: Int
](
    partials: Ptr[DType.float32],
    x: Ptr[dtype],
    dy: Ptr[dtype],
    g: ConvolutionProblem,
    lanes: Int32,
    rows: Int32,
    march: Int32,
    share: Int32,
):
    """Partial dw [channel][tap] of one slice, for one patch of taps and one block of channels.

    A block has `rows` times `lanes` threads, `lanes` of them along channels; each of them marches down `share` strips of
    up to `march` rows of dy. `step` > 0 is the stride along H and W where taps are neighbours on both; 0 stands for any
    stride and dilation, and a patch of one tap.
    """
    comptime T = SIMD[DType.float32, vector]
    comptime V = SIMD[dtype, vector]
    comptime size = tap_rows * tap_columns
    comptime columns = (STRIP - 1) * max(step, 1) + tap_columns
    var y, lane = divide(Int32(thread_idx.x), lanes)
    var channel_blocks = ceildiv(Int32(g.c // vector), lanes)
    # Patches of taps run fastest: blocks that read the same rows run together and share them in the cache.
    var patch_rest, patch_w = divide(
        Int32(block_idx.x), Int32(g.s // tap_columns)
    )
    var t, patch_h = divide(patch_rest, Int32(g.r // tap_rows))
    var s0 = patch_w * Int32(tap_columns)
    var r0 = patch_h * Int32(tap_rows)
    var slice, channel_block = divide(Int32(block_idx.y), channel_blocks)
    var c = Int(channel_block * lanes + lane) * vector
    var live = c < g.c
    var sums = Array[T, size](fill=0)
    var strips = ceildiv(Int32(g.q), Int32(STRIP))
    var marches = ceildiv(Int32(g.p), march)
    var units = Int32(g.n * g.o) * strips * marches
    var first_unit = slice * share * rows
    var last_unit = min(units, first_unit + share * rows) if live else Int32(0)
    for unit in range(first_unit + y, last_unit, rows):
        var down, strip = divide(unit, strips)
        var deep, which = divide(down, marches)
        var n, o = divide(deep, Int32(g.o))
        var p = which * march
        var q = strip * Int32(STRIP)
        var count = min(march, Int32(g.p) - p)
        var d = o * Int32(g.stride_d) + t * Int32(g.dilation_d) - Int32(g.pad_d)
        if UInt32(d) >= UInt32(g.d):
            continue
        var h = (
            p * Int32(g.stride_h) + r0 * Int32(g.dilation_h) - Int32(g.pad_h)
        )
        var w = (
            q * Int32(g.stride_w) + s0 * Int32(g.dilation_w) - Int32(g.pad_w)
        )
        var x_base = x.unsafe_offset(
            ((Int(n) * g.d + Int(d)) * g.h * g.w + Int(w)) * g.c + c
        )
        var dy_base = dy.unsafe_offset(
            (((Int(n) * g.o + Int(o)) * g.p + Int(p)) * g.q + Int(q)) * g.c + c
        )

        @always_inline
        def dy_row(row: Int32) {imm} -> Array[V, STRIP]:
            """Row number `row` of the march; zeros past its end."""
            var values = Array[V, STRIP](fill=0)
            comptime for i in range(STRIP):
                values[i] = _load_inside[dtype, vector](
                    dy_base,
                    (Int(row) * g.q + i) * g.c,
                    row < count and q + Int32(i) < Int32(g.q),
                )
            return values^

        @always_inline
        def x_row(row: Int32) {imm} -> Array[V, columns]:
            var values = Array[V, columns](fill=0)
            var inside = UInt32(row) < UInt32(g.h)
            comptime for i in range(columns):
                values[i] = _load_inside[dtype, vector](
                    x_base,
                    (Int(row) * g.w + i) * g.c,
                    inside and UInt32(w + Int32(i)) < UInt32(g.w),
                )
            return values^

        comptime if step == 1:
            # dy's rows that the row of x at hand meets, in a ring.
            var ring = Array[Array[V, STRIP], tap_rows](
                fill=Array[V, STRIP](fill=0)
            )
            for first in range(
                Int32(0), count + Int32(tap_rows - 1), Int32(tap_rows)
            ):
                comptime for u in range(tap_rows):
                    var at = first + Int32(u)
                    ring[u] = dy_row(at)
                    # Rows past the last meet zeros of dy only.
                    var values = x_row(h + at)
                    comptime for i in range(columns):
                        var value = values[i].cast[DType.float32]()
                        comptime for r in range(tap_rows):
                            comptime slot = (u - r + tap_rows) % tap_rows
                            comptime for j in range(STRIP):
                                comptime s = i - j
                                comptime if s >= 0 and s < tap_columns:
                                    sums[r * tap_columns + s] = value.fma(
                                        ring[slot][j].cast[DType.float32](),
                                        sums[r * tap_columns + s],
                                    )
        elif step > 1:
            for at in range(count):
                var gradient = dy_row(at)
                comptime for r in range(tap_rows):
                    var values = x_row(h + at * Int32(step) + Int32(r))
                    comptime for i in range(columns):
                        var value = values[i].cast[DType.float32]()
                        comptime for j in range(STRIP):
                            comptime s = i - j * step
                            comptime if s >= 0 and s < tap_columns:
                                sums[r * tap_columns + s] = value.fma(
                                    gradient[j].cast[DType.float32](),
                                    sums[r * tap_columns + s],
                                )
        else:
            comptime assert size == 1, "any stride: one tap at a time"
            for at in range(count):
                var gradient = dy_row(at)
                var row = h + at * Int32(g.stride_h)
                var inside = UInt32(row) < UInt32(g.h)
                comptime for j in range(STRIP):
                    var column = Int32(j) * Int32(g.stride_w)
                    sums[0] = (
                        _load_inside[dtype, vector](
                            x_base,
                            (Int(row) * g.w + Int(column)) * g.c,
                            inside and UInt32(w + column) < UInt32(g.w),
                        )
                        .cast[DType.float32]()
                        .fma(gradient[j].cast[DType.float32](), sums[0])
                    )
    var shared = stack_allocation[
        WGRAD_THREADS * vector,
        Float32,
        alignment=16,
        address_space=AddressSpace.SHARED,
    ]()
    var mine = Int(y * lanes + lane) * vector
    comptime for i in range(size):
        barrier()
        shared.unsafe_offset(mine).unsafe_store(sums[i])
        barrier()
        if y == 0 and live:
            var total = T(0)
            for row in range(rows):
                total += shared.unsafe_offset(
                    Int(row * lanes + lane) * vector
                ).unsafe_load[width=vector]()
            # dw is [channel][tap].
            var tap = (
                (Int(t) * g.r + Int(r0) + i // tap_columns) * g.s
                + Int(s0)
                + i % tap_columns
            )
            comptime for j in range(vector):
                partials[
                    unsafe_offset=(Int(slice) * g.c + c + j) * g.taps() + tap
                ] = total[j]


@always_inline
def _grid(g: ConvolutionProblem, phase: Phase, march: Int, vector: Int) -> Int:
    """Blocks for one thread for each march of a phase."""
    return ceildiv(
        g.n
        * phase.d.rows
        * ceildiv(phase.h.rows, march)
        * ceildiv(phase.w.rows, STRIP)
        * (g.c // vector),
        BLOCK,
    )


@always_inline
def _launch_march[
    dtype: DType, vector: Int, taps_h: Int, taps_w: Int, step: Int
](
    result: DeviceBuffer[dtype],
    source: DeviceBuffer[dtype],
    packed: DeviceBuffer[dtype],
    g: ConvolutionProblem,
    phase: Phase,
    ctx: DeviceContext,
) raises:
    comptime kernel = depthwise_march_kernel[
        dtype, vector, taps_h, taps_w, step
    ]
    var march = _march(phase.h.rows)
    ctx.enqueue_function[kernel](
        result,
        source,
        packed,
        phase,
        Int32(g.n),
        Int32(g.c),
        Int32(march),
        grid_dim=_grid(g, phase, march, vector),
        block_dim=BLOCK,
    )


@always_inline
def _launch_any[
    dtype: DType, vector: Int
](
    result: DeviceBuffer[dtype],
    source: DeviceBuffer[dtype],
    packed: DeviceBuffer[dtype],
    g: ConvolutionProblem,
    phase: Phase,
    ctx: DeviceContext,
) raises:
    ctx.enqueue_function[depthwise_gather_kernel[dtype, vector]](
        result,
        source,
        packed,
        phase,
        Int32(g.n),
        Int32(g.c),
        grid_dim=_grid(g, phase, 1, vector),
        block_dim=BLOCK,
    )


def _steps_by_one(axis: Axis) -> Bool:
    """Whether neighbouring taps read neighbouring source pixels."""
    return axis.taps == 1 or abs(axis.offset_step) == 1


@always_inline
def _launch_wide[
    dtype: DType, pass_: Int, vector: Int
](
    result: DeviceBuffer[dtype],
    source: DeviceBuffer[dtype],
    packed: DeviceBuffer[dtype],
    g: ConvolutionProblem,
    phase: Phase,
    ctx: DeviceContext,
) raises:
    """The march where one is made for the phase's taps, else the one for any.
    """
    var h = phase.h
    var w = phase.w
    if (
        phase.d.taps == 1
        and _steps_by_one(h)
        and _steps_by_one(w)
        and h.step == w.step
    ):
        comptime for step in [1, 2]:
            comptime if pass_ == FPROP or step == 1:
                if h.step == step and h.taps == 3 and w.taps == 3:
                    _launch_march[dtype, vector, 3, 3, step](
                        result, source, packed, g, phase, ctx
                    )
                    return
        # The phases of a gradient of stride 2.
        comptime if pass_ != FPROP:
            comptime for taps_h in [1, 2]:
                comptime for taps_w in [1, 2]:
                    if h.taps == taps_h and w.taps == taps_w:
                        _launch_march[dtype, vector, taps_h, taps_w, 1](
                            result, source, packed, g, phase, ctx
                        )
                        return
    _launch_any[dtype, vector](result, source, packed, g, phase, ctx)


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
    var wide = g.c % VECTOR == 0 and _is_aligned(result) and _is_aligned(source)
    var phases: List[Phase]
    comptime if pass_ == FPROP:
        phases = forward_phases(g)
    else:
        phases = gradient_phases(g, g.c)
    var packed = ctx.enqueue_create_buffer[dtype](max(1, g.taps() * g.c))
    for phase in phases:
        if phase.rows(g.n) == 0:
            continue
        if phase.taps() > 0:
            ctx.enqueue_function[depthwise_filter_kernel[dtype]](
                packed,
                w,
                g,
                phase,
                grid_dim=ceildiv(phase.taps() * g.c, BLOCK),
                block_dim=BLOCK,
            )
        if wide:
            _launch_wide[dtype, pass_, VECTOR](
                result, source, packed, g, phase, ctx
            )
        else:
            _launch_any[dtype, 1](result, source, packed, g, phase, ctx)


@always_inline
def _launch_wgrad[
    dtype: DType, vector: Int, tap_rows: Int, tap_columns: Int, step: Int
](
    dw: DeviceBuffer[dtype],
    x: DeviceBuffer[dtype],
    dy: DeviceBuffer[dtype],
    g: ConvolutionProblem,
    ctx: DeviceContext,
) raises:
    var channels = g.c // vector
    var channel_blocks = ceildiv(channels, WGRAD_LANES)
    var lanes = ceildiv(channels, channel_blocks)
    var rows = WGRAD_THREADS // lanes
    var patches = g.t * (g.r // tap_rows) * (g.s // tap_columns)
    var march = _march(g.p)
    var units = g.n * g.o * ceildiv(g.p, march) * ceildiv(g.q, STRIP)
    var blocks = (
        WGRAD_BLOCKS
        * ctx.get_attribute(DeviceAttribute.MULTIPROCESSOR_COUNT)
        // (patches * channel_blocks)
    )
    # The grid's second extent is at most 65535.
    var most = min(
        g.workspace_limit // max(1, 4 * g.w_size()), 65535 // channel_blocks
    )
    # Whole rounds of the block's rows of threads.
    var share = max(1, ceildiv(units, rows * max(1, min(blocks, most))))
    var slices = max(1, ceildiv(units, rows * share))
    var partials = ctx.enqueue_create_buffer[DType.float32](slices * g.w_size())
    comptime kernel = depthwise_wgrad_kernel[
        dtype, vector, tap_rows, tap_columns, step
    ]
    ctx.enqueue_function[kernel](
        partials,
        x,
        dy,
        g,
        Int32(lanes),
        Int32(rows),
        Int32(march),
        Int32(share),
        grid_dim=(patches, channel_blocks * slices),
        block_dim=lanes * rows,
    )
    add_slices(dw, partials, g.w_size(), slices, ctx)


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
    var wide = g.c % VECTOR == 0 and _is_aligned(x) and _is_aligned(dy)
    if not wide:
        _launch_wgrad[dtype, 1, 1, 1, 0](dw, x, dy, g, ctx)
        return
    if (
        g.r % 3 == 0
        and g.s % 3 == 0
        and g.dilation_h == 1
        and g.dilation_w == 1
    ):
        comptime for step in [1, 2]:
            if g.stride_h == step and g.stride_w == step:
                _launch_wgrad[dtype, VECTOR, 3, 3, step](dw, x, dy, g, ctx)
                return
    _launch_wgrad[dtype, VECTOR, 1, 1, 0](dw, x, dy, g, ctx)


def depthwise_gpu_can_implement(g: ConvolutionProblem) -> Optional[String]:
    """None, or why these kernels do not take the problem."""
    if g.groups != g.c or g.groups != g.k:
        return String(t"C = {g.c}, K = {g.k} and groups = {g.groups} differ")
    if 4 * g.w_size() > g.workspace_limit:
        return String(
            t"the filter takes {4 * g.w_size()} bytes, the workspace limit is"
            t" {g.workspace_limit}"
        )
    if g.c > WGRAD_LANES * 65535:
        return String(
            t"C = {g.c}; the grid takes at most {WGRAD_LANES * 65535}"
        )
    # Threads, pixels and strips are counted in 32 bits.
    if max(g.x_size(), g.y_size()) >= STRIP << 31:
        return String(t"{max(g.x_size(), g.y_size())} elements are too many")
    return None
