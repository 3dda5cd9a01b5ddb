"""Building blocks of the block-tiled products of NVIDIA's GPUs: places in shared memory, and products from it.

A stage holds STAGE_LENGTH steps of the reduction of both operands, each in one of two orders: "k-major"
[index][STAGE_LENGTH] or "index-major" [STAGE_LENGTH][width] with each row's indices XOR-ed by a multiple that depends
on the row. A thread always reads QUAD neighbouring steps of one index. With these orders neither copies nor reads meet
bank conflicts: in k-major eight threads read two whole rows, in index-major the XOR parts the four rows that a warp
reads together. Which step of the reduction a lane holds does not matter to the sum as long as both operands agree.
"""

from std.sys import size_of

from max.gpu.compute.mma import mma

from ...common.pointer import Shared
from ...common.tensor_cores import QUAD, Quad, to_tf32
from ...common.ptx import compiling_for_hopper
from ..passes import DGRAD, FPROP
from ..problem import ConvolutionProblem

comptime STAGE_LENGTH = 16
"""Steps of the reduction in one stage."""
comptime STAGES = 4
"""Stages in shared memory, one of which is multiplied while the others are on their way."""
comptime THREADS = 256
comptime WARP_COLUMNS = 32
"""Columns of a block's tile that a warp has."""


@fieldwise_init
struct BlockShape(ImplicitlyCopyable, TrivialRegisterPassable):
    """The tile of a block of 8 warps; a warp has WARP_COLUMNS columns of it."""

    var rows: Int
    var columns: Int

    def warps_along_columns(self) -> Int:
        return self.columns // WARP_COLUMNS

    def warp_rows(self) -> Int:
        return self.rows * self.warps_along_columns() // (THREADS // 32)

    def accumulators(self) -> Int:
        """Returns the accumulators of one thread, in quads."""
        return self.warp_rows() // QUAD

    def stage_elements(self) -> Int:
        return (self.rows + self.columns) * STAGE_LENGTH

    def shared_bytes[dtype: DType](self) -> Int:
        return STAGES * self.stage_elements() * size_of[dtype]()


def left_to_warpgroups[dtype: DType, exact: Bool]() -> Bool:
    """Returns whether Hopper's warpgroup kernels take every problem whose operands are both copied four elements at a
    time: no other kernel is compiled for those."""
    return compiling_for_hopper() and dtype == DType.float32 and not exact


def block_refusal[pass_: Int](p: ConvolutionProblem) -> Optional[String]:
    """Returns None, or why the block-tiled kernels do not take the problem."""
    if p.x_size() == 0 or p.y_size() == 0 or p.w_size() == 0:
        return String("a tensor is empty")
    # Rows, columns and blocks are counted in 32 bits; elements are not.
    if max(p.input_pixels(), p.output_pixels()) >= 1 << 31:
        return String("more than 2^31 pixels")
    if p.taps() * max(p.group_c(), p.group_k()) >= 1 << 31:
        return String("a reduction of more than 2^31 steps")
    comptime if pass_ != FPROP and pass_ != DGRAD:
        if 4 * p.w_size() > p.workspace_limit:
            return String(
                t"the sums take {4 * p.w_size()} bytes, the workspace limit is"
                t" {p.workspace_limit}"
            )
    return None


# Places in a stage.


@always_inline
def k_major(index: Int32, k: Int32) -> Int:
    return Int(index * STAGE_LENGTH + k)


