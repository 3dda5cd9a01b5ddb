"""Weight gradient on Hopper's warpgroups: any filter, group count and rank; float32 in TF32.

The product of block_wgrad (rows are dy's channels of one group, columns the filter's taps and channels, the reduction
over pixels split into slices that a second kernel adds in order), multiplied by wgmma from tiles that warpgroup.mojo
describes.
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
from max.gpu.host import (
    DeviceAttribute,
    DeviceBuffer,
    DeviceContext,
    FuncAttribute,
)
from max.gpu.memory import AddressSpace, external_memory

from ...common.arithmetic import divide
from ...common.async_copy import commit_copies, wait_for_copies
from ...common.library import scratch
from ...common.pointer import Ptr
from ...common.ptx import compiling_for_hopper
from ...common.warpgroup import (
    APART,
    SLOTS,
    THREADS,
    IndexMajor,
    VectorQueue,
    WarpgroupTile,
    finish_product,
    publish_stores,
    start_product,
    steps_of,
    sum_column,
    sum_row,
    vector_of,
)
from ..kernel import ConvolutionKernel, ConvolutionTensors
from ..passes import WGRAD
from ..problem import ConvolutionProblem
from .block_wgrad import Column, Pixel, column_of, pixel_of
from .pipeline import block_refusal
from .slices import Slices, choose_slices
from .tiled import add_slices

comptime TILE_128X128 = WarpgroupTile(128, 128)
comptime TILE_128X256 = WarpgroupTile(128, 256)
comptime TILE_64X128 = WarpgroupTile(64, 128)
comptime TILE_128X64 = WarpgroupTile(128, 64)
# A stage of twice as many columns takes 1.55 times as long: memory moves fewer bytes for each product (H200, TF32).
comptime _WIDE_STAGE = 155
# What the memory moves while one stage runs.
comptime _STAGE_BYTES = 1 << 20


def _is_large(shape: WarpgroupTile) -> Bool:
    """Returns whether a block has a multiprocessor's registers for itself."""
    return shape.rows * shape.columns >= 128 * 128


def _queue_depth[shape: WarpgroupTile]() -> Int:
    """Returns the stages whose copies are under way: as many as shared memory holds.
    """
    return 3 if shape == TILE_128X128 else 2


def _shared_bytes[dtype: DType, shape: WarpgroupTile]() -> Int:
    comptime vectors = (shape.rows + shape.columns) // APART
    return (
        shape.shared_bytes()
        + VectorQueue[dtype, vectors, _queue_depth[shape]()].BYTES
    )


@always_inline
def _advance(mut at: Pixel, by: Pixel, p: ConvolutionProblem):
    """Advances by as many pixels as `by` is from pixel zero; its indices are within the extents.
    """
    at.n += by.n
    at.o += by.o
    at.p += by.p
    at.q += by.q
    if at.q >= Int32(p.q):
        at.q -= Int32(p.q)
        at.p += 1
    if at.p >= Int32(p.p):
        at.p -= Int32(p.p)
        at.o += 1
    if at.o >= Int32(p.o):
        at.o -= Int32(p.o)
        at.n += 1


