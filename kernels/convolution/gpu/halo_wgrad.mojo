"""Weight gradient of groups of a few channels, in 16 bits: each pixel of x is copied once for all taps.

A block has a few groups and every so many tiles of pixels (halo.mojo); the next tile's pixels are on their way while
one is multiplied. A warp has 16 rows (dy's channels), up to 32 columns (x's channels) and three taps of one group, and
keeps their sums in registers over all of its tiles: no product of two groups is made. Rows and columns both lie across
the reduction, so that ldmatrix turns both. A second kernel adds the slices' sums in order.

Drawn problems on an H200 take 1.6 to 1.7 of cuDNN's time (convolution_by_kernel.json).
"""

from std.math import align_up, ceildiv
from std.utils.static_tuple import StaticTuple

from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    barrier,
    block_idx,
    grid_dim,
    thread_idx,
)
from max.gpu.host import DeviceAttribute, DeviceContext, FuncAttribute
from max.gpu.memory import AddressSpace, external_memory

from ...common.arithmetic import divide
from ...common.async_copy import commit_copies, copy_elements, wait_for_copies
from ...common.library import scratch
from ...common.pointer import Ptr
from ...common.ptx import load_matrices
from ...common.tensor_cores import Quad, pairs_compile
from ..gather import Phase, forward_phases
from ..kernel import ConvolutionKernel, ConvolutionTensors
from ..passes import ONE_GROUP, WGRAD
from ..problem import ConvolutionProblem
from .halo import (
    CHUNK,
    MAX_PIXELS,
    SHARED_BYTES,
    VECTOR,
    Halo,
    PixelIndex,
    SharedBudget,
    TileGrid,
    copy_halo,
    halo_refusal,
    multiply,
    result_pixel,
    row_bytes,
    shared_load,
    shared_store,
    smallest,
    tilings,
    width_of,
)
from .tiled import add_slices

comptime _THREADS = 384
comptime _WARPS = _THREADS // 32
comptime _ROWS = 16
"""Rows of a warp's tile: output channels, as mma has them."""
comptime _TAPS = 3
"""Taps of a warp."""
comptime _STEPS = 16
"""Pixels that mma multiplies at a time."""
comptime _ZERO_BYTES = 256
"""Bytes of zeros that stand in for a pixel of x whose pixel of dy does not exist: its own may be infinite."""
comptime _OUTSIDE = Int32(-1)


