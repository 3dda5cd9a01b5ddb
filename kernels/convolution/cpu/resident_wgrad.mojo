"""Weight gradient of large filters: a tile of dw stays in the cache for the whole reduction and is written once.

A tile has all taps of a few vectors of input channels, for some output channels. For each tap a block of pixels is
packed once as the tap reads it, and met by every tile of dy's channels. Writing a tile at its end costs the same in
either order of the filter.

Planes of a few pixels are mostly edges: there the pixels are taken by position, all images of one position after the
other, and a tap meets only the positions where it lies inside the input.

Drawn problems take 1.03 (float32) and 1.11 (bfloat16) of oneDNN's time (convolution_by_kernel.json).
"""

from std.math import ceildiv
from std.memory import unsafe_memset_zero
from std.memory.alloc import unsafe_alloc
from std.sys.info import simd_width_of, size_of
from std.sys.intrinsics import masked_load

from max.gpu.host import DeviceContext

from ...common.parallel import sync_parallelize, worker_count
from ...common.pointer import Ptr, accumulation_type
from ..gather import PhaseAxis, forward_phases
from ..kernel import ConvolutionKernel, ConvolutionTensors
from ..passes import WGRAD
from ..problem import ConvolutionProblem
from .microkernel import has_pairs, outer_tile, packed_length, packed_type
from .pack import pair_rows, write_filter
from .wgrad import (
    BLOCK_PIXELS,
    TILE_ROWS,
    TILE_VECTORS,
    first_lanes,
)

# Bytes of a tile of dw: it stays in the L2 cache beside the packed operands.
comptime SUMS_BYTES = 256 * 1024
# Pixels that are packed at once where they are taken by position.
comptime MAX_POSITION_PIXELS = 512
# Images that one position must have: each run of pixels is an inner loop of its own.
comptime MIN_IMAGES = 4


