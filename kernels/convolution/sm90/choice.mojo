"""The choice of the compiled tile that runs a problem: predicted times, from constants measured on an H200.

A product's time is the number of rounds that its tiles make over the multiprocessors, times what one tile costs (its
pipeline stages and a fixed part for filling the ring and storing), and never less than its memory traffic.
`measured.mojo` has the constants, fitted to committed measurements of every shape on every problem of the list;
microseconds everywhere.
"""

from std.math import ceildiv, sqrt
from std.sys import size_of

from ..problem import ConvolutionProblem
from .costs import TileCost
from .measured import TILE_COSTS, WGRAD_COSTS, WGRAD_STEP
from .plan import MOST_SHARED_TAPS, STAGE_LENGTH
from .tile import TileShape
from .wgrad_plan import PANEL, WgradChoice, WgradShape


comptime TILE_SHAPES: Array[TileShape, 7] = [
    TileShape(row_blocks=1, columns=256, stages=4, cluster=1, alternate=False),
    TileShape(row_blocks=2, columns=128, stages=4, cluster=1, alternate=False),
    TileShape(row_blocks=2, columns=128, stages=6, cluster=1, alternate=True),
    TileShape(row_blocks=2, columns=64, stages=4, cluster=1, alternate=False),
    TileShape(row_blocks=1, columns=192, stages=5, cluster=1, alternate=False),
    TileShape(row_blocks=1, columns=256, stages=4, cluster=2, alternate=False),
    TileShape(
        row_blocks=4,
        columns=64,
        stages=3,
        cluster=1,
        alternate=True,
        taps=MOST_SHARED_TAPS,
    ),
]

# Their places in TILE_SHAPES, by rows and columns.
comptime TILE_128X256 = 0
comptime TILE_256X128 = 1
comptime TILE_128X128 = 2
"""Consumers compute tiles in turn, so that one multiplies while the other stores."""
comptime TILE_256X64 = 3
comptime TILE_128X192 = 4
comptime TILE_128X256_PAIRED = 5
"""The two blocks of a cluster share each filter tile by multicast."""
comptime TILE_256X64_OF_TAPS = 6
"""Copies serve three taps along W."""

comptime WGRAD_SHAPES: Array[WgradShape, 5] = [
    WgradShape(row_blocks=1, columns=256, stages=4, split_steps=False),
    WgradShape(row_blocks=1, columns=192, stages=6, split_steps=True),
    WgradShape(row_blocks=1, columns=192, stages=5, split_steps=False),
    WgradShape(row_blocks=1, columns=128, stages=7, split_steps=False),
    WgradShape(row_blocks=1, columns=64, stages=9, split_steps=False),
]
comptime _WGRAD_128X192 = 2
"""A place in WGRAD_SHAPES."""

comptime _CACHE_BYTES = 45.0e6
"""Bytes of the second-level cache that operands may take to be read again from there."""
comptime _BYTE = 1.0 / 4.27e6
"""Time of moving one byte at the measured copy bandwidth."""
comptime _TF32_TILE = 1.5
"""Ratio of the time of filling the ring and storing a tile in float32 to that in 16 bits; estimated."""
comptime _SHORT_STEP = 0.6
"""Ratio of a short pipeline stage's time to a whole one's; estimated."""
comptime _ROW = 0.00135
"""Time of copying a row of a pipeline stage."""
comptime _UNALIGNED_ROW = 0.0029
"""Time of copying a row where rows begin at odd multiples of 16 bytes."""
comptime _LAUNCH = 2.0
"""Time of beginning and ending a short kernel behind another one."""


