"""Weight gradient as a block-tiled product on NVIDIA GPUs: any filter, group count and rank.

Rows are dy's channels of one group, columns the filter's taps and channels, and the reduction over pixels is split into
slices, whose float32 sums a second kernel adds in order. Arithmetic as in block_gather.
"""

from std.math import ceildiv
from std.sys import size_of
from std.utils.static_tuple import StaticTuple

from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    barrier,
    block_idx,
    thread_idx,
)
from max.gpu.host import DeviceAttribute, DeviceContext, FuncAttribute
from max.gpu.memory import AddressSpace, external_memory

from ...common.arithmetic import divide
from ...common.async_copy import (
    commit_copies,
    copy_elements,
    wait_for_copies,
)
from ...common.library import scratch
from ...common.pointer import Ptr, Shared
from ...common.tensor_cores import QUAD, Quad, blocks_compile
from ..kernel import ConvolutionKernel, ConvolutionTensors
from ..passes import WGRAD
from ..problem import ConvolutionProblem
from .pipeline import (
    STAGE_LENGTH,
    LINE_SUMS,
    STAGES,
    THREADS,
    WARP_COLUMNS,
    BlockShape,
    block_refusal,
    index_major,
    left_to_warpgroups,
    multiply_exact,
    multiply_tensor,
    round_quad,
    sum_column,
    sum_index,
)
from .slices import choose_slices
from .tiled import add_slices

comptime TILE_128X128 = BlockShape(128, 128)
comptime TILE_64X128 = BlockShape(64, 128)
# What the memory moves while one stage runs.
comptime _STAGE_BYTES = 8 << 20


@fieldwise_init
struct Pixel(ImplicitlyCopyable, TrivialRegisterPassable):
    """One pixel of dy by its indices."""

    var n: Int32
    var o: Int32
    var p: Int32
    var q: Int32

    @always_inline
    def advance(mut self, count: Int32, p: ConvolutionProblem):
        self.q += count
        while self.q >= Int32(p.q):
            self.q -= Int32(p.q)
            self.p += 1
            if self.p == Int32(p.p):
                self.p = 0
                self.o += 1
                if self.o == Int32(p.o):
                    self.o = 0
                    self.n += 1


@always_inline
def pixel_of(index: Int32, problem: ConvolutionProblem) -> Pixel:
    """Returns the indices of dy's pixel number `index`."""
    var line, q = divide(index, Int32(problem.q))
    var plane, p = divide(line, Int32(problem.p))
    var n, o = divide(plane, Int32(problem.o))
    return Pixel(n, o, p, q)


@fieldwise_init
struct Column(ImplicitlyCopyable, TrivialRegisterPassable):
    """One column: the tap's offset on each axis, and the element that it reads of pixel zero's source.
    """

    var d: Int32
    var h: Int32
    var w: Int32
    var base: Int


@always_inline
def column_of(
    column: Int32,
    columns: Int32,
    depth: Int32,
    p: ConvolutionProblem,
    first: Int,
) -> Column:
    # Columns past the end read nothing: their depth is outside whatever the pixel.
    if column >= columns:
        return Column(Int32(-(1 << 30)), 0, 0, 0)
    var tap, c = divide(column, depth)
    var outer, s = divide(tap, Int32(p.s))
    var t, r = divide(outer, Int32(p.r))
    var d = t * Int32(p.dilation_d) - Int32(p.pad_d)
    var h = r * Int32(p.dilation_h) - Int32(p.pad_h)
    var w = s * Int32(p.dilation_w) - Int32(p.pad_w)
    var pixel = (Int(d) * p.h + Int(h)) * p.w + Int(w)
    return Column(d, h, w, pixel * p.c + Int(c) + first)


