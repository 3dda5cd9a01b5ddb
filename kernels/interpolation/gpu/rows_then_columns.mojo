"""Interpolation on a GPU where a result reads many elements, as in gradients of enlarging and in antialiasing: a block
sums rows in shared memory, then columns.

A block has a tile of W and C of some rows of results. First its threads add up the stretches of rows that a row of
results reads, 16 bytes at a time, whatever the layout: a stretch's vectors are channels of a few pixels, or run over
pixels and channels. Where there are few vectors, groups of threads share the rows. Then a thread adds up what its
result reads of the sums.
"""

from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    barrier,
    block_idx,
    thread_idx,
)
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_cpu
from max.gpu.memory import AddressSpace
from std.math import ceildiv
from std.memory import stack_allocation
from std.utils.static_tuple import StaticTuple

from ...common.argument import KernelArgument
from ...common.arithmetic import Divisor
from ...common.pointer import Ptr, accumulation_type
from ...common.vectors import pointer_to
from ..kernel import InterpolationKernel, InterpolationTensors
from ..problem import InterpolationProblem, Spans
from .params import THREADS, Params, fits_32_bits, load, store, vector

comptime ROOM = 8192
"""Sums in a block's shared memory."""
comptime ENOUGH = 2048
"""Sums of a row of results that keep a block's threads busy."""
comptime BLOCKS = 528
"""Blocks that keep a large GPU busy."""
comptime LOADS_IN_FLIGHT = 4
"""Rows whose vectors are loaded before the first is added."""
comptime CHANNEL_VECTORS = 16
"""Vectors of a tile's pixels: 256 neighbouring bytes."""
comptime MIN_VECTORS = 4
comptime ROWS_OF_A_GROUP = 4
"""The least that a group of threads adds."""


@fieldwise_init
struct Tile(KernelArgument):
    """How a launch is cut into blocks."""

    var log_width: Int32
    """Results along W of a tile are 2^log_width."""
    var span: Int32
    """Elements along W that they read together, at most."""
    var by_vectors: Divisor
    """Divides by the vectors of a pixel that a tile has; by more than there are where vectors run over pixels.
    """
    var channel_tiles: Divisor
    var width_tiles: Divisor
    var stretch: Divisor
    """Vectors of a row's stretch."""
    var groups: Divisor
    """Divides by the groups of threads that share the rows that a row of results reads."""
    var lines: Int32
    """Rows of results of a block."""
    var all_lines: Int32

    @always_inline
    def blocks(self) -> Int:
        return (
            ceildiv(Int(self.all_lines), Int(self.lines))
            * Int(self.width_tiles.value)
            * Int(self.channel_tiles.value)
        )