@fieldwise_init
struct Product(ImplicitlyCopyable):
    """The quantities of one fprop or of one phase of a dgrad on which the choice depends.
    """

    var rows: Int
    var steps: Int
    """Pipeline stages."""
    var short_steps: Int
    """Number of these stages that are short."""
    var line: Int
    """Rows of a line along W."""
    var shared_taps: Int
    """Taps along W that a stage can serve."""

    def walked_by(self, shape: TileShape) -> Self:
        """Returns the product in stages that serve these taps, where a shape has such.
        """
        if shape.taps == 1:
            return self
        return Self(
            self.rows // max(self.line, 1) * (self.line + self.shared_taps - 1),
            self.steps // self.shared_taps,
            0,
            self.line,
            1,
        )


def _tensor_bytes(p: ConvolutionProblem, element: Int = 2) -> Float64:
    return Float64(element * (p.x_size() + p.y_size()))


def is_compiled[dtype: DType](shape: Int) -> Bool:
    """Returns whether the tile shape of this index exists for the type. Of float32 four exist: a kernel takes time to
    compile, and the prediction of TILE_256X128 is the best one for results of 128 channels alone, by 10 % at most.
    """
    return 0 <= shape < comptime (len(TILE_SHAPES)) and (
        dtype != DType.float32
        or shape
        in (TILE_128X256, TILE_128X128, TILE_256X64, TILE_256X64_OF_TAPS)
    )


def takes_strides(shape: Int) -> Bool:
    """Returns whether the tile shape exists for data gradients with strides."""
    return shape not in (TILE_128X192, TILE_128X256_PAIRED, TILE_256X64_OF_TAPS)


def tile_cost[dtype: DType, shape: Int]() -> TileCost:
    """Returns the cost of a tile shape. A stage of float32 holds half as many elements, and a product of it half as
    many per cycle, so that it takes the same time; the store has twice the bytes.
    """
    comptime cost = TILE_COSTS[shape]
    comptime if dtype == DType.float32:
        return TileCost(cost.step, cost.tile * _TF32_TILE, cost.traffic)
    return cost


def join_steps(parts: Int) -> Int:
    """Returns the time in pipeline stages that the blocks of a cluster take to add their sums: on an H100 3.5 us for 2
    blocks, 7 for 8, where a stage of one consumer takes 0.29."""
    return 8 + 2 * parts


def split_parts(tiles: Int, steps: Int, processors: Int) -> Int:
    """Returns the number of parts into which the blocks of a cluster cut each tile's reduction: where all run at a
    time, and it pays."""
    var best = 1
    var least = steps
    for bits in range(1, 4):
        var parts = 1 << bits
        var time = ceildiv(steps, parts) + join_steps(parts)
        if (
            tiles * parts <= cluster_capacity(parts, processors)
            and time < least
        ):
            least = time
            best = parts
    return best


def tile_time(
    shape: TileShape,
    cost: TileCost,
    products: List[Product],
    columns: Int,
    problem: ConvolutionProblem,
    processors: Int,
    element: Int = 2,
    sums: Bool = False,
) -> Float64:
    """Returns the predicted time of a tile shape; `element` is the bytes of an element, `sums` whether it makes sums
    over columns."""
    var column_tiles = ceildiv(columns, shape.columns)
    var odd = problem.c * element % 32 != 0 or problem.k * element % 32 != 0
    var phases = len(products)
    var copied = shape.rows()
    if phases > 1 or not shape.keeps_filter(
        products[0].walked_by(shape).steps,
        processors // shape.cluster,
        column_tiles,
    ):
        copied += shape.taps * shape.columns // shape.cluster
    var copy = Float64(copied) * (_UNALIGNED_ROW if odd else _ROW)
    var step = max(cost.step, copy)
    var work = 0.0
    var longest = 0.0
    var tiles = 0
    for given in products:
        var product = given.walked_by(shape)
        var count = ceildiv(product.rows, shape.rows()) * column_tiles
        var steps = Float64(product.steps)
        if shape.has_short_stages(phases, sums):
            steps -= (1 - _SHORT_STEP) * Float64(product.short_steps)
        if shape.may_split(phases, sums):
            var parts = split_parts(count, product.steps, processors)
            if parts > 1:
                steps = steps / Float64(parts) + Float64(join_steps(parts))
        var each = steps * step + cost.tile
        tiles += count
        work += Float64(count) * each
        longest = max(longest, each)
    var time: Float64
    if len(products) == 1:
        time = Float64(ceildiv(tiles, processors)) * longest
    else:
        time = work / Float64(processors) + longest / 2
    return max(time, _tensor_bytes(problem, element) * _BYTE * cost.traffic)


