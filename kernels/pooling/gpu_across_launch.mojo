"""Which pooling gradients the kernel of gpu_across.mojo takes, and how it is launched."""

from max.gpu.host import DeviceContext, FuncAttribute
from std.math import align_up, ceildiv
from std.sys import size_of

from .direct import Data
from .gpu_across import pool_dgrad_across
from .gpu_across_plan import (
    BLOCK,
    AcrossShape,
    Teams,
    deep_shape,
    flat_shape,
)
from .gpu_strips import Stage, pool_dgrad_strips
from .gpu_problem import (
    LANES,
    LIMIT_32,
    MOST_SHARED,
    MULTIPROCESSORS,
    GpuProblem,
    fits_32_bits,
    uniform_scale,
)
from .problem import PoolingProblem

comptime SHORTEST = 24
"""Columns from which on strips through shared memory cost less than planes."""
comptime FEWEST = 8
"""Warps, at least, for each multiprocessor, while strips can be shorter."""


def team_vectors(S: AcrossShape, data: Int, entry: Int, vectors: Int) -> Int:
    """Vectors of channels that a team takes of a pixel's: four, which fill whole sectors of bfloat16, but where a sixth of the
    lanes or more would be idle and five, or three, leave none. Half-precision averages, which compute less, gain from longer
    runs. `data` and `entry` are the bytes of a window's gradient and entry (none: averages).
    """
    if vectors <= 4:
        return vectors
    if entry == 0 and data < 4 and vectors >= 16 and vectors % 8 == 0:
        return 8
    if 6 * vectors <= 5 * align_up(vectors, 4):
        if vectors % 5 == 0:
            return 5
        if vectors % 3 == 0 and S.sh == 1:
            return 3
    return 4


def strip_rows(
    S: AcrossShape, data: Int, entry: Int, groups: Int, wide: Int
) -> Int:
    """The rows of windows that a thread shall take, as measured on one H200: longer strips take fewer of them twice, but
    threads then walk through more of the tensors at a time. A plane has `groups` rows of windows, a team takes `wide` vectors
    of channels; `data` and `entry` are the bytes of a window's gradient and entry (none: averages).
    """
    if S.channels > 1:
        if S.sh > 1:
            if entry == 0:
                return 5 if data >= 4 else (11 if wide > 4 else 7)
            return 6 if data >= 4 else 11
        if S.kd > 1:
            return 40
        return 16 if data >= 4 else 30
    if S.sh > 1:
        if entry >= 8:
            return 6 if data >= 4 else (8 if S.kd > 1 else 11)
        if S.kd == 1:
            return 4 if S.dilation > 1 and data < 4 else 6
        if data >= 4 or entry > 0:
            return 5
        return 4 if groups < 40 else 6
    if S.kd > 1:
        return 27
    if S.kh == 2:
        return 57 if entry >= 8 else (8 if data >= 4 else 15)
    if data >= 4 and entry == 0:
        return 8
    # Rows in whole waves of blocks matter more than rows that are taken twice.
    return 18 if data < 4 and entry == 1 and groups >= 40 else 11


def staged_rows(S: AcrossShape, data: Int, entry: Int) -> Int:
    """The same where strips go through shared memory: averages, and windows that move by one by offset.
    """
    if S.above() == 1:
        return 1
    if S.sh > 1:
        return 6
    if S.kh == 2:
        return 8
    if data >= 4:
        return 11
    return 20 if entry == 0 else 17


