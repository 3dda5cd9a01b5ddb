"""One call of a batched matrix product: C[b] = A[b] B[b], with A [M, K], B [K, N] and C [M, N].

The batch is counted by up to three digits, each with a stride for every tensor: 0 where a tensor is broadcast. Rows and
columns have any strides, so that a transposed operand, one head of several, or every third matrix is read where it
lies.
"""

from std.utils.index import IndexList

from ..common.argument import KernelArgument
from ..common.library import Arguments


@fieldwise_init
struct Matrices(KernelArgument):
    """The layout of one tensor's matrices, in elements."""

    var start: Int
    var batch0: Int
    var batch1: Int
    var batch2: Int
    var row: Int
    var column: Int

    @staticmethod
    def take(mut arguments: Arguments, name: StaticString) raises -> Self:
        """Reads the strides from a call's numbers.

        Raises:
            Error: one of them is negative.
        """
        var words = arguments.take_words[6]()
        for i in range(6):
            if words[i] < 0:
                raise Error(
                    t"matmul: {name}'s {words}: no start and no stride may be"
                    t" negative"
                )
        return Self(words[0], words[1], words[2], words[3], words[4], words[5])

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
        """Returns whether every matrix and every row (or column, whichever is not contiguous) begins at a multiple of
        `unit` elements."""
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

    @staticmethod
    def take(mut arguments: Arguments) raises -> Self:
        """Reads the problem from a call's numbers.

        Raises:
            Error: an extent or a stride is negative.
        """
        var words = arguments.take_words[7]()
        for i in range(7):
            if words[i] < 0:
                raise Error(
                    t"matmul: allow_tf32, M, N, K and the batch are {words}: no"
                    t" extent may be negative"
                )
        return Self(
            words[0],
            words[1],
            words[2],
            words[3],
            words[4],
            words[5],
            words[6],
            Matrices.take(arguments, "C"),
            Matrices.take(arguments, "A"),
            Matrices.take(arguments, "B"),
        )

    @always_inline
    def batch(self) -> Int:
        return self.batch0 * self.batch1 * self.batch2

    @always_inline
    def place(self, matrices: Matrices, number: Int) -> Int:
        """Returns the offset of matrix `number` of the batch."""
        var inner = number % self.batch2
        var rest = number // self.batch2
        return matrices.offset(rest // self.batch1, rest % self.batch1, inner)

    def transposed(self) -> Self:
        """Returns the same product as C^T = B^T A^T."""
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


def contiguous(
    c: IndexList[3],
    a: IndexList[3],
    b: IndexList[3],
    allow_tf32: Int,
    a_turned: Bool,
    b_turned: Bool,
) raises -> MatmulProblem:
    """The problem of contiguous batches; a matrix that is turned lies transposed.

    Raises:
        Error: shapes do not fit together.
    """
    var m, n = c[1], c[2]
    var k = a[1] if a_turned else a[2]
    if a[2 if a_turned else 1] != m or b[1 if b_turned else 2] != n:
        raise Error(t"matmul: A is {a}, B is {b}, C is {c}: must fit together")
    if b[2 if b_turned else 1] != k:
        raise Error(
            t"matmul: A has {k} columns, B has {b[2 if b_turned else 1]} rows"
        )
    if a[0] != c[0] or b[0] != c[0]:
        raise Error(
            t"matmul: A is {a}, B is {b}, C is {c}: must have one batch"
        )
    return MatmulProblem(
        allow_tf32,
        m,
        n,
        k,
        c[0],
        1,
        1,
        Matrices(0, m * n, 0, 0, n, 1),
        Matrices(0, m * k, 0, 0, 1 if a_turned else k, m if a_turned else 1),
        Matrices(0, k * n, 0, 0, 1 if b_turned else n, k if b_turned else 1),
    )
