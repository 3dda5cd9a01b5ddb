"""Depthwise convolution on any GPU: direct kernels over channels-last tensors, VECTOR channels to a thread.

A thread owns a narrow strip of columns and marches down its rows, so that a source row, loaded once, serves every tap
row; neighbouring threads own neighbouring strips and share the columns between them in the first-level cache. Rows come
through a queue of the thread (row_queue.mojo). The weight gradient (depthwise_wgrad) marches alike, without a queue:
with one float32 took 1.15 times as long, bfloat16 1.02 and float16 0.96. Rows are a run-time loop on purpose: unrolled,
every load of the tile moves to the front and registers spill.
"""

from std.math import ceildiv
from std.memory import stack_allocation
from std.sys.info import size_of
from std.utils.static_tuple import StaticTuple

from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    block_idx,
    global_idx,
    thread_idx,
)
from max.gpu.memory import AddressSpace

from ...common.arithmetic import divide
from ...common.async_copy import commit_copies, wait_for_copies
from ...common.pointer import Ptr
from ...common.widening import wide
from ..gather import Phase, full_tap
from ..problem import ConvolutionProblem
from .phase_table import PhaseTable
from .row_queue import THREADS, RowQueue

# Channels of a thread. Eight of them, 16 bytes of bfloat16, would want more registers than a thread has.
comptime VECTOR = 4
# Where the window or its sums take the registers, or channels are no multiple of VECTOR.
comptime PAIR = 2
# Rows that a thread marches at most.
comptime MAX_MARCH_ROWS = 16
comptime MIN_MARCH_ROWS = 2
# Threads of a multiprocessor that registers must suffice for.
comptime RESIDENT_THREADS = 384
# Taps along an axis of a strided gradient's phase that registers suffice for.
comptime MOST_TAPS_OF_PHASE = 3
# Threads of a block of the weight gradient along channels, at most.
comptime WGRAD_LANES = 32


def strip_width[dtype: DType]() -> Int:
    """Returns the columns of a thread's strip: as many as registers hold of the rows that are under way.
    """
    return 4 if size_of[dtype]() == 2 else 2


def march_rows(
    rows: Int, across: Int, enough: Int, most: Int = MAX_MARCH_ROWS
) -> Int:
    """Rows of each march: equal ones, not many more than it takes, of `across` threads for each of them. A row takes as
    long as memory takes to answer, so marches are shorter where fewer than `enough` threads would march.
    """
    var wanted = min(
        ceildiv(enough, max(1, across)), ceildiv(rows, MIN_MARCH_ROWS)
    )
    return ceildiv(rows, max(1, max(ceildiv(rows, most), wanted)))


@always_inline
def is_aligned[dtype: DType](data: Ptr[dtype]) -> Bool:
    return Int(data) % 16 == 0


@always_inline
def _load[
    dtype: DType, vector: Int
](p: Ptr[dtype], at: Int) -> SIMD[dtype, vector]:
    return p.unsafe_offset(at).unsafe_load[
        width=vector, alignment=vector * size_of[dtype]()
    ]()


@always_inline
def load_inside[
    dtype: DType, vector: Int
](p: Ptr[dtype], at: Int, inside: Bool) -> SIMD[dtype, vector]:
    """Loads a vector, zeros where not `inside`."""
    var value = SIMD[dtype, vector](0)
    if inside:
        value = _load[dtype, vector](p, at)
    return value


