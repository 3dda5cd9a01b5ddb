"""The layout in which the second stage of batch normalization's reductions finds partial results: two numbers for each
channel of each part, and the number of rows of the part."""

from ..common.argument import KernelArgument
from ..common.arithmetic import divide
from ..common.pointer import Ptr


trait Partials(KernelArgument):
    """Parts in memory, and the rows of a tensor that no part covers."""

    comptime NAME: StaticString

    def parts(self, channel: Int) -> Int:
        """Returns how many parts a channel has."""
        ...

    def place(self, channel: Int, part: Int) -> Int:
        """Returns the offset of the first number of a channel's part."""
        ...

    def plane(self) -> Int:
        """Returns the distance from the first number to the second one."""
        ...

    def count[
        acc: DType
    ](self, partials: Ptr[acc], channel: Int, part: Int) -> Scalar[acc]:
        """Rows of the part."""
        ...

    def tail(self) -> Int:
        """Rows at the end that no part has."""
        ...


@always_inline
def _joined(part: Int, fold: Int64) -> Tuple[Int, Int]:
    """Returns the slice or slot of a part, and which of the `fold` joined rows it has.
    """
    if fold == 1:
        return (part, 0)
    var found = divide(Int32(part), Int32(fold))
    return (Int(found[0]), Int(found[1]))


@fieldwise_init
struct Slices(Partials):
    """Slices of `share` rows, the last one shorter, of a tensor that is seen as rows of `fold * channels` columns:
    [number][slice][column].
    """

    comptime NAME = "slices"
    var wide_rows: Int64
    var tail_rows: Int64
    var channels: Int64
    var fold: Int64
    var slices: Int64
    var share: Int64

    @always_inline
    def parts(self, channel: Int) -> Int:
        return Int(self.fold) * Int(self.slices)

    @always_inline
    def place(self, channel: Int, part: Int) -> Int:
        var found = _joined(part, self.fold)
        var width = Int(self.fold) * Int(self.channels)
        return found[0] * width + found[1] * Int(self.channels) + channel

    @always_inline
    def plane(self) -> Int:
        return Int(self.fold) * Int(self.channels) * Int(self.slices)

    @always_inline
    def count[
        acc: DType
    ](self, partials: Ptr[acc], channel: Int, part: Int) -> Scalar[acc]:
        var before = _joined(part, self.fold)[0] * Int(self.share)
        return Scalar[acc](min(Int(self.share), Int(self.wide_rows) - before))

    @always_inline
    def tail(self) -> Int:
        return Int(self.tail_rows)


@fieldwise_init
struct Slots(Partials):
    """Partial results of blocks that walk tiles: every `column_tiles`-th slot belongs to the same `columns` columns.
    Slots lie as [slot][number][column], followed by the number of rows of each slot. The tensor is seen as rows of
    `fold * channels` columns; where `fold` is not 1, there is one column tile.
    """

    comptime NAME = "slots"
    var slots: Int64
    var column_tiles: Int64
    var columns: Int64
    var channels: Int64
    var fold: Int64

    def elements(self) -> Int:
        """Returns the number of elements of all slots."""
        return Int(self.slots) * (2 * Int(self.columns) + 1)

    @always_inline
    def _slot(self, channel: Int, part: Int) -> Tuple[Int, Int]:
        """A part's slot, and which of the joined rows it has."""
        var slot, row = _joined(part, self.fold)
        if self.fold == 1:
            slot = self._tile(channel)[0] + part * Int(self.column_tiles)
        return (slot, row)

    @always_inline
    def _tile(self, channel: Int) -> Tuple[Int, Int]:
        """A channel's tile of columns, and its place in there."""
        var found = divide(Int32(channel), Int32(self.columns))
        return (Int(found[0]), Int(found[1]))

    @always_inline
    def parts(self, channel: Int) -> Int:
        var after = Int32(self.slots) - Int32(self._tile(channel)[0])
        var step = Int32(self.column_tiles)
        return Int(divide(after + step - 1, step)[0]) * Int(self.fold)

    @always_inline
    def place(self, channel: Int, part: Int) -> Int:
        var slot, row = self._slot(channel, part)
        var column = self._tile(channel)[1] + row * Int(self.channels)
        return 2 * Int(self.columns) * slot + column

    @always_inline
    def plane(self) -> Int:
        return Int(self.columns)

    @always_inline
    def count[
        acc: DType
    ](self, partials: Ptr[acc], channel: Int, part: Int) -> Scalar[acc]:
        return partials[
            unsafe_offset=2 * Int(self.slots) * Int(self.columns)
            + self._slot(channel, part)[0]
        ]

    @always_inline
    def tail(self) -> Int:
        return 0
