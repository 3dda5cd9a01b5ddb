"""Forward pass and data gradient of groups of 4 or 8 channels, summed directly: the tile of a product would be mostly
empty.

A thread has four channels of a strip of pixels of one phase, in float32. Eight neighbouring threads read 128
neighbouring bytes of every pixel's channels and of the filter, which is copied to [tap][channel of the group][result's
channel] first.

Drawn problems on an H200 take 1.6 of cuDNN's time in bfloat16, and 2.3 (forward) and 0.8 in float32
(convolution_by_kernel.json).
"""

from std.math import ceildiv
from std.sys import size_of

from max.gpu import block_idx, thread_idx
from max.gpu.host import DeviceContext

from ...common.arithmetic import divide
from ...common.library import scratch
from ...common.pointer import Ptr
from ...common.tensor_cores import QUAD, Quad, blocks_compile
from ..passes import FPROP, ONE_GROUP, WGRAD
from ..gather import Phase, forward_phases, gradient_phases
from ..kernel import ConvolutionKernel, ConvolutionTensors
from ..problem import ConvolutionProblem
from .pipeline import block_refusal

comptime _THREADS = 256
comptime _LANES = 8
"""Threads beside each other along channels, four channels each."""
comptime _STRIPS = _THREADS // _LANES
"""Strips of a block."""
# Pixels of a strip.
comptime _STRIP = 4
comptime MAX_CHANNELS = 8


@__name(t"conv_small_groups_pack_{dtype}_p{pass_}")
def _pack_filter_kernel[
    dtype: DType, pass_: Int
](
    packed: Ptr[DType.float32],
    w: Ptr[dtype],
    taps: Int32,
    group_c: Int32,
    group_k: Int32,
    size: Int32,
):
    """Writes packed [tap][i][result's channel] of w [K][taps][C / G], i counting the channels that are summed over.
    """
    var at = Int32(block_idx.x) * _THREADS + Int32(thread_idx.x)
    if at >= size:
        return
    var rest, c = divide(at, group_c)
    var k, tap = divide(rest, taps)
    var group, inner = divide(k, group_k)
    var depth = group_c if pass_ == FPROP else group_k
    var channels = size // (taps * depth)
    var i = c if pass_ == FPROP else inner
    var channel = k if pass_ == FPROP else group * group_c + c
    packed[unsafe_offset=Int((tap * depth + i) * channels + channel)] = w[
        unsafe_offset=Int(at)
    ].cast[DType.float32]()