@fieldwise_init
struct Inside(ImplicitlyCopyable, TrivialRegisterPassable):
    """The outputs [low, high) of one axis at which a tap lies inside the input.
    """

    var low: Int
    var high: Int

    @staticmethod
    def of(axis: PhaseAxis, tap: Int) -> Self:
        var shift = axis.offset(tap)
        var low = min(axis.rows, max(0, ceildiv(-shift, axis.step)))
        var high = min(axis.rows, (axis.source - 1 - shift) // axis.step + 1)
        return Self(low, max(low, high))

    def count(self) -> Int:
        return self.high - self.low


def _live(axis: PhaseAxis) -> Int:
    """Returns the number of pairs of a tap and an output that lie inside the input.
    """
    var count = 0
    for tap in range(axis.taps):
        count += Inside.of(axis, tap).count()
    return count


def _by_position[dtype: DType](p: ConvolutionProblem) -> Bool:
    comptime if has_pairs[dtype]:
        # Pairs of pixels must not cross positions.
        if p.n % 2 == 1:
            return False
    var phase = forward_phases(p)[0]
    var live = _live(phase.d) * _live(phase.h) * _live(phase.w)
    var positions = p.o * p.p * p.q
    return (
        positions * p.n <= MAX_POSITION_PIXELS
        and p.n >= MIN_IMAGES
        and 5 * live < 4 * positions * p.taps()
    )


@fieldwise_init
struct Tiles(ImplicitlyCopyable, TrivialRegisterPassable):
    """Partition of dw into tiles: `parts` of a group's input channels, `blocks` of `rows` output channels.
    """

    var vectors: Int
    """Number of vectors that hold all of a group's input channels."""
    var parts: Int
    var rows: Int
    var blocks: Int

    @staticmethod
    def of[width: Int, bytes: Int](p: ConvolutionProblem) -> Self:
        var vectors = ceildiv(p.group_c(), width)
        # Whole register tiles, three of them where there is one tap: dy is packed anew for each part.
        var wide = TILE_VECTORS * max(1, 3 // p.taps())
        var parts = ceildiv(vectors, wide)
        var most = ceildiv(vectors, parts)
        var line = p.taps() * most * width * bytes
        var fit = max(1, SUMS_BYTES // line // TILE_ROWS) * TILE_ROWS
        # Enough tiles for every worker to have two.
        var blocks = max(
            ceildiv(p.group_k(), fit),
            ceildiv(2 * worker_count(), p.groups * parts),
        )
        var rows = ceildiv(ceildiv(p.group_k(), blocks), TILE_ROWS) * TILE_ROWS
        return Self(vectors, parts, rows, ceildiv(p.group_k(), rows))

    def most_vectors(self) -> Int:
        return ceildiv(self.vectors, self.parts)


@always_inline
def _copy_pixels[
    dtype: DType, acc_type: DType, width: Int, vectors: Int
](
    target: Ptr[acc_type],
    target_pitch: Int,
    source: Ptr[dtype],
    step: Int,
    count: Int,
    lanes: Int,
):
    """Copies `count` pixels, `step` elements apart, of `lanes` channels each; the rest of the vectors is zero.
    """
    var mask = first_lanes[width](lanes - (vectors - 1) * width)
    for m in range(count):
        var a = source.unsafe_offset(m * step)
        var b = target.unsafe_offset(m * target_pitch)
        comptime for v in range(vectors - 1):
            b.unsafe_offset(v * width).unsafe_store(
                a.unsafe_offset(v * width)
                .unsafe_load[width=width]()
                .cast[acc_type]()
            )
        comptime last = (vectors - 1) * width
        b.unsafe_offset(last).unsafe_store(
            masked_load[width](
                a.unsafe_offset(last), mask, SIMD[dtype, width](0)
            ).cast[acc_type]()
        )


@no_inline
def _pack_gradient[
    dtype: DType, acc_type: DType
](
    packed: Ptr[acc_type],
    dy: Ptr[dtype],
    p: ConvolutionProblem,
    channels: Int,
    pixel: Int,
    count: Int,
    by_position: Bool,
):
    """Packs `channels` channels of dy, from `dy` on, as packed[tile][pixel][TILE_ROWS], zero beyond the last.
    """
    var stored = packed_length[dtype](count)
    for first in range(0, channels, TILE_ROWS):
        var target = packed.unsafe_offset(first * stored)
        var lanes = min(TILE_ROWS, channels - first)
        if by_position:
            var positions = p.o * p.p * p.q
            for position in range(positions):
                _copy_pixels[dtype, acc_type, TILE_ROWS, 1](
                    target.unsafe_offset(position * p.n * TILE_ROWS),
                    TILE_ROWS,
                    dy.unsafe_offset(position * p.k + first),
                    positions * p.k,
                    p.n,
                    lanes,
                )
        else:
            _copy_pixels[dtype, acc_type, TILE_ROWS, 1](
                target,
                TILE_ROWS,
                dy.unsafe_offset(pixel * p.k + first),
                p.k,
                count,
                lanes,
            )
        pair_rows[dtype](
            rebind[Ptr[packed_type[dtype]]](target), count, TILE_ROWS
        )


@fieldwise_init
struct Tap(ImplicitlyCopyable, TrivialRegisterPassable):
    """A tap's outputs, and its offsets to their input pixels."""

    var d: Inside
    var h: Inside
    var w: Inside
    var shift_d: Int
    var shift_h: Int
    var shift_w: Int

    @staticmethod
    def of(p: ConvolutionProblem, tap: Int) -> Self:
        var phase = forward_phases(p)[0]
        var s = tap % p.s
        var r = tap // p.s % p.r
        var t = tap // p.s // p.r
        return Self(
            Inside.of(phase.d, t),
            Inside.of(phase.h, r),
            Inside.of(phase.w, s),
            phase.d.offset(t),
            phase.h.offset(r),
            phase.w.offset(s),
        )


@no_inline
def _pack_block[
    dtype: DType, acc_type: DType, width: Int, vectors: Int
](
    packed: Ptr[acc_type],
    x: Ptr[dtype],
    problem: ConvolutionProblem,
    tap: Tap,
    pixel: Int,
    count: Int,
    lanes: Int,
) -> Bool:
    """Packs the values that the tap reads for pixels [pixel, pixel + count), zero in the padding; returns False if all
    of it is padding."""
    comptime pitch = vectors * width
    var q = pixel % problem.q
    var rest = pixel // problem.q
    var p = rest % problem.p
    rest //= problem.p
    var o = rest % problem.o
    var n = rest // problem.o
    var m = 0
    var any = False
    while m < count:
        var run = min(problem.q - q, count - m)
        var low = run
        var high = run
        if o >= tap.d.low and o < tap.d.high:
            if p >= tap.h.low and p < tap.h.high:
                low = min(run, max(0, tap.w.low - q))
                high = max(low, min(run, tap.w.high - q))
        var target = packed.unsafe_offset(m * pitch)
        if high > low:
            any = True
            var d = o * problem.stride_d + tap.shift_d
            var h = p * problem.stride_h + tap.shift_h
            var w = (q + low) * problem.stride_w + tap.shift_w
            unsafe_memset_zero(target, low * pitch)
            _copy_pixels[dtype, acc_type, width, vectors](
                target.unsafe_offset(low * pitch),
                pitch,
                x.unsafe_offset(
                    (((n * problem.d + d) * problem.h + h) * problem.w + w)
                    * problem.c
                ),
                problem.stride_w * problem.c,
                high - low,
                lanes,
            )
            unsafe_memset_zero(
                target.unsafe_offset(high * pitch), (run - high) * pitch
            )
        else:
            unsafe_memset_zero(target, run * pitch)
        m += run
        q = 0
        p += 1
        if p == problem.p:
            p = 0
            o += 1
            if o == problem.o:
                o = 0
                n += 1
    return any


@no_inline
def _pack_positions[
    dtype: DType, acc_type: DType, width: Int, vectors: Int
](
    packed: Ptr[acc_type],
    x: Ptr[dtype],
    problem: ConvolutionProblem,
    tap: Tap,
    runs: MutPointer[Int, MutUntrackedOrigin],
    lanes: Int,
) -> Int:
    """Packs the values that the tap reads, by position, without padding; `runs` gets the first pixel and the length of
    each run of dy's pixels that it meets. Returns the number of runs."""
    comptime pitch = vectors * width
    var target = packed
    var image = problem.d * problem.h * problem.w * problem.c
    var count = 0
    for o in range(tap.d.low, tap.d.high):
        var d = o * problem.stride_d + tap.shift_d
        for p in range(tap.h.low, tap.h.high):
            var h = p * problem.stride_h + tap.shift_h
            for q in range(tap.w.low, tap.w.high):
                var w = q * problem.stride_w + tap.shift_w
                _copy_pixels[dtype, acc_type, width, vectors](
                    target,
                    pitch,
                    x.unsafe_offset(
                        ((d * problem.h + h) * problem.w + w) * problem.c
                    ),
                    image,
                    problem.n,
                    lanes,
                )
                target = target.unsafe_offset(problem.n * pitch)
            if tap.w.count() > 0:
                runs[unsafe_offset=2 * count] = (
                    (o * problem.p + p) * problem.q + tap.w.low
                ) * problem.n
                runs[unsafe_offset=2 * count + 1] = tap.w.count() * problem.n
                count += 1
    return count


@no_inline
def _tile[
    dtype: DType, acc_type: DType, width: Int, vectors: Int
](
    sums: Ptr[acc_type],
    pitch: Int,
    dy: Ptr[packed_type[dtype]],
    x: Ptr[packed_type[dtype]],
    runs: MutPointer[Int, MutUntrackedOrigin],
    count: Int,
):
    """Adds the products of `count` runs of pixels to TILE_ROWS rows of sums."""
    comptime size = TILE_ROWS * vectors
    var acc = Array[SIMD[acc_type, width], size](fill=0)
    var b = x
    for run in range(count):
        var first = runs[unsafe_offset=2 * run]
        var length = runs[unsafe_offset=2 * run + 1]
        outer_tile[dtype, acc_type, width, TILE_ROWS, vectors](
            acc, dy.unsafe_offset(first * TILE_ROWS), b, length
        )
        b = b.unsafe_offset(length * vectors * width)
    comptime for row in range(TILE_ROWS):
        comptime for v in range(vectors):
            var target = sums.unsafe_offset(row * pitch + v * width)
            target.unsafe_store(
                target.unsafe_load[width=width]() + acc[row * vectors + v]
            )


@no_inline
def _taps[
    dtype: DType, vectors: Int
](
    sums: Ptr[accumulation_type[dtype]],
    pitch: Int,
    tap_pitch: Int,
    x: Ptr[dtype],
    packed_dy: Ptr[packed_type[dtype]],
    packed_x: Ptr[packed_type[dtype]],
    runs: MutPointer[Int, MutUntrackedOrigin],
    p: ConvolutionProblem,
    rows: Int,
    pixel: Int,
    count: Int,
    lanes: Int,
    by_position: Bool,
):
    """Adds the products of every tap of `vectors` vectors of input channels with one block of pixels.
    """
    comptime acc_type = accumulation_type[dtype]
    comptime width = simd_width_of[acc_type]()
    comptime packed = packed_type[dtype]
    var stored = packed_length[dtype](count)
    for number in range(p.taps()):
        var tap = Tap.of(p, number)
        var run_count: Int
        if by_position:
            run_count = _pack_positions[dtype, packed, width, vectors](
                packed_x, x, p, tap, runs, lanes
            )
        else:
            runs[unsafe_offset=0] = 0
            runs[unsafe_offset=1] = stored
            run_count = Int(
                _pack_block[dtype, packed, width, vectors](
                    packed_x, x, p, tap, pixel, count, lanes
                )
            )
        if run_count == 0:
            continue
        var length = count
        if by_position:
            length = tap.d.count() * tap.h.count() * tap.w.count() * p.n
        pair_rows[dtype](packed_x, length, vectors * width)
        for row in range(0, rows, TILE_ROWS):
            _tile[dtype, acc_type, width, vectors](
                sums.unsafe_offset(row * pitch + number * tap_pitch),
                pitch,
                packed_dy.unsafe_offset(row * stored),
                packed_x,
                runs,
                run_count,
            )


@no_inline
def resident_wgrad_cpu[
    dtype: DType
](dw: Ptr[dtype], x: Ptr[dtype], dy: Ptr[dtype], p: ConvolutionProblem):
    """Computes the weight gradient of the problems that `ResidentWgrad` takes; workers share the tiles of dw.
    """
    comptime acc_type = accumulation_type[dtype]
    comptime width = simd_width_of[acc_type]()
    var workers = worker_count()
    var tiles = Tiles.of[width, size_of[acc_type]()](p)
    var by_position = _by_position[dtype](p)
    var pixels = p.output_pixels()
    var block = pixels if by_position else BLOCK_PIXELS
    # Pixels of x and of dy, and a tile of dw.
    var operands = packed_length[dtype](block) * (
        TILE_VECTORS * width + tiles.rows
    )
    var tile = tiles.rows * p.taps() * tiles.most_vectors() * width
    var buffers = unsafe_alloc[Scalar[packed_type[dtype]]](
        workers * operands, alignment=64
    )
    var all_sums = unsafe_alloc[Scalar[acc_type]](workers * tile, alignment=64)
    var most_runs = 2 * max(1, p.o * p.p)
    var all_runs = unsafe_alloc[Int](workers * most_runs)
    var taps = p.taps()
    var kg = p.group_k()
    var cg = p.group_c()

    @always_inline
    def task(worker: Int) {imm}:
        var packed_x = buffers.unsafe_offset(worker * operands)
        var packed_dy = packed_x.unsafe_offset(
            packed_length[dtype](block) * TILE_VECTORS * width
        )
        var sums = all_sums.unsafe_offset(worker * tile)
        var runs = all_runs.unsafe_offset(worker * most_runs)
        var items = p.groups * tiles.parts * tiles.blocks
        for item in range(
            items * worker // workers, items * (worker + 1) // workers
        ):
            var k = item % tiles.blocks * tiles.rows
            var rows = min(tiles.rows, kg - k)
            var part = item // tiles.blocks % tiles.parts
            var group = item // tiles.blocks // tiles.parts
            var first = tiles.vectors * part // tiles.parts
            var vectors = tiles.vectors * (part + 1) // tiles.parts - first
            var tap_pitch = vectors * width
            var pitch = taps * tap_pitch
            unsafe_memset_zero(sums, tiles.rows * pitch)
            for pixel in range(0, pixels, block):
                var count = min(block, pixels - pixel)
                _pack_gradient[dtype, packed_type[dtype]](
                    packed_dy,
                    dy.unsafe_offset(group * kg + k),
                    p,
                    rows,
                    pixel,
                    count,
                    by_position,
                )
                for v in range(0, vectors, TILE_VECTORS):
                    var c = (first + v) * width
                    var wide = min(TILE_VECTORS, vectors - v)
                    comptime for chosen in range(1, TILE_VECTORS + 1):
                        if wide == chosen:
                            _taps[dtype, chosen](
                                sums.unsafe_offset(v * width),
                                pitch,
                                tap_pitch,
                                x.unsafe_offset(group * cg + c),
                                packed_dy,
                                packed_x,
                                runs,
                                p,
                                rows,
                                pixel,
                                count,
                                min(chosen * width, cg - c),
                                by_position,
                            )
            var channels = min(vectors * width, cg - first * width)
            for row in range(rows):
                write_filter[dtype, acc_type](
                    dw.unsafe_offset(
                        (group * kg + k + row) * taps * cg
                        + first * width * p.channel_pitch()
                    ),
                    sums.unsafe_offset(row * pitch),
                    taps,
                    channels,
                    tap_pitch,
                    cg,
                    p.taps_inside,
                )

    sync_parallelize(task, workers)
    all_runs.unsafe_free()
    all_sums.unsafe_free()
    buffers.unsafe_free()


def _scratch_elements[
    width: Int
](p: ConvolutionProblem, tiles: Tiles, block: Int) -> Int:
    """Returns the elements of scratch memory of one worker: packed pixels of x and of dy, and a tile of dw.
    """
    return (
        block * (TILE_VECTORS * width + tiles.rows)
        + tiles.rows * p.taps() * tiles.most_vectors() * width
    )


struct ResidentWgrad(ConvolutionKernel):
    comptime NAME: StaticString = "resident_wgrad"

    @staticmethod
    def compiles[dtype: DType, pass_: Int, grouping: Int]() -> Bool:
        return pass_ == WGRAD

    @staticmethod
    def refusal[
        dtype: DType, pass_: Int
    ](t: ConvolutionTensors[dtype], p: ConvolutionProblem) -> Optional[String]:
        comptime acc_type = accumulation_type[dtype]
        comptime width = simd_width_of[acc_type]()
        if p.w_size() == 0:
            return String("a tensor is empty")
        if p.group_c() < 2 * width:
            return String(
                t"groups of {p.group_c()} channels are less than two vectors"
            )
        var tiles = Tiles.of[width, size_of[acc_type]()](p)
        var block = max(BLOCK_PIXELS, MAX_POSITION_PIXELS)
        var scratch = worker_count() * _scratch_elements[width](p, tiles, block)
        var bytes = scratch * size_of[acc_type]()
        if bytes > p.workspace_limit:
            return String(
                t"the tiles take {bytes} bytes, the workspace limit is"
                t" {p.workspace_limit}"
            )
        return None

    @staticmethod
    def launch[
        dtype: DType, pass_: Int
    ](
        ctx: DeviceContext, t: ConvolutionTensors[dtype], p: ConvolutionProblem
    ) raises:
        resident_wgrad_cpu[dtype](t.result, t.a, t.b, p)