def choose_tile[
    dtype: DType
](
    products: List[Product],
    columns: Int,
    problem: ConvolutionProblem,
    processors: Int,
    strided: Bool = False,
) -> Int:
    """Returns the index into TILE_SHAPES of the fastest shape; `strided` for a data gradient with strides.
    """
    var best = 0
    var best_time = Float64.MAX
    comptime for i in range(len(TILE_SHAPES)):
        comptime if is_compiled[dtype](i):
            comptime shape = TILE_SHAPES[i]
            comptime cost = tile_cost[dtype, i]()
            var time = tile_time(
                shape,
                cost,
                products,
                columns,
                problem,
                processors,
                size_of[dtype](),
            )
            if time < best_time and (takes_strides(i) or not strided):
                best_time = time
                best = i
    return best


def sums_pay(
    shape: Int,
    products: List[Product],
    columns: Int,
    size: Int,
    problem: ConvolutionProblem,
    processors: Int,
) -> Bool:
    """Returns whether a shape that makes sums over the result's `size` elements on the way is predicted to save time:
    it may be slower than the best one by as much as reading the result once more takes.
    """
    var best = choose_tile[DType.bfloat16](
        products, columns, problem, processors
    )
    var times: Array[Float64, 2] = [0.0, 0.0]
    comptime for i in range(len(TILE_SHAPES)):
        comptime each = TILE_SHAPES[i]
        comptime cost = TILE_COSTS[i]
        if i == shape or i == best:
            var time = tile_time(
                each, cost, products, columns, problem, processors
            )
            if i == best:
                times[1] = time
            if i == shape:
                times[0] = tile_time(
                    each,
                    cost,
                    products,
                    columns,
                    problem,
                    processors,
                    sums=True,
                )
    return times[0] < times[1] + Float64(2 * size) * _BYTE + _LAUNCH


def wgrad_tiles(
    shape: WgradShape,
    p: ConvolutionProblem,
    share_rows: Int = 1,
    share_columns: Int = 1,
) -> Int:
    """Returns the number of tiles of the result, rounded up to whole groups of those that share copies.
    """
    var panels = p.taps() * ceildiv(p.group_c(), PANEL)
    return (
        p.groups
        * ceildiv(ceildiv(p.group_k(), shape.rows()), share_rows)
        * ceildiv(ceildiv(panels, shape.panels()), share_columns)
        * share_rows
        * share_columns
    )


