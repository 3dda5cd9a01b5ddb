"""Pooling forward on a GPU over contiguous NCHW tensors, for the windows that networks use.

A thread takes the windows of one row that start in 16 bytes of x. It loads those columns of all rows of the window at
once, as vectors where the rows allow it, and the few columns beside them that its windows reach. Windows are padded by
no more than the compiler knows of; where they are padded by less, tiles are moved by the difference.
"""

from max.gpu import block_dim, block_idx, grid_dim, thread_idx
from max.gpu.host import DeviceContext
from std.math import ceildiv
from std.sys import size_of
from std.utils.numerics import neg_inf

from ...common.arithmetic import Divisor
from ...common.gpu import vector_alignment
from ...common.pointer import Ptr
from ..kernel import NO_ARGMAX, OFFSET, PoolingTensors, PoolingKernel
from ..problem import PoolingProblem
from .params import PoolingParams, LaunchShape, uniform_scale

comptime columns_of[dtype: DType, SW: Int] = (32 if SW >= 4 else 16) // size_of[
    dtype
]()
"""Columns of x in which a thread's windows start: 16 bytes, or twice that where few windows would leave it idle."""


@always_inline
def _load_row[
    dtype: DType, N: Int, //, *, left: Int, COLUMNS: Int
](
    mut values: Array[Float32, N],
    row: Ptr[dtype],
    column: Int32,
    extent: Int32,
    aligned: Bool,
):
    """Loads the columns of a row from `column` - `left` on; values of columns outside the row are unchanged.
    """

    @always_inline
    def one(i: Int) {mut values, imm}:
        var w = column + Int32(i - left)
        if w >= 0 and w < extent:
            values[i] = row[unsafe_offset=Int(w)].cast[DType.float32]()

    if aligned:
        comptime bytes = vector_alignment[dtype, COLUMNS]
        if column < extent:
            var run = row.unsafe_load[width=COLUMNS, alignment=bytes](
                Int(column)
            ).cast[DType.float32]()
            comptime for j in range(COLUMNS):
                values[left + j] = run[j]
        comptime for i in range(N):
            comptime if i < left or i >= left + COLUMNS:
                one(i)
    else:
        comptime for i in range(N):
            one(i)


@always_inline
def _store_run[
    dtype: DType, R: Int, //
](data: Ptr[dtype], at: Int, run: SIMD[dtype, R], count: Int32, aligned: Bool,):
    if aligned:
        comptime bytes = vector_alignment[dtype, R]
        data.unsafe_store[alignment=bytes](at, run)
    else:
        comptime for i in range(R):
            if Int32(i) < count:
                data[unsafe_offset=at + i] = run[i]


@fieldwise_init
struct TileWindow(TrivialRegisterPassable):
    """Windows that are compiled: at most `kh` rows, `kw` columns, stride and most padding on W.
    """

    var kh: Int
    var kw: Int
    var sw: Int
    var pw: Int

    def is_of(self, p: PoolingProblem) -> Bool:
        return (
            Int(p.h.window) <= self.kh
            and p.w.is_window(self.kw, self.sw)
            and Int(p.w.padding) <= self.pw
        )


comptime WINDOWS = [
    TileWindow(2, 2, 2, 0),
    TileWindow(3, 3, 2, 1),
    TileWindow(3, 3, 1, 1),
    TileWindow(4, 4, 4, 0),
]


