"""roi_align and roi_pool on a GPU. Forward, a thread has a vector of channels of a bin. Backward, a block has a tile of
pixels, and its threads gather the contributions of the regions over the tile, in the regions' order: nothing is added
atomically."""

from std.math import ceildiv
from std.memory import stack_allocation

from max.gpu import barrier, block_idx, global_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.memory import AddressSpace

from ..common.arithmetic import Divisor
from ..common.gpu import GRID_LIMIT, load_wide, store_vector
from ..common.pointer import Ptr, Shared, accumulation_type
from .problem import RegionsProblem, Region, aligned_region, pooled_region
from .regions_cpu import FLT_MAX

comptime THREADS = 256
comptime TILE = 8
"""Rows and columns of pixels that a block has."""
comptime LANES = THREADS // TILE
"""Threads that share the channels of a column of the tile."""
comptime CHUNK = 32
"""Bins of a row, or of a column, whose weights are in shared memory at a time."""
comptime VECTOR = 4
"""Channels of a thread, where they are whole vectors of 16 bytes."""


@__name(t"regions_means_{dtype}_v{V}")
def region_means[
    dtype: DType, V: Int
](
    y: Ptr[dtype],
    x: Ptr[dtype],
    regions: Ptr[dtype],
    p: RegionsProblem,
    by_vectors: Divisor,
):
    """A thread has V channels of a bin; `by_vectors` divides by the vectors of a bin.
    """
    comptime Acc = accumulation_type[dtype]
    var item, vector = by_vectors.divide(Int32(global_idx.x))
    if Int(item) >= Int(p.regions) * p.bins():
        return
    var bin = item % Int32(p.bins())
    var region = aligned_region[positions=False](
        regions, Int(item) // p.bins(), p
    )
    var channels = Int(p.channels)
    var c = Int(vector) * V
    var total = SIMD[Acc, V](0)
    if region.image >= 0:
        var image = x.unsafe_offset(Int(region.image) * p.image() + c)
        for i in range(region.h.samples):
            var h = region.h.sample(bin // p.columns, i)
            if h.low < 0:
                continue
            var low = Int(h.low) * Int(p.width)
            var high = Int(h.high) * Int(p.width)
            for j in range(region.w.samples):
                var w = region.w.sample(bin % p.columns, j)
                if w.low < 0:
                    continue
                var left = Int(w.low)
                var right = Int(w.high)
                total += (1 - h.share) * (
                    (1 - w.share) * load_wide[V](image, (low + left) * channels)
                    + w.share * load_wide[V](image, (low + right) * channels)
                ) + h.share * (
                    (1 - w.share)
                    * load_wide[V](image, (high + left) * channels)
                    + w.share * load_wide[V](image, (high + right) * channels)
                )
    store_vector(
        y, Int(item) * channels + c, (total / region.count).cast[dtype]()
    )


@__name(t"regions_maxima_{dtype}_v{V}")
def region_maxima[
    dtype: DType, V: Int
](
    y: Ptr[dtype],
    places: Ptr[DType.int32],
    x: Ptr[dtype],
    regions: Ptr[dtype],
    p: RegionsProblem,
    by_vectors: Divisor,
):
    """Computes the maxima of regions as region_means does the means; `places` receives the maxima's pixels.
    """
    comptime Acc = accumulation_type[dtype]
    var item, vector = by_vectors.divide(Int32(global_idx.x))
    if Int(item) >= Int(p.regions) * p.bins():
        return
    var bin = item % Int32(p.bins())
    var region = pooled_region[positions=False](
        regions, Int(item) // p.bins(), p
    )
    var channels = Int(p.channels)
    var c = Int(vector) * V
    var top, bottom = region.h.span(bin // p.columns, p.height)
    var left, right = region.w.span(bin % p.columns, p.width)
    var empty = bottom <= top or right <= left or region.image < 0
    var most = SIMD[Acc, V](0 if empty else Scalar[Acc](-FLT_MAX))
    var place = SIMD[DType.int32, V](-1)
    if not empty:
        var image = x.unsafe_offset(Int(region.image) * p.image() + c)
        for h in range(top, bottom):
            for w in range(left, right):
                var pixel = h * p.width + w
                var value = load_wide[V](image, Int(pixel) * channels)
                var more = value.gt(most)
                most = more.select(value, most)
                place = more.select(SIMD[DType.int32, V](pixel), place)
    var at = Int(item) * channels + c
    store_vector(y, at, most.cast[dtype]())
    store_vector(places, at, place)


@fieldwise_init
struct _PixelTile(TrivialRegisterPassable):
    """A block's tile of pixels, and a thread's column and first channel of it.
    """

    var h: Int32
    """The tile's first row."""
    var w: Int32
    """The tile's first column."""
    var column: Int32
    """The thread's, counted from the tile's first."""
    var c: Int


@always_inline
def _add_maxima[
    dtype: DType, V: Int
](
    mut sums: Array[SIMD[accumulation_type[dtype], V], TILE],
    dy: Ptr[dtype],
    places: Ptr[DType.int32],
    number: Int,
    region: Region[accumulation_type[dtype]],
    tile: _PixelTile,
    p: RegionsProblem,
):
    """Adds one region's contributions to the thread's pixels: those of the bins whose maxima they are.
    """
    comptime Acc = accumulation_type[dtype]
    var w = tile.w + tile.column
    var rows = region.h.over(tile.h, tile.h + TILE - 1, p.rows)
    var columns = region.w.over(w, w, p.columns)
    for row in range(rows[0], rows[1]):
        for bin in range(columns[0], columns[1]):
            var at = (number * p.bins() + Int(row * p.columns + bin)) * Int(
                p.channels
            ) + tile.c
            var value = load_wide[V](dy, at)
            var place = places.unsafe_load[width=V](at)
            comptime for r in range(TILE):
                var pixel = (tile.h + Int32(r)) * p.width + w
                sums[r] += place.eq(SIMD[DType.int32, V](pixel)).select(
                    value, SIMD[Acc, V](0)
                )


@always_inline
def _weigh_bins[
    Acc: DType, //
](
    down: Shared[Acc],
    along: Shared[Acc],
    region: Region[Acc],
    tile: _PixelTile,
    rows: Tuple[Int32, Int32],
    columns: Tuple[Int32, Int32],
):
    """down [row of bins, row of pixels] and along [column of bins, column of pixels] = their weights, of means. Half of
    the threads weigh rows, the other half columns."""
    var thread = Int32(thread_idx.x)
    if thread < THREADS // 2:
        for at in range(thread, (rows[1] - rows[0]) * TILE, THREADS // 2):
            down[unsafe_offset=at] = (
                region.h.weight(rows[0] + at // TILE, tile.h + at % TILE)
                / region.count
            )
    else:
        for at in range(
            thread - THREADS // 2,
            (columns[1] - columns[0]) * TILE,
            THREADS // 2,
        ):
            along[unsafe_offset=at] = region.w.weight(
                columns[0] + at // TILE, tile.w + at % TILE
            )


@always_inline
def _add_means[
    dtype: DType, V: Int
](
    mut sums: Array[SIMD[accumulation_type[dtype], V], TILE],
    dy: Ptr[dtype],
    down: Shared[accumulation_type[dtype]],
    along: Shared[accumulation_type[dtype]],
    number: Int,
    region: Region[accumulation_type[dtype]],
    active: Bool,
    tile: _PixelTile,
    p: RegionsProblem,
):
    """Adds one region's contributions to the thread's pixels, with weights that the block's threads share.
    """
    var w = tile.w + tile.column
    var rows = region.h.over(tile.h, tile.h + TILE - 1, p.rows)
    var columns = region.w.over(tile.w, tile.w + TILE - 1, p.columns)
    var own_columns = region.w.over(w, w, p.columns)
    for row_first in range(rows[0], rows[1], Int32(CHUNK)):
        for bin_first in range(columns[0], columns[1], Int32(CHUNK)):
            var row_end = min(row_first + CHUNK, rows[1])
            var bin_end = min(bin_first + CHUNK, columns[1])
            barrier()
            _weigh_bins(
                down,
                along,
                region,
                tile,
                (row_first, row_end),
                (bin_first, bin_end),
            )
            barrier()
            if not active:
                continue
            for bin in range(
                max(bin_first, own_columns[0]), min(bin_end, own_columns[1])
            ):
                var share = along[
                    unsafe_offset=(bin - bin_first) * TILE + tile.column
                ]
                if share == 0:
                    continue
                for row in range(row_first, row_end):
                    var at = (
                        number * p.bins() + Int(row * p.columns + bin)
                    ) * Int(p.channels) + tile.c
                    var value = load_wide[V](dy, at) * share
                    comptime for r in range(TILE):
                        sums[r] += (
                            value
                            * down[
                                unsafe_offset=(row - row_first) * TILE
                                + Int32(r)
                            ]
                        )


@__name(t"regions_dgrad_gather_{dtype}_v{V}_m{maxima}")
def gather_regions[
    dtype: DType, V: Int, maxima: Bool
](
    dx: Ptr[accumulation_type[dtype]],
    dy: Ptr[dtype],
    places: Ptr[DType.int32],
    regions: Ptr[dtype],
    p: RegionsProblem,
    tiles_along: Int32,
):
    """A block has a tile of pixels and LANES * V channels; a thread V channels of a column of the tile.
    """
    comptime Acc = accumulation_type[dtype]
    var found = stack_allocation[
        THREADS, Scalar[DType.uint8], address_space=AddressSpace.SHARED
    ]()
    var down = stack_allocation[
        CHUNK * TILE, Scalar[Acc], address_space=AddressSpace.SHARED
    ]().unsafe_origin_cast[MutUntrackedOrigin]()
    var along = stack_allocation[
        CHUNK * TILE, Scalar[Acc], address_space=AddressSpace.SHARED
    ]().unsafe_origin_cast[MutUntrackedOrigin]()
    var thread = Int32(thread_idx.x)
    var tile = _PixelTile(
        Int32(block_idx.x) // tiles_along * TILE,
        Int32(block_idx.x) % tiles_along * TILE,
        thread // LANES,
        (Int(block_idx.y) * LANES + Int(thread % LANES)) * V,
    )
    var w = tile.w + tile.column
    var active = tile.c < Int(p.channels) and w < p.width
    var n = Int32(block_idx.z)
    while n < p.batch:
        var sums = Array[SIMD[Acc, V], TILE](fill=SIMD[Acc, V](0))
        for first in range(Int32(0), p.regions, Int32(THREADS)):
            var own = first + thread
            var hit = False
            if own < p.regions:
                hit = _reaches[maxima=maxima](regions, Int(own), p, n, tile)
            barrier()
            found[unsafe_offset=thread] = UInt8(1 if hit else 0)
            barrier()
            for j in range(min(Int32(THREADS), p.regions - first)):
                if found[unsafe_offset=j] == 0:
                    continue
                var number = Int(first + j)
                var region = _region[maxima=maxima](regions, number, p)
                comptime if maxima:
                    if active:
                        _add_maxima[dtype, V](
                            sums, dy, places, number, region, tile, p
                        )
                else:
                    _add_means[dtype, V](
                        sums, dy, down, along, number, region, active, tile, p
                    )
        if active:
            comptime for r in range(TILE):
                if tile.h + Int32(r) < p.height:
                    store_vector(
                        dx,
                        Int(n) * p.image()
                        + Int((tile.h + Int32(r)) * p.width + w)
                        * Int(p.channels)
                        + tile.c,
                        sums[r],
                    )
        n += Int32(GRID_LIMIT)


@always_inline
def _region[
    dtype: DType, //, maxima: Bool
](
    regions: Ptr[dtype],
    number: Int,
    p: RegionsProblem,
    out region: Region[accumulation_type[dtype]],
):
    comptime if maxima:
        return pooled_region[positions=False](regions, number, p)
    else:
        return aligned_region[positions=False](regions, number, p)


@always_inline
def _reaches[
    dtype: DType, //, maxima: Bool
](
    regions: Ptr[dtype],
    number: Int,
    p: RegionsProblem,
    n: Int32,
    tile: _PixelTile,
) -> Bool:
    """Returns whether bins of a region may read pixels of a tile of image n."""
    var region = _region[maxima=maxima](regions, number, p)
    if region.image != n:
        return False
    var rows = region.h.over(tile.h, tile.h + TILE - 1, p.rows)
    var columns = region.w.over(tile.w, tile.w + TILE - 1, p.columns)
    return rows[0] < rows[1] and columns[0] < columns[1]


def check_sizes(p: RegionsProblem) raises:
    """Checks that 32-bit thread numbers can count the work."""
    comptime most = Int(Int32.MAX) - (1 << 20)
    if Int(p.regions) * p.bins() * Int(p.channels) > most or p.image() > most:
        raise Error(
            "regions: ",
            p.regions,
            " of ",
            p.bins(),
            " bins and ",
            p.channels,
            " channels from ",
            p.pixels(),
            " pixels: an image and the result must be below 2^31 elements",
        )


@no_inline
def align_gpu[
    dtype: DType, //
](
    ctx: DeviceContext,
    y: Ptr[dtype],
    x: Ptr[dtype],
    regions: Ptr[dtype],
    p: RegionsProblem,
) raises:
    """y = the mean of each bin's samples."""
    check_sizes(p)
    var whole = Int(p.channels) % VECTOR == 0 and (Int(x) | Int(y)) % 16 == 0
    comptime for V in [VECTOR, 1]:
        if V == 1 or whole:
            var vectors = Int(p.channels) // V
            ctx.enqueue_function[region_means[dtype, V]](
                y,
                x,
                regions,
                p,
                Divisor(vectors),
                grid_dim=ceildiv(Int(p.regions) * p.bins() * vectors, THREADS),
                block_dim=THREADS,
            )
            return


@no_inline
def maxima_gpu[
    dtype: DType, //
](
    ctx: DeviceContext,
    y: Ptr[dtype],
    places: Ptr[DType.int32],
    x: Ptr[dtype],
    regions: Ptr[dtype],
    p: RegionsProblem,
) raises:
    """y = the maximum of each bin, and at which pixel it is."""
    check_sizes(p)
    var whole = (
        Int(p.channels) % VECTOR == 0
        and (Int(x) | Int(y) | Int(places)) % 16 == 0
    )
    comptime for V in [VECTOR, 1]:
        if V == 1 or whole:
            var vectors = Int(p.channels) // V
            ctx.enqueue_function[region_maxima[dtype, V]](
                y,
                places,
                x,
                regions,
                p,
                Divisor(vectors),
                grid_dim=ceildiv(Int(p.regions) * p.bins() * vectors, THREADS),
                block_dim=THREADS,
            )
            return


@no_inline
def regions_gradient_gpu[
    dtype: DType, sums: DType, //, *, maxima: Bool
](
    ctx: DeviceContext,
    sums_of_image: Ptr[sums],
    dy: Ptr[dtype],
    places: Ptr[DType.int32],
    regions: Ptr[dtype],
    p: RegionsProblem,
) raises:
    """The images' gradient; `places` are read of maxima alone."""
    var dx = rebind[Ptr[accumulation_type[dtype]]](sums_of_image)
    var whole = (
        Int(p.channels) % VECTOR == 0
        and (Int(dx) | Int(dy) | Int(places)) % 16 == 0
    )
    var tiles_along = ceildiv(Int(p.width), TILE)
    comptime for V in [VECTOR, 1]:
        if V == 1 or whole:
            ctx.enqueue_function[gather_regions[dtype, V, maxima]](
                dx,
                dy,
                places,
                regions,
                p,
                Int32(tiles_along),
                grid_dim=(
                    tiles_along * ceildiv(Int(p.height), TILE),
                    ceildiv(Int(p.channels), LANES * V),
                    min(Int(p.batch), GRID_LIMIT),
                ),
                block_dim=THREADS,
            )
            return
