"""The division of dx and windows by the kernel of prefetch_scatter.mojo."""

from std.math import ceildiv

from ...common.argument import KernelArgument
from ...common.arithmetic import Divisor
from ..problem import PoolingProblem
from .params import LANES, MAX_SHARED_BYTES

comptime COPY_BYTES = 16
"""Bytes that are moved at a time."""
comptime STAGES = 2
"""Pieces whose windows are in shared memory or being copied there."""
comptime BARRIER_BYTES = 16
"""Bytes for the stages' barriers."""
comptime MULTIPROCESSOR_SHARED_BYTES = 227 * 1024
"""Bytes of shared memory of a multiprocessor of a large GPU."""
comptime BLOCK_RESERVED_BYTES = 1024
"""Bytes of it that the system takes for each block."""
comptime BLOCK_OVERHEAD_BYTES = 512
"""Bytes of a block's shared memory that are no plane's: barriers, lines that runs begin and end in."""
comptime MULTIPROCESSOR_THREADS = 2048
"""Threads of a multiprocessor."""
comptime MAX_BLOCK_THREADS = 128
comptime MULTIPROCESSOR_BLOCKS = 32
comptime VECTOR = 4
"""Sums that a thread stores at a time."""
comptime MAX_STRIPS = 16
"""Strips that a plane is cut into, at most: their windows overlap."""
comptime SHIFT = 20
"""Bits after the binary point of one over a row's pixels."""
comptime WIDTHS = [3, 7, 13]
"""Windows beside each other that a thread may take."""
comptime MAX_WINDOWS = 13
"""The longest of WIDTHS."""


@always_inline
def lines(elements: Int, size: Int) -> Int:
    """The lines that a run of elements of `size` bytes touches at most: it may begin anywhere in one.
    """
    return ceildiv(elements * size + COPY_BYTES - size, COPY_BYTES)


def can_divide(p: PoolingProblem) -> Bool:
    """Returns whether multiplying by the stored bits of one over W finds the row of every pixel under a window, counted
    from its first row, and windows are no wider than rows."""
    var width = Int(p.w.input)
    var scale = ceildiv(1 << SHIFT, width)
    var most = p.h.reach() * width
    return (
        p.w.reach() <= width
        and most * (scale * width - (1 << SHIFT)) < 1 << SHIFT
        and most * scale < 1 << 32
    )


