"""Gradient of max pooling on a GPU over channels-last tensors, for every window.

A thread owns V channels of a strip of columns of one slab, or of a few slabs that lie one behind the other, and walks
down H, one row of windows at a time. It adds each dy where its argmax points: to sums in shared memory that no other
thread touches, a ring of as many rows as a window reaches over. So a window costs the same however many taps it has,
nothing is atomic, and additions always come in the same order. Rows that no later window reaches are rounded, stored
and cleared. The loads of the next few windows are under way while the last are added.

What the offset of a tap means (which row, which column, which of the thread's slabs) is looked up in a table in shared
memory. An index that points outside the strip or outside its window's rows is ignored.
"""

from max.gpu import barrier, block_idx, thread_idx
from max.gpu.host import DeviceAttribute, DeviceContext, FuncAttribute
from max.gpu.memory import AddressSpace, external_memory
from std.math import ceildiv
from std.sys import size_of

from ...common.gpu import vector_alignment
from ...common.pointer import Ptr
from ..kernel import NO_ARGMAX, OFFSET, PoolingTensors, PoolingKernel
from ..problem import PoolingProblem
from .params import LIMIT_32, PoolingParams, refuse_misses
from .ring_scatter_plan import (
    LOADS_IN_FLIGHT,
    THREADS,
    MAX_SUMS,
    TABLE,
    StripPlan,
    plan_strips,
)

comptime MAX_TABLES = 16
"""Slabs that a window may reach over: each has a table in shared memory."""
comptime NO_COLUMN = Int32(0x7FFF)
"""The table's entry for bytes that name no tap of the thread's slabs."""


@fieldwise_init
struct RingTarget(TrivialRegisterPassable):
    """The sum to which an argmax points, if it is `ok`."""

    var row: Int32
    """The row of sums (a thread's slabs lie side by side), counted from the first under the windows."""
    var column: Int32
    """Counted from the strip's first."""
    var ok: Bool


struct LoadedWindows[dtype: DType, argmax: DType, V: Int](Copyable):
    """A few windows of one row as they lie in memory, so that only their later use waits for the loads. Bytes stay in
    the words in which they are loaded."""

    comptime packed = Self.argmax == OFFSET
    comptime word = DType.uint16 if Self.V == 2 else DType.uint8
    comptime kept = DType.uint32 if Self.packed else Self.argmax
    comptime words = 1 if Self.packed else Self.V
    var dy: Array[SIMD[Self.dtype, Self.V], LOADS_IN_FLIGHT]
    var found: Array[SIMD[Self.kept, Self.words], LOADS_IN_FLIGHT]

    @always_inline
    def __init__(out self):
        self.dy = Array[SIMD[Self.dtype, Self.V], LOADS_IN_FLIGHT](
            fill=SIMD[Self.dtype, Self.V](0)
        )
        self.found = Array[SIMD[Self.kept, Self.words], LOADS_IN_FLIGHT](
            fill=SIMD[Self.kept, Self.words](0)
        )

    @always_inline
    def load(
        mut self,
        dy: Ptr[Self.dtype],
        found: Ptr[Self.argmax],
        start: Int,
        channels: Int32,
        count: Int32,
    ):
        """Loads `count` windows, `channels` apart; the others are unchanged."""
        comptime data_bytes = vector_alignment[Self.dtype, Self.V]
        comptime index_bytes = vector_alignment[Self.argmax, Self.V]
        var dy_start = dy.unsafe_offset(start)
        var found_start = found.unsafe_offset(start)
        comptime for k in range(LOADS_IN_FLIGHT):
            if Int32(k) < count:
                var at = Int(UInt32(k) * UInt32(channels))
                self.dy[k] = dy_start.unsafe_load[
                    width=Self.V, alignment=data_bytes
                ](at)
                comptime if Self.packed:
                    self.found[k] = (
                        found_start.unsafe_offset(at)
                        .unsafe_bitcast[Scalar[Self.word]]()[]
                        .cast[Self.kept]()
                    )
                else:
                    self.found[k] = rebind[SIMD[Self.kept, Self.words]](
                        found_start.unsafe_load[
                            width=Self.V, alignment=index_bytes
                        ](at)
                    )

    @always_inline
    def found_at[k: Int, v: Int](self) -> Scalar[Self.kept]:
        comptime if Self.packed:
            return (self.found[k][0] >> Scalar[Self.kept](8 * v)) & 0xFF
        else:
            return self.found[k][v]