@always_inline
def index_major[dtype: DType, width: Int](index: Int32, k: Int32) -> Int:
    """Returns the place of step k of an index in an index-major tile. `index` may be any; neighbours of one quad stay
    neighbours."""
    comptime step = 32 // size_of[dtype]()
    return Int(k * Int32(width) + (index ^ ((k // QUAD) * Int32(step))))


@always_inline
def read_quad[
    dtype: DType, width: Int, by_k: Bool
](tile: Shared[dtype], index: Int32, quad: Int32) -> SIMD[dtype, QUAD]:
    """Loads steps 4 * quad … 4 * quad + 3 of one index."""
    comptime if by_k:
        return tile.unsafe_offset(k_major(index, quad * QUAD)).unsafe_load[
            width=QUAD, alignment=QUAD * size_of[dtype]()
        ]()
    else:
        comptime step = 32 // size_of[dtype]()
        var at = quad * Int32(QUAD * width) + (index ^ (quad * Int32(step)))
        var result = SIMD[dtype, QUAD](0)
        comptime for i in range(QUAD):
            result[i] = tile[unsafe_offset=Int(at) + i * width]
        return result


# Products.


@always_inline
def round_quad(at: Shared[DType.float32]):
    """Rounds four elements where they are. Done once by the thread that copied them: each is read by several warps.
    """
    at.unsafe_store[alignment=4 * QUAD](
        to_tf32(at.unsafe_load[width=QUAD, alignment=4 * QUAD]())
    )


@always_inline
def multiply_tensor[
    dtype: DType,
    shape: BlockShape,
    a_by_k: Bool,
    b_by_k: Bool,
    count: Int,
](
    mut sums: Array[Quad, count],
    a: Shared[dtype],
    b: Shared[dtype],
    row: Int32,
    column: Int32,
    lane: Int32,
):
    """Adds one stage's product of the warp's tile at (row, column) on tensor cores: mma m16n8k8 for (rounded) float32,
    m16n8k16 for elements of two bytes.
    """
    comptime blocks = WARP_COLUMNS // 8
    var index = lane // 4
    var quad = lane % 4
    var right = Array[SIMD[dtype, QUAD], blocks](fill=0)
    comptime for j in range(blocks):
        right[j] = read_quad[dtype, shape.columns, b_by_k](
            b, column + Int32(j * 8) + index, quad
        )
    comptime for i in range(shape.warp_rows() // 16):
        var upper = read_quad[dtype, shape.rows, a_by_k](
            a, row + Int32(i * 16) + index, quad
        )
        var lower = read_quad[dtype, shape.rows, a_by_k](
            a, row + Int32(i * 16 + 8) + index, quad
        )
        comptime if dtype == DType.float32:
            comptime for half in range(2):
                var left = SIMD[dtype, 4](
                    upper[2 * half],
                    lower[2 * half],
                    upper[2 * half + 1],
                    lower[2 * half + 1],
                )
                comptime for j in range(blocks):
                    mma(
                        sums[i * blocks + j],
                        left,
                        SIMD[dtype, 2](
                            right[j][2 * half], right[j][2 * half + 1]
                        ),
                        sums[i * blocks + j],
                    )
        else:
            var left = SIMD[dtype, 8](
                upper[0],
                upper[1],
                lower[0],
                lower[1],
                upper[2],
                upper[3],
                lower[2],
                lower[3],
            )
            comptime for j in range(blocks):
                mma(sums[i * blocks + j], left, right[j], sums[i * blocks + j])


@always_inline
def multiply_exact[
    dtype: DType,
    shape: BlockShape,
    a_by_k: Bool,
    b_by_k: Bool,
    count: Int,
](
    mut sums: Array[Quad, count],
    a: Shared[dtype],
    b: Shared[dtype],
    row: Int32,
    column: Int32,
    lane: Int32,
):
    """Adds the same product in float32 multiply-adds: lane (l / 4, l % 4) has every eighth row and every fourth column.
    """
    comptime rows = shape.warp_rows() // 8
    comptime columns = WARP_COLUMNS // 4
    comptime for quad in range(STAGE_LENGTH // QUAD):
        var left = Array[Quad, rows](fill=0)
        comptime for i in range(rows):
            left[i] = read_quad[dtype, shape.rows, a_by_k](
                a, row + Int32(i * 8) + lane // 4, Int32(quad)
            ).cast[DType.float32]()
        comptime for j in range(columns):
            var right = read_quad[dtype, shape.columns, b_by_k](
                b, column + Int32(j * 4) + lane % 4, Int32(quad)
            ).cast[DType.float32]()
            comptime at = j % QUAD
            comptime for i in range(rows):
                comptime which = (i * columns + j) // QUAD
                var sum = sums[which][at]
                comptime for k in range(QUAD):
                    sum = left[i][k].fma(right[k], sum)
                sums[which][at] = sum


# Where a lane's sums stand: line i of a warp's tile is row 8 * i + lane / 4, and the lane has LINE_SUMS of its columns.

comptime LINE_SUMS = 8


def sum_index[exact: Bool](line: Int, e: Int) -> Tuple[Int, Int]:
    """Returns the accumulator, and the place in it, of the lane's column number `e` of a line.
    """
    if exact:
        return (line * LINE_SUMS + e) // QUAD, (line * LINE_SUMS + e) % QUAD
    # Element 2 * h + i of mma's accumulator is column i of the lane's pair in half h of 16 rows.
    return (
        line // 2 * (WARP_COLUMNS // 8) + e // 2,
        line % 2 * 2 + e % 2,
    )


@always_inline
def sum_column[exact: Bool](e: Int, lane: Int32) -> Int32:
    """Returns the column, in the warp's tile, of a lane's column number `e`."""
    comptime if exact:
        return Int32(e * 4) + lane % 4
    else:
        return Int32(e // 2 * 8 + e % 2) + lane % 4 * 2