@__llvm_metadata(
    # Twice the block: registers for two blocks on each multiprocessor.
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(2 * THREADS)),
)
@__name(
    t"conv_block_wgrad_{dtype}_{shape.rows}x{shape.columns}_e{exact}_a{a_quads}_b{b_quads}"
)
def block_wgrad_kernel[
    dtype: DType,
    shape: BlockShape,
    exact: Bool,
    a_quads: Bool,
    b_quads: Bool,
](
    partials: Ptr[DType.float32],
    x: Ptr[dtype],
    dy: Ptr[dtype],
    p: ConvolutionProblem,
    rows: Int32,
    depth: Int32,
    columns: Int32,
    pixels: Int32,
    slice_pixels: Int32,
):
    """Computes one tile of one slice's partial dw. `a_quads` and `b_quads` say that dy and x are copied four elements
    at a time."""
    comptime count = shape.accumulators()
    comptime a_across = Int32(shape.rows // QUAD)
    comptime a_apart = Int32(THREADS) // a_across
    comptime a_lines = shape.rows * STAGE_LENGTH // (QUAD * THREADS)
    comptime b_across = Int32(shape.columns // QUAD)
    comptime b_apart = Int32(THREADS) // b_across
    comptime b_lines = shape.columns * STAGE_LENGTH // (QUAD * THREADS)
    comptime b_columns = 1 if b_quads else QUAD
    comptime a_size = shape.rows * STAGE_LENGTH
    comptime rounds = dtype == DType.float32 and not exact

    var thread = Int32(thread_idx.x)
    var lane = thread % 32
    var warp = thread // 32
    # Tiles of one slice run together: they read the same pixels.
    var rest, column_tile = divide(
        Int32(block_idx.x), ceildiv(columns, Int32(shape.columns))
    )
    var outer, row_tile = divide(rest, ceildiv(rows, Int32(shape.rows)))
    var slice, group = divide(outer, Int32(p.groups))
    var first_row = row_tile * Int32(shape.rows)
    var first_column = column_tile * Int32(shape.columns)
    var first = slice * slice_pixels
    var last = min(pixels, first + slice_pixels)
    var shared = external_memory[
        Scalar[dtype], address_space=AddressSpace.SHARED, alignment=128
    ]()

    var a_inner = thread % a_across * QUAD
    var b_inner = thread % b_across * QUAD
    var sources = Array[Column, b_columns](fill=Column(0, 0, 0, 0))
    comptime for e in range(b_columns):
        sources[e] = column_of(
            first_column + b_inner + Int32(e),
            columns,
            depth,
            p,
            Int(group * depth),
        )
    var at = Array[Pixel, b_lines](fill=Pixel(0, 0, 0, 0))
    comptime for i in range(b_lines):
        at[i] = pixel_of(first + thread // b_across + Int32(i) * b_apart, p)
    var start = first

    @always_inline
    def load(slot: Int32) {mut at, mut start, imm}:
        var a = shared.unsafe_offset(Int(slot) * shape.stage_elements())
        var b = a.unsafe_offset(a_size)
        comptime for i in range(a_lines):
            var line = thread // a_across + Int32(i) * a_apart
            var target = a.unsafe_offset(
                index_major[dtype, shape.rows](a_inner, line)
            )
            var channel = first_row + a_inner
            var offset = Int(start + line) * p.k + Int(group * rows + channel)
            comptime if a_quads:
                copy_elements[QUAD](
                    UInt32(Int(target)),
                    dy,
                    offset,
                    start + line < last and channel < rows,
                )
            else:
                comptime for e in range(QUAD):
                    copy_elements[1](
                        UInt32(Int(target.unsafe_offset(e))),
                        dy,
                        offset + e,
                        start + line < last and channel + Int32(e) < rows,
                    )
        comptime for i in range(b_lines):
            var line = thread // b_across + Int32(i) * b_apart
            var target = b.unsafe_offset(
                index_major[dtype, shape.columns](b_inner, line)
            )
            var d = at[i].o * Int32(p.stride_d)
            var h = at[i].p * Int32(p.stride_h)
            var w = at[i].q * Int32(p.stride_w)
            var pixel = (
                (Int(at[i].n) * p.d + Int(d)) * p.h + Int(h)
            ) * p.w + Int(w)
            comptime for e in range(b_columns):
                var valid = (
                    start + line < last
                    and UInt32(d + sources[e].d) < UInt32(p.d)
                    and UInt32(h + sources[e].h) < UInt32(p.h)
                    and UInt32(w + sources[e].w) < UInt32(p.w)
                )
                var offset = pixel * p.c + sources[e].base
                comptime if b_quads:
                    copy_elements[QUAD](UInt32(Int(target)), x, offset, valid)
                else:
                    copy_elements[1](
                        UInt32(Int(target.unsafe_offset(e))), x, offset, valid
                    )
            at[i].advance(STAGE_LENGTH, p)
        start += STAGE_LENGTH

    @always_inline
    def round_own(slot: Int32) {imm}:
        """Rounds the elements that this thread copied into a slot."""
        var a = shared.unsafe_offset(Int(slot) * shape.stage_elements())
        var b = a.unsafe_offset(a_size)
        comptime for i in range(a_lines):
            var line = thread // a_across + Int32(i) * a_apart
            round_quad(
                rebind[Shared[DType.float32]](
                    a.unsafe_offset(
                        index_major[dtype, shape.rows](a_inner, line)
                    )
                )
            )
        comptime for i in range(b_lines):
            var line = thread // b_across + Int32(i) * b_apart
            round_quad(
                rebind[Shared[DType.float32]](
                    b.unsafe_offset(
                        index_major[dtype, shape.columns](b_inner, line)
                    )
                )
            )

    var stages = ceildiv(max(last - first, Int32(0)), Int32(STAGE_LENGTH))
    comptime for i in range(STAGES - 1):
        if Int32(i) < stages:
            load(Int32(i))
        commit_copies()
    comptime across_warps = Int32(shape.warps_along_columns())
    var row = warp // across_warps * Int32(shape.warp_rows())
    var column = warp % across_warps * Int32(WARP_COLUMNS)
    var sums = Array[Quad, count](fill=0)
    var slot = Int32(0)
    for stage in range(stages):
        wait_for_copies[STAGES - 2]()
        comptime if rounds:
            round_own(slot)
        barrier()
        if stage + (STAGES - 1) < stages:
            # The slot that every warp has finished with: the one before this stage's.
            load((slot + STAGES - 1) % STAGES)
        commit_copies()
        var a = shared.unsafe_offset(Int(slot) * shape.stage_elements())
        var b = a.unsafe_offset(a_size)
        comptime if exact:
            multiply_exact[dtype, shape, False, False, count](
                sums, a, b, row, column, lane
            )
        else:
            multiply_tensor[dtype, shape, False, False, count](
                sums, a, b, row, column, lane
            )
        slot = (slot + 1) % STAGES

    var base = partials.unsafe_offset(
        (Int(slice) * Int(p.groups) + Int(group)) * Int(rows) * Int(columns)
    )
    comptime for line in range(shape.warp_rows() // 8):
        var k = first_row + row + Int32(line * 8) + lane // 4
        if k < rows:
            comptime for e in range(LINE_SUMS):
                comptime at_sum = sum_index[exact](line, e)
                var j = first_column + column + sum_column[exact](e, lane)
                if j < columns:
                    base[unsafe_offset=Int(k) * Int(columns) + Int(j)] = sums[
                        at_sum[0]
                    ][at_sum[1]]


@always_inline
def _launch[
    dtype: DType,
    shape: BlockShape,
    exact: Bool,
    a_quads: Bool,
    b_quads: Bool,
](
    dw: Ptr[dtype],
    x: Ptr[dtype],
    dy: Ptr[dtype],
    p: ConvolutionProblem,
    ctx: DeviceContext,
) raises:
    var size = p.w_size()
    var columns = p.taps() * p.group_c()
    var tiles = (
        ceildiv(p.group_k(), shape.rows)
        * ceildiv(columns, shape.columns)
        * p.groups
    )
    var stages = ceildiv(p.output_pixels(), STAGE_LENGTH)
    # Two blocks share a multiprocessor.
    var at_once = 2 * ctx.get_attribute(DeviceAttribute.MULTIPROCESSOR_COUNT)
    var slices = choose_slices(p, tiles, at_once, stages, _STAGE_BYTES).count
    # Whole stages to a slice.
    var slice_pixels = ceildiv(stages, slices) * STAGE_LENGTH
    slices = ceildiv(p.output_pixels(), slice_pixels)
    var partials = scratch[DType.float32](ctx, slices * size)
    comptime kernel = block_wgrad_kernel[dtype, shape, exact, a_quads, b_quads]
    ctx.enqueue_function[kernel](
        partials,
        x,
        dy,
        p,
        Int32(p.group_k()),
        Int32(p.group_c()),
        Int32(columns),
        Int32(p.output_pixels()),
        Int32(slice_pixels),
        grid_dim=tiles * slices,
        block_dim=THREADS,
        shared_mem_bytes=shape.shared_bytes[dtype](),
        func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(
            UInt32(shape.shared_bytes[dtype]())
        ),
    )
    add_slices(dw, partials, size, slices, ctx)


@always_inline
def _choose[
    dtype: DType, exact: Bool
](
    dw: Ptr[dtype],
    x: Ptr[dtype],
    dy: Ptr[dtype],
    p: ConvolutionProblem,
    ctx: DeviceContext,
) raises:
    var quad_bytes = QUAD * size_of[dtype]()
    var a_quads = p.group_k() % QUAD == 0 and Int(dy) % quad_bytes == 0
    var b_quads = p.group_c() % QUAD == 0 and Int(x) % quad_bytes == 0
    if not a_quads:
        _launch[dtype, TILE_64X128, exact, False, False](dw, x, dy, p, ctx)
    elif not b_quads or left_to_warpgroups[dtype, exact]():
        _launch[dtype, TILE_64X128, exact, True, False](dw, x, dy, p, ctx)
    else:
        comptime if not left_to_warpgroups[dtype, exact]():
            if exact or p.group_k() <= TILE_64X128.rows:
                _launch[dtype, TILE_64X128, exact, True, True](
                    dw, x, dy, p, ctx
                )
                return
            comptime if not exact:
                _launch[dtype, TILE_128X128, exact, True, True](
                    dw, x, dy, p, ctx
                )


struct BlockWgrad(ConvolutionKernel):
    """Block-tiled weight gradient; its partial sums stay within the workspace limit.
    """

    comptime NAME: StaticString = "block_wgrad"

    @staticmethod
    def compiles[dtype: DType, pass_: Int, grouping: Int]() -> Bool:
        return blocks_compile() and pass_ == WGRAD and dtype != DType.float64

    @staticmethod
    def refusal[
        dtype: DType, pass_: Int
    ](t: ConvolutionTensors[dtype], p: ConvolutionProblem) -> Optional[String]:
        return block_refusal[pass_](p)

    @staticmethod
    @no_inline
    def launch[
        dtype: DType, pass_: Int
    ](
        ctx: DeviceContext, t: ConvolutionTensors[dtype], p: ConvolutionProblem
    ) raises:
        comptime if dtype == DType.float32:
            if not p.allow_tf32:
                _choose[dtype, True](t.result, t.a, t.b, p, ctx)
                return
        _choose[dtype, False](t.result, t.a, t.b, p, ctx)