@__name(t"conv_depthwise_filter_{dtype}")
def depthwise_filter_kernel[
    dtype: DType
](packed: Ptr[dtype], w: Ptr[dtype], p: ConvolutionProblem, phase: Phase,):
    """Packs the phase's taps as [tap][channel]."""
    var i = global_idx.x
    if i >= phase.taps() * p.c:
        return
    packed[unsafe_offset=phase.filter_offset + i] = w[
        unsafe_offset=i % p.c * p.taps() + full_tap(p, phase, i // p.c)
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
    def of[
        width: Int
    ](
        index: Int32, phase: Phase, channels: Int, vector: Int, march: Int32
    ) -> Self:
        """Channels run fastest, then strips along W, marches along H, pixels along D, images.
        """
        var rest, lane = divide(index, Int32(channels // vector))
        var down, q = divide(rest, Int32(ceildiv(phase.w.rows, width)))
        var deep, p = divide(down, ceildiv(Int32(phase.h.rows), march))
        var n, o = divide(deep, Int32(phase.d.rows))
        return Self(
            Int(lane) * vector, Int(n), Int(o), p * march, q * Int32(width)
        )

    @always_inline
    def source_row(self, phase: Phase, d: Int, h: Int32) -> Int:
        """Returns the index of the source row's first pixel, in pixels."""
        return (
            (self.n * phase.d.source + d) * phase.h.source + Int(h)
        ) * phase.w.source

    @always_inline
    def result_row(self, phase: Phase, p: Int32) -> Int:
        """Returns the index of the phase's first pixel in row p of the result, in pixels.
        """
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
    dtype: DType, vector: Int, width: Int
](
    target: Ptr[dtype],
    pitch: Int,
    left: Int32,
    values: Array[SIMD[DType.float32, vector], width],
):
    """Stores the strip's first `left` pixels, `pitch` elements apart."""
    comptime for i in range(width):
        if Int32(i) < left:
            target.unsafe_offset(i * pitch).unsafe_store[
                alignment=vector * size_of[dtype]()
            ](values[i].cast[dtype]())


@always_inline
def _filter_of[
    dtype: DType, vector: Int, taps_h: Int, taps_w: Int
](
    packed: Ptr[dtype], phase: Phase, c: Int, channels: Int, whole: Bool
) -> Array[SIMD[DType.float32, vector], taps_h * taps_w]:
    """Returns the taps of some channels in the source's order: packed, or of a `whole` filter as it lies.
    """
    comptime T = SIMD[DType.float32, vector]
    var rising_h = phase.h.offset_step > 0
    var rising_w = phase.w.offset_step > 0
    comptime size = taps_h * taps_w
    var filter = Array[T, size](fill=0)
    if whole:
        # [channel][tap]: as many vectors as taps, of which an element belongs to each.
        var channel = packed.unsafe_offset(c * size)
        var flat = Array[T, size](fill=0)
        comptime for i in range(size):
            flat[i] = wide(_load[dtype, vector](channel, i * vector))
        comptime for r in range(taps_h):
            comptime for s in range(taps_w):
                comptime for j in range(vector):
                    comptime tap = r * taps_w + s
                    comptime at = j * size + tap
                    comptime back = j * size + size - 1 - tap
                    filter[tap][j] = flat[at // vector][
                        at % vector
                    ] if rising_h else flat[back // vector][back % vector]
    else:
        var taps = packed.unsafe_offset(phase.filter_offset + c)
        comptime for r in range(taps_h):
            comptime for s in range(taps_w):
                var row = r if rising_h else taps_h - 1 - r
                var column = s if rising_w else taps_w - 1 - s
                filter[r * taps_w + s] = wide(
                    _load[dtype, vector](
                        taps, (row * taps_w + column) * channels
                    )
                )
    return filter^


@always_inline
def _filter_of_phase[
    dtype: DType, vector: Int, taps_h: Int, taps_w: Int
](
    w: Ptr[dtype], phase: Phase, c: Int, filter_r: Int32, filter_s: Int32
) -> Array[SIMD[DType.float32, vector], taps_h * taps_w]:
    """Returns a gradient's taps of one phase in the source's order, of a filter as it lies.
    """
    var filter = Array[SIMD[DType.float32, vector], taps_h * taps_w](fill=0)
    comptime for j in range(vector):
        var channel = w.unsafe_offset((c + j) * Int(filter_r * filter_s))
        comptime for r in range(taps_h):
            comptime for s in range(taps_w):
                var row = (
                    phase.h.first_tap + (taps_h - 1 - r) * phase.h.tap_step
                )
                var column = (
                    phase.w.first_tap + (taps_w - 1 - s) * phase.w.tap_step
                )
                filter[r * taps_w + s][j] = channel[
                    unsafe_offset=row * Int(filter_s) + column
                ].cast[DType.float32]()
    return filter^


@always_inline
def _march[
    dtype: DType, vector: Int, taps_h: Int, taps_w: Int, step: Int
](
    result: Ptr[dtype],
    source: Ptr[dtype],
    filter: Array[SIMD[DType.float32, vector], taps_h * taps_w],
    phase: Phase,
    strip: Strip,
    channels: Int,
    march: Int32,
    shared: UInt32,
):
    """Computes a strip of columns by up to `march` rows by `vector` channels, for taps_h x taps_w taps that are
    neighbours in the source along both axes and one tap along D, with `step` source pixels from one pixel to the next.
    """
    comptime T = SIMD[DType.float32, vector]
    comptime V = SIMD[dtype, vector]
    comptime width = strip_width[dtype]()
    comptime columns = (width - 1) * step + taps_w
    comptime Queue = RowQueue[dtype, vector, columns]
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
    # Pointers walk down with the march: the next row to load, and the next to store.
    var line = source.unsafe_offset(
        (strip.source_row(phase, d, h) + Int(w)) * channels + strip.c
    )
    var line_pitch = phase.w.source * channels
    var target = result.unsafe_offset(
        (strip.result_row(phase, strip.p) + Int(strip.q) * phase.w.out_step)
        * channels
        + strip.c
    )
    var target_pitch = phase.h.out_step * phase.w.out_extent * channels
    var pixel_pitch = phase.w.out_step * channels
    var left = Int32(phase.w.rows) - strip.q
    var rows = min(march, Int32(phase.h.rows) - strip.p)
    var wanted = rows * Int32(step) + Int32(taps_h - step)

    var queue = Queue.of(shared)

    @always_inline
    def is_inside(row: Int32) {imm} -> Bool:
        return inside_d and UInt32(row) < UInt32(phase.h.source)

    @always_inline
    def request_row() {mut queue, mut line, mut h, mut wanted, imm}:
        """Starts the copies of the next row; nothing is read of rows outside.
        """
        if wanted > 0 and is_inside(h):
            comptime for i in range(columns):
                queue.copy(
                    i,
                    line.unsafe_offset(i * channels),
                    UInt32(w + Int32(i)) < UInt32(phase.w.source),
                )
        queue.end_row()
        commit_copies()
        line = line.unsafe_offset(line_pitch)
        h += 1
        wanted -= 1

    @always_inline
    def next_row(
        inside: Bool,
    ) {mut queue, mut line, mut h, mut wanted, imm} -> Array[V, columns]:
        wait_for_copies[Queue.DEPTH - 2]()
        var values = queue.take(inside)
        request_row()
        return values^

    # The row at hand.
    var row = h
    comptime for _ in range(Queue.DEPTH - 1):
        request_row()
    comptime if step == 1 or taps_h > step + 1:
        # Sums of the rows that the source row at hand contributes to, in a ring.
        comptime ring = ceildiv(taps_h, step)
        comptime period = ring * step
        var sums = Array[Array[T, width], ring](fill=Array[T, width](fill=0))
        var count = (rows - 1) * Int32(step) + Int32(taps_h)
        for first in range(Int32(0), count, Int32(period)):
            comptime for u in range(period):
                var at = first + Int32(u)
                if at < count:
                    var inside = is_inside(row)
                    var values = next_row(inside)
                    row += 1
                    if inside:
                        comptime for i in range(columns):
                            var value = wide(values[i])
                            comptime for slot in range(ring):
                                comptime r = (u - slot * step) % period
                                comptime for j in range(width):
                                    comptime s = i - j * step
                                    comptime if r < taps_h and s >= 0 and s < taps_w:
                                        sums[slot][j] = value.fma(
                                            filter[r * taps_w + s],
                                            sums[slot][j],
                                        )
                    comptime for slot in range(ring):
                        comptime if (u - slot * step) % period == taps_h - 1:
                            if at >= Int32(taps_h - 1):
                                _store_strip[dtype, vector, width](
                                    target, pixel_pitch, left, sums[slot]
                                )
                                target = target.unsafe_offset(target_pitch)
                            comptime for j in range(width):
                                sums[slot][j] = 0
    else:
        # The last row that a pixel reads is the first that the next one reads.
        comptime assert taps_h == step + 1, "one shared row"
        var shared_row = next_row(is_inside(row))
        for _ in range(rows):
            var rows_here = Array[Array[V, columns], taps_h](
                fill=Array[V, columns](fill=0)
            )
            comptime for i in range(columns):
                rows_here[0][i] = shared_row[i]
            comptime for r in range(1, taps_h):
                row += 1
                rows_here[r] = next_row(is_inside(row))
            var sums = Array[T, width](fill=0)
            comptime for r in range(taps_h):
                comptime for i in range(columns):
                    var value = wide(rows_here[r][i])
                    comptime for j in range(width):
                        comptime s = i - j * step
                        comptime if s >= 0 and s < taps_w:
                            sums[j] = value.fma(filter[r * taps_w + s], sums[j])
            _store_strip[dtype, vector, width](target, pixel_pitch, left, sums)
            target = target.unsafe_offset(target_pitch)
            comptime for i in range(columns):
                shared_row[i] = rows_here[taps_h - 1][i]


@always_inline
def _shared[bytes: Int]() -> UInt32:
    """Returns the address of so much of a block's shared memory."""
    return UInt32(
        Int(
            stack_allocation[
                bytes, UInt8, alignment=16, address_space=AddressSpace.SHARED
            ]()
        )
    )


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](
        Int32(RESIDENT_THREADS)
    ),
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
    whole: Int32,
):
    """Computes one phase. A `whole` filter lies as the caller has it."""
    comptime columns = (strip_width[dtype]() - 1) * step + taps_w
    var channels = Int(channels_)
    var strip = Strip.of[strip_width[dtype]()](
        Int32(global_idx.x), phase, channels, vector, march
    )
    if strip.n >= Int(batch):
        return
    _march[dtype, vector, taps_h, taps_w, step](
        result,
        source,
        _filter_of[dtype, vector, taps_h, taps_w](
            packed, phase, strip.c, channels, whole != 0
        ),
        phase,
        strip,
        channels,
        march,
        _shared[RowQueue[dtype, vector, columns].BYTES](),
    )


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](
        Int32(RESIDENT_THREADS)
    ),
)
@__name(t"conv_depthwise_phases_{dtype}_v{vector}_{fewest}")
def depthwise_phases_kernel[
    dtype: DType, vector: Int, fewest: Int
](
    result: Ptr[dtype],
    source: Ptr[dtype],
    w: Ptr[dtype],
    phases: PhaseTable,
    batch: Int32,
    channels_: Int32,
    march: Int32,
    filter_r: Int32,
    filter_s: Int32,
):
    """Computes all phases of a data gradient, which have `fewest` taps or one more along H and W. Their blocks take
    turns, so that dy, which all of them read, comes from memory once, and lines of dx are written while they are in
    the cache.
    """
    var channels = Int(channels_)
    var block, number = divide(Int32(block_idx.x), Int32(phases.count()))
    var phase = phases.phase(number)
    var strip = Strip.of[strip_width[dtype]()](
        block * THREADS + Int32(thread_idx.x), phase, channels, vector, march
    )
    if strip.n >= Int(batch):
        return
    comptime columns = strip_width[dtype]() + fewest
    comptime Narrow = RowQueue[dtype, vector, columns - 1]
    comptime Wide = RowQueue[dtype, vector, columns]
    var shared = _shared[max(Narrow.BYTES, Wide.BYTES)]()
    comptime for taps_h in range(fewest, fewest + 2):
        comptime for taps_w in range(fewest, fewest + 2):
            if phase.h.taps == taps_h and phase.w.taps == taps_w:
                _march[dtype, vector, taps_h, taps_w, 1](
                    result,
                    source,
                    _filter_of_phase[dtype, vector, taps_h, taps_w](
                        w, phase, strip.c, filter_r, filter_s
                    ),
                    phase,
                    strip,
                    channels,
                    march,
                    shared,
                )


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](
        Int32(RESIDENT_THREADS)
    ),
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
    """Computes a strip of one row by `vector` channels, for any taps."""
    comptime T = SIMD[DType.float32, vector]
    var channels = Int(channels_)
    comptime width = strip_width[dtype]()
    var strip = Strip.of[width](Int32(global_idx.x), phase, channels, vector, 1)
    if strip.n >= Int(batch):
        return
    var sums = Array[T, width](fill=0)
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
                comptime for i in range(width):
                    var column = (
                        Int(strip.q) + i
                    ) * phase.w.step + phase.w.offset(s)
                    sums[i] = (
                        load_inside[dtype, vector](
                            row,
                            column * channels,
                            column >= 0 and column < phase.w.source,
                        )
                        .cast[DType.float32]()
                        .fma(f, sums[i])
                    )
    _store_strip[dtype, vector, width](
        result.unsafe_offset(
            (strip.result_row(phase, strip.p) + Int(strip.q) * phase.w.out_step)
            * channels
            + strip.c
        ),
        phase.w.out_step * channels,
        Int32(phase.w.rows) - strip.q,
        sums,
    )
