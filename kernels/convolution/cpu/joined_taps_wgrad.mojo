"""Weight gradient of a few input channels, a model's first layer: a row of taps is one run of memory.

A block of pixels takes its columns from x, a few whole vectors for each row of taps: what a vector has beyond its row
is overwritten by the next one, or falls behind the last column.

Drawn problems take 1.19 (float32) and 0.87 (bfloat16) of oneDNN's time (convolution_by_kernel.json).
"""

from std.math import ceildiv
from std.memory import unsafe_memset_zero
from std.memory.alloc import unsafe_alloc
from std.sys.info import simd_width_of, size_of

from max.gpu.host import DeviceContext

from ...common.parallel import sync_parallelize, worker_count
from ...common.pointer import Ptr, accumulation_type
from ..kernel import ConvolutionKernel, ConvolutionTensors
from ..passes import WGRAD
from ..problem import ConvolutionProblem
from .microkernel import has_pairs, outer_tile, packed_length, packed_type
from .pack import write_filter
from .wgrad import TILE_ROWS, TILE_VECTORS, pack_gradient_rows

# Vectors of a row of taps.
comptime MAX_VECTORS = 3
# Bytes of a block's columns: they stay in the L1 cache.
comptime BLOCK_BYTES = 8 * 1024
comptime MAX_PIXELS = 144


