"""Reduction programs on a GPU, in a fixed order: no atomics, the same bits every run.

Where what is reduced lies together, some lanes of a block share a row; else a block has some columns, and its rows of
threads share what is reduced. Where results are few, several blocks share them: their values lie as
[result, output, slice], and a second kernel puts them together.
"""

from std.math import ceildiv
from std.memory import stack_allocation

from max.gpu import barrier, block_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.memory import AddressSpace

from ..convolution.common import Ptr
from ..library import scratch
from ..pointwise.program import Operands, Place
from .values import Extents, Values, combined, identity

comptime BLOCK = 256
# Threads of a block beside each other, at most, where many rows of columns are reduced.
comptime ACROSS = 32
# Blocks that fill the largest GPU several times over; more would only lengthen the second stage.
comptime MOST_BLOCKS = 1024
comptime MOST_SLICES = 512
# Vectors that a thread should have at least.
comptime LEAST = 4
comptime MERGERS = 32


@always_inline
def together[
    acc: DType, kinds: Int, n: Int, width: Int
](value: SIMD[acc, width], stride: Int, members: Int) -> SIMD[acc, width]:
    """The values of `members` threads that lie `stride` apart, in the first of them; a power of two.

    The members of a thread's group are its number over `stride`, below the next multiple of `members`.
    """
    var shared = stack_allocation[
        BLOCK, SIMD[acc, width], address_space=AddressSpace.SHARED
    ]()
    var mine = Int(thread_idx.x)
    var member = mine // stride % members
    barrier()
    shared[unsafe_offset=mine] = value
    barrier()
    var half = members // 2
    while half > 0:
        if member < half:
            shared[unsafe_offset=mine] = combined[kinds, n, acc, width](
                shared[unsafe_offset=mine],
                shared[unsafe_offset=mine + half * stride],
            )
        barrier()
        half //= 2
    return shared[unsafe_offset=mine]


@always_inline
def _keep[
    acc: DType, result: DType, width: Int, n: Int, count: Int, dims: Int
](
    operands: Operands[count, dims],
    partials: Ptr[acc],
    output: Int,
    outputs: Int,
    slice: Int,
    slices: Int,
    value: SIMD[acc, width],
):
    """Stores `width` neighbouring results, or what a slice has of them."""
    comptime for lane in range(width):
        if slices > 1:
            partials[
                unsafe_offset=(n * outputs + output + lane) * slices + slice
            ] = value[lane]
        else:
            Ptr[result](unsafe_from_address=operands.data[n])[
                unsafe_offset=output + lane
            ] = value[lane].cast[result]()


def reduce_rows_kernel[
    acc: DType,
    result: DType,
    kinds: Int,
    results: Int,
    count: Int,
    dims: Int,
    run: def[width: Int](Operands[count, dims], Place[dims]) thin -> Values[
        acc, width, results
    ],
    width: Int,
](
    operands: Operands[count, dims],
    partials: Ptr[acc],
    outer: Int64,
    reduced: Int64,
    slices: Int64,
    lanes: Int64,
):
    """`lanes` threads reduce a slice of a row."""
    var lane = Int(thread_idx.x) % Int(lanes)
    var unit = Int(block_idx.x) * (BLOCK // Int(lanes)) + Int(
        thread_idx.x
    ) // Int(lanes)
    var row = unit // Int(slices)
    var slice = unit % Int(slices)
    var values = Values[acc, width, results].start[kinds]()
    if row < Int(outer):
        var vectors = Int(reduced) // width
        var first = vectors * slice // Int(slices)
        var last = vectors * (slice + 1) // Int(slices)
        for vector in range(first + lane, last, Int(lanes)):
            values.fold[kinds](
                run[width](
                    operands,
                    operands.place(row * Int(reduced) + vector * width),
                )
            )
    var mine = values.across[kinds]()
    comptime for n in range(results):
        var value = together[acc, kinds, n, 1](mine.data[n], 1, Int(lanes))
        if lane == 0 and row < Int(outer):
            _keep[acc, result, 1, n, count, dims](
                operands, partials, row, Int(outer), slice, Int(slices), value
            )


