"""Gradient of max pooling on a GPU over contiguous NCHW tensors (C = 1 here), for every two-dimensional window of which
few share a pixel: pieces of dx in shared memory, whose windows are loaded while those of the piece before are added.

A block takes one piece after another: whole planes, or a strip of a plane's rows. Each window's dy is added where its
argmax points. A thread takes a block of neighbouring windows, at least as high and as wide as windows without a common
pixel are apart, and all threads of a plane take the same place of their blocks at a time: no two of them add to one
pixel, and waiting for each other after each place puts the additions into one order. Sums leave as runs of vectors. An
index that points outside its window or outside the piece is ignored.
"""

from max.gpu import barrier, block_idx, grid_dim, thread_idx
from max.gpu.host import DeviceAttribute, DeviceContext
from max.gpu.memory import AddressSpace, external_memory
from max.gpu.sync import syncwarp
from std.sys import size_of

from ...common.pointer import Ptr
from .prefetch import (
    Piece,
    ask_piece,
    keep,
    prepare_stages,
    shift,
    stage_at,
    wait_for_piece,
)
from .prefetch_scatter_plan import (
    BARRIER_BYTES,
    SHIFT,
    VECTOR,
    WIDTHS,
    Pipeline,
    can_cut,
    can_divide,
    plan_pipeline,
)
from .params import LANES, LIMIT_32, PoolingParams, refuse_misses
from .primitives import NOWHERE, where_below
from ..kernel import INDEX, NO_ARGMAX, OFFSET, PoolingTensors, PoolingKernel
from ..problem import PoolingProblem


