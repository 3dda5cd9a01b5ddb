"""Which pooling gradients the kernel of gpu_across.mojo takes, and how it is launched."""

from max.gpu.host import DeviceContext
from std.math import ceildiv
from std.sys import size_of

from .direct import Data
from .gpu_across import pool_dgrad_across
from .gpu_across_plan import BLOCK, LANES, AcrossShape, Teams
from .gpu_problem import (
    LIMIT_32,
    MULTIPROCESSORS,
    GpuProblem,
    fits_32_bits,
    uniform_scale,
)
from .problem import PoolingAxis, PoolingProblem

comptime COLUMNS = 8
"""Tiles of a team, channels-last: with four vectors of channels each, which fill whole sectors of bfloat16."""
comptime FEWEST = 8
"""Warps, at least, for each multiprocessor, while strips can be shorter."""


def strip_rows(S: AcrossShape, data: Int, entry: Int, groups: Int) -> Int:
    """The rows of windows that a thread shall take, as measured on one H200: longer strips take fewer of them twice, but
    threads then walk through more of the tensors at a time. A plane has `groups` rows of windows; `data` and `entry` are the
    bytes of a window's gradient and entry (none: averages)."""
    if S.channels > 1:
        if S.sh > 1:
            return 6 if data >= 4 else 11
        return 16 if data >= 4 else 30
    if S.sh > 1:
        if entry >= 8:
            return 6 if data >= 4 else (7 if S.kd > 1 else 11)
        if S.kd == 1:
            return 4 if S.dilation > 1 and data < 4 else 6
        if data >= 4:
            return 5
        if entry > 0:
            return 7
        return 4 if groups < 40 else 6
    if S.kd > 1:
        return 27
    if S.kh == 2:
        return 57 if entry >= 8 else (8 if data >= 4 else 15)
    if data >= 4 and entry < 8:
        return 11 if entry > 0 else 8
    return 14


