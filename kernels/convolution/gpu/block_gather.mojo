"""Forward pass and data gradient as block-tiled implicit products on NVIDIA GPUs: any filter, group count and rank.

Rows are the pixels of one phase, columns the result's channels of one group; the reduction runs over taps and the
source's channels, flattened, so that filters of few channels fill a stage too. Products are tensor-core ones in TF32,
or (`exact`) float32 multiply-adds. Elements of two bytes are exact in TF32.
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
from ...common.pointer import Ptr, Shared
from ...common.tensor_cores import QUAD, Quad, blocks_compile
from ..passes import FPROP, WGRAD
from ..gather import Phase, forward_phases, gradient_phases
from ..kernel import ConvolutionKernel, ConvolutionTensors
from ..problem import ConvolutionProblem
from .gather_rows import SourceRow, Step, result_pixel, source_row
from .pipeline import (
    STAGE_LENGTH,
    LINE_SUMS,
    STAGES,
    THREADS,
    WARP_COLUMNS,
    BlockShape,
    block_refusal,
    index_major,
    k_major,
    left_to_warpgroups,
    multiply_exact,
    multiply_tensor,
    round_quad,
    sum_column,
    sum_index,
)

comptime TILE_128X128 = BlockShape(128, 128)
comptime TILE_128X64 = BlockShape(128, 64)


@__llvm_metadata(
    # Twice the block: registers for two blocks on each multiprocessor.
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(2 * THREADS)),
)
@__name(
    t"conv_block_gather_{dtype}_p{pass_}_{shape.rows}x{shape.columns}_e{exact}_a{a_quads}_b{b_quads}"
)
def block_gather_kernel[
    dtype: DType,
    pass_: Int,
    shape: BlockShape,
    exact: Bool,
    a_quads: Bool,
    b_quads: Bool,
](
    result: Ptr[dtype],
    source: Ptr[dtype],
    w: Ptr[dtype],
    phase: Phase,
    rows: Int32,
    depth: Int32,
    columns: Int32,
    groups: Int32,
    filter_taps: Int32,
    filter_r: Int32,
    filter_s: Int32,
):
    """Computes one tile of y or of one phase of dx. `a_quads` and `b_quads` say that source and filter are copied four
    elements at a time."""
    comptime forward = pass_ == FPROP
    comptime row_count = shape.rows // 64
    comptime count = shape.accumulators()
    # The filter's tile: k-major [column][k] in the forward pass, index-major [k][column] in the gradient.
    comptime lines = shape.columns // 64 if forward else shape.columns * STAGE_LENGTH // (
        QUAD * THREADS
    )
    comptime across = Int32(shape.columns // QUAD)
    comptime lines_apart = Int32(THREADS) // across
    comptime a_size = shape.rows * STAGE_LENGTH
    comptime rounds = dtype == DType.float32 and not exact

    var thread = Int32(thread_idx.x)
    var lane = thread % 32
    var warp = thread // 32
    var rest, column_tile = divide(
        Int32(block_idx.x), ceildiv(columns, Int32(shape.columns))
    )
    var row_tile, group = divide(rest, groups)
    var first_row = row_tile * Int32(shape.rows)
    var first_column = column_tile * Int32(shape.columns)
    var channels = Int(depth) * Int(groups)
    var shared = external_memory[
        Scalar[dtype], address_space=AddressSpace.SHARED, alignment=128
    ]()

    var quad = thread % 4 * QUAD
    var source_rows = Array[SourceRow, row_count](fill=SourceRow(0, 0, 0, 0))
    comptime for i in range(row_count):
        source_rows[i] = source_row(
            phase,
            first_row + thread // 4 + Int32(i * 64),
            rows,
            channels,
            Int(group * depth),
        )
    var a_step = Step(0, 0, 0, 0)
    a_step.advance(quad, depth, phase)
    var b_steps = Array[Step, lines](fill=Step(0, 0, 0, 0))
    comptime if not forward:
        comptime for i in range(lines):
            b_steps[i].advance(
                thread // across + Int32(i) * lines_apart, depth, phase
            )
    var k = Int32(0)
    var total = (
        Int32(phase.d.taps) * Int32(phase.h.taps) * Int32(phase.w.taps) * depth
    )

    @always_inline
    def a_place(slot: Int32, i: Int) {imm} -> Shared[dtype]:
        """Returns the place of this thread's quad of source row `i` in a slot.
        """
        return shared.unsafe_offset(
            Int(slot) * shape.stage_elements()
            + k_major(thread // 4 + Int32(i * 64), quad)
        )

    @always_inline
    def b_place(slot: Int32, i: Int) {imm} -> Shared[dtype]:
        """Returns the place of this thread's quad of filter line `i` in a slot.
        """
        var b = shared.unsafe_offset(
            Int(slot) * shape.stage_elements() + a_size
        )
        comptime if forward:
            return b.unsafe_offset(k_major(thread // 4 + Int32(i * 64), quad))
        else:
            return b.unsafe_offset(
                index_major[dtype, shape.columns](
                    thread % across * QUAD,
                    thread // across + Int32(i) * lines_apart,
                )
            )

    @always_inline
    def load_source(slot: Int32) {mut a_step, imm}:
        comptime for i in range(row_count):
            var at = a_place(slot, i)
            var row = source_rows[i]
            var step = a_step
            comptime for e in range(1 if a_quads else QUAD):
                var offset = step.offset(phase)
                var first = (
                    row.base + offset.pixels(phase) * channels + Int(step.c)
                )
                var valid = step.exists(phase) and row.reaches(offset, phase)
                comptime if a_quads:
                    copy_elements[QUAD](UInt32(Int(at)), source, first, valid)
                else:
                    copy_elements[1](
                        UInt32(Int(at.unsafe_offset(e))), source, first, valid
                    )
                    step.advance(1, depth, phase)
        a_step.advance(STAGE_LENGTH, depth, phase)

    @always_inline
    def load_filter(slot: Int32) {mut b_steps, mut k, imm}:
        comptime for i in range(lines):
            var at = b_place(slot, i)
            comptime if forward:
                # A filter of the forward pass has its taps and channels in the reduction's order.
                var column = first_column + thread // 4 + Int32(i * 64)
                var first = Int(group * columns + column) * Int(total) + Int(
                    k + quad
                )
                comptime if b_quads:
                    copy_elements[QUAD](
                        UInt32(Int(at)),
                        w,
                        first,
                        column < columns and k + quad < total,
                    )
                else:
                    comptime for e in range(QUAD):
                        copy_elements[1](
                            UInt32(Int(at.unsafe_offset(e))),
                            w,
                            first + e,
                            column < columns and k + quad + Int32(e) < total,
                        )
            else:
                var column = first_column + thread % across * QUAD
                var step = b_steps[i]
                var first = (
                    Int(group * depth + step.c) * Int(filter_taps)
                    + Int(step.tap(phase, filter_r, filter_s))
                ) * Int(columns) + Int(column)
                var exists = step.exists(phase)
                comptime if b_quads:
                    copy_elements[QUAD](
                        UInt32(Int(at)), w, first, exists and column < columns
                    )
                else:
                    comptime for e in range(QUAD):
                        copy_elements[1](
                            UInt32(Int(at.unsafe_offset(e))),
                            w,
                            first + e,
                            exists and column + Int32(e) < columns,
                        )
                b_steps[i].advance(STAGE_LENGTH, depth, phase)
        k += STAGE_LENGTH

    @always_inline
    def round_own(slot: Int32) {imm}:
        """Rounds the elements that this thread copied into a slot."""
        comptime for i in range(row_count):
            round_quad(rebind[Shared[DType.float32]](a_place(slot, i)))
        comptime for i in range(lines):
            round_quad(rebind[Shared[DType.float32]](b_place(slot, i)))

    var stages = ceildiv(total, Int32(STAGE_LENGTH))
    comptime for i in range(STAGES - 1):
        if Int32(i) < stages:
            load_source(Int32(i))
            load_filter(Int32(i))
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
            load_source((slot + STAGES - 1) % STAGES)
            load_filter((slot + STAGES - 1) % STAGES)
        commit_copies()
        var a = shared.unsafe_offset(Int(slot) * shape.stage_elements())
        var b = a.unsafe_offset(a_size)
        comptime if exact:
            multiply_exact[dtype, shape, True, forward, count](
                sums, a, b, row, column, lane
            )
        else:
            multiply_tensor[dtype, shape, True, forward, count](
                sums, a, b, row, column, lane
            )
        slot = (slot + 1) % STAGES

    _store[dtype, shape, exact, count](
        result,
        sums,
        phase,
        first_row + row,
        rows,
        first_column + column,
        columns,
        group,
        groups,
        lane,
    )


@always_inline
def _store[
    dtype: DType, shape: BlockShape, exact: Bool, count: Int
](
    result: Ptr[dtype],
    sums: Array[Quad, count],
    phase: Phase,
    first_row: Int32,
    rows: Int32,
    first_column: Int32,
    columns: Int32,
    group: Int32,
    groups: Int32,
    lane: Int32,
):
    """Stores a lane's sums of a warp's tile, which begins at a row of the phase and a column of the group.
    """
    var result_channels = Int(columns) * Int(groups)
    var pairs = result_channels % 2 == 0 and columns % 2 == 0
    comptime for line in range(shape.warp_rows() // 8):
        var row = first_row + Int32(line * 8) + lane // 4
        if row < rows:
            var target = result.unsafe_offset(
                result_pixel(phase, row) * result_channels
                + Int(group * columns)
            )
            comptime for e in range(0, LINE_SUMS, 2):
                comptime first = sum_index[exact](line, e)
                comptime second = sum_index[exact](line, e + 1)
                var left = sums[first[0]][first[1]].cast[dtype]()
                var right = sums[second[0]][second[1]].cast[dtype]()
                var at = first_column + sum_column[exact](e, lane)
                var next = first_column + sum_column[exact](e + 1, lane)
                if not exact and pairs:
                    if at < columns:
                        target.unsafe_offset(Int(at)).unsafe_store[
                            alignment=2 * size_of[dtype]()
                        ](SIMD[dtype, 2](left, right))
                else:
                    if at < columns:
                        target[unsafe_offset=Int(at)] = left
                    if next < columns:
                        target[unsafe_offset=Int(next)] = right


@always_inline
def _launch[
    dtype: DType,
    pass_: Int,
    shape: BlockShape,
    exact: Bool,
    a_quads: Bool,
    b_quads: Bool,
](
    result: Ptr[dtype],
    source: Ptr[dtype],
    w: Ptr[dtype],
    p: ConvolutionProblem,
    ctx: DeviceContext,
) raises:
    var phases: List[Phase]
    comptime if pass_ == FPROP:
        phases = forward_phases(p)
    else:
        phases = gradient_phases(p, 0)
    var depth = p.group_c() if pass_ == FPROP else p.group_k()
    var columns = p.group_k() if pass_ == FPROP else p.group_c()
    for phase in phases:
        var rows = phase.rows(p.n)
        if rows == 0:
            continue
        comptime kernel = block_gather_kernel[
            dtype, pass_, shape, exact, a_quads, b_quads
        ]
        ctx.enqueue_function[kernel](
            result,
            source,
            w,
            phase,
            Int32(rows),
            Int32(depth),
            Int32(columns),
            Int32(p.groups),
            Int32(p.taps()),
            Int32(p.r),
            Int32(p.s),
            grid_dim=ceildiv(rows, shape.rows)
            * ceildiv(columns, shape.columns)
            * p.groups,
            block_dim=THREADS,
            shared_mem_bytes=shape.shared_bytes[dtype](),
            func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(
                UInt32(shape.shared_bytes[dtype]())
            ),
        )


@always_inline
def _choose[
    dtype: DType, pass_: Int, exact: Bool
](
    result: Ptr[dtype],
    source: Ptr[dtype],
    w: Ptr[dtype],
    p: ConvolutionProblem,
    ctx: DeviceContext,
) raises:
    var depth = p.group_c() if pass_ == FPROP else p.group_k()
    var columns = p.group_k() if pass_ == FPROP else p.group_c()
    var result_pixels = (
        p.output_pixels() if pass_ == FPROP else p.input_pixels()
    )
    var phases = 1 if pass_ == FPROP else (p.stride_d * p.stride_h * p.stride_w)
    var quad_bytes = QUAD * size_of[dtype]()
    var a_quads = depth % QUAD == 0 and Int(source) % quad_bytes == 0
    var b_quads = (depth if pass_ == FPROP else columns) % QUAD == 0 and Int(
        w
    ) % quad_bytes == 0
    var wide_tiles = (
        ceildiv(result_pixels // phases, TILE_128X128.rows)
        * ceildiv(columns, TILE_128X128.columns)
        * p.groups
    )
    var enough = 2 * ctx.get_attribute(DeviceAttribute.MULTIPROCESSOR_COUNT)
    if not a_quads:
        _launch[dtype, pass_, TILE_128X64, exact, False, False](
            result, source, w, p, ctx
        )
    elif not b_quads or left_to_warpgroups[dtype, exact]():
        _launch[dtype, pass_, TILE_128X64, exact, True, False](
            result, source, w, p, ctx
        )
    else:
        comptime if not left_to_warpgroups[dtype, exact]():
            # Exact products of a wide tile would need more registers than two blocks have; few wide tiles leave
            # multiprocessors without work.
            if exact or columns <= TILE_128X64.columns or wide_tiles < enough:
                _launch[dtype, pass_, TILE_128X64, exact, True, True](
                    result, source, w, p, ctx
                )
                return
            comptime if not exact:
                _launch[dtype, pass_, TILE_128X128, exact, True, True](
                    result, source, w, p, ctx
                )


struct BlockGather(ConvolutionKernel):
    comptime NAME: StaticString = "block_gather"

    @staticmethod
    def compiles[dtype: DType, pass_: Int, grouping: Int]() -> Bool:
        return blocks_compile() and pass_ != WGRAD and dtype != DType.float64

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
                _choose[dtype, pass_, True](t.result, t.a, t.b, p, ctx)
                return
        _choose[dtype, pass_, False](t.result, t.a, t.b, p, ctx)
