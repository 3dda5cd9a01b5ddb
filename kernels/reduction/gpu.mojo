"""Reduction programs on a GPU, in a fixed order: no atomics, the same bits every run.

Where the reduced elements are contiguous, some lanes of a block share a row; else a block has some columns, and its
rows of threads share the reduced extent. Where results are few, several blocks share them: their values lie as [result,
slice, output], and a second kernel puts them together.
"""

from std.math import ceildiv
from std.memory import stack_allocation
from std.sys.info import is_nvidia_gpu, size_of
from std.utils.static_tuple import StaticTuple

from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    barrier,
    block_dim,
    block_idx,
    thread_idx,
)
from max.gpu.host import DeviceAttribute, DeviceContext
from max.gpu.memory import AddressSpace

from ..common.arithmetic import divide
from ..common.lanes import from_lane
from ..common.library import scratch
from ..common.pointer import Ptr
from ..pointwise.program import ProgramOperands, RunPositions
from .program import ReductionProgram
from .values import Extents, Values, combined, identity

comptime THREADS = 256
comptime WARP = 32
"""Threads whose values NVIDIA's GPUs exchange without memory."""
# Threads of a block beside each other, at most, where rows of columns are reduced.
comptime MAX_LANES = 32
# Blocks that fill the largest GPU a few times over, so that none waits long for the last one; more would only lengthen
# the second stage.
comptime MAX_BLOCKS = 1056
# Blocks over columns that registers must suffice for on a multiprocessor.
comptime RESIDENT_BLOCKS = 3
# Times that blocks come one after the other on a multiprocessor, at most.
comptime _MOST_WAVES = 4
# Vectors that a thread should have at least.
comptime MIN_VECTORS = 4
# Rounds of its loop that a thread over columns should have at least: a second stage costs as much.
comptime MIN_ROUNDS = 4
# Rows that one thread adds up where there are columns enough for all of a GPU's.
comptime SHORT_REDUCTION = 64
# Threads of a block that puts slices together, those that an output has at most, and slices read at once.
comptime MERGE_BLOCK_THREADS = 512
comptime MOST_MERGERS = 64
comptime MERGE_LOADS = 4


@always_inline
def divided(value: Int, divisor: Int) -> Tuple[Int, Int]:
    """Quotient and remainder of numbers that are not negative; quick where they have 31 bits, as almost always.
    """
    if value >> 31 == 0:
        var small = divide(Int32(value), Int32(divisor))
        return Int(small[0]), Int(small[1])
    return value // divisor, value % divisor


@always_inline
def block_reduce[
    acc: DType, kinds: Int, n: Int, width: Int, threads: Int = THREADS
](value: SIMD[acc, width], stride: Int, members: Int) -> SIMD[acc, width]:
    """The values of `members` threads that lie `stride` apart, in the first of them.

    The members of a thread's group are its number over `stride`, below the next multiple of `members`.
    """
    # A lane's numbers stand `threads` apart: neighbours' stand in different banks.
    var shared = stack_allocation[
        threads * width, Scalar[acc], address_space=AddressSpace.SHARED
    ]()
    var mine = Int(thread_idx.x)
    var group = divide(Int32(mine), Int32(stride))[0]
    var member = Int(divide(group, Int32(members))[1])
    var total = value
    barrier()
    comptime for k in range(width):
        shared[unsafe_offset=k * threads + mine] = total[k]
    barrier()
    var left = members
    while left > 1:
        var half = ceildiv(left, 2)
        if member < left - half:
            var other = SIMD[acc, width](0)
            comptime for k in range(width):
                other[k] = shared[
                    unsafe_offset=k * threads + mine + half * stride
                ]
            total = combined[kinds, n, acc, width](total, other)
            comptime for k in range(width):
                shared[unsafe_offset=k * threads + mine] = total[k]
        barrier()
        left = half
    return total