@always_inline
def walk_ring[
    dtype: DType, argmax: DType, V: Int, DEPTH: Int
](
    dx: Ptr[dtype],
    dy: Ptr[dtype],
    argmaxes: Ptr[argmax],
    sums: MutPointer[Float32, _, address_space=AddressSpace.SHARED],
    table: MutPointer[Int32, _, address_space=AddressSpace.SHARED],
    p: PoolingParams,
    t: StripPlan,
    flat: Int32,
):
    """The work of thread `flat`; its sums are THREADS apart and begin as zeros at `sums`.
    """
    comptime CELL = V * THREADS
    var unit, item = t.by_items.divide(flat)
    var tile, vector = p.by_vectors.divide(item)
    var rest, strip = t.by_strips.divide(unit)
    var n, slabs = t.by_slabs.divide(rest)
    var d0 = slabs * Int32(DEPTH)
    var c = vector * Int32(V)
    var w0 = tile * t.columns
    var columns = min(t.columns, p.w.input - w0)
    var plane = p.h.input * p.w.input
    var od0 = p.d.outputs_over[False](d0)[0]
    var od1 = p.d.outputs_over[False](min(d0 + Int32(DEPTH), p.d.input) - 1)[1]
    var ow0 = p.w.outputs_over[False](w0)[0]
    var ow1 = p.w.outputs_over[False](w0 + columns - 1)[1]
    var sample = Int(n) * Int(p.output_plane()) * Int(p.channels) + Int(c)
    var dy_n = dy.unsafe_offset(sample)
    var argmaxes_n = argmaxes.unsafe_offset(sample)
    var dx_tile = dx.unsafe_offset(
        (Int(n) * Int(p.d.input) + Int(d0)) * Int(plane * p.channels)
        + Int(w0 * p.channels + c)
    )
    var first_group = strip * t.groups
    var end_group = min(first_group + t.groups, t.all_groups)
    var last_group = min(end_group, p.h.output)
    var stride = p.h.stride()
    var row_step = t.columns * Int32(CELL)
    var row_size = row_step * Int32(DEPTH)
    var size = t.ring * row_size
    var group = max(first_group - t.above + 1, 0)
    # What the ring's first row under the current windows is away from its first.
    var head = Int32(0)

    @always_inline
    def start_of(group: Int32, od: Int32, ow: Int32) {imm} -> Int:
        return Int(((od * p.h.output + group) * p.w.output + ow) * p.channels)

    var od = od0
    var ow = ow0
    var next = LoadedWindows[dtype, argmax, V]()
    # How many of a row's windows are left from the next ones on.
    var left = Int32(0)
    if od0 < od1 and group < last_group:
        left = ow1 - ow0
    next.load(dy_n, argmaxes_n, start_of(group, od, ow), p.channels, left)
    while group < end_group:
        var top = p.h.origin(group)
        var here = group < last_group and left > 0
        while here:
            var now = next.copy()
            var count = left
            var from_d = p.d.origin(od) - d0
            var column = p.w.origin(ow) - w0
            # The windows after these, if this thread has any.
            ow += Int32(LOADS_IN_FLIGHT)
            if ow >= ow1:
                ow = ow0
                od += 1
                if od == od1:
                    od = od0
                    here = False
            left = ow1 - ow
            var row = group
            if not here:
                row += 1
                if row >= last_group:
                    left = 0
            next.load(dy_n, argmaxes_n, start_of(row, od, ow), p.channels, left)

            var meanings = table
            comptime if argmax == OFFSET:
                meanings = table.unsafe_offset(
                    Int((from_d + p.d.reach - 1) * Int32(TABLE))
                )
            # All of the table's words first: no store to the sums may pass a load.
            var words = Array[Int32, LOADS_IN_FLIGHT * V](fill=0)
            comptime if argmax == OFFSET:
                comptime for k in range(LOADS_IN_FLIGHT):
                    comptime for v in range(V):
                        words[k * V + v] = meanings[
                            unsafe_offset=Int(now.found_at[k, v]())
                        ]
            var corner = (d0 * p.h.input + top) * p.w.input + w0
            comptime for k in range(LOADS_IN_FLIGHT):
                var left_of = column + Int32(k) * p.w.stride()
                var places = Array[Int32, V](fill=0)
                var oks = Array[Bool, V](fill=False)
                comptime for v in range(V):
                    var found: RingTarget
                    comptime if argmax == OFFSET:
                        var word = words[k * V + v]
                        found = RingTarget(
                            word >> 16, left_of + (word & 0xFFFF), True
                        )
                    else:
                        found = _find[DEPTH](
                            Int64(now.found_at[k, v]()), corner, p
                        )
                    oks[v] = (
                        found.ok
                        & (UInt32(found.column) < UInt32(columns))
                        & (Int32(k) < count)
                    )
                    var place = found.row * row_step + head
                    if place >= size:
                        place -= size
                    places[v] = place + found.column * Int32(CELL)
                # The channels' sums are read side by side.
                var total = SIMD[DType.float32, V](0)
                comptime for v in range(V):
                    if oks[v]:
                        total[v] = sums[
                            unsafe_offset=Int(places[v]) + v * THREADS
                        ]
                total += now.dy[k].cast[DType.float32]()
                comptime for v in range(V):
                    if oks[v]:
                        sums[
                            unsafe_offset=Int(places[v]) + v * THREADS
                        ] = total[v]
        for r in range(stride):
            var h = top + r
            var live = group >= first_group and h >= 0 and h < p.h.input
            comptime for e in range(DEPTH):
                _store_row[V](
                    dx_tile.unsafe_offset(
                        Int((Int32(e) * plane + h * p.w.input) * p.channels)
                    ),
                    sums.unsafe_offset(Int(head + Int32(e) * row_step)),
                    live and d0 + Int32(e) < p.d.input,
                    columns,
                    p.channels,
                )
            head += row_size
            if head == size:
                head = 0
        group += 1