@always_inline
def _copy_result[
    dtype: DType
](
    shared: UInt32,
    places: UInt32,
    dy: Ptr[dtype],
    tiling: TileGrid,
    first: PixelIndex,
    phase: Phase,
    images: Int32,
    channels: Int32,
    first_channel: Int32,
    vectors: Int32,
    layout: Halo,
    thread: Int32,
):
    """Starts the copy of a tile's pixels of dy, with zeros for those outside the tensor, and notes what each reads of
    the halo."""
    comptime apart = Int32(_THREADS // 8)
    var vector = thread % 8
    if vector >= vectors:
        return
    var step = PixelIndex.of(apart, tiling.rows, tiling.columns)
    var index = thread // 8
    var pixel = tiling.pixel(index)
    var row = row_bytes(vectors)
    while index < align_up(tiling.pixels(), Int32(_STEPS)):
        var valid = tiling.is_pixel(first, pixel, images, phase)
        var at = result_pixel(first, pixel, phase)
        copy_elements[VECTOR](
            shared + UInt32(index * row + vector * 16),
            dy,
            at * Int(channels) + Int(first_channel + vector * VECTOR),
            valid,
        )
        if vector == 0:
            shared_store[DType.int32, 1](
                places + UInt32(4 * index),
                layout.lowest(pixel, phase) if valid else _OUTSIDE,
            )
        pixel.advance(step, tiling.rows, tiling.columns)
        index += apart


@always_inline
def _add_step[
    dtype: DType, tiles: Int
](
    mut sums: Array[Quad, _TAPS * tiles],
    dy: UInt32,
    x: UInt32,
    moved: StaticTuple[UInt32, _TAPS],
    mask: UInt32,
):
    """Adds the products of 16 pixels. `mask` is zero for a lane whose pixel does not exist.
    """
    var a = load_matrices[4, True](dy)
    comptime for tap in range(_TAPS):
        var at = x + (moved[tap] & mask)
        comptime for pair in range(tiles // 2):
            var b = load_matrices[4, True](at + UInt32(32 * pair))
            multiply[dtype](
                sums[tap * tiles + 2 * pair],
                a,
                SIMD[DType.uint32, 2](b[0], b[1]),
            )
            multiply[dtype](
                sums[tap * tiles + 2 * pair + 1],
                a,
                SIMD[DType.uint32, 2](b[2], b[3]),
            )
        comptime if tiles % 2 != 0:
            multiply[dtype](
                sums[tap * tiles + tiles - 1],
                a,
                load_matrices[2, True](at + UInt32(16 * (tiles - 1))),
            )


@__llvm_metadata(
    # Two blocks share a multiprocessor's registers.
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(2 * _THREADS)),
)
@__name(t"conv_halo_wgrad_{dtype}_{columns}")
def halo_wgrad_kernel[
    dtype: DType, columns: Int
](
    dw: Ptr[dtype],
    slices: Ptr[DType.float32],
    x: Ptr[dtype],
    dy: Ptr[dtype],
    phase: Phase,
    tiling: TileGrid,
    images: Int32,
    groups: Int32,
    group_k: Int32,
    group_c: Int32,
    together: Int32,
    halo_bytes: Int32,
    tile_bytes: Int32,
    size: Int64,
):
    """Computes dw, if one slice has all tiles, or the sums of every slice; `together` groups to a block.
    """
    comptime tiles = columns // 8
    var thread = Int32(thread_idx.x)
    var lane = thread % 32
    var first_group = Int32(block_idx.y) * together
    var live_groups = min(together, groups - first_group)
    var x_vectors = live_groups * group_c // VECTOR
    var dy_vectors = live_groups * group_k // VECTOR
    var layout = Halo.of(tiling, phase, x_vectors)
    var dy_pitch = row_bytes(dy_vectors)
    var filter_s = Int32(phase.w.taps)
    var taps = Int32(phase.h.taps) * filter_s

    # This warp's part of the gradient.
    var tap_parts = ceildiv(taps, Int32(_TAPS))
    var row_parts = ceildiv(group_k, Int32(_ROWS))
    var column_parts, _ = divide(group_c, Int32(columns))
    var unit = Int32(block_idx.z) * _WARPS + thread // 32
    var rest, tap_part = divide(unit, tap_parts)
    var outer, row_part = divide(rest, row_parts)
    var group, column_part = divide(outer, column_parts)
    var works = group < live_groups
    var moved = StaticTuple[UInt32, _TAPS](fill=0)
    comptime for i in range(_TAPS):
        # A tap past the last one is dropped in the end.
        var tap = min(tap_part * _TAPS + Int32(i), taps - 1)
        var r, s = divide(tap, filter_s)
        moved[i] = UInt32(layout.moved(r, s, phase))

    # Zeros, and twice a halo, pixels of dy, and a number of each of them.
    var dynamic = external_memory[
        UInt8, address_space=AddressSpace.SHARED, alignment=16
    ]()
    var zeros = UInt32(Int(dynamic))
    if thread < _ZERO_BYTES // 4:
        shared_store[DType.uint32, 1](zeros + UInt32(4 * thread), 0)
    var walkers = Int32(grid_dim.x)
    var tile = Int32(block_idx.x)
    var places = align_up(tiling.pixels(), Int32(_STEPS)) * dy_pitch

    @always_inline
    def halo_at(slot: Int32) {imm} -> UInt32:
        return zeros + UInt32(_ZERO_BYTES) + UInt32(slot * tile_bytes)

    @always_inline
    def load(tile: Int32, slot: Int32) {imm}:
        var first = tiling.first(tile)
        var halo = halo_at(slot)
        var dy_tile = halo + UInt32(halo_bytes)
        copy_halo[dtype, _THREADS](
            halo,
            x,
            tiling,
            first,
            phase,
            images,
            groups * group_c,
            first_group * group_c,
            x_vectors,
            thread,
        )
        _copy_result[dtype](
            dy_tile,
            dy_tile + UInt32(places),
            dy,
            tiling,
            first,
            phase,
            images,
            groups * group_k,
            first_group * group_k,
            dy_vectors,
            layout,
            thread,
        )

    if tile < tiling.tiles():
        load(tile, 0)
    commit_copies()
    var sums = Array[Quad, _TAPS * tiles](fill=0)
    var x_lane = UInt32(
        (group * group_c + column_part * Int32(columns)) * 2 + lane // 16 * 16
    )
    var dy_lane = UInt32(
        (lane % 8 + lane // 16 * 8) * dy_pitch
        + (group * group_k + row_part * _ROWS) * 2
        + lane // 8 % 2 * 16
    )
    var slot = Int32(0)
    while tile < tiling.tiles():
        if tile + walkers < tiling.tiles():
            load(tile + walkers, slot ^ 1)
        commit_copies()
        wait_for_copies[1]()
        barrier()
        if works:
            var halo = halo_at(slot)
            var dy_tile = halo + UInt32(halo_bytes)
            var steps = ceildiv(
                tiling.live_pixels(tiling.first(tile), images, phase),
                Int32(_STEPS),
            )
            var noted = dy_tile + UInt32(places + 4 * (lane % 16))
            var dy_row = dy_tile + dy_lane
            for _ in range(steps):
                var place = shared_load[DType.int32, 1](noted)[0]
                var valid = place != _OUTSIDE
                _add_step[dtype, tiles](
                    sums,
                    dy_row,
                    (halo + UInt32(place) if valid else zeros) + x_lane,
                    moved,
                    UInt32.MAX if valid else UInt32(0),
                )
                noted += 4 * _STEPS
                dy_row += UInt32(_STEPS * dy_pitch)
        tile += walkers
        slot ^= 1
        # The pixels that the next copies overwrite were read by every warp.
        barrier()

    if not works:
        return
    comptime for half in range(2):
        var k = row_part * _ROWS + lane // 4 + Int32(8 * half)
        var row = Int((first_group + group) * group_k + k) * Int(taps * group_c)
        comptime for i in range(_TAPS):
            var tap = tap_part * _TAPS + Int32(i)
            if k < group_k and tap < taps:
                comptime for j in range(tiles):
                    var at = row + Int(
                        tap * group_c
                        + column_part * Int32(columns)
                        + Int32(8 * j)
                        + lane % 4 * 2
                    )
                    var sum = sums[i * tiles + j]
                    var pair = SIMD[DType.float32, 2](
                        sum[2 * half], sum[2 * half + 1]
                    )
                    if walkers == 1:
                        dw.unsafe_offset(at).unsafe_store[alignment=4](
                            pair.cast[dtype]()
                        )
                    else:
                        slices.unsafe_offset(
                            Int(block_idx.x) * Int(size) + at
                        ).unsafe_store[alignment=8](pair)


@fieldwise_init
struct _WgradGroups(ImplicitlyCopyable, TrivialRegisterPassable):
    """A problem's groups as the kernel sees them."""

    var width: Int
    """Columns of a warp."""
    var together: Int
    """Groups of a block."""
    var parts: Int
    """Blocks that share the parts of the gradient of such groups."""
    var chunks: Int
    """Number of chunks of `together` groups."""
    var budget: SharedBudget

    @staticmethod
    def of(p: ConvolutionProblem) -> Self:
        var together = max(
            1, min(p.groups, CHUNK // max(p.group_c(), p.group_k()))
        )
        var width = width_of(p.group_c())
        var units = (
            together
            * (p.group_c() // width)
            * ceildiv(p.group_k(), _ROWS)
            * ceildiv(p.taps(), _TAPS)
        )
        return Self(
            width,
            together,
            ceildiv(units, _WARPS),
            ceildiv(p.groups, together),
            SharedBudget(
                SHARED_BYTES - _ZERO_BYTES - 8 * MAX_PIXELS,
                together * p.group_c() // VECTOR,
                Int(row_bytes(Int32(together * p.group_k() // VECTOR))),
            ),
        )


@fieldwise_init
struct _Choice(ImplicitlyCopyable, TrivialRegisterPassable):
    var tiling: TileGrid
    var slices: Int


def _choose(
    p: ConvolutionProblem, shape: _WgradGroups, processors: Int
) -> _Choice:
    """Chooses the launch with the fewest cycles by a model of blocks of which two share a multiprocessor.
    """
    var phase = forward_phases(p)[0]
    var walkers = max(1, 2 * processors // (shape.chunks * shape.parts))
    var most = min(walkers, max(1, p.workspace_limit // (4 * p.w_size())))
    var best = _Choice(smallest(p.n, phase), 1)
    var least = Float64.MAX
    for tiling in tilings(p.n, phase, shape.budget):
        # Reading the second-level cache, and shared memory for mma.
        var copied = Float64(shape.budget.tile_bytes(tiling, phase)) / 32
        var products = Float64(
            2
            * ceildiv(Int(tiling.pixels()), _STEPS)
            * _WARPS
            * (4 + _TAPS * shape.width * 3 // 4)
        )
        var tile = max(copied, products) + 1000
        var tiles = Int(tiling.tiles())
        var rounds = ceildiv(tiles, most)
        while True:
            var slices = ceildiv(tiles, rounds)
            var cost = Float64(rounds) * tile
            if slices > 1:
                # Another launch, and what it reads.
                cost += 4000 + Float64(8 * p.w_size() * slices) / 2000
            if cost < least:
                least = cost
                best = _Choice(tiling, slices)
            if slices == 1:
                break
            rounds *= 2
    return best


struct HaloWgrad(ConvolutionKernel):
    """Weight gradient on halos; its partial sums stay within the workspace limit.
    """

    comptime NAME: StaticString = "halo_wgrad"

    @staticmethod
    def compiles[dtype: DType, pass_: Int, grouping: Int]() -> Bool:
        return (
            pairs_compile[dtype]() and pass_ == WGRAD and grouping != ONE_GROUP
        )

    @staticmethod
    def refusal[
        dtype: DType, pass_: Int
    ](t: ConvolutionTensors[dtype], p: ConvolutionProblem) -> Optional[String]:
        var reason = halo_refusal[dtype, pass_](t, p)
        if reason:
            return reason
        var shape = _WgradGroups.of(p)
        var phase = forward_phases(p)[0]
        if not shape.budget.fits(smallest(p.n, phase), phase):
            return String("a halo that shared memory has no room for")
        if max(shape.chunks, shape.parts) > 65535:
            return String(t"{p.groups} groups of {p.taps()} taps")
        return None

    @staticmethod
    @no_inline
    def launch[
        dtype: DType, pass_: Int
    ](
        ctx: DeviceContext, t: ConvolutionTensors[dtype], p: ConvolutionProblem
    ) raises:
        var shape = _WgradGroups.of(p)
        var choice = _choose(
            p, shape, ctx.get_attribute(DeviceAttribute.MULTIPROCESSOR_COUNT)
        )
        var phase = forward_phases(p)[0]
        var tiling = choice.tiling
        var halo_bytes = shape.budget.halo_bytes(tiling, phase)
        var pixels = align_up(Int(tiling.pixels()), _STEPS)
        var tile_bytes = shape.budget.tile_bytes(tiling, phase) + 4 * pixels
        var sums = scratch[DType.float32](
            ctx, choice.slices * p.w_size() if choice.slices > 1 else 1
        )
        comptime for columns in range(8, 33, 8):
            if shape.width == columns:
                ctx.enqueue_function[halo_wgrad_kernel[dtype, columns]](
                    t.result,
                    sums,
                    t.a,
                    t.b,
                    phase,
                    tiling,
                    Int32(p.n),
                    Int32(p.groups),
                    Int32(p.group_k()),
                    Int32(p.group_c()),
                    Int32(shape.together),
                    Int32(halo_bytes),
                    Int32(tile_bytes),
                    Int64(p.w_size()),
                    grid_dim=(choice.slices, shape.chunks, shape.parts),
                    block_dim=_THREADS,
                    shared_mem_bytes=_ZERO_BYTES + 2 * tile_bytes,
                    func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(
                        UInt32(SHARED_BYTES)
                    ),
                )
        if choice.slices > 1:
            add_slices(t.result, sums, p.w_size(), choice.slices, ctx)
        # Lives until its last use is enqueued.
        _ = sums^
