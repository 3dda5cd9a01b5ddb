"""Forward pass and data gradient of groups of a few channels, in 16 bits: each source pixel is copied once for all
taps.

A block has a few groups, whose filter stays in shared memory in the order in which mma's lanes read it, and walks over
tiles (halo.mojo); the next tile's halo is on its way while one is multiplied. A warp has the columns of one group and
up to 64 pixels, of which mma takes 16 at a time: each matrix of a tap is a copy of the halo's rows, moved by the tap.
Groups are never merged: a zero of a foreign group's filter times infinity would be NaN.

Drawn problems on an H200 take 1.1 to 1.8 of cuDNN's time (convolution_by_kernel.json).
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
from ...common.async_copy import commit_copies, wait_for_copies
from ...common.pointer import Ptr
from ...common.ptx import load_matrices
from ...common.tensor_cores import Quad, pairs_compile
from ..passes import FPROP, ONE_GROUP, WGRAD
from ..gather import Phase
from ..kernel import ConvolutionKernel, ConvolutionTensors
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
    filter_tap,
    halo_refusal,
    multiply,
    multiply_half,
    phases_of,
    result_pixel,
    shared_load,
    shared_store,
    smallest,
    tilings,
    widest,
    width_of,
)
from .phase_table import PhaseTable

comptime _THREADS = 256
comptime _WARPS = _THREADS // 32
comptime _BLOCKS = 16
"""Pixels of a block, the rows of one of mma's matrices."""
comptime _AT_ONCE = 4
"""Vectors of the filter that a thread loads before it stores them."""
comptime _PIECE = 4
"""Most blocks of 16 pixels of a warp: each matrix of the filter is read once for all of them."""


@always_inline
def _pieces(blocks: Int32, units: Int32) -> Int32:
    """Returns the number of warps that share the blocks of pixels of one unit of columns: in each round all of them
    have work."""
    var least = ceildiv(blocks, Int32(_PIECE))
    var rounds = ceildiv(least * units, Int32(_WARPS))
    var most, _ = divide(rounds * _WARPS, units)
    return min(blocks, max(least, most))


@always_inline
def _lane_of[tiles: Int](column: Int32) -> Tuple[Int32, Int32]:
    """Returns a column's number in an mma's columns, and the mma, for one of a warp's columns. A lane gets neighbouring
    columns of all of them, so that it can store them together."""
    var quad, within = divide(column, Int32(2 * tiles))
    return quad * 2 + within % 2, within // 2


@always_inline
def _pack_filter[
    dtype: DType, forward: Bool, columns: Int
](
    shared: UInt32,
    w: Ptr[dtype],
    phase: Phase,
    first_group: Int32,
    groups: Int32,
    group_k: Int32,
    group_c: Int32,
    filter_r: Int32,
    filter_s: Int32,
    thread: Int32,
):
    """Packs the groups' filter as [group][part of the columns][tap][8 steps][lane][mma] pairs of steps.
    """
    comptime tiles = columns // 8
    var taps = Int32(phase.h.taps) * Int32(phase.w.taps)
    var across, _ = divide(group_c, VECTOR)
    var depth = group_c if forward else group_k
    var parts, _ = divide(group_k if forward else group_c, Int32(columns))
    var steps = depth // 8
    var total = groups * group_k * taps * across
    for first in range(thread, total, _AT_ONCE * _THREADS):
        # All loads of a batch are in flight together.
        var values = Array[SIMD[dtype, VECTOR], _AT_ONCE](fill=0)
        comptime for i in range(_AT_ONCE):
            var index = first + Int32(i * _THREADS)
            var rest, piece = divide(index, across)
            var row, tap = divide(rest, taps)
            var r, s = divide(tap, Int32(phase.w.taps))
            if index < total:
                values[i] = w.unsafe_offset(
                    (
                        Int(first_group * group_k + row)
                        * Int(filter_r * filter_s)
                        + Int(filter_tap(r, s, phase, filter_s))
                    )
                    * Int(group_c)
                    + Int(piece * VECTOR)
                ).unsafe_load[width=VECTOR, alignment=16]()
        comptime for i in range(_AT_ONCE):
            var index = first + Int32(i * _THREADS)
            if index < total:
                var rest, piece = divide(index, across)
                var row, tap = divide(rest, taps)
                var group, k = divide(row, group_k)
                var column = k if forward else piece * VECTOR
                var part, within = divide(column, Int32(columns))
                var step = piece if forward else k // 8
                var at = (
                    ((group * parts + part) * taps + tap) * steps + step
                ) * Int32(32 * tiles)
                _place_vector[dtype, forward, tiles](
                    shared + UInt32(4 * at), values[i], within, k % 8
                )