@always_inline
def _sum_of_rows[
    dtype: DType, V: Int
](
    x: Ptr[dtype],
    p: Params[accumulation_type[dtype]],
    d: Int32,
    h: Int32,
    at: Int32,
    group: Int32,
    groups: Int32,
) -> SIMD[accumulation_type[dtype], V]:
    """The sum of a group's share of the rows that the results in (d, h) read, of the vector that begins at element `at`
    of a row."""
    comptime Acc = accumulation_type[dtype]
    var d_first = p.d.first(d)
    var h_first = p.h.first(h)
    var h_count = p.h.count(h)
    var count = p.d.count(d) * h_count
    var row = count * group // groups
    var end = count * (group + 1) // groups
    var total = SIMD[Acc, V](0)
    if row >= end:
        return total
    var a = row // h_count
    var b = row - a * h_count
    var length = p.w.extent * p.channels

    @always_inline
    def take[together: Int]() {mut a, mut b, mut total, imm}:
        var values = Array[SIMD[dtype, V], together](fill=SIMD[dtype, V](0))
        var weights = Array[Scalar[Acc], together](fill=Scalar[Acc](0))
        comptime for k in range(together):
            var above = (d_first + a) * p.h.extent + h_first + b
            values[k] = load[V](x, above * length + at)
            weights[k] = p.d.weight(d, a) * p.h.weight(h, b)
            b += 1
            if b == h_count:
                b = 0
                a += 1
        comptime for k in range(together):
            total += values[k].cast[Acc]() * weights[k]

    for _ in range((end - row) // Int32(LOADS_IN_FLIGHT)):
        take[LOADS_IN_FLIGHT]()
    for _ in range((end - row) % Int32(LOADS_IN_FLIGHT)):
        take[1]()
    return total


@fieldwise_init
struct _Block(TrivialRegisterPassable):
    """The position of a block's tile."""

    var first_line: Int32
    var w_first: Int32
    var c_first: Int32
    var start: Int32
    """The offset in their rows at which stretches begin."""

    @always_inline
    def __init__[
        Acc: DType, //, V: Int, by_channels: Bool
    ](out self, block: Int32, p: Params[Acc], tile: Tile):
        var rest, channel_tile = tile.channel_tiles.divide(block)
        var line_tile, width_tile = tile.width_tiles.divide(rest)
        self.first_line = line_tile * tile.lines
        self.w_first = width_tile << tile.log_width
        self.start = p.w.first(self.w_first) * p.channels
        self.c_first = 0
        comptime if by_channels:
            self.c_first = channel_tile * tile.by_vectors.value * Int32(V)
        else:
            # A whole vector, which rows are made of.
            self.start -= self.start % Int32(V)


@always_inline
def _sum_rows[
    dtype: DType, V: Int, by_channels: Bool
](
    sums: MutPointer[Scalar[accumulation_type[dtype]], _, address_space=_],
    x: Ptr[dtype],
    p: Params[accumulation_type[dtype]],
    tile: Tile,
    block: _Block,
    thread: Int32,
):
    """A thread's part of the sums of rows."""
    comptime Acc = accumulation_type[dtype]
    var length = p.w.extent * p.channels
    var stretch = tile.stretch.value
    var groups = tile.groups.value
    var item = thread
    while item < tile.lines * groups * stretch:
        var of_line, j = tile.stretch.divide(item)
        var l, group = tile.groups.divide(of_line)
        var line = block.first_line + l
        var at = block.start + j * Int32(V)
        var inside = line < tile.all_lines and at < length
        comptime if by_channels:
            var pixel, v = tile.by_vectors.divide(j)
            var c = block.c_first + v * Int32(V)
            at = block.start + pixel * p.channels + c
            inside = line < tile.all_lines and at < length and c < p.channels
        var sum = SIMD[Acc, V](0)
        if inside:
            var slab, h = p.by_height.divide(line)
            var n, d = p.by_depth.divide(slab)
            sum = _sum_of_rows[dtype, V](
                x.unsafe_offset(Int(n) * p.sources()),
                p,
                d,
                h,
                at,
                group,
                groups,
            )
        sums.unsafe_store[alignment=min(V * 4, 16)](Int(item) * V, sum)
        item += Int32(THREADS)


@always_inline
def _sum_columns[
    dtype: DType, V: Int, by_channels: Bool
](
    y: Ptr[dtype],
    sums: MutPointer[Scalar[accumulation_type[dtype]], _, address_space=_],
    p: Params[accumulation_type[dtype]],
    tile: Tile,
    block: _Block,
    thread: Int32,
):
    """A thread's part of the results."""
    comptime Acc = accumulation_type[dtype]
    comptime R = V if by_channels else 1
    var vectors = tile.by_vectors.value
    var stretch = tile.stretch.value
    var groups = tile.groups.value
    var width = Int32(1) << tile.log_width
    # Results of a line in this tile: vectors of channels, or single ones.
    var of_pixel = vectors if by_channels else p.channels
    var of_line = width * of_pixel
    var item = thread
    while item < tile.lines * of_line:
        var l = item // of_line
        var k = item - l * of_line
        var w = k // of_pixel
        var c = (k - w * of_pixel) * Int32(R) + block.c_first
        w += block.w_first
        var line = block.first_line + l
        if line < tile.all_lines and w < p.w.results and c < p.channels:
            var begin = p.w.first(w) * p.channels + c - block.start
            var step = p.channels
            comptime if by_channels:
                begin = (
                    (p.w.first(w) - p.w.first(block.w_first))
                    * vectors
                    * Int32(V)
                    + c
                    - block.c_first
                )
                step = vectors * Int32(V)
            var total = SIMD[Acc, R](0)
            for tap in range(p.w.count(w)):
                var weight = p.w.weight(w, tap)
                for group in range(groups):
                    var at = (
                        (l * groups + group) * stretch * Int32(V)
                        + begin
                        + tap * step
                    )
                    total += (
                        sums.unsafe_load[width=R, alignment=min(R * 4, 16)](
                            Int(at)
                        )
                        * weight
                    )
            store(
                y.unsafe_offset(Int(line) * Int(p.w.results * p.channels)),
                w * p.channels + c,
                total.cast[dtype](),
            )
        item += Int32(THREADS)


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS))
)
@__name(t"interpolate_rows_then_columns_{dtype}_v{V}_c{by_channels}")
def interpolate_rows_then_columns[
    dtype: DType, V: Int, by_channels: Bool
](
    y: Ptr[dtype],
    x: Ptr[dtype],
    p: Params[accumulation_type[dtype]],
    tile: Tile,
):
    """Runs a block's tile. With `by_channels` a vector belongs to one pixel; else a tile has all channels.
    """
    var sums = stack_allocation[
        ROOM,
        Scalar[accumulation_type[dtype]],
        address_space=AddressSpace.SHARED,
        alignment=16,
    ]()
    var block = _Block.__init__[V, by_channels](Int32(block_idx.x), p, tile)
    var thread = Int32(thread_idx.x)
    _sum_rows[dtype, V, by_channels](sums, x, p, tile, block, thread)
    barrier()
    _sum_columns[dtype, V, by_channels](y, sums, p, tile, block, thread)