def nearest_strips(groups: Int, again: Int, rows: Int) -> Int:
    """The number of strips whose rows, `again` of which are another's, come nearest to `rows`.
    """
    var own = max(groups - again, 1)
    var strips = max(own // max(rows - again, 1), 1)
    var longer = ceildiv(own, strips) + again
    var shorter = ceildiv(own, strips + 1) + again
    return strips + 1 if rows * rows < longer * shorter else strips


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
    var flat = p.d.window == 1 and p.d.stride == 1 and p.d.padding == 0
    var done = False

    @always_inline
    def scale() {imm} -> Float32:
        comptime if averaging:
            return uniform_scale[False](p)
        else:
            return 0

    @always_inline
    def launch[S: AcrossShape, vector: Bool]() raises {mut done, imm}:
        var columns = LANES
        var wide = 1
        comptime if S.channels > 1:
            wide = team_vectors(S, DATA, ENTRY, Int(p.channels) // S.channels)
            columns = min(LANES // wide, ceildiv(Int(p.w.input), S.columns))
        var groups = ceildiv(Int(p.h.input) + Int(p.h.padding), S.sh)
        var again = S.above() - 1
        var strips = nearest_strips(
            groups, again, strip_rows(S, DATA, ENTRY, groups, wide)
        )
        # Of one strip a plane first, to find out how many warps there are.
        var teams = Teams(p, S, columns=columns, wide=wide, strips=1)
        var warps = teams.blocks() * (BLOCK // LANES)
        while (
            strips * warps < FEWEST * MULTIPROCESSORS
            and groups // strips > 2 * again + 1
        ):
            strips *= 2
        teams = Teams(
            p,
            S,
            columns=columns,
            wide=wide,
            strips=strips,
            beside=S.strips_beside(),
        )
        if Int(teams.count) >= LIMIT_32 // 2:
            return
        comptime kernel = pool_dgrad_across[
            dtype, index, S, vector, averaging, offsets
        ]
        ctx.enqueue_function[kernel](
            dx,
            dy,
            indices,
            GpuProblem(p, extent_d=p.d.input, vector=S.channels, scale=scale()),
            teams,
            grid_dim=teams.blocks(),
            block_dim=BLOCK,
        )
        done = True

    @always_inline
    def stage[S: AcrossShape, vector: Bool]() raises {mut done, imm}:
        var tiles = ceildiv(Int(p.w.input), S.columns)
        if (
            done
            or Int(p.w.input) < SHORTEST
            or tiles > LANES
            or Int(p.w.output) > tiles * S.run()
            or (
                Int(p.w.input) % S.columns == 0
                and Int(p.w.output) % S.run() == 0
            )
            != vector
        ):
            return
        var groups = ceildiv(Int(p.h.input) + Int(p.h.padding), S.sh)
        var again = S.above() - 1
        var strips = nearest_strips(groups, again, staged_rows(S, DATA, ENTRY))
        var teams = Teams(p, S, columns=LANES, wide=1, strips=strips)
        var staged = Stage(p, teams, S, data=DATA, entry=ENTRY)
        while staged.shared_bytes(teams) > MOST_SHARED:
            if strips >= groups:
                return
            strips = min(2 * strips, groups)
            teams = Teams(p, S, columns=LANES, wide=1, strips=strips)
            staged = Stage(p, teams, S, data=DATA, entry=ENTRY)
        if Int(teams.count) >= LIMIT_32 // 2:
            return
        var bytes = staged.shared_bytes(teams)
        comptime kernel = pool_dgrad_strips[
            dtype, index, S, vector, averaging, offsets
        ]
        ctx.enqueue_function[kernel](
            dx,
            dy,
            indices,
            GpuProblem(p, extent_d=p.d.input, vector=1, scale=scale()),
            teams,
            staged,
            grid_dim=teams.blocks(),
            block_dim=BLOCK,
            shared_mem_bytes=bytes,
            # Otherwise the driver leaves less of it to blocks.
            func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(
                UInt32(bytes)
            ),
        )
        done = True

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
        if (
            done
            or not p.h.is_window(K, S, D)
            or not p.w.is_window(K, S, D)
            or Int(p.w.padding) != P
        ):
            return
        if p.channels > 1:
            # The others cost less without exchange: two columns hold nearly all windows, or int64 entries all registers.
            comptime if offsets and ((K == 3 and S == 1) or D > 1):
                if flat and Int(p.channels) % 4 == 0:
                    comptime ahead = 6 if S == 1 else 3
                    launch[
                        flat_shape(
                            K,
                            S,
                            P,
                            columns=2,
                            channels=4,
                            ahead=ahead,
                            dilation=D,
                        ),
                        False,
                    ]()
            # Averages that move by one are faster by marching down D (gpu_march_avg.mojo).
            comptime if deep and (offsets or (averaging and S > 1)):
                if (
                    not flat
                    and Int(p.channels) % 4 == 0
                    and p.d.is_window(K, S)
                    and Int(p.d.padding) == P
                ):
                    # As many rows as registers hold.
                    comptime ahead = 2 if S == 1 and DATA >= 4 else (
                        6 if S > 1 and DATA < 4 and offsets else 3
                    )
                    launch[
                        deep_shape(
                            K,
                            S,
                            P,
                            columns=2,
                            depth=S,
                            ahead=ahead,
                            channels=4,
                        ),
                        False,
                    ]()
            return
        # Rows of windows that move by one and are not padded begin anywhere.
        comptime vector = S > 1 or P > 0
        if flat:
            comptime staged = flat_shape(K, S, P, columns=4, dilation=D)
            comptime tile[columns: Int] = flat_shape(
                K, S, P, columns=columns, ahead=AHEAD, dilation=D
            )
            comptime if averaging and S == 1:
                stage[staged, True]()
            comptime if offsets and not vector:
                stage[staged, False]()
            comptime if DATA < 4 and vector and ENTRY < 8:
                planes[tile[8], True]()
            planes[tile[4], vector]()
            # Other maxima go through shared memory faster as pieces (gpu_pipeline_max.mojo).
            comptime if averaging or (
                offsets and DATA < 4 and K == 3 and S == 1
            ):
                stage[staged, False]()
            return
        comptime if deep:
            if not p.d.is_window(K, S) or Int(p.d.padding) != P:
                return
            comptime if S > 1:
                comptime tile[columns: Int] = deep_shape(
                    K,
                    S,
                    P,
                    columns=columns,
                    depth=S,
                    ahead=6 if averaging else 3,
                )
                comptime if averaging and DATA < 4:
                    planes[tile[8], True]()
                planes[tile[4], True]()
            elif not averaging:
                comptime if offsets:
                    planes[
                        deep_shape(K, S, P, columns=8, depth=1, ahead=1), True
                    ]()
                comptime ahead = 2 if DATA < 4 else 1
                planes[
                    deep_shape(K, S, P, columns=4, depth=2, ahead=ahead), True
                ]()

    # Padding, dilation and the rows whose loads are under way.
    consider[3, 1, 1, 1, 6, deep=True]()
    consider[3, 2, 1, 1, 6, deep=True]()
    consider[3, 2, 0, 1, 6]()
    consider[2, 1, 0, 1, 4]()
    comptime if averaging:
        if (
            p.channels == 1
            and flat
            and p.h.is_window(8, 8)
            and p.w.is_window(8, 8)
            and p.w.padding == 0
        ):
            stage[flat_shape(8, 8, 0, columns=8), False]()
    else:
        consider[2, 2, 1, 2, 6]()
    return done