@always_inline
def _place_vector[
    dtype: DType, forward: Bool, tiles: Int
](shared: UInt32, value: SIMD[dtype, VECTOR], column: Int32, step: Int32,):
    """Stores a vector among the words of eight steps: all of one column, or of one step eight columns.
    """
    comptime if forward:
        var n, tile = _lane_of[tiles](column)
        comptime for pair in range(4):
            shared_store[dtype, 2](
                shared
                + UInt32(((n * 4 + Int32(pair)) * Int32(tiles) + tile) * 4),
                SIMD[dtype, 2](value[2 * pair], value[2 * pair + 1]),
            )
    else:
        comptime for e in range(VECTOR):
            var n, tile = _lane_of[tiles](column + Int32(e))
            shared_store[dtype, 1](
                shared
                + UInt32(
                    ((n * 4 + step // 2) * Int32(tiles) + tile) * 4
                    + step % 2 * 2
                ),
                value[e],
            )


@always_inline
def _filter_words[tiles: Int](address: UInt32) -> Array[UInt32, tiles]:
    """Loads a lane's words of eight steps."""
    var words = Array[UInt32, tiles](fill=0)
    comptime if tiles == 3:
        comptime for j in range(tiles):
            words[j] = shared_load[DType.uint32, 1](address + UInt32(4 * j))
    else:
        var vector = shared_load[DType.uint32, tiles](address)
        comptime for j in range(tiles):
            words[j] = vector[j]
    return words^


@always_inline
def _add_tap[
    dtype: DType, tiles: Int
](
    mut sums: Array[Quad, _PIECE * tiles],
    rows: StaticTuple[UInt32, _PIECE],
    moved: UInt32,
    filter: UInt32,
    steps: Int32,
    blocks: Int32,
):
    """Adds one tap's products of up to _PIECE blocks of pixels. `filter` is the lane's address.
    """
    comptime step_bytes = UInt32(32 * tiles * 4)
    var at = filter
    var source = moved
    for _ in range(steps // 2):
        var low = _filter_words[tiles](at)
        var high = _filter_words[tiles](at + step_bytes)
        comptime for pair in range(_PIECE // 2):
            if pair == 0 or blocks > Int32(2 * pair):
                comptime for m in range(2 * pair, 2 * pair + 2):
                    var a = load_matrices[4](rows[m] + source)
                    comptime for j in range(tiles):
                        multiply[dtype](
                            sums[m * tiles + j],
                            a,
                            SIMD[DType.uint32, 2](low[j], high[j]),
                        )
        at += 2 * step_bytes
        source += 32
    if steps % 2 != 0:
        var low = _filter_words[tiles](at)
        comptime for m in range(_PIECE):
            if m < 2 or blocks > Int32(m):
                var a = load_matrices[2](rows[m] + source)
                comptime for j in range(tiles):
                    multiply_half[dtype](sums[m * tiles + j], a, low[j])


@__llvm_metadata(
    # Two blocks share a multiprocessor's registers.
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(2 * _THREADS)),
)
@__name(t"conv_halo_gather_{dtype}_p{pass_}_{columns}")
def halo_gather_kernel[
    dtype: DType, pass_: Int, columns: Int
](
    result: Ptr[dtype],
    source: Ptr[dtype],
    w: Ptr[dtype],
    phases: PhaseTable,
    tiling: TileGrid,
    images: Int32,
    groups: Int32,
    group_k: Int32,
    group_c: Int32,
    filter_r: Int32,
    filter_s: Int32,
    together: Int32,
    halo_bytes: Int32,
    filter_bytes: Int32,
):
    """Computes tiles of y or of one phase of dx, `columns` of a group to a warp, `together` groups to a block.
    """
    comptime forward = pass_ == FPROP
    comptime tiles = columns // 8
    var thread = Int32(thread_idx.x)
    var lane = thread % 32
    var phase = phases.phase(Int32(block_idx.z))
    var depth = group_c if forward else group_k
    var group_columns = group_k if forward else group_c
    var first_group = Int32(block_idx.y) * together
    var live_groups = min(together, groups - first_group)
    var parts, _ = divide(group_columns, Int32(columns))
    var vectors = live_groups * depth // VECTOR
    var layout = Halo.of(tiling, phase, vectors)
    var steps = depth // 8
    var taps = Int32(phase.h.taps) * Int32(phase.w.taps)
    var pixels = tiling.pixels()
    var dynamic = external_memory[
        UInt8, address_space=AddressSpace.SHARED, alignment=16
    ]()
    # The filter, two halos, and two numbers of each pixel of a tile.
    var filter = UInt32(Int(dynamic))
    var halos = filter + UInt32(filter_bytes)
    var slots = halos + UInt32(2 * halo_bytes)
    var places = slots + UInt32(4 * pixels)
    var walkers = Int32(grid_dim.x)
    var tile = Int32(block_idx.x)

    @always_inline
    def load(tile: Int32, slot: Int32) {imm}:
        copy_halo[dtype, _THREADS](
            halos + UInt32(slot * halo_bytes),
            source,
            tiling,
            tiling.first(tile),
            phase,
            images,
            depth * groups,
            first_group * depth,
            vectors,
            thread,
        )

    if tile < tiling.tiles():
        load(tile, 0)
    commit_copies()
    for index in range(thread, pixels, _THREADS):
        var pixel = tiling.pixel(index)
        shared_store[DType.int32, 1](
            slots + UInt32(4 * index), layout.lowest(pixel, phase)
        )
        shared_store[DType.int32, 1](
            places + UInt32(4 * index),
            pixel.n << 20 | pixel.h << 10 | pixel.w,
        )
    _pack_filter[dtype, forward, columns](
        filter,
        w,
        phase,
        first_group,
        live_groups,
        group_k,
        group_c,
        filter_r,
        filter_s,
        thread,
    )

    var slot = Int32(0)
    while tile < tiling.tiles():
        if tile + walkers < tiling.tiles():
            load(tile + walkers, slot ^ 1)
        commit_copies()
        wait_for_copies[1]()
        barrier()
        var first = tiling.first(tile)
        var halo = halos + UInt32(slot * halo_bytes)
        var blocks = ceildiv(
            tiling.live_pixels(first, images, phase), Int32(_BLOCKS)
        )
        var pieces = _pieces(blocks, live_groups * parts)
        for item in range(thread // 32, live_groups * parts * pieces, _WARPS):
            var unit, piece = divide(item, pieces)
            var group, part = divide(unit, parts)
            var begin, _ = divide(piece * blocks, pieces)
            var end, _ = divide((piece + 1) * blocks, pieces)
            var rows = StaticTuple[UInt32, _PIECE](fill=0)
            comptime for m in range(_PIECE):
                var index = (begin + Int32(m)) * _BLOCKS + lane % 16
                rows[m] = (
                    halo
                    + UInt32(
                        shared_load[DType.int32, 1](
                            slots + UInt32(4 * min(index, pixels - 1))
                        )[0]
                    )
                    + UInt32(group * depth * 2 + lane // 16 * 16)
                )
            var sums = Array[Quad, _PIECE * tiles](fill=0)
            var at = filter + UInt32(
                (unit * taps * steps * 32 + lane) * Int32(tiles * 4)
            )
            for r in range(Int32(phase.h.taps)):
                for s in range(Int32(phase.w.taps)):
                    _add_tap[dtype, tiles](
                        sums,
                        rows,
                        UInt32(layout.moved(r, s, phase)),
                        at,
                        steps,
                        end - begin,
                    )
                    at += UInt32(steps * Int32(32 * tiles * 4))
            var column = (
                (first_group + group) * group_columns
                + part * Int32(columns)
                + lane % 4 * Int32(2 * tiles)
            )
            comptime for m in range(_PIECE):
                comptime for half in range(2):
                    var index = (
                        (begin + Int32(m)) * _BLOCKS
                        + lane // 4
                        + Int32(half * 8)
                    )
                    var packed = shared_load[DType.int32, 1](
                        places + UInt32(4 * min(index, pixels - 1))
                    )[0]
                    var pixel = PixelIndex(
                        packed >> 20, packed >> 10 & 1023, packed & 1023
                    )
                    if (
                        Int32(m) < end - begin
                        and index < pixels
                        and tiling.is_pixel(first, pixel, images, phase)
                    ):
                        var target = result.unsafe_offset(
                            result_pixel(first, pixel, phase)
                            * Int(group_columns * groups)
                            + Int(column)
                        )
                        # Three pairs of columns lie at multiples of four bytes alone.
                        comptime width = 2 if tiles == 3 else 2 * tiles
                        comptime for v in range(2 * tiles // width):
                            var value = SIMD[dtype, width](0)
                            comptime for e in range(width):
                                comptime c = v * width + e
                                value[e] = sums[m * tiles + c // 2][
                                    2 * half + c % 2
                                ].cast[dtype]()
                            target.unsafe_offset(v * width).unsafe_store[
                                alignment=2 * width
                            ](value)
        tile += walkers
        slot ^= 1
        # The halo that the next copies overwrite was read by every warp.
        barrier()


@fieldwise_init
struct _GatherGroups(ImplicitlyCopyable, TrivialRegisterPassable):
    """Channels of a problem's groups as the kernel sees them."""

    var depth: Int
    """Channels that are summed over."""
    var columns: Int
    var width: Int
    """Columns of a warp."""
    var together: Int
    """Groups of a block."""
    var filter_bytes: Int
    """Bytes of a block's filter."""

    @staticmethod
    def of[pass_: Int](p: ConvolutionProblem) -> Self:
        var depth = p.group_c() if pass_ == FPROP else p.group_k()
        var columns = p.group_k() if pass_ == FPROP else p.group_c()
        var together = max(1, min(p.groups, CHUNK // max(depth, columns)))
        return Self(
            depth,
            columns,
            width_of(columns),
            together,
            together * p.taps() * depth * columns * 2,
        )

    def budget(self) -> SharedBudget:
        return SharedBudget(
            SHARED_BYTES - self.filter_bytes - 8 * MAX_PIXELS,
            self.together * self.depth // VECTOR,
            0,
        )


def _cost(
    tiling: TileGrid, phase: Phase, shape: _GatherGroups, at_once: Int
) -> Tuple[Float64, Int]:
    """Returns the cycles, by a model, of a block that shares its multiprocessor with another, and the number of
    walkers; `at_once` walk at a time."""
    var tiles = Int(tiling.tiles())
    var walkers = min(tiles, max(1, at_once))
    # Reading the second-level cache, and reading shared memory for mma.
    var copied = Float64(shape.budget().tile_bytes(tiling, phase))
    var blocks = ceildiv(Int(tiling.pixels()), _BLOCKS)
    var units = shape.together * shape.columns // shape.width
    var pieces = Int(_pieces(Int32(blocks), Int32(units)))
    var products = Float64(
        ceildiv(pieces * units, _WARPS)
        * align_up(ceildiv(blocks, pieces), 2)
        * _WARPS
        * phase.taps()
        * ceildiv(shape.depth, 16)
        * 2
        * max(5, shape.width // 5)
    )
    var tile = max(copied / 32, products) + 1000
    return Float64(ceildiv(tiles, walkers)) * tile, walkers


struct HaloGather(ConvolutionKernel):
    comptime NAME: StaticString = "halo_gather"

    @staticmethod
    def compiles[dtype: DType, pass_: Int, grouping: Int]() -> Bool:
        return (
            pairs_compile[dtype]() and pass_ != WGRAD and grouping != ONE_GROUP
        )

    @staticmethod
    def refusal[
        dtype: DType, pass_: Int
    ](t: ConvolutionTensors[dtype], p: ConvolutionProblem) -> Optional[String]:
        var reason = halo_refusal[dtype, pass_](t, p)
        if reason:
            return reason
        comptime if pass_ != FPROP:
            if not PhaseTable.takes(p):
                return String(t"strides of {p.stride_h} and {p.stride_w}")
        var phase = widest(phases_of[pass_](p))
        if (
            not _GatherGroups.of[pass_](p)
            .budget()
            .fits(smallest(p.n, phase), phase)
        ):
            return String(
                "a filter and a halo that shared memory has no room for"
            )
        if ceildiv(p.groups, _GatherGroups.of[pass_](p).together) > 65535:
            return String(t"{p.groups} groups")
        return None

    @staticmethod
    @no_inline
    def launch[
        dtype: DType, pass_: Int
    ](
        ctx: DeviceContext, t: ConvolutionTensors[dtype], p: ConvolutionProblem
    ) raises:
        var shape = _GatherGroups.of[pass_](p)
        var table = phases_of[pass_](p)
        var phase = widest(table)
        var chunks = ceildiv(p.groups, shape.together)
        var at_once = 2 * ctx.get_attribute(
            DeviceAttribute.MULTIPROCESSOR_COUNT
        )
        var choices = tilings(p.n, phase, shape.budget())
        var best = choices[0]
        var least = Float64.MAX
        var walkers = 1
        for tiling in choices:
            var cost, count = _cost(
                tiling, phase, shape, at_once // (chunks * table.count())
            )
            if cost < least:
                least = cost
                best = tiling
                walkers = count
        var halo_bytes = shape.budget().tile_bytes(best, phase)
        var shared = (
            shape.filter_bytes + 2 * halo_bytes + 8 * Int(best.pixels())
        )
        comptime for columns in range(8, 33, 8):
            if shape.width == columns:
                ctx.enqueue_function[halo_gather_kernel[dtype, pass_, columns]](
                    t.result,
                    t.a,
                    t.b,
                    table,
                    best,
                    Int32(p.n),
                    Int32(p.groups),
                    Int32(p.group_k()),
                    Int32(p.group_c()),
                    Int32(p.r),
                    Int32(p.s),
                    Int32(shape.together),
                    Int32(halo_bytes),
                    Int32(align_up(shape.filter_bytes, 16)),
                    grid_dim=(walkers, chunks, table.count()),
                    block_dim=_THREADS,
                    shared_mem_bytes=shared,
                    func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(
                        UInt32(SHARED_BYTES)
                    ),
                )