@always_inline
def _find[
    DEPTH: Int
](index: Int64, corner: Int32, p: PoolingParams) -> RingTarget:
    """Finds the sum to which an index points. `corner` is the number of the pixel of the thread's first column in the
    first row under the windows."""
    var pixel = Int32(index) - corner
    var e = Int32(0)
    comptime for _ in range(DEPTH - 1):
        if pixel >= p.h.input * p.w.input:
            pixel -= p.h.input * p.w.input
            e += 1
    var r, j = p.w.by_input.divide(pixel)
    # A pixel before the strip's first column seems to lie at the end of the row above, past the strip's last.
    var ok = UInt32(pixel) < UInt32(p.h.reach * p.w.input)
    return RingTarget(r * Int32(DEPTH) + e, j, ok & ((index >> 32) == 0))


@always_inline
def _store_row[
    dtype: DType, //, V: Int
](
    dx: Ptr[dtype],
    sums: MutPointer[Float32, _, address_space=AddressSpace.SHARED],
    live: Bool,
    columns: Int32,
    channels: Int32,
):
    """Clears a row of sums; stores its columns where it is `live`."""
    comptime CELL = V * THREADS
    comptime bytes = V * size_of[dtype]()
    for first in range(Int32(0), columns, LOADS_IN_FLIGHT):
        var values = Array[SIMD[DType.float32, V], LOADS_IN_FLIGHT](
            fill=SIMD[DType.float32, V](0)
        )
        var row = sums.unsafe_offset(Int(first * Int32(CELL)))
        comptime for k in range(LOADS_IN_FLIGHT):
            if first + Int32(k) < columns:
                comptime for v in range(V):
                    values[k][v] = row[unsafe_offset=k * CELL + v * THREADS]
                    row[unsafe_offset=k * CELL + v * THREADS] = 0
        if live:
            var out = dx.unsafe_offset(Int(first * channels))
            comptime for k in range(LOADS_IN_FLIGHT):
                if first + Int32(k) < columns:
                    out.unsafe_store[alignment=bytes](
                        Int(UInt32(k) * UInt32(channels)),
                        values[k].cast[dtype](),
                    )


@__name(t"pool_dgrad_ring_scatter_{dtype}_{argmax}_v{V}_d{DEPTH}")
def max_pool_dgrad_ring_scatter[
    dtype: DType, argmax: DType, V: Int, DEPTH: Int
](
    dx: Ptr[dtype],
    dy: Ptr[dtype],
    argmaxes: Ptr[argmax],
    p: PoolingParams,
    t: StripPlan,
):
    var shared = external_memory[
        Float32, address_space=AddressSpace.SHARED, alignment=16
    ]()
    var thread = Int(thread_idx.x)
    var table = shared.unsafe_bitcast[Int32]()
    comptime if argmax == OFFSET:
        shared = shared.unsafe_offset(Int(t.tables) * TABLE)
        _fill_table[DEPTH](table, p, t)
        barrier()
    var flat = Int32(block_idx.x) * THREADS + Int32(thread)
    if flat >= t.total:
        return
    var sums = shared.unsafe_offset(thread)
    for i in range(t.sums()):
        sums[unsafe_offset=i * THREADS] = 0
    walk_ring[dtype, argmax, V, DEPTH](
        dx, dy, argmaxes, sums, table, p, t, flat
    )