@__name(t"conv_small_groups_{dtype}_{depth}")
def small_groups_kernel[
    dtype: DType, depth: Int
](
    result: Ptr[dtype],
    source: Ptr[dtype],
    packed: Ptr[DType.float32],
    phase: Phase,
    strips: Int32,
    columns: Int32,
    channels: Int32,
    filter_r: Int32,
    filter_s: Int32,
):
    """Computes four channels of one strip of y or of one phase of dx; `depth` channels of the source and `columns` of
    the result's `channels` in each group."""
    var thread = Int32(thread_idx.x)
    var strip = Int32(block_idx.x) * _STRIPS + thread // _LANES
    var channel = (Int32(block_idx.y) * _LANES + thread % _LANES) * QUAD
    if strip >= strips or channel >= channels:
        return
    var group, _ = divide(channel, columns)
    var groups, _ = divide(channels, columns)
    var line, place = divide(strip, ceildiv(Int32(phase.w.rows), Int32(_STRIP)))
    var outer, p = divide(line, Int32(phase.h.rows))
    var n, o = divide(outer, Int32(phase.d.rows))
    var q = place * _STRIP
    var source_channels = Int(groups) * depth
    var filter_step = Int(channels)
    var sums = Array[Quad, _STRIP](fill=0)
    for t in range(Int32(phase.d.taps)):
        var d = o * Int32(phase.d.step) + Int32(phase.d.offset(Int(t)))
        if UInt32(d) >= UInt32(phase.d.source):
            continue
        for r in range(Int32(phase.h.taps)):
            var h = p * Int32(phase.h.step) + Int32(phase.h.offset(Int(r)))
            if UInt32(h) >= UInt32(phase.h.source):
                continue
            var row = source.unsafe_offset(
                ((Int(n) * phase.d.source + Int(d)) * phase.h.source + Int(h))
                * phase.w.source
                * source_channels
                + Int(group) * depth
            )
            var tap_row = (
                (Int32(phase.d.first_tap) + t * Int32(phase.d.tap_step))
                * filter_r
                + Int32(phase.h.first_tap)
                + r * Int32(phase.h.tap_step)
            ) * filter_s
            for s in range(Int32(phase.w.taps)):
                var tap = (
                    tap_row
                    + Int32(phase.w.first_tap)
                    + s * Int32(phase.w.tap_step)
                )
                var filter = packed.unsafe_offset(
                    Int(tap) * depth * filter_step + Int(channel)
                )
                var weights = Array[Quad, depth](fill=0)
                comptime for i in range(depth):
                    weights[i] = filter.unsafe_offset(
                        i * filter_step
                    ).unsafe_load[width=QUAD, alignment=16]()
                var first = q * Int32(phase.w.step) + Int32(
                    phase.w.offset(Int(s))
                )
                comptime for pixel in range(_STRIP):
                    var x = first + Int32(pixel) * Int32(phase.w.step)
                    if UInt32(x) < UInt32(phase.w.source):
                        var at = row.unsafe_offset(Int(x) * source_channels)
                        comptime for quad in range(depth // QUAD):
                            var value = (
                                at.unsafe_offset(quad * QUAD)
                                .unsafe_load[
                                    width=QUAD,
                                    alignment=QUAD * size_of[dtype](),
                                ]()
                                .cast[DType.float32]()
                            )
                            comptime for e in range(QUAD):
                                sums[pixel] = Quad(value[e]).fma(
                                    weights[quad * QUAD + e], sums[pixel]
                                )
    var base = (
        (
            Int(n) * phase.d.out_extent
            + phase.d.out_first
            + Int(o) * phase.d.out_step
        )
        * phase.h.out_extent
        + phase.h.out_first
        + Int(p) * phase.h.out_step
    ) * phase.w.out_extent + phase.w.out_first
    comptime for pixel in range(_STRIP):
        if q + Int32(pixel) < Int32(phase.w.rows):
            result.unsafe_offset(
                (base + Int(q + Int32(pixel)) * phase.w.out_step)
                * Int(channels)
                + Int(channel)
            ).unsafe_store[alignment=QUAD * size_of[dtype]()](
                sums[pixel].cast[dtype]()
            )


struct SmallGroups(ConvolutionKernel):
    comptime NAME: StaticString = "small_groups"

    @staticmethod
    def compiles[dtype: DType, pass_: Int, grouping: Int]() -> Bool:
        return (
            blocks_compile()
            and pass_ != WGRAD
            and grouping != ONE_GROUP
            and dtype != DType.float64
        )

    @staticmethod
    def refusal[
        dtype: DType, pass_: Int
    ](t: ConvolutionTensors[dtype], p: ConvolutionProblem) -> Optional[String]:
        var reason = block_refusal[pass_](p)
        if reason:
            return reason
        var depth = p.group_c() if pass_ == FPROP else p.group_k()
        var columns = p.group_k() if pass_ == FPROP else p.group_c()
        if p.groups == 1 or (depth != 4 and depth != 8):
            return String(t"sums over {depth} channels; takes groups of 4 or 8")
        if columns % QUAD != 0 or columns > MAX_CHANNELS:
            return String(t"{columns} columns in a group; takes 4 or 8")
        if (Int(t.result) | Int(t.a)) % (QUAD * size_of[dtype]()) != 0:
            return String(
                "a tensor does not begin at a multiple of four elements"
            )
        if 4 * p.w_size() > p.workspace_limit or p.w_size() >= 1 << 31:
            return String(
                t"the copied filter takes {4 * p.w_size()} bytes, the workspace"
                t" limit is {p.workspace_limit}"
            )
        var channels = p.k if pass_ == FPROP else p.c
        if ceildiv(channels, QUAD * _LANES) > 65535:
            return String(t"{channels} channels")
        return None

    @staticmethod
    @no_inline
    def launch[
        dtype: DType, pass_: Int
    ](
        ctx: DeviceContext, t: ConvolutionTensors[dtype], p: ConvolutionProblem
    ) raises:
        var phases: List[Phase]
        comptime if pass_ == FPROP:
            phases = forward_phases(p)
        else:
            phases = gradient_phases(p, 0)
        var columns = p.group_k() if pass_ == FPROP else p.group_c()
        var channels = p.k if pass_ == FPROP else p.c
        var depth_given = p.group_c() if pass_ == FPROP else p.group_k()
        var packed = scratch[DType.float32](ctx, p.w_size())
        var filter = Ptr[DType.float32](
            unsafe_from_address=Int(packed.unsafe_ptr())
        )
        ctx.enqueue_function[_pack_filter_kernel[dtype, pass_]](
            filter,
            t.b,
            Int32(p.taps()),
            Int32(p.group_c()),
            Int32(p.group_k()),
            Int32(p.w_size()),
            grid_dim=ceildiv(p.w_size(), _THREADS),
            block_dim=_THREADS,
        )
        for phase in phases:
            var strips = (
                p.n
                * phase.d.rows
                * phase.h.rows
                * ceildiv(phase.w.rows, _STRIP)
            )
            if strips == 0:
                continue
            comptime for depth in [4, 8]:
                if depth_given == depth:
                    ctx.enqueue_function[small_groups_kernel[dtype, depth]](
                        t.result,
                        t.a,
                        filter,
                        phase,
                        Int32(strips),
                        Int32(columns),
                        Int32(channels),
                        Int32(p.r),
                        Int32(p.s),
                        grid_dim=(
                            ceildiv(strips, _STRIPS),
                            ceildiv(channels, QUAD * _LANES),
                        ),
                        block_dim=_THREADS,
                    )
        # Lives until its last use is enqueued.
        _ = packed^
