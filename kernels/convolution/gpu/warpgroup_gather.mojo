"""Forward pass and data gradient on Hopper's warpgroups: any filter, group count and rank; float32 in TF32.

The product of block_gather (rows are a phase's pixels, columns the result's channels of one group, the reduction taps
and channels flattened), multiplied by wgmma from tiles that warpgroup.mojo describes.
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
from max.gpu.host import DeviceContext, FuncAttribute
from max.gpu.memory import AddressSpace, external_memory

from ...common.arithmetic import divide
from ...common.pointer import Ptr
from ...common.ptx import compiling_for_hopper
from ...common.warpgroup import (
    APART,
    SLOTS,
    THREADS,
    IndexMajor,
    DepthMajor,
    WarpgroupTile,
    Vector,
    finish_product,
    load_vector,
    publish_stores,
    start_product,
    steps_of,
    sum_column,
    sum_row,
    vector_of,
)
from ..passes import FPROP, WGRAD
from ..gather import forward_phases, gradient_phases
from ..kernel import ConvolutionKernel, ConvolutionTensors
from ..problem import ConvolutionProblem
from .gather_rows import SourceRow, Step, result_pixel, source_row
from .phase_table import PhaseTable
from .pipeline import block_refusal

comptime TILE_128X128 = WarpgroupTile(128, 128)
comptime TILE_128X64 = WarpgroupTile(128, 64)
comptime TILE_128X32 = WarpgroupTile(128, 32)


def _together[pass_: Int, shape: WarpgroupTile]() -> Bool:
    """Returns whether one launch computes every phase: the wide tile's kernel has registers to spare for that.
    """
    return pass_ != FPROP and shape == TILE_128X128


@__llvm_metadata(
    # Of the smaller tiles two blocks share a multiprocessor's registers.
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](
        Int32(THREADS if shape == TILE_128X128 else 2 * THREADS)
    ),
)
@__name(t"conv_warpgroup_gather_{dtype}_p{pass_}_{shape.rows}x{shape.columns}")
def warpgroup_gather_kernel[
    dtype: DType, pass_: Int, shape: WarpgroupTile
](
    result: Ptr[dtype],
    source: Ptr[dtype],
    w: Ptr[dtype],
    phases: PhaseTable,
    images: Int32,
    phase_tiles: Int32,
    depth: Int32,
    columns: Int32,
    groups: Int32,
    filter_taps: Int32,
    filter_r: Int32,
    filter_s: Int32,
):
    """Computes one tile of y or of one phase of dx; each phase has `phase_tiles` tiles.
    """
    comptime forward = pass_ == FPROP
    comptime steps = Int32(steps_of[dtype]())
    comptime a_count = shape.rows // APART
    comptime b_count = shape.columns // APART
    comptime count = shape.accumulators()
    comptime slot_elements = shape.slot_bytes() // size_of[dtype]()

    var thread = Int32(thread_idx.x)
    var warpgroup = thread // 128
    var phase = phases.first()
    var tile = Int32(block_idx.x)
    comptime if _together[pass_, shape]():
        var index, within = divide(tile, phase_tiles)
        phase = phases.phase(index)
        tile = within
    var rows = (
        images * Int32(phase.d.rows) * Int32(phase.h.rows) * Int32(phase.w.rows)
    )
    var rest, column_tile = divide(tile, ceildiv(columns, Int32(shape.columns)))
    var row_tile, group = divide(rest, groups)
    var first_row = row_tile * Int32(shape.rows)
    comptime if _together[pass_, shape]():
        # A phase of fewer rows than the first.
        if first_row >= rows:
            return
    var first_column = column_tile * Int32(shape.columns)
    var channels = Int(depth) * Int(groups)
    var base = external_memory[
        Scalar[dtype], address_space=AddressSpace.SHARED, alignment=1024
    ]()
    # The swizzle counts rows from a multiple of 1024 bytes.
    var shared = base.unsafe_offset(
        (1024 - Int(base) % 1024) % 1024 // size_of[dtype]()
    )

    var along = DepthMajor[dtype].of(thread)
    var across = IndexMajor[dtype].of(thread)
    var source_rows = Array[SourceRow, a_count](fill=SourceRow(0, 0, 0, 0))
    comptime for i in range(a_count):
        source_rows[i] = source_row(
            phase,
            first_row + along.row + Int32(i * APART),
            rows,
            channels,
            Int(group * depth),
        )
    var a_step = Step(0, 0, 0, 0)
    a_step.advance(along.step, depth, phase)
    var b_step = Step(0, 0, 0, 0)
    comptime if not forward:
        b_step.advance(across.step, depth, phase)
    var k = along.step
    var total = (
        Int32(phase.d.taps) * Int32(phase.h.taps) * Int32(phase.w.taps) * depth
    )
    var a = Array[Vector[dtype], a_count](fill=0)
    var b = Array[Vector[dtype], b_count](fill=0)

    @always_inline
    def load() {mut a, mut b, mut a_step, mut b_step, mut k, imm}:
        """Loads the next stage into registers."""
        var offset = a_step.offset(phase)
        var first = offset.pixels(phase) * channels + Int(a_step.c)
        var exists = a_step.exists(phase)
        comptime for i in range(a_count):
            var row = source_rows[i]
            a[i] = load_vector[dtype](
                source,
                row.base + first,
                exists and row.reaches(offset, phase),
            )
        comptime if forward:
            # A filter of the forward pass has its taps and channels in the reduction's order.
            comptime for i in range(b_count):
                var column = first_column + along.row + Int32(i * APART)
                b[i] = load_vector[dtype](
                    w,
                    Int(group * columns + column) * Int(total) + Int(k),
                    column < columns and k < total,
                )
            k += steps
        else:
            var tap = b_step.tap(phase, filter_r, filter_s)
            var line = (
                Int(group * depth + b_step.c) * Int(filter_taps) + Int(tap)
            ) * Int(columns)
            var tap_exists = b_step.exists(phase)
            comptime for i in range(b_count):
                var column = first_column + across.row + Int32(i * APART)
                b[i] = load_vector[dtype](
                    w, line + Int(column), tap_exists and column < columns
                )
            b_step.advance(steps, depth, phase)
        a_step.advance(steps, depth, phase)

    @always_inline
    def store(slot: Int32) {imm}:
        """Stores the stage that the registers hold."""
        var tile = shared.unsafe_offset(Int(slot) * slot_elements)
        comptime for i in range(a_count):
            along.store(tile, i, a[i])
        var filter_tile = tile.unsafe_offset(shape.rows * Int(steps))
        comptime for i in range(b_count):
            comptime if forward:
                along.store(filter_tile, i, b[i])
            else:
                across.store(filter_tile, i, b[i])

    var sums = StaticTuple[Float32, count](fill=0)
    var stages = ceildiv(total, steps)
    if stages > 0:
        load()
        store(0)
        publish_stores()
        if stages > 1:
            load()
    for stage in range(stages):
        var slot = stage % SLOTS
        barrier()
        start_product[dtype, shape, count, False, not forward](
            sums,
            shared.unsafe_offset(Int(slot) * slot_elements),
            warpgroup,
        )
        # The other slot's product was finished before the barrier.
        if stage + 1 < stages:
            store((slot + 1) % SLOTS)
            # Before the loads: it would wait for them too.
            publish_stores()
        if stage + 2 < stages:
            load()
        finish_product()

    var result_channels = Int(columns) * Int(groups)
    var pairs = result_channels % 2 == 0 and columns % 2 == 0
    comptime for half in range(2):
        var row = first_row + warpgroup * 64 + sum_row(thread) + Int32(half * 8)
        if row < rows:
            var target = result.unsafe_offset(
                result_pixel(phase, row) * result_channels
                + Int(group * columns)
            )
            comptime for j in range(shape.columns // 8):
                var column = first_column + Int32(j * 8) + sum_column(thread)
                comptime at = j * 4 + half * 2
                if pairs:
                    if column < columns:
                        target.unsafe_offset(Int(column)).unsafe_store[
                            alignment=2 * size_of[dtype]()
                        ](
                            SIMD[DType.float32, 2](sums[at], sums[at + 1]).cast[
                                dtype
                            ]()
                        )
                else:
                    if column < columns:
                        target[unsafe_offset=Int(column)] = sums[at].cast[
                            dtype
                        ]()
                    if column + 1 < columns:
                        target[unsafe_offset=Int(column) + 1] = sums[
                            at + 1
                        ].cast[dtype]()


@always_inline
def _launch[
    dtype: DType, pass_: Int, shape: WarpgroupTile
](
    result: Ptr[dtype],
    source: Ptr[dtype],
    w: Ptr[dtype],
    p: ConvolutionProblem,
    ctx: DeviceContext,
) raises:
    var depth = p.group_c() if pass_ == FPROP else p.group_k()
    var columns = p.group_k() if pass_ == FPROP else p.group_c()
    var tables = List[PhaseTable]()
    comptime if _together[pass_, shape]():
        tables.append(PhaseTable.of(p))
    elif pass_ == FPROP:
        tables.append(PhaseTable.single(forward_phases(p)[0]))
    else:
        for phase in gradient_phases(p, 0):
            tables.append(PhaseTable.single(phase))
    for table in tables:
        var tiles = (
            ceildiv(table.most_rows(p.n), shape.rows)
            * ceildiv(columns, shape.columns)
            * p.groups
        )
        if tiles == 0:
            continue
        comptime kernel = warpgroup_gather_kernel[dtype, pass_, shape]
        ctx.enqueue_function[kernel](
            result,
            source,
            w,
            table,
            Int32(p.n),
            Int32(tiles),
            Int32(depth),
            Int32(columns),
            Int32(p.groups),
            Int32(p.taps()),
            Int32(p.r),
            Int32(p.s),
            grid_dim=table.count() * tiles,
            block_dim=THREADS,
            shared_mem_bytes=shape.shared_bytes(),
            func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(
                UInt32(shape.shared_bytes())
            ),
        )


struct WarpgroupGather(ConvolutionKernel):
    comptime NAME: StaticString = "warpgroup_gather"

    @staticmethod
    def compiles[dtype: DType, pass_: Int, grouping: Int]() -> Bool:
        return (
            compiling_for_hopper() and pass_ != WGRAD and dtype != DType.float64
        )

    @staticmethod
    def refusal[
        dtype: DType, pass_: Int
    ](t: ConvolutionTensors[dtype], p: ConvolutionProblem) -> Optional[String]:
        var reason = block_refusal[pass_](p)
        if reason:
            return reason
        comptime vector = vector_of[dtype]()
        comptime if dtype == DType.float32:
            if not p.allow_tf32:
                return String("TF32 is not allowed")
        if (Int(t.a) | Int(t.b)) % 16 != 0:
            return String("an operand does not begin at a multiple of 16 bytes")
        var depth = p.group_c() if pass_ == FPROP else p.group_k()
        if depth % vector != 0:
            return String(
                t"{depth} channels to sum over; takes multiples of {vector}"
            )
        if pass_ != FPROP and p.group_c() % vector != 0:
            return String(t"{p.group_c()} columns; takes multiples of {vector}")
        return None

    @staticmethod
    @no_inline
    def launch[
        dtype: DType, pass_: Int
    ](
        ctx: DeviceContext, t: ConvolutionTensors[dtype], p: ConvolutionProblem
    ) raises:
        var columns = p.group_k() if pass_ == FPROP else p.group_c()
        if columns <= TILE_128X32.columns:
            _launch[dtype, pass_, TILE_128X32](t.result, t.a, t.b, p, ctx)
        elif columns <= TILE_128X64.columns or not (
            pass_ == FPROP or PhaseTable.takes(p)
        ):
            _launch[dtype, pass_, TILE_128X64](t.result, t.a, t.b, p, ctx)
        else:
            _launch[dtype, pass_, TILE_128X128](t.result, t.a, t.b, p, ctx)