def strips_of(
    p: PoolingProblem, S: AcrossShape, data: Int, entry: Int, tile_warps: Int
) -> Int:
    """Strips of a plane. `tile_warps` are the warps that one strip of each takes.
    """
    var groups = ceildiv(Int(p.h.input) + Int(p.h.padding), S.sh)
    var again = S.above() - 1
    var rows = max(strip_rows(S, data, entry, groups) - again, 1)
    # The number of strips whose rows come nearest.
    var strips = max(groups // rows, 1)
    var longer = ceildiv(groups, strips) + again
    var shorter = ceildiv(groups, strips + 1) + again
    if (rows + again) * (rows + again) < longer * shorter:
        strips += 1
    while (
        strips * tile_warps < FEWEST * MULTIPROCESSORS
        and groups // strips > 2 * again + 1
    ):
        strips *= 2
    return strips


def launch_pool_dgrad_across[
    dtype: DType, index: DType, *, averaging: Bool, offsets: Bool
](
    ctx: DeviceContext,
    dx: Data[dtype],
    dy: Data[dtype],
    indices: Data[index],
    p: PoolingProblem,
) raises -> Bool:
    """Launches the kernel for windows that overlap, where rows are whole tiles or channels whole vectors; False where it
    does not take the problem, or others take it better.

    Averages have no indices: any pointer does.
    """
    comptime DATA = size_of[dtype]()
    comptime ENTRY = 0 if averaging else size_of[index]()
    if not fits_32_bits(p) or p.d.dilation != 1:
        return False
    if Int(dx) % 16 != 0 or Int(dy) % 16 != 0:
        return False
    comptime if not averaging:
        if Int(indices) % 16 != 0:
            return False
    var scale = Float32(0)
    comptime if averaging:
        scale = uniform_scale[False](p)
    var flat = p.d.window == 1 and p.d.stride == 1 and p.d.padding == 0
    var done = False

    @always_inline
    def launch[S: AcrossShape, vector: Bool]() raises {mut done, imm}:
        var columns = LANES
        var wide = 1
        comptime if S.channels > 1:
            columns = min(COLUMNS, ceildiv(Int(p.w.input), S.columns))
            wide = LANES // columns
        # Of one strip a plane first, to find out how many there shall be.
        var whole = Teams(p, S, columns=columns, wide=wide, strips=1)
        var strips = strips_of(
            p, S, DATA, ENTRY, whole.blocks() * (BLOCK // LANES)
        )
        var teams = Teams(p, S, columns=columns, wide=wide, strips=strips)
        if teams.blocks() >= LIMIT_32 // LANES:
            return
        comptime kernel = pool_dgrad_across[
            dtype, index, S, vector, averaging, offsets
        ]
        ctx.enqueue_function[kernel](
            dx,
            dy,
            indices,
            GpuProblem(p, extent_d=p.d.input, vector=S.channels, scale=scale),
            teams,
            grid_dim=teams.blocks(),
            block_dim=BLOCK,
        )
        done = True

    @always_inline
    def is_window[K: Int, S: Int, P: Int, D: Int](axis: PoolingAxis) -> Bool:
        return (
            Int(axis.window) == K
            and Int(axis.stride) == S
            and Int(axis.dilation) == D
            and (P < 0 or Int(axis.padding) == P)
        )

    @always_inline
    def planes[S: AcrossShape, vector: Bool]() raises {imm}:
        if (
            not done
            and Int(p.w.input) % S.columns == 0
            and Int(p.w.output) * S.sw <= Int(p.w.input)
            and (not vector or Int(p.w.output) % S.run() == 0)
        ):
            launch[S, vector]()

    @always_inline
    def consider[
        K: Int, S: Int, P: Int, D: Int, AHEAD: Int, *, deep: Bool = False
    ]() raises {imm}:
        if done or not (
            is_window[K, S, -1, D](p.h) and is_window[K, S, P, D](p.w)
        ):
            return
        if p.channels > 1:
            # The others cost less without exchange: two columns hold nearly all windows, or int64 entries all registers.
            comptime if offsets and K < 5 and (
                (K == 3 and S == 1) or D > 1 or (K == 3 and DATA < 4)
            ):
                if flat and Int(p.channels) % 4 == 0:
                    comptime shape = AcrossShape(
                        1, 1, 0, K, S, K, S, P, D, 2, 4, 1, 6 if S == 1 else 3
                    )
                    launch[shape, False]()
            return
        # Rows of windows that move by one and are not padded begin anywhere.
        comptime vector = S > 1 or P > 0
        if flat:
            comptime if DATA < 4 and vector and ENTRY < 8:
                planes[
                    AcrossShape(1, 1, 0, K, S, K, S, P, D, 8, 1, 1, AHEAD),
                    vector,
                ]()
            planes[
                AcrossShape(1, 1, 0, K, S, K, S, P, D, 4, 1, 1, AHEAD), vector
            ]()
            return
        comptime if deep:
            if not is_window[K, S, P, D](p.d):
                return
            comptime if S > 1:
                comptime if averaging and DATA < 4:
                    planes[
                        AcrossShape(K, S, P, K, S, K, S, P, D, 8, 1, S, 6), True
                    ]()
                planes[
                    AcrossShape(
                        K,
                        S,
                        P,
                        K,
                        S,
                        K,
                        S,
                        P,
                        D,
                        4,
                        1,
                        S,
                        6 if averaging else 3,
                    ),
                    True,
                ]()
            elif not averaging:
                comptime if offsets:
                    planes[
                        AcrossShape(K, S, P, K, S, K, S, P, D, 8, 1, 1, 1), True
                    ]()
                planes[
                    AcrossShape(
                        K, S, P, K, S, K, S, P, D, 4, 1, 2, 2 if DATA < 4 else 1
                    ),
                    True,
                ]()

    # Padding, dilation and the rows whose loads are under way.
    consider[3, 1, 1, 1, 6, deep=True]()
    consider[3, 2, 1, 1, 6, deep=True]()
    consider[3, 2, 0, 1, 6]()
    consider[2, 1, 0, 1, 4]()
    comptime if not averaging:
        consider[5, 1, 2, 1, 3]()
        consider[2, 2, 1, 2, 6]()
    return done