@fieldwise_init
struct _Sizes(ImplicitlyCopyable, TrivialRegisterPassable):
    """Sizes of a worker's own memory, in elements."""

    var run: Int
    """Elements of a row of taps."""
    var lines: Int
    """Rows of taps."""
    var pitch: Int
    """Elements of all columns, rounded up to whole vectors."""
    var block: Int
    """Pixels taken at once, an even number."""
    var rows: Int
    """Output channels, rounded up to whole tiles."""

    @staticmethod
    def of[dtype: DType](p: ConvolutionProblem) -> Self:
        comptime width = simd_width_of[accumulation_type[dtype]]()
        var run = p.s * p.c
        var lines = p.t * p.r
        var pitch = ceildiv(run * lines, width) * width
        var fit = BLOCK_BYTES // (pitch * size_of[packed_type[dtype]]())
        return Self(
            run,
            lines,
            pitch,
            max(8, min(MAX_PIXELS, fit // 2 * 2)),
            ceildiv(p.k, TILE_ROWS) * TILE_ROWS,
        )

    def columns[dtype: DType](self) -> Int:
        """Returns the elements of a block's columns, twice as many where they are packed into pairs of pixels; the last
        pixel's last vectors reach beyond it."""
        comptime width = simd_width_of[accumulation_type[dtype]]()
        var one = self.block * self.pitch + (MAX_VECTORS + 1) * width
        return 2 * one if has_pairs[dtype] else one

    def operands[dtype: DType](self) -> Int:
        return self.columns[dtype]() + self.block * self.rows


@no_inline
def _pack_columns[
    dtype: DType, vectors: Int
](
    packed: Ptr[packed_type[dtype]],
    x: Ptr[dtype],
    lines: MutPointer[Int, MutUntrackedOrigin],
    problem: ConvolutionProblem,
    sizes: _Sizes,
    first: Int,
    count: Int,
):
    """Packs the columns of pixels [first, first + count) as packed[pixel][column].
    """
    comptime width = simd_width_of[accumulation_type[dtype]]()
    comptime packed_dtype = packed_type[dtype]
    var step = problem.stride_w * problem.c
    var row_size = problem.w * problem.c
    # Where whole vectors of a row of taps may be read.
    var end = problem.x_size() - vectors * width
    # Pixels whose taps all lie in their row.
    var low = min(problem.q, ceildiv(problem.pad_w, problem.stride_w))
    var high = max(
        low,
        min(
            problem.q,
            (problem.w - problem.s + problem.pad_w) // problem.stride_w + 1,
        ),
    )
    var q = first % problem.q
    var rest = first // problem.q
    var p = rest % problem.p
    rest //= problem.p
    var o = rest % problem.o
    var n = rest // problem.o
    var target = packed
    var m = 0

    @always_inline
    def edge(target: Ptr[packed_dtype], line: Int, column: Int) {imm}:
        """Copies value by value, from `column` of the row on."""
        for i in range(sizes.run):
            var value = Scalar[packed_dtype](0)
            if line >= 0 and column + i >= 0 and column + i < row_size:
                value = x[unsafe_offset=line + column + i].cast[packed_dtype]()
            target[unsafe_offset=i] = value

    while m < count:
        var run = min(problem.q - q, count - m)
        var last_line = 0
        for t in range(problem.t):
            var d = (
                o * problem.stride_d + t * problem.dilation_d - problem.pad_d
            )
            for r in range(problem.r):
                var h = (
                    p * problem.stride_h
                    + r * problem.dilation_h
                    - problem.pad_h
                )
                var line = -1
                if d >= 0 and d < problem.d and h >= 0 and h < problem.h:
                    line = ((n * problem.d + d) * problem.h + h) * row_size
                    last_line = max(last_line, line)
                lines[unsafe_offset=t * problem.r + r] = line
        for i in range(q, q + run):
            var column = i * step - problem.pad_w * problem.c
            var whole = i >= low and i < high and last_line + column <= end
            for number in range(sizes.lines):
                var to = target.unsafe_offset(number * sizes.run)
                var line = lines[unsafe_offset=number]
                if not whole:
                    edge(to, line, column)
                    continue
                comptime for v in range(vectors):
                    var value = SIMD[dtype, width](0)
                    if line >= 0:
                        value = x.unsafe_offset(
                            line + column + v * width
                        ).unsafe_load[width=width]()
                    to.unsafe_offset(v * width).unsafe_store(
                        value.cast[packed_dtype]()
                    )
            target = target.unsafe_offset(sizes.pitch)
        m += run
        q = 0
        p += 1
        if p == problem.p:
            p = 0
            o += 1
            if o == problem.o:
                o = 0
                n += 1


@no_inline
def _pair_columns[
    dtype: DType
](target: Ptr[dtype], source: Ptr[dtype], pitch: Int, count: Int):
    """Reorders [pixel][column] as [vector of columns][pair of pixels][column][2].
    """
    comptime width = simd_width_of[accumulation_type[dtype]]()
    var to = target
    for column in range(0, pitch, width):
        for pixel in range(0, count, 2):
            var at = source.unsafe_offset(pixel * pitch + column)
            var second = SIMD[dtype, width](0)
            if pixel + 1 < count:
                second = at.unsafe_offset(pitch).unsafe_load[width=width]()
            to.unsafe_store(at.unsafe_load[width=width]().interleave(second))
            to = to.unsafe_offset(2 * width)


@no_inline
def _add_block[
    dtype: DType, vectors: Int
](
    sums: Ptr[accumulation_type[dtype]],
    dy: Ptr[packed_type[dtype]],
    columns: Ptr[packed_type[dtype]],
    sizes: _Sizes,
    stored: Int,
):
    """Adds the products of some vectors of columns with every output channel.
    """
    comptime acc_type = accumulation_type[dtype]
    comptime width = simd_width_of[acc_type]()
    var pitch = sizes.pitch
    var apart = width
    comptime if has_pairs[dtype]:
        pitch = width
        apart = stored // 2 * width
    for row in range(0, sizes.rows, TILE_ROWS):
        var acc = Array[SIMD[acc_type, width], TILE_ROWS * vectors](fill=0)
        outer_tile[dtype, acc_type, width, TILE_ROWS, vectors](
            acc, dy.unsafe_offset(row * stored), columns, stored, pitch, apart
        )
        comptime for i in range(TILE_ROWS):
            comptime for v in range(vectors):
                var target = sums.unsafe_offset(
                    (row + i) * sizes.pitch + v * width
                )
                target.unsafe_store(
                    target.unsafe_load[width=width]() + acc[i * vectors + v]
                )


@no_inline
def _slice[
    dtype: DType
](
    sums: Ptr[accumulation_type[dtype]],
    operands: Ptr[packed_type[dtype]],
    x: Ptr[dtype],
    lines: MutPointer[Int, MutUntrackedOrigin],
    dy: Ptr[dtype],
    p: ConvolutionProblem,
    sizes: _Sizes,
    first: Int,
    last: Int,
):
    """Computes the sums of pixels [first, last)."""
    comptime width = simd_width_of[accumulation_type[dtype]]()
    var packed_dy = operands.unsafe_offset(sizes.columns[dtype]())
    unsafe_memset_zero(sums, sizes.rows * sizes.pitch)
    for pixel in range(first, last, sizes.block):
        var count = min(sizes.block, last - pixel)
        var stored = packed_length[dtype](count)
        pack_gradient_rows[dtype](packed_dy, dy, p.k, p.k, pixel, count)
        var columns = operands
        comptime for vectors in range(1, MAX_VECTORS + 1):
            if ceildiv(sizes.run, width) == vectors:
                _pack_columns[dtype, vectors](
                    columns, x, lines, p, sizes, pixel, count
                )
        comptime if has_pairs[dtype]:
            columns = operands.unsafe_offset(sizes.columns[dtype]() // 2)
            _pair_columns(
                rebind[Ptr[dtype]](columns),
                rebind[Ptr[dtype]](operands),
                sizes.pitch,
                count,
            )
        for column in range(0, sizes.pitch, TILE_VECTORS * width):
            var at = columns.unsafe_offset(
                column * stored if has_pairs[dtype] else column
            )
            var wide = min(TILE_VECTORS, (sizes.pitch - column) // width)
            comptime for vectors in range(1, TILE_VECTORS + 1):
                if wide == vectors:
                    _add_block[dtype, vectors](
                        sums.unsafe_offset(column),
                        packed_dy,
                        at,
                        sizes,
                        stored,
                    )


@no_inline
def joined_taps_wgrad_cpu[
    dtype: DType
](dw: Ptr[dtype], x: Ptr[dtype], dy: Ptr[dtype], p: ConvolutionProblem):
    """Computes the weight gradient of the problems that `JoinedTapsWgrad` takes; workers share the pixels, and their
    sums are added in order."""
    comptime acc_type = accumulation_type[dtype]
    comptime width = simd_width_of[acc_type]()
    var workers = worker_count()
    var sizes = _Sizes.of[dtype](p)
    var operands = unsafe_alloc[Scalar[packed_type[dtype]]](
        workers * sizes.operands[dtype](), alignment=64
    )
    var tile = sizes.rows * sizes.pitch
    var all_sums = unsafe_alloc[Scalar[acc_type]](workers * tile, alignment=64)
    var all_lines = unsafe_alloc[Int](workers * sizes.lines)
    var pixels = p.output_pixels()

    @always_inline
    def reduce(worker: Int) {imm}:
        _slice[dtype](
            all_sums.unsafe_offset(worker * tile),
            operands.unsafe_offset(worker * sizes.operands[dtype]()),
            x,
            all_lines.unsafe_offset(worker * sizes.lines),
            dy,
            p,
            sizes,
            pixels * worker // workers,
            pixels * (worker + 1) // workers,
        )

    sync_parallelize(reduce, workers)
    for k in range(p.k):
        var total = all_sums.unsafe_offset(k * sizes.pitch)
        for worker in range(1, workers):
            var other = total.unsafe_offset(worker * tile)
            for i in range(sizes.pitch):
                total[unsafe_offset=i] += other[unsafe_offset=i]
        write_filter[dtype, acc_type](
            dw.unsafe_offset(k * p.taps() * p.c),
            total,
            p.taps(),
            p.c,
            p.c,
            p.c,
            p.taps_inside,
        )
    all_lines.unsafe_free()
    all_sums.unsafe_free()
    operands.unsafe_free()


struct JoinedTapsWgrad(ConvolutionKernel):
    comptime NAME: StaticString = "joined_taps_wgrad"

    @staticmethod
    def compiles[dtype: DType, pass_: Int, grouping: Int]() -> Bool:
        return pass_ == WGRAD

    @staticmethod
    def refusal[
        dtype: DType, pass_: Int
    ](t: ConvolutionTensors[dtype], p: ConvolutionProblem) -> Optional[String]:
        comptime acc_type = accumulation_type[dtype]
        if p.s * p.c > MAX_VECTORS * simd_width_of[acc_type]():
            return String(t"a row of {p.s * p.c} values is long enough")
        if p.groups != 1 or p.s == 1 or p.dilation_w != 1:
            return String("taps along W are no neighbours")
        if p.output_pixels() == 0:
            return String("there are no pixels")
        var sizes = _Sizes.of[dtype](p)
        var each = (
            sizes.operands[dtype]() * size_of[packed_type[dtype]]()
            + sizes.rows * sizes.pitch * size_of[acc_type]()
        )
        var bytes = worker_count() * each
        if bytes > p.workspace_limit:
            return String(
                t"columns and sums take {bytes} bytes, the workspace limit is"
                t" {p.workspace_limit}"
            )
        return None

    @staticmethod
    def launch[
        dtype: DType, pass_: Int
    ](
        ctx: DeviceContext, t: ConvolutionTensors[dtype], p: ConvolutionProblem
    ) raises:
        joined_taps_wgrad_cpu[dtype](t.result, t.a, t.b, p)