@fieldwise_init
struct Pipeline(KernelArgument):
    """Pieces of dx, some planes or one of the `strips` of a plane, and threads' blocks of windows.
    """

    var planes: Int32
    var beside: Int32
    """Planes whose windows a block's threads take at a time."""
    var turns: Int32
    """Turns after which all windows of a piece are done."""
    var rows: Int32
    """Rows of a strip of dx."""
    var units: Int32
    """All planes, or all strips."""
    var blocks: Int32
    var threads: Int32
    var wide: Int32
    """Windows beside each other that a thread takes."""
    var high: Int32
    """Rows of windows that a thread takes."""
    var within_warps: Int32
    """Whether the threads of a plane, its team, belong to one warp."""
    var abreast: Int32
    """Planes that a warp, or else a block, takes at a time."""
    var by_team: Divisor
    """Divides by the threads of a plane."""
    var by_columns: Divisor
    """Divides by the threads of a row of windows."""
    var by_strips: Divisor
    var sums_bytes: Int32
    var argmaxes_at: Int32
    """The offset of a stage's argmaxes, in bytes."""
    var stage_bytes: Int32
    var per_width: Int32
    """One over the pixels of a row, with SHIFT fractional bits."""
    var per_row: Int32
    """One over the columns of a window, with 16 fractional bits."""
    var windows: Int64
    """Windows of the whole tensor."""

    def __init__(
        out self,
        p: PoolingProblem,
        *,
        data: Int,
        argmax: Int,
        threads: Int,
        wide: Int,
        below: Int,
        times: Int,
        strips: Int,
        processors: Int,
    ):
        """Makes pieces for blocks of `threads`, each of which takes `wide` windows of a row, with at most `below`
        threads below each other. Pieces are `times` as many planes as that occupies the threads, as many as fit (0), or
        a plane in `strips`. `data` and `argmax` are the bytes of a window's gradient and argmax.
        """
        var height = Int(p.h.input)
        var width = Int(p.w.input)
        var windows_w = Int(p.w.output)
        var rows = ceildiv(height, strips)
        var taken = ceildiv(height, rows)
        var windows_h = p.h.most_reaching(rows)
        var columns = ceildiv(windows_w, wide)
        # No thread's block is less high than windows without a common row are apart.
        var rows_of_threads = min(
            min(below, windows_h), max(threads // columns, 1)
        )
        var high = max(
            ceildiv(windows_h, rows_of_threads),
            min(p.h.most_above(), windows_h),
        )
        var team = columns * ceildiv(windows_h, high)
        # Threads of a warp wait for each other at no cost.
        self.within_warps = Int32(team <= LANES)
        var abreast = LANES // team if team <= LANES else threads // team
        var beside = abreast
        if team <= LANES:
            beside *= threads // LANES
        # Where fewer planes fit than occupy the threads, some threads have none.
        var bytes = 4 * height * width + STAGES * (
            windows_h * windows_w * (data + argmax)
        )
        var fitting = (MAX_SHARED_BYTES - BLOCK_OVERHEAD_BYTES) // bytes
        var planes = min(max(times * beside, 1), Int(p.batch))
        if times == 0:
            planes = min(max(min(beside, fitting), 1), Int(p.batch))
        if taken > 1:
            planes = 1
        self.planes = Int32(planes)
        self.beside = Int32(beside)
        self.abreast = Int32(abreast)
        self.turns = Int32(ceildiv(planes, max(beside, 1)))
        self.rows = Int32(rows)
        self.threads = Int32(threads)
        self.wide = Int32(wide)
        self.high = Int32(high)
        self.by_team = Divisor(team)
        self.by_columns = Divisor(columns)
        self.by_strips = Divisor(taken)
        # Sums lie as far from a vector's begin as in dx.
        var sums = ceildiv(planes * rows * width + VECTOR - 1, VECTOR)
        self.sums_bytes = Int32(sums * VECTOR * 4)
        # A thread's last windows may lie behind the run.
        var run = planes * windows_h * windows_w + MAX_WINDOWS
        self.argmaxes_at = Int32(lines(run, data) * COPY_BYTES)
        self.stage_bytes = self.argmaxes_at + Int32(
            lines(run, argmax) * COPY_BYTES
        )
        self.per_width = Int32(ceildiv(1 << SHIFT, width))
        self.per_row = Int32(ceildiv(1 << 16, Int(p.w.window)))
        self.windows = Int64(p.output_size())
        self.units = Int32(Int(p.batch) * taken)
        self.blocks = 0
        self.blocks = Int32(
            min(
                ceildiv(Int(self.units), planes),
                self.resident() * processors,
            )
        )

    def shared_bytes(self) -> Int:
        return (
            BARRIER_BYTES
            + Int(self.sums_bytes)
            + STAGES * Int(self.stage_bytes)
        )

    def fits(self) -> Bool:
        return self.beside > 0 and self.shared_bytes() <= MAX_SHARED_BYTES

    def resident(self) -> Int:
        """Blocks that a multiprocessor holds."""
        return min(
            min(
                MULTIPROCESSOR_BLOCKS,
                MULTIPROCESSOR_THREADS // Int(self.threads),
            ),
            MULTIPROCESSOR_SHARED_BYTES
            // (self.shared_bytes() + BLOCK_RESERVED_BYTES),
        )

    def cycles(self, data: Int, processors: Int) -> Float32:
        """Estimates the cycles that each of an H200's multiprocessors takes for all pieces: as long as one block takes,
        or all of its blocks' instructions, or the bytes that they move. The constants are fitted to some 2,000 launches
        over seven problems; its choice was 2.2 % slower than the fastest of the same divisions.
        """
        var held = Float32(self.blocks) / Float32(processors)
        var stored = Float32(self.sums_bytes) / Float32(4 * VECTOR)
        var vectors = stored / Float32(self.threads)
        var rows = Float32(self.turns * self.high)
        var wide = Float32(self.wide)
        var latency = 5500 + rows * (90 + 50 * wide) + 100 * vectors
        var instructions = 360 + rows * (20 + 25 * wide) + 10 * vectors
        var warps = held * Float32(self.threads) / LANES
        # Four start in a cycle, of which some are lost.
        var issue = warps * instructions / 4 * 1.27
        var moved = Float32(self.stage_bytes) + stored * Float32(VECTOR * data)
        var slowest = max(max(latency, issue), held * moved / 22)
        var pieces = Float32(self.units) / Float32(self.planes)
        return pieces / Float32(self.blocks) * slowest


def _narrowest(p: PoolingProblem) -> Int:
    """The narrowest block of windows that is as wide as two windows of no common pixel are apart; 0 where none is.
    """
    for wide in materialize[WIDTHS]():
        if p.w.most_above() <= wide:
            return wide
    return 0


def can_cut(p: PoolingProblem, *, data: Int, argmax: Int) -> Bool:
    """Returns whether plan_pipeline finds a division: whether the smallest of its pieces fits.
    """
    var wide = _narrowest(p)
    if wide == 0:
        return False
    return Pipeline(
        p,
        data=data,
        argmax=argmax,
        threads=MAX_BLOCK_THREADS,
        wide=wide,
        below=Int(p.h.output),
        times=1,
        strips=MAX_STRIPS,
        processors=1,
    ).fits()


def plan_pipeline(
    p: PoolingProblem, *, data: Int, argmax: Int, processors: Int
) raises -> Pipeline:
    """The fastest of some ways to cut a problem, as far as is known."""
    var best = Optional[Pipeline](None)
    var least = Float32.MAX
    var apart = p.w.most_above()
    var narrower = 0
    for wide in materialize[WIDTHS]():
        var whole = Int(p.w.output) <= wide
        # Widths near what is needed, and whole rows.
        var near = narrower == 0 or apart > narrower
        if whole and Int(p.w.output) > narrower:
            near = True
        narrower = wide
        if apart > wide or not near:
            continue
        for shape in range(6):
            var threads = 64 if shape % 2 == 0 else MAX_BLOCK_THREADS
            # Threads that take whole rows may take whole planes.
            var below = shape // 2 if shape >= 2 else Int(p.h.output)
            if shape >= 2 and not whole:
                break

            @always_inline
            def consider(
                times: Int, strips: Int
            ) {mut best, mut least, imm} -> Bool:
                var c = Pipeline(
                    p,
                    data=data,
                    argmax=argmax,
                    threads=threads,
                    wide=wide,
                    below=below,
                    times=times,
                    strips=strips,
                    processors=processors,
                )
                if not c.fits():
                    return False
                var cycles = c.cycles(data, processors)
                if cycles < least:
                    least = cycles
                    best = c
                return True

            if consider(1, 1):
                _ = consider(2, 1)
                _ = consider(1, 2)
            else:
                _ = consider(0, 1)
                var strips = 2
                while strips <= MAX_STRIPS and not consider(1, strips):
                    strips += 1
    if not best:
        raise Error("no piece fits shared memory: can_cut was not asked")
    return best.value()