@always_inline
def lanes_reduce[
    acc: DType, kinds: Int, n: Int
](value: SIMD[acc, 1], lanes: Int) -> SIMD[acc, 1]:
    """The values of `lanes` neighbouring threads, a power of two, in the first of them. All threads of the block take
    part where `lanes` is more than a warp has."""
    comptime if not is_nvidia_gpu():
        return block_reduce[acc, kinds, n, 1](value, 1, lanes)
    var total = value
    var distance = min(lanes, WARP) // 2
    while distance > 0:
        total = combined[kinds, n, acc, 1](total, from_lane(total, distance))
        distance //= 2
    if lanes <= WARP:
        return total
    var shared = stack_allocation[
        THREADS // WARP, Scalar[acc], address_space=AddressSpace.SHARED
    ]()
    var warp, lane = divide(Int32(thread_idx.x), Int32(WARP))
    # The values of the reduction before were read.
    barrier()
    if lane == 0:
        shared[unsafe_offset=Int(warp)] = total[0]
    barrier()
    var warps = lanes // WARP
    var first = Int(warp) // warps * warps
    total = SIMD[acc, 1](shared[unsafe_offset=first])
    for i in range(1, warps):
        total = combined[kinds, n, acc, 1](
            total, SIMD[acc, 1](shared[unsafe_offset=first + i])
        )
    return total


@always_inline
def _keep[
    acc: DType, result: DType, width: Int, n: Int, count: Int, dims: Int
](
    operands: ProgramOperands[count, dims],
    partials: Ptr[acc],
    output: Int,
    outputs: Int,
    slice: Int,
    slices: Int,
    value: SIMD[acc, width],
):
    """Stores `width` neighbouring results, or a slice's values of them."""
    if slices > 1:
        var kept = partials.unsafe_offset(
            (n * slices + slice) * outputs + output
        )
        comptime if width % 4 == 0 and size_of[acc]() == 4:
            if outputs % 4 == 0:
                comptime for part in range(width // 4):
                    kept.unsafe_offset(4 * part).unsafe_store[alignment=16](
                        value.slice[4, offset=4 * part]()
                    )
                return
        comptime for lane in range(width):
            kept[unsafe_offset=lane] = value[lane]
        return
    comptime for lane in range(width):
        Ptr[result](unsafe_from_address=operands.data[n])[
            unsafe_offset=output + lane
        ] = value[lane].cast[result]()


@__name(t"reduce_rows_{P.NAME}")
def reduce_rows_kernel[
    P: ReductionProgram,
    width: Int,
    parts: Int,
](
    operands: ProgramOperands[P.COUNT, P.DIMS],
    partials: Ptr[P.ACC],
    outer: Int64,
    reduced: Int64,
    share: Int64,
    slices: Int64,
    lanes: Int64,
):
    """`lanes` threads reduce a slice of a row, `share` vectors."""
    # Small divisions: those of 64 bits take a hundred instructions.
    var mine = divide(Int32(thread_idx.x), Int32(lanes))
    var lane = Int(mine[1])
    var group = Int32(block_idx.x) * (THREADS // Int32(lanes)) + mine[0]
    var unit = divide(group, Int32(slices))
    var row = Int(unit[0])
    var slice = Int(unit[1])
    var values = Values[P.ACC, width, P.RESULTS].start[P.KINDS]()
    if row < Int(outer):
        var first = slice * Int(share)
        var last = min(first + Int(share), Int(reduced) // width)
        for vector in range(first + lane, last, Int(lanes) * parts):
            var start = row * Int(reduced)
            var places = RunPositions[P.DIMS, parts](
                operands.place(start + vector * width)
            )
            comptime for part in range(1, parts):
                var next = vector + part * Int(lanes)
                places.put[part](
                    operands.place(start + min(next, last - 1) * width),
                    next < last,
                )
            values.fold_runs[P.KINDS, parts](
                P.run[width * parts, parts](operands, places), places.live
            )
    var own = values.across[P.KINDS]()
    comptime for n in range(P.RESULTS):
        var value = lanes_reduce[P.ACC, P.KINDS, n](own.data[n], Int(lanes))
        if lane == 0 and row < Int(outer):
            _keep[P.ACC, P.RESULT, 1, n, P.COUNT, P.DIMS](
                operands, partials, row, Int(outer), slice, Int(slices), value
            )


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)),
    `nvvm.minctasm`=SIMDLength(RESIDENT_BLOCKS),
)
@__name(t"reduce_columns_{P.NAME}")
def reduce_columns_kernel[
    P: ReductionProgram,
    width: Int,
    parts: Int,
](
    operands: ProgramOperands[P.COUNT, P.DIMS],
    partials: Ptr[P.ACC],
    outer: Int64,
    reduced: Int64,
    inner: Int64,
    share: Int64,
    slices: Int64,
    tiles: Int64,
    across: Int64,
):
    """A block reduces a slice of `across` vectors of columns, of one plane or several, `share` rows.
    """
    var mine = divide(Int32(thread_idx.x), Int32(across))
    var x = Int(mine[1])
    var y = Int(mine[0])
    var rows = Int(divide(Int32(block_dim.x), Int32(across))[0])
    var unit = divide(Int32(block_idx.x), Int32(tiles))
    var slice = Int(unit[0])
    var vector = Int(unit[1]) * Int(across) + x
    # `width` divides `inner`.
    var vectors = Int(inner) // width
    var place = divided(vector, vectors)
    var plane = place[0]
    var column = place[1] * width
    var values = Values[P.ACC, width, P.RESULTS].start[P.KINDS]()
    if plane < Int(outer):
        var first = slice * Int(share)
        var last = min(first + Int(share), Int(reduced))
        var start = plane * Int(reduced)
        # All rows have the last digit in common where programs rely on it: so what does not change is read once.
        var digit = operands.place(start * Int(inner) + column).digits[
            P.DIMS - 1
        ]
        for row in range(first + y, last, rows * parts):
            var places = RunPositions[P.DIMS, parts](
                operands.place((start + row) * Int(inner) + column)
            )
            places.column = Int(digit)
            comptime for part in range(1, parts):
                var next = row + part * rows
                places.put[part](
                    operands.place(
                        (start + min(next, last - 1)) * Int(inner) + column
                    ),
                    next < last,
                )
            values.fold_runs[P.KINDS, parts](
                P.run[width * parts, parts](operands, places), places.live
            )
    comptime for n in range(P.RESULTS):
        var value = block_reduce[P.ACC, P.KINDS, n, width](
            values.data[n], Int(across), rows
        )
        if y == 0 and plane < Int(outer):
            _keep[P.ACC, P.RESULT, width, n, P.COUNT, P.DIMS](
                operands,
                partials,
                plane * Int(inner) + column,
                Int(outer) * Int(inner),
                slice,
                Int(slices),
                value,
            )