def _walk[
    dtype: DType, V: Int, by_channels: Bool
](
    t: InterpolationTensors[dtype],
    p: Params[accumulation_type[dtype]],
    tile: Tile,
):
    """Runs on a CPU the work of a GPU's threads, one after the other."""
    var storage = List[Scalar[accumulation_type[dtype]]](length=ROOM, fill=0)
    var sums = pointer_to(storage)
    for number in range(tile.blocks()):
        var block = _Block.__init__[V, by_channels](Int32(number), p, tile)
        for thread in range(THREADS):
            _sum_rows[dtype, V, by_channels](
                sums, t.x, p, tile, block, Int32(thread)
            )
        for thread in range(THREADS):
            _sum_columns[dtype, V, by_channels](
                t.y, sums, p, tile, block, Int32(thread)
            )
    _ = storage^


@fieldwise_init
struct RowsThenColumnsPlan(TrivialRegisterPassable):
    """A launch's tile, before divisors are made of it."""

    var log_width: Int
    var vectors: Int
    """Vectors of a pixel in a tile; 0 where vectors run over pixels."""
    var groups: Int
    var lines: Int
    var span: Int
    var stretch: Int

    def __init__(
        out self,
        channels: Int,
        width: Int,
        all_lines: Int,
        most_rows: Int,
        spans: Spans,
        *,
        vector: Int,
        by_channels: Bool,
    ):
        """Cuts `width` results along W of each of `all_lines` rows into tiles; a row of results reads up to `most_rows`
        rows."""
        self.log_width = spans.count - 1
        self.vectors = 0
        if by_channels:
            self.vectors = min(channels // vector, CHANNEL_VECTORS)

        @always_inline
        def stretch_of(log: Int, vectors: Int) {imm} -> Int:
            if by_channels:
                return spans.of(log) * vectors
            # It may begin within a vector.
            return ceildiv(spans.of(log) * channels, vector) + 1

        @always_inline
        def blocks_of(log: Int, vectors: Int) {imm} -> Int:
            var tiles = ceildiv(width, 1 << log)
            if by_channels:
                tiles *= ceildiv(channels // vector, vectors)
            return tiles * all_lines

        while (
            self.log_width > 0
            and stretch_of(self.log_width, self.vectors) * vector > ENOUGH
        ):
            self.log_width -= 1
        while (
            self.log_width > 0
            and blocks_of(self.log_width, self.vectors) < BLOCKS
        ):
            self.log_width -= 1
        while (
            self.vectors > 1
            and stretch_of(self.log_width, self.vectors) * vector > ROOM
        ) or (
            self.vectors > MIN_VECTORS
            and blocks_of(self.log_width, self.vectors) < BLOCKS
        ):
            self.vectors = ceildiv(self.vectors, 2)
        self.span = spans.of(self.log_width)
        self.stretch = stretch_of(self.log_width, self.vectors)
        var room = ROOM // (self.stretch * vector)
        self.groups = max(
            min(
                min(THREADS // self.stretch, room),
                most_rows // ROWS_OF_A_GROUP,
            ),
            1,
        )
        var blocks = blocks_of(self.log_width, self.vectors)
        self.lines = max(
            min(
                min(
                    THREADS // (self.stretch * self.groups),
                    room // self.groups,
                ),
                blocks // BLOCKS,
            ),
            1,
        )

    def fits(self, vector: Int) -> Bool:
        return self.stretch * vector <= ROOM


def _plan[
    dtype: DType, V: Int, by_channels: Bool
](
    p: InterpolationProblem[accumulation_type[dtype]], spans: Spans
) -> RowsThenColumnsPlan:
    return RowsThenColumnsPlan(
        Int(p.channels),
        Int(p.w.results),
        Int(p.batch) * Int(p.d.results) * Int(p.h.results),
        Int(p.d.most) * Int(p.h.most),
        spans,
        vector=V,
        by_channels=by_channels,
    )


def _launch[
    target: StaticString, dtype: DType, V: Int, by_channels: Bool
](
    ctx: DeviceContext,
    t: InterpolationTensors[dtype],
    p: InterpolationProblem[accumulation_type[dtype]],
    spans: Spans,
) raises:
    var plan = _plan[dtype, V, by_channels](p, spans)
    var channel_tiles = 1
    if by_channels:
        channel_tiles = ceildiv(Int(p.channels) // V, plan.vectors)
    var tile = Tile(
        Int32(plan.log_width),
        Int32(plan.span),
        Divisor(max(plan.vectors, 1)),
        Divisor(channel_tiles),
        Divisor(ceildiv(Int(p.w.results), 1 << plan.log_width)),
        Divisor(plan.stretch),
        Divisor(plan.groups),
        Int32(plan.lines),
        p.batch * p.d.results * p.h.results,
    )
    comptime if is_cpu[target]():
        _walk[dtype, V, by_channels](t, Params(p), tile)
        return
    ctx.enqueue_function[interpolate_rows_then_columns[dtype, V, by_channels]](
        t.y,
        t.x,
        Params(p),
        tile,
        grid_dim=tile.blocks(),
        block_dim=THREADS,
    )


struct RowsThenColumns[target: StaticString](InterpolationKernel):
    """Sums along rows, then along columns. Tests run it on a CPU, too, lane by lane.
    """

    comptime NAME: StaticString = "rows_then_columns"

    @staticmethod
    def refusal[
        dtype: DType
    ](
        t: InterpolationTensors[dtype],
        p: InterpolationProblem[accumulation_type[dtype]],
        spans: Spans,
    ) -> Optional[String]:
        if not fits_32_bits(p):
            return String("a sample is too large for 32-bit numbers")
        # Even the least tile: one result along W, and one of its channels.
        if spans.of(0) + 2 * vector[dtype]() > ROOM:
            return String("a result reads too many columns")
        return None

    @staticmethod
    def launch[
        dtype: DType
    ](
        ctx: DeviceContext,
        t: InterpolationTensors[dtype],
        p: InterpolationProblem[accumulation_type[dtype]],
        spans: Spans,
    ) raises:
        comptime V = vector[dtype]()
        var aligned = t.are_aligned()
        if aligned and Int(p.channels) % V == 0:
            if _plan[dtype, V, True](p, spans).fits(V):
                _launch[Self.target, dtype, V, True](ctx, t, p, spans)
                return
        elif aligned and Int(p.w.extent) * Int(p.channels) % V == 0:
            if _plan[dtype, V, False](p, spans).fits(V):
                _launch[Self.target, dtype, V, False](ctx, t, p, spans)
                return
        elif _plan[dtype, 1, False](p, spans).fits(1):
            _launch[Self.target, dtype, 1, False](ctx, t, p, spans)
            return
        _launch[Self.target, dtype, 1, True](ctx, t, p, spans)
