"""Weight gradient of a depthwise convolution on any GPU: marches as in depthwise, taps in registers.

A thread marches down strips of dy and adds its products to one sum for each tap; a block's threads add theirs in shared
memory, and the blocks' slices are added in order: no atomics, the same bits every time.
"""

from std.math import ceildiv
from std.memory import stack_allocation
from std.utils.static_tuple import StaticTuple

from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    barrier,
    block_idx,
    thread_idx,
)
from max.gpu.host import DeviceAttribute, DeviceContext
from max.gpu.memory import AddressSpace

from ...common.arithmetic import divide
from ...common.library import scratch
from ...common.pointer import Ptr
from ...common.widening import wide
from ..problem import ConvolutionProblem
from .depthwise import (
    MAX_MARCH_ROWS,
    PAIR,
    RESIDENT_THREADS,
    VECTOR,
    WGRAD_LANES,
    is_aligned,
    load_inside,
    march_rows,
    strip_width,
)
from .tiled import add_slices

# The weight gradient's blocks: at most so many threads along channels, the rest share a channel's pixels.
comptime WGRAD_THREADS = 128
# Blocks for each multiprocessor: as many as registers let run together.
comptime WGRAD_BLOCKS = 3


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](
        Int32(RESIDENT_THREADS)
    ),
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
    problem: ConvolutionProblem,
    lanes: Int32,
    rows: Int32,
    march: Int32,
    share: Int32,
):
    """Computes partial dw [channel][tap] of one slice, for one patch of taps and one block of channels.

    A block has `rows` times `lanes` threads, `lanes` of them along channels; each of them marches down `share` strips
    of up to `march` rows of dy. `step` > 0 is the stride along H and W where taps are neighbours on both; 0 stands for
    any stride and dilation, and a patch of one tap.
    """
    comptime T = SIMD[DType.float32, vector]
    comptime V = SIMD[dtype, vector]
    comptime size = tap_rows * tap_columns
    comptime width = strip_width[dtype]()
    comptime columns = (width - 1) * max(step, 1) + tap_columns
    var y, lane = divide(Int32(thread_idx.x), lanes)
    var channel_blocks = ceildiv(Int32(problem.c // vector), lanes)
    # Patches of taps run fastest: blocks that read the same rows run together and share them in the cache.
    var patch_rest, patch_w = divide(
        Int32(block_idx.x), Int32(ceildiv(problem.s, tap_columns))
    )
    var t, patch_h = divide(patch_rest, Int32(ceildiv(problem.r, tap_rows)))
    var s0 = patch_w * Int32(tap_columns)
    var r0 = patch_h * Int32(tap_rows)
    var slice, channel_block = divide(Int32(block_idx.y), channel_blocks)
    var c = Int(channel_block * lanes + lane) * vector
    var live = c < problem.c
    var sums = Array[T, size](fill=0)
    var strips = ceildiv(Int32(problem.q), Int32(width))
    var marches = ceildiv(Int32(problem.p), march)
    var units = Int32(problem.n * problem.o) * strips * marches
    var first_unit = slice * share * rows
    var last_unit = min(units, first_unit + share * rows) if live else Int32(0)
    for unit in range(first_unit + y, last_unit, rows):
        var down, strip = divide(unit, strips)
        var deep, which = divide(down, marches)
        var n, o = divide(deep, Int32(problem.o))
        var p = which * march
        var q = strip * Int32(width)
        var count = min(march, Int32(problem.p) - p)
        var d = (
            o * Int32(problem.stride_d)
            + t * Int32(problem.dilation_d)
            - Int32(problem.pad_d)
        )
        if UInt32(d) >= UInt32(problem.d):
            continue
        var h = (
            p * Int32(problem.stride_h)
            + r0 * Int32(problem.dilation_h)
            - Int32(problem.pad_h)
        )
        var w = (
            q * Int32(problem.stride_w)
            + s0 * Int32(problem.dilation_w)
            - Int32(problem.pad_w)
        )
        var x_base = x.unsafe_offset(
            ((Int(n) * problem.d + Int(d)) * problem.h * problem.w + Int(w))
            * problem.c
            + c
        )
        var dy_base = dy.unsafe_offset(
            (
                ((Int(n) * problem.o + Int(o)) * problem.p + Int(p)) * problem.q
                + Int(q)
            )
            * problem.c
            + c
        )

        @always_inline
        def dy_row(row: Int32) {imm} -> Array[V, width]:
            """Returns row number `row` of the march; zeros past its end."""
            var values = Array[V, width](fill=0)
            var line = dy_base.unsafe_offset(Int(row) * problem.q * problem.c)
            comptime for i in range(width):
                values[i] = load_inside[dtype, vector](
                    line,
                    i * problem.c,
                    row < count and q + Int32(i) < Int32(problem.q),
                )
            return values^

        @always_inline
        def x_row(row: Int32) {imm} -> Array[V, columns]:
            var values = Array[V, columns](fill=0)
            var inside = UInt32(row) < UInt32(problem.h)
            var line = x_base.unsafe_offset(Int(row) * problem.w * problem.c)
            comptime for i in range(columns):
                values[i] = load_inside[dtype, vector](
                    line,
                    i * problem.c,
                    inside and UInt32(w + Int32(i)) < UInt32(problem.w),
                )
            return values^

        comptime if step > 0 and (step == 1 or tap_rows > step + 1):
            # dy's rows that the row of x at hand meets, in a ring; what comes next is loaded before this row's
            # products.
            comptime lines = ceildiv(tap_rows, step)
            var ring = Array[Array[T, width], lines](
                fill=Array[T, width](fill=0)
            )
            var values = x_row(h)
            var gradient = dy_row(0)
            for first in range(
                Int32(0), count + Int32(lines - 1), Int32(lines)
            ):
                comptime for u in range(lines):
                    var at = first + Int32(u)
                    comptime for j in range(width):
                        ring[u][j] = wide(gradient[j])
                    # Rows past the last meet zeros of dy only.
                    gradient = dy_row(at + 1)
                    comptime for e in range(step):
                        var following = x_row(
                            h + at * Int32(step) + Int32(e + 1)
                        )
                        comptime for i in range(columns):
                            var value = wide(values[i])
                            comptime for r in range(e, tap_rows, step):
                                comptime slot = (u - r // step + lines) % lines
                                comptime for j in range(width):
                                    comptime s = i - j * step
                                    comptime if s >= 0 and s < tap_columns:
                                        sums[r * tap_columns + s] = value.fma(
                                            ring[slot][j],
                                            sums[r * tap_columns + s],
                                        )
                        values = following^
        elif step > 1:
            # The last row that a pixel reads is the first that the next one reads.
            comptime assert tap_rows == step + 1, "one shared row"
            var shared_row = x_row(h)
            for at in range(count):
                var gradient = dy_row(at)
                comptime for r in range(tap_rows):
                    comptime if r > 0:
                        shared_row = x_row(h + at * Int32(step) + Int32(r))
                    comptime for i in range(columns):
                        var value = wide(shared_row[i])
                        comptime for j in range(width):
                            comptime s = i - j * step
                            comptime if s >= 0 and s < tap_columns:
                                sums[r * tap_columns + s] = value.fma(
                                    wide(gradient[j]),
                                    sums[r * tap_columns + s],
                                )
        else:
            comptime assert size == 1, "any stride: one tap at a time"
            for at in range(count):
                var gradient = dy_row(at)
                var row = h + at * Int32(problem.stride_h)
                var inside = UInt32(row) < UInt32(problem.h)
                comptime for j in range(width):
                    var column = Int32(j) * Int32(problem.stride_w)
                    sums[0] = wide(
                        load_inside[dtype, vector](
                            x_base,
                            (Int(row) * problem.w + Int(column)) * problem.c,
                            inside and UInt32(w + column) < UInt32(problem.w),
                        )
                    ).fma(wide(gradient[j]), sums[0])
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
        var r = r0 + Int32(i // tap_columns)
        var s = s0 + Int32(i % tap_columns)
        # The last patches may reach past the window.
        if y == 0 and live and r < Int32(problem.r) and s < Int32(problem.s):
            var total = T(0)
            for row in range(rows):
                total += shared.unsafe_offset(
                    Int(row * lanes + lane) * vector
                ).unsafe_load[width=vector]()
            # dw is [channel][tap].
            var tap = (Int(t) * problem.r + Int(r)) * problem.s + Int(s)
            comptime for j in range(vector):
                partials[
                    unsafe_offset=(Int(slice) * problem.c + c + j)
                    * problem.taps()
                    + tap
                ] = total[j]


@always_inline
def _launch_wgrad[
    dtype: DType, vector: Int, tap_rows: Int, tap_columns: Int, step: Int
](
    dw: Ptr[dtype],
    x: Ptr[dtype],
    dy: Ptr[dtype],
    p: ConvolutionProblem,
    ctx: DeviceContext,
) raises:
    var channels = p.c // vector
    var channel_blocks = ceildiv(channels, WGRAD_LANES)
    var lanes = ceildiv(channels, channel_blocks)
    var rows = WGRAD_THREADS // lanes
    var patches = p.t * ceildiv(p.r, tap_rows) * ceildiv(p.s, tap_columns)
    # A ring is filled and emptied once for each march: the longer the ring, the longer the march.
    var processors = ctx.get_attribute(DeviceAttribute.MULTIPROCESSOR_COUNT)
    var across = p.n * p.o * ceildiv(p.q, strip_width[dtype]())
    var march = march_rows(
        p.p,
        patches * channels * across,
        processors * WGRAD_THREADS,
        MAX_MARCH_ROWS if tap_rows <= 3 else 2 * MAX_MARCH_ROWS,
    )
    var units = across * ceildiv(p.p, march)
    var blocks = WGRAD_BLOCKS * processors // (patches * channel_blocks)
    # The grid's second extent is at most 65535.
    var most = min(
        p.workspace_limit // max(1, 4 * p.w_size()), 65535 // channel_blocks
    )
    # Whole rounds of the block's rows of threads.
    var share = max(1, ceildiv(units, rows * max(1, min(blocks, most))))
    var slices = max(1, ceildiv(units, rows * share))
    var partials = scratch[DType.float32](ctx, slices * p.w_size())
    comptime kernel = depthwise_wgrad_kernel[
        dtype, vector, tap_rows, tap_columns, step
    ]
    ctx.enqueue_function[kernel](
        partials,
        x,
        dy,
        p,
        Int32(lanes),
        Int32(rows),
        Int32(march),
        Int32(share),
        grid_dim=(patches, channel_blocks * slices),
        block_dim=lanes * rows,
    )
    add_slices(dw, partials, p.w_size(), slices, ctx)


@no_inline
def depthwise_wgrad_gpu[
    dtype: DType
](
    dw: Ptr[dtype],
    x: Ptr[dtype],
    dy: Ptr[dtype],
    p: ConvolutionProblem,
    ctx: DeviceContext,
) raises:
    var aligned = is_aligned(x) and is_aligned(dy)
    if not (aligned and p.c % PAIR == 0):
        _launch_wgrad[dtype, 1, 1, 1, 0](dw, x, dy, p, ctx)
        return
    if p.dilation_h == 1 and p.dilation_w == 1 and p.taps() > p.t:
        # What the patches cover, taps past the window's edge with it. A large patch reads x and dy less often.
        var small = ceildiv(p.r, 3) * 3 * ceildiv(p.s, 3) * 3
        var large = ceildiv(p.r, 5) * 5 * ceildiv(p.s, 5) * 5
        var by_small = p.c % VECTOR == 0 and (
            max(p.r, p.s) <= 3 or 2 * small <= large
        )
        comptime for step in [1, 2]:
            if p.stride_h == step and p.stride_w == step:
                if by_small:
                    _launch_wgrad[dtype, VECTOR, 3, 3, step](dw, x, dy, p, ctx)
                else:
                    _launch_wgrad[dtype, PAIR, 5, 5, step](dw, x, dy, p, ctx)
                return
    if p.c % VECTOR == 0:
        if p.taps() == p.t and p.stride_h == 1 and p.stride_w == 1:
            _launch_wgrad[dtype, VECTOR, 1, 1, 1](dw, x, dy, p, ctx)
        else:
            _launch_wgrad[dtype, VECTOR, 1, 1, 0](dw, x, dy, p, ctx)
    else:
        _launch_wgrad[dtype, 1, 1, 1, 0](dw, x, dy, p, ctx)