@always_inline
def _fill_table[
    DEPTH: Int
](
    table: MutPointer[Int32, _, address_space=AddressSpace.SHARED],
    p: PoolingParams,
    t: StripPlan,
):
    """Row and column that each byte names, for slabs of windows that begin 1 - reach, ..., DEPTH - 1 slabs after the
    thread's first."""
    var i = Int32(thread_idx.x)
    while i < t.tables * Int32(TABLE):
        var from_d = i // Int32(TABLE) - (p.d.reach - 1)
        var rest, kw = t.by_window_w.divide(i % Int32(TABLE))
        var kd, kh = t.by_window_h.divide(rest)
        var e = from_d + kd * p.d.dilation()
        var meaning = (kh * p.h.dilation() * Int32(DEPTH) + e) << 16
        meaning |= kw * p.w.dilation()
        if kd >= p.d.window or UInt32(e) >= UInt32(DEPTH):
            meaning = NO_COLUMN
        table[unsafe_offset=Int(i)] = meaning
        i += THREADS


comptime VARIANTS = [(2, 2), (2, 1), (1, 1)]
"""Channels and slabs of a thread, the fastest first."""


struct RingScatter(PoolingKernel):
    comptime NAME: StaticString = "ring_scatter"

    @staticmethod
    def compiles[argmax: DType, adaptive: Bool]() -> Bool:
        return argmax != NO_ARGMAX and not adaptive

    @staticmethod
    def refusal[
        dtype: DType, argmax: DType, adaptive: Bool
    ](p: PoolingProblem) -> Optional[String]:
        if p.w.reach() > Int(p.w.input):
            return String("windows reach farther than a row is long")
        if StripPlan.ring_of(p) > MAX_SUMS:
            return String("windows reach over more rows than a thread has sums")
        if p.input_size() // Int(p.h.input) >= LIMIT_32 - THREADS:
            return String("strips are too many for 32 bits")
        comptime if argmax == OFFSET:
            if p.d.reach() >= MAX_TABLES:
                return String(
                    "windows reach over more slabs than there are tables"
                )
        return refuse_misses[argmax, adaptive](p)

    @staticmethod
    def launch[
        dtype: DType, argmax: DType, adaptive: Bool
    ](
        ctx: DeviceContext, t: PoolingTensors[dtype, argmax], p: PoolingProblem
    ) raises:
        comptime tabled = argmax == OFFSET
        var processors = ctx.get_attribute(DeviceAttribute.MULTIPROCESSOR_COUNT)
        comptime for i in range(len(VARIANTS)):
            comptime V = VARIANTS[i][0]
            comptime DEPTH = VARIANTS[i][1]
            if _suits[V, DEPTH](p):
                var plan = plan_strips(
                    p,
                    vector=V,
                    depth=DEPTH,
                    table=tabled,
                    processors=processors,
                )
                if plan:
                    var strips = plan.value()
                    var bytes = strips.shared_bytes(table=tabled)
                    comptime kernel = max_pool_dgrad_ring_scatter[
                        dtype, argmax, V, DEPTH
                    ]
                    ctx.enqueue_function[kernel](
                        t.result,
                        t.source,
                        t.argmaxes,
                        PoolingParams(p, extent_d=p.d.input, vector=V),
                        strips,
                        grid_dim=ceildiv(Int(strips.total), THREADS),
                        block_dim=THREADS,
                        shared_mem_bytes=bytes,
                        func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(
                            UInt32(bytes)
                        ),
                    )
                    return
        raise Error("no strips fit: the problem has a refusal")


def _suits[V: Int, DEPTH: Int](p: PoolingProblem) -> Bool:
    """Returns whether threads take V channels and DEPTH slabs, provided that they have sums for them.
    """
    if Int(p.channels) % V != 0:
        return False
    comptime if DEPTH > 1:
        # Slabs that share windows, unless a window's rows of one might be taken for the next one's.
        return p.d.reach() > Int(p.d.stride) and p.h.reach() <= Int(p.h.input)
    comptime if V > 1:
        # Two channels share what a window costs, if the strips are not too narrow for it.
        return MAX_SUMS // (V * StripPlan.ring_of(p)) >= min(
            p.w.reach() // 2, Int(p.w.input)
        )
    return True