@__name(
    t"reduce_merge_slices_{acc}_{result}_k{kinds}_r{results}_{count}_{dims}"
)
def merge_slices_kernel[
    acc: DType,
    result: DType,
    kinds: Int,
    results: Int,
    count: Int,
    dims: Int,
](
    operands: ProgramOperands[count, dims],
    partials: Ptr[acc],
    outputs: Int64,
    slices: Int64,
    mergers: Int64,
):
    """Merges the slices' values of an output, by `mergers` threads, a power of two.
    """
    var together = MERGE_BLOCK_THREADS // Int32(mergers)
    var mine = divide(Int32(thread_idx.x), together)
    var lane = Int(mine[0])
    var output = Int(block_idx.x) * Int(together) + Int(mine[1])
    comptime for n in range(results):
        var value = identity[kinds, n, acc, 1]()
        if output < Int(outputs):
            var own = partials.unsafe_offset(
                n * Int(slices) * Int(outputs) + output
            )
            for first in range(lane, Int(slices), MERGE_LOADS * Int(mergers)):
                var read = StaticTuple[Scalar[acc], MERGE_LOADS](fill=0)
                comptime for k in range(MERGE_LOADS):
                    var slice = min(first + k * Int(mergers), Int(slices) - 1)
                    read[k] = own[unsafe_offset=slice * Int(outputs)]
                comptime for k in range(MERGE_LOADS):
                    if first + k * Int(mergers) < Int(slices):
                        value = combined[kinds, n, acc, 1](value, read[k])
        value = block_reduce[acc, kinds, n, 1, MERGE_BLOCK_THREADS](
            value, Int(together), Int(mergers)
        )
        if lane == 0 and output < Int(outputs):
            _keep[acc, result, 1, n, count, dims](
                operands, partials, output, Int(outputs), 0, 1, value
            )


