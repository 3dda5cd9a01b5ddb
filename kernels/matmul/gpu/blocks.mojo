"""The mapping of a kernel's blocks to tiles of products."""

from std.math import ceildiv

from ...common.argument import KernelArgument
from ...common.arithmetic import Divisor
from ..problem import Matrices, MatmulProblem


@fieldwise_init
struct Blocks(KernelArgument):
    """The blocks of one launch: tiles of each product, product after product.
    """

    var tiles: Divisor
    """Divides by the tiles of one product."""
    var across: Divisor
    """Tiles side by side."""
    var middle: Divisor
    """The batch's second extent."""
    var inner: Divisor
    """The batch's last extent."""

    @staticmethod
    def of(p: MatmulProblem, rows: Int, columns: Int) -> Self:
        """Divides a problem with elements in C into tiles of `rows` x `columns`.
        """
        var across = ceildiv(p.n, columns)
        return Self(
            Divisor(ceildiv(p.m, rows) * across),
            Divisor(across),
            Divisor(p.batch1),
            Divisor(p.batch2),
        )

    @always_inline
    def tile(self, block: Int32) -> Tuple[Int32, Int32, Int32]:
        """The product's number, and the tile's among its rows and columns of tiles.
        """
        var number, tile = self.tiles.divide(block)
        var row, column = self.across.divide(tile)
        return number, row, column

    @always_inline
    def place(self, matrices: Matrices, number: Int32) -> Int:
        """Returns the offset of matrix `number` of the batch."""
        var rest, b2 = self.inner.divide(number)
        var b0, b1 = self.middle.divide(rest)
        return matrices.offset(Int(b0), Int(b1), Int(b2))


def blocks_refusal(
    p: MatmulProblem, rows: Int, columns: Int
) -> Optional[String]:
    """Returns None, or why blocks cannot be numbered: within a product, and of blocks, numbers have 32 bits. Elements
    are counted in 64."""
    if max(p.m, p.n, p.k) >= 1 << 30:
        return String("an extent of 2^30 or more")
    if ceildiv(p.m, rows) * ceildiv(p.n, columns) * p.batch() >= 1 << 31:
        return String("2^31 tiles or more")
    return None