def reduce_columns_kernel[
    acc: DType,
    result: DType,
    kinds: Int,
    results: Int,
    count: Int,
    dims: Int,
    run: def[width: Int](Operands[count, dims], Place[dims]) thin -> Values[
        acc, width, results
    ],
    width: Int,
](
    operands: Operands[count, dims],
    partials: Ptr[acc],
    outer: Int64,
    reduced: Int64,
    inner: Int64,
    slices: Int64,
    tiles: Int64,
    across: Int64,
):
    """A block reduces a slice of `across` vectors of columns."""
    var x = Int(thread_idx.x) % Int(across)
    var y = Int(thread_idx.x) // Int(across)
    var rows = BLOCK // Int(across)
    var tile = Int(block_idx.x) % Int(tiles)
    var unit = Int(block_idx.x) // Int(tiles)
    var slice = unit % Int(slices)
    var plane = unit // Int(slices)
    var column = (tile * Int(across) + x) * width
    var values = Values[acc, width, results].start[kinds]()
    if column < Int(inner):
        var first = Int(reduced) * slice // Int(slices)
        var last = Int(reduced) * (slice + 1) // Int(slices)
        for row in range(first + y, last, rows):
            values.fold[kinds](
                run[width](
                    operands,
                    operands.place(
                        (plane * Int(reduced) + row) * Int(inner) + column
                    ),
                )
            )
    comptime for n in range(results):
        var value = together[acc, kinds, n, width](
            values.data[n], Int(across), rows
        )
        if y == 0 and column < Int(inner):
            _keep[acc, result, width, n, count, dims](
                operands,
                partials,
                plane * Int(inner) + column,
                Int(outer) * Int(inner),
                slice,
                Int(slices),
                value,
            )