@__name(t"pool_dgrad_prefetch_scatter_{dtype}_{argmax}_w{wide}")
def max_pool_dgrad_prefetch_scatter[
    dtype: DType, argmax: DType, wide: Int
](
    dx: Ptr[dtype],
    dy: Ptr[dtype],
    argmaxes: Ptr[argmax],
    p: PoolingParams,
    c: Pipeline,
):
    """Runs a block over its pieces. `wide` is the number of neighbouring windows of a row that a thread takes.
    """
    # Barriers of the stages, sums, stages.
    var shared = external_memory[
        UInt8, address_space=AddressSpace.SHARED, alignment=16
    ]()
    var sums_bytes = shared.unsafe_offset(BARRIER_BYTES)
    var sums = sums_bytes.unsafe_bitcast[Float32]()
    var thread = Int32(thread_idx.x)
    var threads = c.threads

    # Threads that are not needed have windows of no plane.
    var lane = thread
    var own_plane = Int32(0)
    if c.within_warps != 0:
        lane = thread % LANES
        own_plane = thread // LANES * c.abreast
    var team, place_in_team = c.by_team.divide(lane)
    var own_row, column = c.by_columns.divide(place_in_team)
    own_plane = own_plane + team if team < c.abreast else c.planes
    var width = keep(p.w.input)
    var stride = keep(p.h.stride())
    var high = keep(c.high)
    var windows_w = keep(p.w.output)
    var part = keep(c.per_row if argmax == OFFSET else c.per_width)
    var slab_in = p.h.input * width
    var slab_out = p.h.output * windows_w
    # By index a window's first column inside the plane, and its columns there; by offset its first column. Windows that
    # are not there have none.
    var left = Array[Int32, wide](fill=width)
    var reach = Array[UInt32, wide](fill=0)
    comptime for j in range(wide):
        var ow = column * Int32(wide) + Int32(j)
        if ow < windows_w:
            left[j] = p.w.origin(ow)
            comptime if argmax == INDEX:
                var end = min(left[j] + p.w.reach, width)
                left[j] = max(left[j], 0)
                reach[j] = UInt32(max(end - left[j], 0))
    var corner = own_row * high * windows_w + column * Int32(wide)

    prepare_stages(shared, thread)

    @always_inline
    def ask(piece: Piece, stage: Int32) {imm}:
        ask_piece(shared, dy, argmaxes, piece, stage, p, c, thread)

    # Blocks beside each other take pieces beside each other.
    var unit = Int32(block_idx.x) * c.planes
    var step = Int32(grid_dim.x) * c.planes
    var piece = Piece(p, c, unit)
    ask(piece, 0)
    var at = thread * VECTOR
    while at < c.sums_bytes // 4:
        sums.unsafe_store[alignment=16](Int(at), SIMD[DType.float32, VECTOR](0))
        at += threads * VECTOR

    var stage = Int32(0)
    # How often each stage has been used, modulo two.
    var use = UInt32(0)
    while True:
        unit += step
        var next = Piece(p, c, unit)
        if unit < c.units:
            ask(next, 1 - stage)
        wait_for_piece(shared, stage, use, last=unit >= c.units)
        # All have loaded, and cleared sums.
        barrier()

        var first = piece.first_window(p)
        var mine = stage_at(shared, c, stage)
        var dy_rows = mine.unsafe_bitcast[Scalar[dtype]]().unsafe_offset(
            Int(shift[dtype](first))
        )
        var argmax_rows = (
            mine.unsafe_offset(Int(c.argmaxes_at))
            .unsafe_bitcast[Scalar[argmax]]()
            .unsafe_offset(Int(shift[argmax](first)))
        )
        # Sums lie as far from a vector's begin as in dx.
        var first_pixel = piece.first_pixel(p)
        var lead = (
            Int32(Int(dx) // size_of[dtype]() % VECTOR)
            + Int32(first_pixel % VECTOR)
        ) % VECTOR
        var first_top = p.h.origin(piece.oh0 + own_row * high)
        var end_top = p.h.origin(piece.oh1)
        var end_h = piece.h0 + piece.height
        var g = own_plane
        for _ in range(c.turns):
            var o = g * slab_out + corner
            # The sum of the plane's first pixel, were its first row in the piece.
            var base = g * slab_in + lead - piece.h0 * width
            var beyond = end_top if g < piece.planes else Int32.MIN
            var top = first_top
            for _ in range(c.high):
                # The window's rows in the piece, or by index their pixels.
                var begin = max(top, piece.h0)
                var rows = Int32(0)
                var from_row = Int32(0)
                if top < beyond:
                    rows = max(min(top + p.h.reach, end_h) - begin, 0)
                    from_row = o
                comptime if argmax == INDEX:
                    rows *= width
                var before = top - begin
                var first_in_row = begin * width
                var values = Array[Float32, wide](fill=0)
                var places = Array[UInt32, wide](fill=0)
                comptime for j in range(wide):
                    values[j] = dy_rows[unsafe_offset=Int(from_row) + j].cast[
                        DType.float32
                    ]()
                    var found = argmax_rows[unsafe_offset=Int(from_row) + j]
                    comptime if argmax == OFFSET:
                        places[j] = _place_of_tap(
                            Int32(found),
                            base + first_in_row,
                            before,
                            left[j],
                            rows,
                            width,
                            part,
                            p,
                        )
                    else:
                        places[j] = _place_of_pixel(
                            Int64(found),
                            base,
                            first_in_row + left[j],
                            rows,
                            width,
                            reach[j],
                            part,
                        )
                comptime for j in range(wide):
                    if c.within_warps != 0:
                        syncwarp()
                    else:
                        barrier()
                    if places[j] != NOWHERE:
                        var sum = sums_bytes.unsafe_offset(
                            Int(places[j])
                        ).unsafe_bitcast[Float32]()
                        sum[] += values[j]
                o += windows_w
                top += stride
            g += c.beside
        barrier()
        _give_out(
            dx.unsafe_offset(first_pixel - Int(lead)),
            sums,
            lead,
            lead + piece.pixels(p),
            thread,
            threads,
        )
        if unit >= c.units:
            return
        piece = next
        stage = 1 - stage
        if stage == 0:
            use ^= 1


@always_inline
def _place_of_tap(
    tap: Int32,
    base: Int32,
    before: Int32,
    left: Int32,
    rows: Int32,
    width: Int32,
    part: Int32,
    p: PoolingParams,
) -> UInt32:
    """Returns the offset, in bytes, of the sum of a window's tap. `base` is the sum of the row's first pixel, if the
    window began `before` rows above it and in column `left`; the window has `rows` in the piece. Exact: a tap is at
    most 255."""
    var kh = (tap * part) >> 16
    var kw = tap - kh * p.w.window
    var h = before + kh * p.h.dilation()
    var w = left + kw * p.w.dilation()
    return where_below(
        UInt32((base + h * width + w) * 4),
        UInt32(w),
        UInt32(width),
        UInt32(h),
        UInt32(rows),
        0,
        1,
    )


@always_inline
def _place_of_pixel(
    found: Int64,
    base: Int32,
    first: Int32,
    pixels: Int32,
    width: Int32,
    reach: UInt32,
    part: Int32,
) -> UInt32:
    """Returns the offset, in bytes, of the sum of a pixel under a window whose first pixel is `first` and that reaches
    over `pixels` pixels of whole rows and `reach` columns. The division is exact in its rows.
    """
    var pixel = UInt32(Int32(found) - first)
    var row = (pixel * UInt32(part)) >> SHIFT
    return where_below(
        UInt32((base + Int32(found)) * 4),
        pixel,
        UInt32(pixels),
        pixel - row * UInt32(width),
        reach,
        UInt32(found >> 32),
        1,
    )


@always_inline
def _give_out[
    dtype: DType
](
    dx: Ptr[dtype],
    sums: MutPointer[Float32, _, address_space=AddressSpace.SHARED],
    first: Int32,
    end: Int32,
    thread: Int32,
    threads: Int32,
):
    """Rounds the sums from `first` to before `end` and stores them as vectors, those before and after whole vectors one
    by one; then clears them. dx is aligned."""
    comptime bytes = VECTOR * size_of[dtype]()
    var whole = (first + VECTOR - 1) & -VECTOR
    var rest = max(end & -VECTOR, whole)
    var at = whole + thread * VECTOR
    while at < rest:
        var values = sums.unsafe_load[width=VECTOR, alignment=16](Int(at))
        sums.unsafe_store[alignment=16](Int(at), SIMD[DType.float32, VECTOR](0))
        dx.unsafe_store[alignment=bytes](Int(at), values.cast[dtype]())
        at += threads * VECTOR

    @always_inline
    def give(at: Int32) {imm}:
        dx[unsafe_offset=Int(at)] = sums[unsafe_offset=Int(at)].cast[dtype]()
        sums[unsafe_offset=Int(at)] = 0

    if thread < VECTOR:
        if first + thread < min(whole, end):
            give(first + thread)
        if rest + thread < end:
            give(rest + thread)


struct PrefetchScatter(PoolingKernel):
    comptime NAME: StaticString = "prefetch_scatter"

    @staticmethod
    def compiles[argmax: DType, adaptive: Bool]() -> Bool:
        return argmax != NO_ARGMAX and not adaptive

    @staticmethod
    def refusal[
        dtype: DType, argmax: DType, adaptive: Bool
    ](p: PoolingProblem) -> Optional[String]:
        if p.channels != 1:
            return String("channels lie between pixels")
        if p.d.input > 1 or p.d.output > 1 or p.d.window > 1:
            return String("planes have several slabs")
        if Int(p.batch) >= LIMIT_32 // 32:
            return String("planes are too many for 32 bits")
        if argmax == INDEX and not can_divide(p):
            return String("rows are too long, or shorter than windows")
        if not can_cut(p, data=size_of[dtype](), argmax=size_of[argmax]()):
            return String(
                "no piece fits shared memory, or windows overlap too much"
            )
        return refuse_misses[argmax, adaptive](p)

    @staticmethod
    def launch[
        dtype: DType, argmax: DType, adaptive: Bool
    ](
        ctx: DeviceContext, t: PoolingTensors[dtype, argmax], p: PoolingProblem
    ) raises:
        var plan = plan_pipeline(
            p,
            data=size_of[dtype](),
            argmax=size_of[argmax](),
            processors=ctx.get_attribute(DeviceAttribute.MULTIPROCESSOR_COUNT),
        )
        comptime for wide in WIDTHS:
            if Int(plan.wide) == wide:
                comptime kernel = max_pool_dgrad_prefetch_scatter[
                    dtype, argmax, wide
                ]
                ctx.enqueue_function[kernel](
                    t.result,
                    t.source,
                    t.argmaxes,
                    PoolingParams(p, extent_d=1, vector=1),
                    plan,
                    grid_dim=Int(plan.blocks),
                    block_dim=Int(plan.threads),
                    shared_mem_bytes=plan.shared_bytes(),
                )