@always_inline
def pool_fprop_tile[
    dtype: DType, argmax: DType, W: TileWindow
](
    y: Ptr[dtype],
    argmaxes: Ptr[argmax],
    x: Ptr[dtype],
    p: PoolingParams,
    aligned_x: Bool,
    aligned_y: Bool,
    tile: Int32,
    oh: Int32,
    slab: Int32,
):
    """The windows of tile `tile` of row `oh`; at most W.kh rows to a window."""
    comptime KH = W.kh
    comptime KW = W.kw
    comptime SW = W.sw
    comptime PW = W.pw
    comptime COLUMNS = columns_of[dtype, SW]
    comptime R = COLUMNS // SW
    comptime N = max(PW + COLUMNS, (R - 1) * SW + KW)
    var n, od = p.d.by_output.divide(slab)
    var td = p.d.taps[False](od)
    var th = p.h.taps[False](oh)
    var x_n = x.unsafe_offset(Int(n) * Int(p.input_plane()))
    var first = tile * Int32(R)
    var column = tile * Int32(COLUMNS) + Int32(PW) - p.w.padding

    var best = SIMD[DType.float32, R](
        Float32(0) if argmax == NO_ARGMAX else neg_inf[DType.float32]()
    )
    var found = SIMD[DType.int32, R](0)
    comptime if argmax != NO_ARGMAX:
        # Where nothing is above -inf the first position under the window wins.
        comptime for i in range(R):
            var w = column + Int32(i * SW - PW)
            comptime if argmax == OFFSET:
                found[i] = (td.first * p.h.window + th.first) * Int32(KW) + max(
                    -w, 0
                )
            else:
                found[i] = (td.start * p.h.input + th.start) * p.w.input + max(
                    w, 0
                )

    for a in range(td.count):
        comptime Row = Array[Float32, N]
        var rows = Array[Row, KH](
            fill=Row(
                fill=Float32(0) if argmax
                == NO_ARGMAX else neg_inf[DType.float32]()
            )
        )
        var top = (td.start + a) * p.h.input + th.start
        comptime for b in range(KH):
            if Int32(b) < th.count:
                _load_row[left=PW, COLUMNS=COLUMNS](
                    rows[b],
                    x_n.unsafe_offset(Int((top + Int32(b)) * p.w.input)),
                    column,
                    p.w.input,
                    aligned_x,
                )
        comptime for b in range(KH):
            var place = (top + Int32(b)) * p.w.input + column - Int32(PW)
            comptime if argmax == OFFSET:
                place = (
                    (td.first + a) * p.h.window + th.first + Int32(b)
                ) * Int32(KW)
            comptime for k in range(KW):
                comptime for i in range(R):
                    var value = rows[b][i * SW + k]
                    comptime if argmax == NO_ARGMAX:
                        best[i] += value
                    else:
                        comptime step = k if argmax == OFFSET else i * SW + k
                        var wins = value > best[i] or value != value
                        best[i] = value if wins else best[i]
                        found[i] = place + Int32(step) if wins else found[i]
    comptime if argmax == NO_ARGMAX:
        comptime for i in range(R):
            best[i] *= p.scale_of[False](od, oh, first + Int32(i))
    var count = p.w.output - first
    if count <= 0:
        return
    var at = Int(n) * Int(p.output_plane()) + Int(
        (od * p.h.output + oh) * p.w.output + first
    )
    _store_run(y, at, best.cast[dtype](), count, aligned_y)
    comptime if argmax != NO_ARGMAX:
        _store_run(argmaxes, at, found.cast[argmax](), count, aligned_y)


@__name(t"pool_fprop_tiles_{dtype}_{argmax}_{W.kh}x{W.kw}_s{W.sw}_p{W.pw}")
def pool_fprop_tiles[
    dtype: DType, argmax: DType, W: TileWindow
](
    y: Ptr[dtype],
    argmaxes: Ptr[argmax],
    x: Ptr[dtype],
    p: PoolingParams,
    by_tiles: Divisor,
    aligned_x: Int32,
    aligned_y: Int32,
):
    var item = Int32(block_idx.x * block_dim.x + thread_idx.x)
    var oh, tile = by_tiles.divide(item)
    if oh >= p.h.output:
        return
    var slab = Int32(block_idx.y * block_dim.y + thread_idx.y)
    while slab < p.slabs:
        pool_fprop_tile[dtype, argmax, W](
            y, argmaxes, x, p, aligned_x != 0, aligned_y != 0, tile, oh, slab
        )
        slab += Int32(grid_dim.y * block_dim.y)


struct TilesFprop(PoolingKernel):
    comptime NAME: StaticString = "tiles"

    @staticmethod
    def compiles[argmax: DType, adaptive: Bool]() -> Bool:
        return not adaptive

    @staticmethod
    def refusal[
        dtype: DType, argmax: DType, adaptive: Bool
    ](p: PoolingProblem) -> Optional[String]:
        if p.channels != 1:
            return String("channels lie between pixels")
        if p.d.dilation != 1 or p.h.dilation != 1:
            return String("windows are dilated")
        comptime for i in range(len(WINDOWS)):
            comptime W = WINDOWS[i]
            if W.is_of(p):
                return None
        return String("no window that is compiled")

    @staticmethod
    def launch[
        dtype: DType, argmax: DType, adaptive: Bool
    ](
        ctx: DeviceContext, t: PoolingTensors[dtype, argmax], p: PoolingProblem
    ) raises:
        comptime for i in range(len(WINDOWS)):
            comptime W = WINDOWS[i]
            if W.is_of(p):
                comptime COLUMNS = columns_of[dtype, W.sw]
                comptime R = COLUMNS // W.sw
                var tiles = ceildiv(Int(p.w.output), R)
                var shape = LaunchShape(
                    tiles * Int(p.h.output), Int(p.batch) * Int(p.d.output)
                )
                comptime kernel = pool_fprop_tiles[dtype, argmax, W]
                var aligned_x = (
                    Int(p.w.input) % COLUMNS == 0 and Int(p.w.padding) == W.pw
                )
                ctx.enqueue_function[kernel](
                    t.result,
                    t.argmaxes,
                    t.source,
                    PoolingParams(
                        p,
                        extent_d=p.d.output,
                        vector=1,
                        scale=uniform_scale[argmax, False](p),
                    ),
                    Divisor(tiles),
                    Int32(aligned_x),
                    Int32(Int(p.w.output) % R == 0),
                    grid_dim=(shape.grid_x, shape.grid_y),
                    block_dim=(shape.x, shape.y),
                )
                return