def merge_slices_kernel[
    acc: DType,
    result: DType,
    kinds: Int,
    results: Int,
    count: Int,
    dims: Int,
](
    operands: Operands[count, dims],
    partials: Ptr[acc],
    outputs: Int64,
    slices: Int64,
):
    """MERGERS threads put together what the slices have of an output."""
    var lane = Int(thread_idx.x) % MERGERS
    var output = (
        Int(block_idx.x) * (BLOCK // MERGERS) + Int(thread_idx.x) // MERGERS
    )
    comptime for n in range(results):
        var value = identity[kinds, n, acc, 1]()
        if output < Int(outputs):
            var first = (n * Int(outputs) + output) * Int(slices)
            for slice in range(lane, Int(slices), MERGERS):
                value = combined[kinds, n, acc, 1](
                    value, partials[unsafe_offset=first + slice]
                )
        value = together[acc, kinds, n, 1](value, 1, MERGERS)
        if lane == 0 and output < Int(outputs):
            _keep[acc, result, 1, n, count, dims](
                operands, partials, output, Int(outputs), 0, 1, value
            )


def _slices(blocks: Int, reduced: Int, share: Int) -> Int:
    """How many blocks share a reduction, each `share` elements at least."""
    if blocks >= MOST_BLOCKS // 2:
        return 1
    return max(
        1,
        min(min(MOST_BLOCKS // blocks, MOST_SLICES), reduced // share),
    )


@always_inline
def _reduce[
    acc: DType,
    result: DType,
    kinds: Int,
    results: Int,
    count: Int,
    dims: Int,
    run: def[width: Int](Operands[count, dims], Place[dims]) thin -> Values[
        acc, width, results
    ],
    width: Int,
    rows: Bool,
](
    operands: Operands[count, dims],
    partials: Ptr[acc],
    extents: Extents,
    slices: Int,
    lanes: Int,
    ctx: DeviceContext,
) raises:
    """The first stage."""
    comptime if rows:
        ctx.enqueue_function[
            reduce_rows_kernel[
                acc, result, kinds, results, count, dims, run, width
            ]
        ](
            operands,
            partials,
            Int64(extents.outer),
            Int64(extents.reduced),
            Int64(slices),
            Int64(lanes),
            grid_dim=ceildiv(extents.outer * slices, BLOCK // lanes),
            block_dim=BLOCK,
        )
    else:
        var tiles = ceildiv(extents.inner, lanes * width)
        ctx.enqueue_function[
            reduce_columns_kernel[
                acc, result, kinds, results, count, dims, run, width
            ]
        ](
            operands,
            partials,
            Int64(extents.outer),
            Int64(extents.reduced),
            Int64(extents.inner),
            Int64(slices),
            Int64(tiles),
            Int64(lanes),
            grid_dim=extents.outer * slices * tiles,
            block_dim=BLOCK,
        )


@no_inline
def _launch[
    acc: DType,
    result: DType,
    kinds: Int,
    results: Int,
    count: Int,
    dims: Int,
    run: def[width: Int](Operands[count, dims], Place[dims]) thin -> Values[
        acc, width, results
    ],
    width: Int,
    rows: Bool,
](operands: Operands[count, dims], extents: Extents, ctx: DeviceContext) raises:
    var outputs = extents.outputs()
    # Lanes of a row, or threads beside each other.
    var lanes = 1
    var blocks: Int
    var share: Int
    comptime if rows:
        while lanes < BLOCK and lanes * width * LEAST < extents.reduced:
            lanes *= 2
        blocks = ceildiv(extents.outer * lanes, BLOCK)
        share = BLOCK * width * LEAST
    else:
        # Few rows leave room for more columns.
        var most = ACROSS
        while most < BLOCK and BLOCK // most > extents.reduced:
            most *= 2
        while lanes < most and lanes * width < extents.inner:
            lanes *= 2
        blocks = extents.outer * ceildiv(extents.inner, lanes * width)
        share = BLOCK // lanes * LEAST
    var slices = _slices(blocks, extents.reduced, share)
    if slices == 1:
        # No partial values: any address will do.
        _reduce[acc, result, kinds, results, count, dims, run, width, rows](
            operands,
            Ptr[acc](unsafe_from_address=operands.data[0]),
            extents,
            1,
            lanes,
            ctx,
        )
        return
    var buffer = scratch[acc](ctx, results * outputs * slices)
    var partials = Ptr[acc](unsafe_from_address=Int(buffer.unsafe_ptr()))
    _reduce[acc, result, kinds, results, count, dims, run, width, rows](
        operands, partials, extents, slices, lanes, ctx
    )
    ctx.enqueue_function[
        merge_slices_kernel[acc, result, kinds, results, count, dims]
    ](
        operands,
        partials,
        Int64(outputs),
        Int64(slices),
        grid_dim=ceildiv(outputs, BLOCK // MERGERS),
        block_dim=BLOCK,
    )
    _ = buffer^


@no_inline
def reduction_gpu[
    acc: DType,
    result: DType,
    kinds: Int,
    results: Int,
    count: Int,
    dims: Int,
    run: def[width: Int](Operands[count, dims], Place[dims]) thin -> Values[
        acc, width, results
    ],
    vector: Int,
    rows: Bool,
](
    operands: Operands[count, dims],
    extents: Extents,
    aligned: Bool,
    ctx: DeviceContext,
) raises:
    """Reduces, by vectors where all inputs are `aligned` for them: `vector` divides the extent that lies together.
    """
    comptime if vector > 1:
        if aligned:
            _launch[
                acc, result, kinds, results, count, dims, run, vector, rows
            ](operands, extents, ctx)
            return
    _launch[acc, result, kinds, results, count, dims, run, 1, rows](
        operands, extents, ctx
    )