@__llvm_metadata(
    # Of the smaller tiles two blocks share a multiprocessor's registers.
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](
        Int32(THREADS if _is_large(shape) else 2 * THREADS)
    ),
)
@__name(t"conv_warpgroup_wgrad_{dtype}_{shape.rows}x{shape.columns}")
def warpgroup_wgrad_kernel[
    dtype: DType, shape: WarpgroupTile
](
    sums_of_slices: Ptr[DType.float32],
    x: Ptr[dtype],
    dy: Ptr[dtype],
    p: ConvolutionProblem,
    rows: Int32,
    depth: Int32,
    columns: Int32,
    pixels: Int32,
    slice_pixels: Int32,
):
    """Computes one tile of one slice's partial dw."""
    comptime steps = Int32(steps_of[dtype]())
    comptime a_count = shape.rows // APART
    comptime b_count = shape.columns // APART
    comptime count = shape.accumulators()
    comptime slot_elements = shape.slot_bytes() // size_of[dtype]()

    var thread = Int32(thread_idx.x)
    var warpgroup = thread // 128
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
    var base = external_memory[
        Scalar[dtype], address_space=AddressSpace.SHARED, alignment=1024
    ]()
    # The swizzle counts rows from a multiple of 1024 bytes.
    var shared = base.unsafe_offset(
        (1024 - Int(base) % 1024) % 1024 // size_of[dtype]()
    )

    var across = IndexMajor[dtype].of(thread)
    var sources = Array[Column, b_count](fill=Column(0, 0, 0, 0))
    comptime for i in range(b_count):
        sources[i] = column_of(
            first_column + across.row + Int32(i * APART),
            columns,
            depth,
            p,
            Int(group * depth),
        )
    var pixel = first + across.step
    var at = pixel_of(pixel, p)
    var stage_pixels = pixel_of(steps, p)
    comptime depth_of_queue = _queue_depth[shape]()
    var queue = VectorQueue[dtype, a_count + b_count, depth_of_queue].of(
        UInt32(Int(shared)) + UInt32(SLOTS * shape.slot_bytes()), thread
    )

    @always_inline
    def load(stage: Int32) {mut at, mut pixel, imm}:
        """Starts the copies of the next stage, of this number; past the last one there are none.
        """
        var exists = pixel < last
        var line = Int(pixel) * p.k + Int(group * rows)
        comptime for i in range(a_count):
            var channel = first_row + across.row + Int32(i * APART)
            queue.copy(
                stage, i, dy, line + Int(channel), exists and channel < rows
            )
        var d = at.o * Int32(p.stride_d)
        var h = at.p * Int32(p.stride_h)
        var w = at.q * Int32(p.stride_w)
        var offset = (
            ((Int(at.n) * p.d + Int(d)) * p.h + Int(h)) * p.w + Int(w)
        ) * p.c
        comptime for i in range(b_count):
            var source = sources[i]
            queue.copy(
                stage,
                a_count + i,
                x,
                offset + source.base,
                exists
                and UInt32(d + source.d) < UInt32(p.d)
                and UInt32(h + source.h) < UInt32(p.h)
                and UInt32(w + source.w) < UInt32(p.w),
            )
        commit_copies()
        _advance(at, stage_pixels, p)
        pixel += steps

    @always_inline
    def store(stage: Int32) {mut at, mut pixel, imm}:
        """Stores the tiles of a stage, and starts the copies of another one in its place.
        """
        wait_for_copies[depth_of_queue - 1]()
        var tile = shared.unsafe_offset(Int(stage % SLOTS) * slot_elements)
        comptime for i in range(a_count):
            across.store(tile, i, queue.vector(stage, i))
        var x_tile = tile.unsafe_offset(shape.rows * Int(steps))
        comptime for i in range(b_count):
            across.store(x_tile, i, queue.vector(stage, a_count + i))
        publish_stores()
        load(stage + Int32(depth_of_queue))

    var sums = StaticTuple[Float32, count](fill=0)
    var stages = ceildiv(max(last - first, Int32(0)), steps)
    if stages > 0:
        comptime for stage in range(depth_of_queue):
            load(Int32(stage))
        store(0)
    for stage in range(stages):
        barrier()
        start_product[dtype, shape, count, True, True](
            sums,
            shared.unsafe_offset(Int(stage % SLOTS) * slot_elements),
            warpgroup,
        )
        # The other slot's product was finished before the barrier.
        if stage + 1 < stages:
            store(stage + 1)
        finish_product()
    # No copy may arrive in a later block's memory.
    wait_for_copies[0]()

    var target = sums_of_slices.unsafe_offset(
        (Int(slice) * p.groups + Int(group)) * Int(rows) * Int(columns)
    )
    var row = first_row + sum_row(thread)
    var column = first_column + sum_column(thread)
    comptime if shape.rows == 128:
        row += warpgroup * 64
    else:
        column += warpgroup * Int32(shape.group_columns())
    comptime for half in range(2):
        var k = row + Int32(half * 8)
        comptime for j in range(shape.group_columns() // 8):
            var tap_channel = column + Int32(j * 8)
            comptime first_sum = j * 4 + half * 2
            if k < rows and tap_channel < columns:
                target.unsafe_offset(
                    Int(k) * Int(columns) + Int(tap_channel)
                ).unsafe_store[alignment=8](
                    SIMD[DType.float32, 2](sums[first_sum], sums[first_sum + 1])
                )


def _tiles[shape: WarpgroupTile](p: ConvolutionProblem) -> Int:
    """Returns the number of tiles of dw, of all groups."""
    return (
        ceildiv(p.group_k(), shape.rows)
        * ceildiv(p.taps() * p.group_c(), shape.columns)
        * p.groups
    )


def _slices[
    dtype: DType, shape: WarpgroupTile
](p: ConvolutionProblem, ctx: DeviceContext) raises -> Slices:
    var at_once = (1 if _is_large(shape) else 2) * ctx.get_attribute(
        DeviceAttribute.MULTIPROCESSOR_COUNT
    )
    var stages = ceildiv(p.output_pixels(), steps_of[dtype]())
    return choose_slices(
        p,
        _tiles[shape](p),
        at_once,
        stages,
        _STAGE_BYTES,
        _WIDE_STAGE if shape == TILE_128X256 else 100,
    )


@always_inline
def _launch[
    dtype: DType, shape: WarpgroupTile
](
    dw: Ptr[dtype],
    x: Ptr[dtype],
    dy: Ptr[dtype],
    p: ConvolutionProblem,
    chosen: Slices,
    ctx: DeviceContext,
) raises:
    var stages = ceildiv(p.output_pixels(), steps_of[dtype]())
    # Whole stages to a slice.
    var slice_pixels = ceildiv(stages, chosen.count) * steps_of[dtype]()
    var slices = ceildiv(p.output_pixels(), slice_pixels)
    # float32 sums of a single slice are the result.
    var partials: DeviceBuffer[DType.float32]
    comptime if dtype == DType.float32:
        partials = DeviceBuffer[DType.float32](
            ctx, rebind[Ptr[DType.float32]](dw), p.w_size(), owning=False
        ) if slices == 1 else scratch[DType.float32](ctx, slices * p.w_size())
    else:
        partials = scratch[DType.float32](ctx, slices * p.w_size())
    comptime kernel = warpgroup_wgrad_kernel[dtype, shape]
    ctx.enqueue_function[kernel](
        partials,
        x,
        dy,
        p,
        Int32(p.group_k()),
        Int32(p.group_c()),
        Int32(p.taps() * p.group_c()),
        Int32(p.output_pixels()),
        Int32(slice_pixels),
        grid_dim=_tiles[shape](p) * slices,
        block_dim=THREADS,
        shared_mem_bytes=_shared_bytes[dtype, shape](),
        func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(
            UInt32(_shared_bytes[dtype, shape]())
        ),
    )
    if dtype != DType.float32 or slices > 1:
        add_slices(dw, partials, p.w_size(), slices, ctx)


struct WarpgroupWgrad(ConvolutionKernel):
    """Weight gradient on Hopper's warpgroups; its partial sums stay within the workspace limit.
    """

    comptime NAME: StaticString = "warpgroup_wgrad"

    @staticmethod
    def compiles[dtype: DType, pass_: Int, grouping: Int]() -> Bool:
        return (
            compiling_for_hopper() and pass_ == WGRAD and dtype != DType.float64
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
        if p.group_c() % vector != 0 or p.group_k() % vector != 0:
            return String(
                t"{p.group_c()} and {p.group_k()} channels in a group; takes"
                t" multiples of {vector}"
            )
        return None

    @staticmethod
    @no_inline
    def launch[
        dtype: DType, pass_: Int
    ](
        ctx: DeviceContext, t: ConvolutionTensors[dtype], p: ConvolutionProblem
    ) raises:
        @always_inline
        def launch[shape: WarpgroupTile](chosen: Slices) raises {imm}:
            _launch[dtype, shape](t.result, t.a, t.b, p, chosen, ctx)

        if p.group_k() <= TILE_64X128.rows:
            launch[TILE_64X128](_slices[dtype, TILE_64X128](p, ctx))
        elif p.taps() * p.group_c() <= TILE_128X64.columns:
            launch[TILE_128X64](_slices[dtype, TILE_128X64](p, ctx))
        else:
            var usual = _slices[dtype, TILE_128X128](p, ctx)
            comptime if dtype == DType.float32:
                var wide = _slices[dtype, TILE_128X256](p, ctx)
                if wide.cost < usual.cost:
                    launch[TILE_128X256](wide)
                    return
            launch[TILE_128X128](usual)