@fieldwise_init
struct _Slices(ImplicitlyCopyable, TrivialRegisterPassable):
    """The number of blocks that share a reduction, and the share of each."""

    var count: Int
    var share: Int

    @staticmethod
    def of(most: Int, reduced: Int, least: Int) -> Self:
        """Divides `reduced` rows or vectors into `most` slices; a slice has at least `least` of them.
        """
        var count = max(1, min(most, reduced // least))
        var share = ceildiv(reduced, count)
        return Self(ceildiv(reduced, share), share)


def _slices_in_waves(blocks: Int, resident: Int) -> Int:
    """Returns how many slices take the shortest time, where `blocks` blocks have a slice and `resident` ones run at a
    time: blocks of few waves that are almost full."""
    var best = 1
    var least = Float64(ceildiv(blocks, resident))
    for waves in range(1, _MOST_WAVES + 1):
        var count = waves * resident // blocks
        if count > 0 and Float64(waves) / Float64(count) < least:
            least = Float64(waves) / Float64(count)
            best = count
    return best


@always_inline
def _reduce[
    P: ReductionProgram,
    width: Int,
    parts: Int,
    rows: Bool,
](
    operands: ProgramOperands[P.COUNT, P.DIMS],
    partials: Ptr[P.ACC],
    extents: Extents,
    slices: _Slices,
    lanes: Int,
    ctx: DeviceContext,
) raises:
    """The first stage."""
    comptime if rows:
        ctx.enqueue_function[reduce_rows_kernel[P, width, parts]](
            operands,
            partials,
            Int64(extents.outer),
            Int64(extents.reduced),
            Int64(slices.share),
            Int64(slices.count),
            Int64(lanes),
            grid_dim=ceildiv(extents.outer * slices.count, THREADS // lanes),
            block_dim=THREADS,
        )
    else:
        var tiles = ceildiv(extents.outer * extents.inner, lanes * width)
        ctx.enqueue_function[reduce_columns_kernel[P, width, parts]](
            operands,
            partials,
            Int64(extents.outer),
            Int64(extents.reduced),
            Int64(extents.inner),
            Int64(slices.share),
            Int64(slices.count),
            Int64(tiles),
            Int64(lanes),
            grid_dim=slices.count * tiles,
            block_dim=lanes * min(THREADS // lanes, extents.reduced),
        )


@no_inline
def reduction_gpu[
    P: ReductionProgram,
    width: Int,
    parts: Int,
    rows: Bool,
](
    operands: ProgramOperands[P.COUNT, P.DIMS],
    extents: Extents,
    ctx: DeviceContext,
) raises:
    """Reduces, by vectors of `width` elements, which divides the extent that lies together.
    """
    var outputs = extents.outputs()
    # Lanes of a row, or threads beside each other.
    var lanes = 1
    var slices: _Slices
    comptime if rows:
        while lanes < THREADS and lanes * width * MIN_VECTORS < extents.reduced:
            lanes *= 2
        slices = _Slices.of(
            MAX_BLOCKS // ceildiv(extents.outer * lanes, THREADS),
            extents.reduced // width,
            THREADS * MIN_VECTORS,
        )
    else:
        # Equal parts of the columns, wider ones where few rows leave room, and for short sums a thread for each.
        var vectors = max(1, extents.outer * (extents.inner // width))
        var most = max(MAX_LANES, THREADS // extents.reduced)
        if (
            extents.reduced <= SHORT_REDUCTION
            and vectors >= MAX_BLOCKS * THREADS
        ):
            most = THREADS
        lanes = ceildiv(vectors, ceildiv(vectors, most))
        var resident = RESIDENT_BLOCKS * ctx.get_attribute(
            DeviceAttribute.MULTIPROCESSOR_COUNT
        )
        slices = _Slices.of(
            _slices_in_waves(ceildiv(vectors, lanes), resident),
            extents.reduced,
            THREADS // lanes * parts * MIN_ROUNDS,
        )
    if slices.count == 1:
        # No partial values: any address will do.
        _reduce[P, width, parts, rows](
            operands,
            Ptr[P.ACC](unsafe_from_address=operands.data[0]),
            extents,
            slices,
            lanes,
            ctx,
        )
        return
    var buffer = scratch[P.ACC](ctx, P.RESULTS * outputs * slices.count)
    var partials = Ptr[P.ACC](unsafe_from_address=Int(buffer.unsafe_ptr()))
    _reduce[P, width, parts, rows](
        operands, partials, extents, slices, lanes, ctx
    )
    var mergers = 1
    while mergers < MOST_MERGERS and mergers * MERGE_LOADS < slices.count:
        mergers *= 2
    ctx.enqueue_function[
        merge_slices_kernel[
            P.ACC, P.RESULT, P.KINDS, P.RESULTS, P.COUNT, P.DIMS
        ]
    ](
        operands,
        partials,
        Int64(outputs),
        Int64(slices.count),
        Int64(mergers),
        grid_dim=ceildiv(outputs, MERGE_BLOCK_THREADS // mergers),
        block_dim=MERGE_BLOCK_THREADS,
    )
    _ = buffer^