def cluster_capacity(cluster: Int, processors: Int) -> Int:
    """Returns the number of blocks in clusters of `cluster` that run at a time: the groups of multiprocessors that a
    cluster must fit into are not multiples of it. On an H200, 120 blocks in clusters of 8 run together, and 128 do not.
    """
    var usable = processors if cluster <= 2 else processors * 10 // 11
    return max(usable // max(cluster, 1), 1) * max(cluster, 1)


def wgrad_time(
    shape: WgradShape,
    products: Float64,
    choice: WgradChoice,
    p: ConvolutionProblem,
    processors: Int,
) -> Tuple[Float64, Int]:
    """Returns the predicted time, and the bytes of the slots; `products` is the shape's WGRAD_STEP.
    """
    var splits = choice.splits
    var cluster = choice.cluster
    var share = choice.share_rows * choice.share_columns
    var tiles = wgrad_tiles(shape, p, choice.share_rows, choice.share_columns)
    comptime costs = WGRAD_COSTS
    # What a block loads for one step; of a shared copy its part.
    var step_bytes = (
        Float64(shape.rows()) / Float64(choice.share_columns)
        + Float64(shape.columns) / Float64(choice.share_rows)
    ) * Float64(STAGE_LENGTH * 2)
    var loads = step_bytes * 1e-6 * costs.load_byte
    var step = sqrt(sqrt(products**4 + loads**4))
    var steps = ceildiv(p.output_pixels(), STAGE_LENGTH)
    var bytes = _tensor_bytes(p)
    var time: Float64
    var slots: Int
    if splits == 0:
        slots = tiles + min(processors, tiles * steps)
        time = Float64(tiles * steps) / Float64(processors) * step
        if bytes > _CACHE_BYTES:
            var loaded = Float64(tiles * steps) * step_bytes
            time = max(time, loaded * _BYTE * costs.unaligned)
    else:
        var parts = min(splits, steps)
        slots = parts // max(cluster, 1)
        slots = 0 if slots == 1 else tiles * slots
        time = (
            Float64(
                ceildiv(
                    tiles * parts,
                    cluster_capacity(max(cluster, share), processors),
                )
            )
            * Float64(ceildiv(steps, parts))
            * step
        )
    var traffic = bytes * _BYTE * costs.traffic
    time = (time**3 + traffic**3) ** (1.0 / 3.0) + costs.start
    if cluster > 0:
        var rounds = ceildiv(
            tiles * splits, cluster_capacity(cluster, processors)
        )
        var megabytes = (
            Float64(shape.slot_elements() * shape.copies() * 4) * 1e-6
        )
        if cluster == 2 and not shape.split_steps:
            time += Float64(rounds) * (costs.swap + megabytes * costs.swap_byte)
        else:
            time += Float64(rounds) * (costs.join + megabytes * costs.join_byte)
    if share > 1:
        time += costs.share
    var slot_bytes = slots * shape.slot_elements() * 4
    time += Float64(slot_bytes) * 2e-6 * costs.combine_byte
    time += Float64(slots) / Float64(tiles) * costs.combine_slot
    if slots > 0:
        time += costs.combine
    return time, slot_bytes


def choose_wgrad(p: ConvolutionProblem, processors: Int) -> WgradChoice:
    var best = WgradChoice(_WGRAD_128X192, 1, 0, 1, 1)
    var best_time = Float64.MAX
    var steps = ceildiv(p.output_pixels(), STAGE_LENGTH)
    comptime for i in range(len(WGRAD_SHAPES)):
        comptime shape = WGRAD_SHAPES[i]
        comptime products = WGRAD_STEP[i]
        # Alone, clusters that join, blocks that share copies. Consumers that sum the same tile join at least with each
        # other.
        for way in range(7):
            var choice = WgradChoice(i, 0, 0, 1, 1)
            if way <= 3:
                choice.cluster = (
                    1 << way
                ) if way > 0 or shape.split_steps else 0
            elif shape.split_steps:
                continue
            else:
                choice.share_rows = 1 if way == 4 else 2
                choice.share_columns = 1 if way == 5 else 2
            if choice.cluster > steps:
                continue
            var share = choice.share_rows * choice.share_columns
            var tiles = wgrad_tiles(
                shape, p, choice.share_rows, choice.share_columns
            )
            var width = max(choice.cluster, 1)
            var capacity = cluster_capacity(max(width, share), processors)
            # As many parts as fill a whole number of rounds over the multiprocessors; 0 rounds: the even spread.
            var most = 4 if way == 0 else (2 if choice.cluster > 2 else 3)
            for rounds in range(most):
                if rounds == 0 and choice.cluster > 0:
                    continue
                choice.splits = rounds * capacity // (tiles * width) * width
                if rounds > 0 and choice.splits == 0:
                    continue
                var time, bytes = wgrad_time(
                    shape, products, choice, p, processors
                )
                if time < best_time and bytes <= p.workspace_limit:
                    best_time = time
                    best = choice
    return best
