"""The operands of the entries, and the sizes on which they agree."""

from max.gpu.host import DeviceContext
from std.utils.index import IndexList

from ..common.library import Arguments, Operand
from .extents import Rows


@no_inline
def _rows(
    y: IndexList[3], x: IndexList[3], source: IndexList[3]
) raises -> Rows:
    # An x without elements stands for zeros.
    var zeros = x.flattened_length() == 0
    if not zeros and x != y:
        raise Error(t"scatter: x is {x}, y is {y}: must be equal")
    if source[0] != y[0] or source[2] != y[2]:
        raise Error(
            t"scatter: source is {source}, y is {y}: must agree in the first"
            t" and the last extent"
        )
    if y[1] == 0 and source.flattened_length() > 0:
        raise Error("scatter: y has no rows")
    return Rows(y[0], y[1], source[1], y[2], zeros)


@fieldwise_init
struct ScatterOperands[dtype: DType, rank: Int](ImplicitlyCopyable):
    """y = x with the source added to (or put in) the places of the index: of rank 1 a list for whole rows, of rank 3 a
    place for each element."""

    var y: Operand[Self.dtype, 3]
    var x: Operand[Self.dtype, 3]
    """The tensor that is added to; without elements it stands for zeros."""
    var index: Operand[DType.int64, Self.rank]
    var source: Operand[Self.dtype, 3]

    @staticmethod
    def take(mut arguments: Arguments) -> Self:
        return Self(
            arguments.take[Self.dtype, 3](),
            arguments.take[Self.dtype, 3](),
            arguments.take[DType.int64, Self.rank](),
            arguments.take[Self.dtype, 3](),
        )

    def rows(self) raises -> Rows:
        """The extents, checked."""
        var rows = _rows(self.y.shape(), self.x.shape(), self.source.shape())
        comptime if Self.rank == 1:
            if self.index.dim_size(0) != rows.count:
                raise Error(
                    t"scatter: index has {self.index.dim_size(0)} places,"
                    t" source {rows.count} rows"
                )
        else:
            for axis in range(Self.rank):
                if self.index.dim_size(axis) != self.source.dim_size(axis):
                    raise Error(
                        t"scatter: index is {self.index.shape()}, source is"
                        t" {self.source.shape()}: must be equal"
                    )
        return rows

    def start(self, ctx: DeviceContext) raises:
        """Sets y to x, or to zeros, on a GPU."""
        var y = self.y.to_device_buffer(ctx)
        if self.x.shape().flattened_length() == 0:
            ctx.enqueue_memset(y, 0)
        else:
            ctx.enqueue_copy(y, self.x.to_device_buffer(ctx))


@fieldwise_init
struct GatherOperands[dtype: DType, rank: Int](ImplicitlyCopyable):
    """y = x at the places of the index: of rank 1 a list for whole rows, of rank 3 a place for each element.
    """

    var y: Operand[Self.dtype, 3]
    var x: Operand[Self.dtype, 3]
    var index: Operand[DType.int64, Self.rank]

    @staticmethod
    def take(mut arguments: Arguments) -> Self:
        return Self(
            arguments.take[Self.dtype, 3](),
            arguments.take[Self.dtype, 3](),
            arguments.take[DType.int64, Self.rank](),
        )

    def rows(self) raises -> Rows:
        """The extents, checked."""
        comptime counted = 0 if Self.rank == 1 else 1
        var rows = Rows(
            self.x.dim_size(0),
            self.x.dim_size(1),
            self.index.dim_size(counted),
            self.x.dim_size(2),
            False,
        )
        comptime if Self.rank == 3:
            if self.index.dim_size(0) != rows.outer or (
                self.index.dim_size(2) != rows.inner
            ):
                raise Error(
                    t"gather: index is {self.index.shape()}, x is"
                    t" {self.x.shape()}: must agree in the first and the last"
                    t" extent"
                )
        var wanted = IndexList[3](rows.outer, rows.count, rows.inner)
        if self.y.shape() != wanted:
            raise Error(t"gather: y is {self.y.shape()}: must be {wanted}")
        if rows.places == 0 and wanted.flattened_length() > 0:
            raise Error("gather: x has no rows")
        return rows
