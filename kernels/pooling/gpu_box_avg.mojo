"""Gradient of average pooling on a GPU for windows of 3x3, over contiguous NCHW tensors 3x3x3 too, that move by one pixel and
keep the size: a box filter.

NCHW, a thread owns some neighbouring pixels of dx wherever they lie in their plane, in two rows at most, and loads the same
pixels of dy and those one row above and below. These lie equally far away for all threads: where rows are no whole vectors,
all take the same bytes of the words that they load. It adds up columns, and lanes tell each other the columns beside
theirs, so that a warp's first and last lane store nothing. In three dimensions it walks down D and keeps the boxes of
three slabs. Every number of dy comes from memory once and twice more from the first-level cache. Channels-last, a
thread walks down a column of vectors of channels and keeps the sums of three rows. What lies outside a plane is skipped,
not multiplied by zero: a gradient may be infinite.
"""

import max.gpu.primitives.warp as warp
from max.gpu import block_idx, thread_idx
from max.gpu.host import DeviceContext
from std.builtin.device_passable import DevicePassable, DeviceTypeEncoder
from std.math import ceildiv
from std.memory import bitcast
from std.sys import size_of

from .direct import Data
from .gpu_problem import (
    LANES,
    LIMIT_32,
    FastDivisor,
    GpuProblem,
    fits_32_bits,
    strip_length,
    uniform_scale,
)
from .gpu_runs import LINE
from .gpu_windows import add_flagged, funnel_shift, widen
from .problem import PoolingAxis, PoolingProblem

comptime BLOCK = 128
comptime WARPS = BLOCK // LANES
comptime OWN = LANES - 2
"""Threads of a warp that store."""
comptime AHEAD = 3
"""Rows, or slabs, whose loads are under way while one is added: as many as a window is wide, so that they and the sums
take turns together. With one on the way few bytes are, for all that each thread keeps (1.04 to 1.13 times the time)."""
comptime ENOUGH_WARPS = 1 << 13
"""Strips get shorter until so many run, about twice what a large GPU holds."""


