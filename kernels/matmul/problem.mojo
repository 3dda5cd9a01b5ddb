"""One call of a batched matrix product: C[b] = A[b] B[b], with A [M, K], B [K, N] and C [M, N].

The batch is counted by up to three digits, each with a stride for every tensor: 0 where a tensor is broadcast. Rows and
columns have any strides, so that a transposed operand, one head of several, or every third matrix is read where it lies.
"""

from std.utils.index import IndexList

from ..common.argument import KernelArgument

comptime BATCH_DIGITS = 3
comptime OPERAND_LENGTH = BATCH_DIGITS + 3
"""Of the geometry for one tensor: where it begins, the batch's strides, and those of rows and columns."""
comptime GEOMETRY_LENGTH = 4 + BATCH_DIGITS + 3 * OPERAND_LENGTH
"""Values of the geometry operand: allow_tf32, M, N, K, the batch's extents, then C, A and B."""


@fieldwise_init
struct Matrices(KernelArgument):
    """How the matrices of one tensor lie, in elements."""

    var start: Int
    var batch0: Int
    var batch1: Int
    var batch2: Int
    var row: Int
    var column: Int

    @always_inline
    def offset(self, b0: Int, b1: Int, b2: Int) -> Int:
        return (
            self.start + b0 * self.batch0 + b1 * self.batch1 + b2 * self.batch2
        )

    @always_inline
    def transposed(self) -> Self:
        return Self(
            self.start,
            self.batch0,
            self.batch1,
            self.batch2,
            self.column,
            self.row,
        )

    @always_inline
    def is_whole(self, unit: Int) -> Bool:
        """Whether every matrix and every row (or column, whichever is not contiguous) begins at a multiple of `unit`
        elements."""
        var other = self.row if self.column == 1 else self.column
        return (
            self.start % unit == 0
            and self.batch0 % unit == 0
            and self.batch1 % unit == 0
            and self.batch2 % unit == 0
            and other % unit == 0
        )


@fieldwise_init
struct MatmulProblem(KernelArgument):
    """Sizes and strides of a call."""

    var allow_tf32: Int
    var m: Int
    var n: Int
    var k: Int
    var batch0: Int
    var batch1: Int
    var batch2: Int
    var c: Matrices
    var a: Matrices
    var b: Matrices

    @always_inline
    def batch(self) -> Int:
        return self.batch0 * self.batch1 * self.batch2

    @always_inline
    def place(self, matrices: Matrices, number: Int) -> Int:
        """Where matrix `number` of the batch begins."""
        var inner = number % self.batch2
        var rest = number // self.batch2
        return matrices.offset(rest // self.batch1, rest % self.batch1, inner)

    def transposed(self) -> Self:
        """The same product as C^T = B^T A^T."""
        return Self(
            self.allow_tf32,
            self.n,
            self.m,
            self.k,
            self.batch0,
            self.batch1,
            self.batch2,
            self.c.transposed(),
            self.b.transposed(),
            self.a.transposed(),
        )


def problem_of(values: IndexList[GEOMETRY_LENGTH]) raises -> MatmulProblem:
    """The problem that a geometry describes.

    Raises:
        Error: an extent or a stride is negative.
    """
    for i in range(GEOMETRY_LENGTH):
        if values[i] < 0:
            raise Error(
                t"matmul: value {i} of the geometry is {values[i]}: must be at"
                t" least 0"
            )
    comptime first = 4 + BATCH_DIGITS

    @always_inline
    def matrices(number: Int) {imm} -> Matrices:
        var at = first + number * OPERAND_LENGTH
        return Matrices(
            values[at],
            values[at + 1],
            values[at + 2],
            values[at + 3],
            values[at + 4],
            values[at + 5],
        )

    return MatmulProblem(
        values[0],
        values[1],
        values[2],
        values[3],
        values[4],
        values[5],
        values[6],
        matrices(0),
        matrices(1),
        matrices(2),
    )