@fieldwise_init
struct Boxes(DevicePassable, TrivialRegisterPassable):
    """How dx is cut: units (all of dx, or in three dimensions a strip of a sample's slabs), each into vectors of a slab.
    """

    var vectors: Int32
    """Of a slab; in two dimensions of all of dx."""
    var above: Int32
    """The row above a vector begins so many lines before it, rounded up."""
    var below: Int32
    """The row below begins so many after it, rounded down."""
    var rest: Int32
    """And so many bytes after that."""
    var units: Int32
    var slabs: Int32
    """Of a strip."""
    var by_pieces: FastDivisor
    """Divides warps by those of a unit."""
    var by_strips: FastDivisor

    comptime device_type: AnyType = Self

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        return "Boxes"

    def __init__(
        out self, p: PoolingProblem, *, vector: Int, size: Int, deep: Bool
    ):
        """Vectors of `vector` elements of `size` bytes."""
        var slab = Int(p.h.input) * Int(p.w.input)
        var samples = Int(p.batch)
        if not deep:
            slab *= samples * Int(p.d.input)
            samples = 1
        var pieces = ceildiv(slab // vector, OWN)
        var depth = Int(p.d.input) if deep else 1
        var slabs = strip_length(depth, pieces * samples, ENOUGH_WARPS)
        var strips = ceildiv(depth, slabs)
        var row = Int(p.w.input) * size
        self.vectors = Int32(slab // vector)
        self.above = Int32(ceildiv(row, LINE))
        self.below = Int32(row // LINE)
        self.rest = Int32(row % LINE)
        self.units = Int32(min(samples * strips, LIMIT_32 - 1))
        self.slabs = Int32(slabs)
        self.by_pieces = FastDivisor(pieces)
        self.by_strips = FastDivisor(strips)

    def warps(self) -> Int:
        return Int(self.units) * Int(self.by_pieces.divisor)


@fieldwise_init
struct Place[V: Int, whole: Bool](TrivialRegisterPassable):
    """A thread's pixels in their slab; bit j of a number stands for pixel j. `whole`: rows are whole vectors, and the first
    bit of `up` and of `down` stands for all.
    """

    var flat: Int32
    """The first one's number in the slab, which may be all of dx."""
    var up: UInt32
    """Those that have a row above."""
    var down: UInt32
    var left: UInt32
    var right: UInt32

    @always_inline
    def __init__(out self, p: GpuProblem, vector: Int32):
        comptime ALL = UInt32((1 << Self.V) - 1)
        self.flat = vector * Int32(Self.V)
        var row, w = p.w.by_input.divmod(self.flat)
        var h = p.h.by_input.divmod(row)[1]
        var last = p.h.input - 1
        comptime if Self.whole:
            self.up = UInt32(1) if h > 0 else UInt32(0)
            self.down = UInt32(1) if h < last else UInt32(0)
            self.left = UInt32(1) if w > 0 else UInt32(0)
            self.right = UInt32(0)
            if w + Int32(Self.V) < p.w.input:
                self.right = UInt32(1 << (Self.V - 1))
        else:
            # The first pixel of the next row, if it is one of these.
            var next = min(p.w.input - w, Int32(Self.V))
            var here = UInt32((Int32(1) << next) - 1)
            var there = ALL ^ here
            # Under the last row of a plane lies the first of the next.
            self.up = (here if h > 0 else UInt32(0)) | (
                there if h < last else UInt32(0)
            )
            var next_is_last = h + 1 == last or last == 0
            self.down = (here if h < last else UInt32(0)) | (
                UInt32(0) if next_is_last else there
            )
            self.left = ALL & ~((here + 1) | (UInt32(1) if w == 0 else 0))
            self.right = ALL
            if p.w.input - w <= Int32(Self.V):
                self.right = ALL ^ (here ^ (here >> 1))


@always_inline
def _load_vector[
    dtype: DType, V: Int
](source: Data[dtype], first: Int32) -> SIMD[dtype, V]:
    """Elements first, first + 1, ...; they begin with a line."""
    comptime N = LINE // size_of[dtype]()
    var values = SIMD[dtype, V](0)
    comptime for part in range(V // N):
        values = values.insert[offset=part * N](
            source.unsafe_load[width=N, alignment=LINE](Int(first) + part * N)
        )
    return values


@always_inline
def _load_bytes[
    dtype: DType, V: Int
](source: Data[dtype], line: Int32, last: Int32, rest: Int32) -> SIMD[dtype, V]:
    """Elements that begin `rest` bytes after a line; lines before the first or after the last are any.
    """
    comptime size = size_of[dtype]()
    comptime N = V * size // 4
    comptime EACH = LINE // size
    var words = Array[UInt32, N + 4](fill=0)
    comptime for k in range(N // 4 + 1):
        var at = min(max(line + Int32(k), 0), last) * Int32(EACH)
        var four = bitcast[DType.uint32, 4](
            source.unsafe_load[width=EACH, alignment=LINE](Int(at))
        )
        comptime for i in range(4):
            words[4 * k + i] = four[i]
    var by_two = rest & 8 != 0
    comptime for k in range(N + 2):
        words[k] = words[k + 2] if by_two else words[k]
    var by_one = rest & 4 != 0
    comptime for k in range(N + 1):
        words[k] = words[k + 1] if by_one else words[k]
    var values = SIMD[DType.uint32, N](0)
    comptime for k in range(N):
        values[k] = words[k]
        comptime if size < 4:
            values[k] = funnel_shift(
                words[k], words[k + 1], UInt32(rest & 2) * 8
            )
    return bitcast[dtype, V](values)


@always_inline
def _box[
    dtype: DType, V: Int, whole: Bool
](
    place: Place[V, whole],
    middle: SIMD[dtype, V],
    above: SIMD[dtype, V],
    below: SIMD[dtype, V],
) -> SIMD[DType.float32, V]:
    """The sums of the 3x3 windows around the thread's pixels; every lane takes part.
    """
    var columns = SIMD[DType.float32, V](0)
    comptime for j in range(V):
        columns[j] = widen[j, 1](middle)[0]
    # The tests of one number side by side: only those share an instruction.
    comptime for j in range(V):
        comptime bit = 0 if whole else j
        columns[j] = add_flagged[bit](
            columns[j], place.up, widen[j, 1](above)[0]
        )
    comptime for j in range(V):
        comptime bit = 0 if whole else j
        columns[j] = add_flagged[bit](
            columns[j], place.down, widen[j, 1](below)[0]
        )
    var before = warp.shuffle_up(columns[V - 1], UInt32(1))
    var after = warp.shuffle_down(columns[0], UInt32(1))
    var sums = columns
    comptime for j in range(V):
        comptime if whole and j > 0:
            sums[j] += columns[j - 1]
        else:
            var left = before
            comptime if j > 0:
                left = columns[j - 1]
            sums[j] = add_flagged[j](sums[j], place.left, left)
    comptime for j in range(V):
        comptime if whole and j < V - 1:
            sums[j] += columns[j + 1]
        else:
            var right = after
            comptime if j < V - 1:
                right = columns[j + 1]
            sums[j] = add_flagged[j](sums[j], place.right, right)
    return sums


@always_inline
def _store_vector[
    dtype: DType, V: Int, //
](dx: Data[dtype], values: SIMD[dtype, V]):
    comptime N = LINE // size_of[dtype]()
    comptime for part in range(V // N):
        dx.unsafe_store[alignment=LINE](
            part * N, values.slice[N, offset=part * N]()
        )


def avg_pool_dgrad_box[
    dtype: DType, V: Int, deep: Bool, whole: Bool
](dx: Data[dtype], dy: Data[dtype], p: GpuProblem, b: Boxes):
    """`deep`: 3x3x3 windows. `whole`: rows are whole vectors, as they must be if deep.
    """
    comptime Raw = SIMD[dtype, V]
    comptime LINES = V * size_of[dtype]() // LINE
    var number = Int32(block_idx.x) * WARPS + Int32(thread_idx.x) // LANES
    var lane = Int32(thread_idx.x) % LANES
    var unit, piece = b.by_pieces.divmod(number)
    if unit >= b.units:
        return
    var vector = piece * OWN + lane - 1
    var live = lane > 0 and lane <= OWN and vector < b.vectors
    vector = min(max(vector, 0), b.vectors - 1)
    var place = Place[V, whole](p, vector)
    # Rows outside the slab are any: they are not added.
    var high = max(place.flat - p.w.input, 0)
    var low = min(place.flat + p.w.input, (b.vectors - 1) * Int32(V))

    comptime if not deep:
        var middle = _load_vector[dtype, V](dy, place.flat)
        var above: Raw
        var below: Raw
        comptime if whole:
            above = _load_vector[dtype, V](dy, high)
            below = _load_vector[dtype, V](dy, low)
        else:
            var line = vector * Int32(LINES)
            var last = b.vectors * Int32(LINES) - 1
            above = _load_bytes[dtype, V](
                dy, line - b.above, last, (LINE - b.rest) & (LINE - 1)
            )
            below = _load_bytes[dtype, V](dy, line + b.below, last, b.rest)
        var sums = _box[dtype, V, whole](place, middle, above, below)
        if live:
            _store_vector(
                dx.unsafe_offset(Int(place.flat)),
                (sums * p.scale).cast[dtype](),
            )
    else:
        var n, strip = b.by_strips.divmod(unit)
        var d0 = strip * b.slabs
        var d1 = min(d0 + b.slabs, p.d.input)
        var slab = p.h.input * p.w.input
        var sample = Int(n) * Int(p.input_plane())
        var dy_n = dy.unsafe_offset(sample)
        var dx_n = dx.unsafe_offset(sample + Int(place.flat))
        var boxes = Array[SIMD[DType.float32, V], 3](
            fill=SIMD[DType.float32, V](0)
        )
        var loaded = Array[Raw, 3 * AHEAD](fill=Raw(0))

        @always_inline
        def load[slot: Int](od: Int32) {mut loaded, imm}:
            var at = min(max(od, 0), p.d.input - 1) * slab
            loaded[3 * slot] = _load_vector[dtype, V](dy_n, at + place.flat)
            loaded[3 * slot + 1] = _load_vector[dtype, V](dy_n, at + high)
            loaded[3 * slot + 2] = _load_vector[dtype, V](dy_n, at + low)

        var od = d0 - 1
        comptime for k in range(AHEAD):
            load[k](od + Int32(k))
        while True:
            comptime for turn in range(AHEAD):
                boxes[turn] = SIMD[DType.float32, V](0)
                if od >= 0 and od < p.d.input:
                    boxes[turn] = _box[dtype, V, whole](
                        place,
                        loaded[3 * turn],
                        loaded[3 * turn + 1],
                        loaded[3 * turn + 2],
                    )
                load[turn](od + Int32(AHEAD))
                if od > d0 and live:
                    var sums = boxes[(turn + 1) % 3] + boxes[(turn + 2) % 3]
                    _store_vector(
                        dx_n.unsafe_offset(Int((od - 1) * slab)),
                        ((sums + boxes[turn]) * p.scale).cast[dtype](),
                    )
                od += 1
                # All lanes end together.
                if od > d1:
                    return


@fieldwise_init
struct Columns(DevicePassable, TrivialRegisterPassable):
    """How a channels-last dx is cut: strips of a slab's rows, each into columns of vectors of channels.
    """

    var total: Int32
    """Threads."""
    var rows: Int32
    """Of a strip."""
    var by_strips: FastDivisor

    comptime device_type: AnyType = Self

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        return "Columns"

    def __init__(out self, p: PoolingProblem, *, vector: Int):
        var columns = Int(p.w.input) * (Int(p.channels) // vector)
        var threads = columns * Int(p.batch) * Int(p.d.input)
        var rows = strip_length(Int(p.h.input), threads, ENOUGH_WARPS * LANES)
        var strips = ceildiv(Int(p.h.input), rows)
        self.total = Int32(min(threads * strips, LIMIT_32 - 1))
        self.rows = Int32(rows)
        self.by_strips = FastDivisor(strips)


def avg_pool_dgrad_box_columns[
    dtype: DType, V: Int
](dx: Data[dtype], dy: Data[dtype], p: GpuProblem, b: Columns):
    """Channels-last, V channels a thread."""
    comptime Raw = SIMD[dtype, V]
    comptime Sums = SIMD[DType.float32, V]
    var flat = Int32(block_idx.x) * BLOCK + Int32(thread_idx.x)
    if flat >= b.total:
        return
    var pixels, vector = p.by_vectors.divmod(flat)
    var unit, w = p.w.by_input.divmod(pixels)
    var slab, strip = b.by_strips.divmod(unit)
    var row = p.w.input * p.channels
    var start = (
        Int(slab) * Int(p.h.input * row)
        + Int(w * p.channels)
        + Int(vector * Int32(V))
    )
    var dy_column = dy.unsafe_offset(start)
    var dx_column = dx.unsafe_offset(start)
    # A column that is not there is read as this one, and not added.
    var has_left = UInt32(1) if w > 0 else UInt32(0)
    var has_right = UInt32(1) if w + 1 < p.w.input else UInt32(0)
    var to_left = -p.channels if w > 0 else Int32(0)
    var to_right = p.channels if w + 1 < p.w.input else Int32(0)
    var h0 = strip * b.rows
    var h1 = min(h0 + b.rows, p.h.input)
    var rows = Array[Sums, 3](fill=Sums(0))
    var loaded = Array[Raw, 3 * AHEAD](fill=Raw(0))

    @always_inline
    def load[slot: Int](h: Int32) {mut loaded, imm}:
        var at = min(max(h, 0), p.h.input - 1) * row
        loaded[3 * slot] = _load_vector[dtype, V](dy_column, at)
        loaded[3 * slot + 1] = _load_vector[dtype, V](dy_column, at + to_left)
        loaded[3 * slot + 2] = _load_vector[dtype, V](dy_column, at + to_right)

    var oh = h0 - 1
    comptime for k in range(AHEAD):
        load[k](oh + Int32(k))
    while True:
        comptime for turn in range(AHEAD):
            var sums = Sums(0)
            if oh >= 0 and oh < p.h.input:
                comptime for v in range(V):
                    sums[v] = widen[v, 1](loaded[3 * turn])[0]
                comptime for v in range(V):
                    sums[v] = add_flagged[0](
                        sums[v], has_left, widen[v, 1](loaded[3 * turn + 1])[0]
                    )
                comptime for v in range(V):
                    sums[v] = add_flagged[0](
                        sums[v], has_right, widen[v, 1](loaded[3 * turn + 2])[0]
                    )
            rows[turn] = sums
            load[turn](oh + Int32(AHEAD))
            if oh > h0:
                var all = rows[(turn + 1) % 3] + rows[(turn + 2) % 3] + sums
                _store_vector(
                    dx_column.unsafe_offset(Int((oh - 1) * row)),
                    (all * p.scale).cast[dtype](),
                )
            oh += 1
            if oh > h1:
                return


def launch_avg_pool_dgrad_box[
    dtype: DType
](
    ctx: DeviceContext, dx: Data[dtype], dy: Data[dtype], p: PoolingProblem
) raises -> Bool:
    """False for other windows and where divisors differ; NCHW where rows are shorter than a thread's pixels or, in three
    dimensions, no whole lines; channels-last in three dimensions, or where channels are no whole lines.
    """
    comptime N = LINE // size_of[dtype]()

    @always_inline
    def keeps_size(axis: PoolingAxis) {imm} -> Bool:
        return axis.is_window(3, 1) and axis.padding == 1

    var deep = keeps_size(p.d)
    if (
        not keeps_size(p.h)
        or not keeps_size(p.w)
        or not (deep or (p.d.is_window(1, 1) and p.d.padding == 0))
        or not fits_32_bits(p)
        or Int(dx) % LINE != 0
        or Int(dy) % LINE != 0
    ):
        return False
    var scale = uniform_scale[False](p)
    if scale == 0:
        return False
    var done = False

    @always_inline
    def launch[V: Int, deep: Bool, whole: Bool]() raises {mut done, imm}:
        var total = Int(p.batch) * Int(p.input_plane())
        if (
            done
            or Int(p.w.input) < V
            or (whole and Int(p.w.input) % V != 0)
            or total % V != 0
            or (not deep and total >= LIMIT_32 // 2)
        ):
            return
        var boxes = Boxes(p, vector=V, size=size_of[dtype](), deep=deep)
        if boxes.warps() >= LIMIT_32 - WARPS:
            return
        comptime kernel = avg_pool_dgrad_box[dtype, V, deep, whole]
        ctx.enqueue_function[kernel](
            dx,
            dy,
            GpuProblem(p, extent_d=p.d.input, vector=1, scale=scale),
            boxes,
            grid_dim=ceildiv(boxes.warps(), WARPS),
            block_dim=BLOCK,
        )
        done = True

    if p.channels > 1:
        if not deep and Int(p.channels) % N == 0:
            var columns = Columns(p, vector=N)
            if Int(columns.total) < LIMIT_32 - BLOCK:
                ctx.enqueue_function[avg_pool_dgrad_box_columns[dtype, N]](
                    dx,
                    dy,
                    GpuProblem(p, extent_d=p.d.input, vector=N, scale=scale),
                    columns,
                    grid_dim=ceildiv(Int(columns.total), BLOCK),
                    block_dim=BLOCK,
                )
                done = True
    elif deep:
        launch[N, True, True]()
    else:
        launch[N, False, True]()
        # Finding out where a thread is costs as much as some pixels.
        launch[2 * N, False, False]()
    return done
