"""Where the second stage of batch normalization's reductions finds partial results: two numbers for each channel of each
part, and how many rows the part has.
"""

from ..argument import KernelArgument
from ..convolution.common import Ptr


@always_inline
def slice_row(rows: Int, slices: Int, slice: Int) -> Int:
    """The first row of a slice."""
    return rows * slice // slices


trait Partials(KernelArgument):
    """Parts in memory, and what of a tensor's rows no part has."""

    def parts(self, channel: Int) -> Int:
        """How many parts a channel has."""
        ...

    def place(self, channel: Int, part: Int) -> Int:
        """Of the first number."""
        ...

    def plane(self) -> Int:
        """How far behind the first number the second one lies."""
        ...

    def count[
        acc: DType
    ](self, partials: Ptr[acc], channel: Int, part: Int) -> Scalar[acc]:
        """Rows of the part."""
        ...

    def tail(self) -> Int:
        """Rows at the end that no part has."""
        ...


@fieldwise_init
struct Slices(Partials):
    """Slices of rows of a tensor that is seen as rows of `fold * channels` columns: [number][column][slice].
    """

    var rows: Int64
    var channels: Int64
    var fold: Int64
    var slices: Int64

    @always_inline
    def parts(self, channel: Int) -> Int:
        return Int(self.fold) * Int(self.slices)

    @always_inline
    def place(self, channel: Int, part: Int) -> Int:
        var slices = Int(self.slices)
        return (
            part // slices * Int(self.channels) + channel
        ) * slices + part % slices

    @always_inline
    def plane(self) -> Int:
        return Int(self.fold) * Int(self.channels) * Int(self.slices)

    @always_inline
    def count[
        acc: DType
    ](self, partials: Ptr[acc], channel: Int, part: Int) -> Scalar[acc]:
        var wide_rows = Int(self.rows) // Int(self.fold)
        var slices = Int(self.slices)
        var slice = part % slices
        return Scalar[acc](
            slice_row(wide_rows, slices, slice + 1)
            - slice_row(wide_rows, slices, slice)
        )

    @always_inline
    def tail(self) -> Int:
        return Int(self.rows) % Int(self.fold)


@fieldwise_init
struct Slots(Partials):
    """What blocks that walk tiles keep: every `column_tiles`-th slot belongs to the same `columns` channels. Slots lie as
    [slot][number][column], and behind them the rows of each.
    """

    var slots: Int64
    var column_tiles: Int64
    var columns: Int64

    def elements(self) -> Int:
        """Of all slots."""
        return Int(self.slots) * (2 * Int(self.columns) + 1)

    @always_inline
    def _slot(self, channel: Int, part: Int) -> Int:
        return channel // Int(self.columns) + part * Int(self.column_tiles)

    @always_inline
    def parts(self, channel: Int) -> Int:
        var first = channel // Int(self.columns)
        var step = Int(self.column_tiles)
        return (Int(self.slots) - first + step - 1) // step

    @always_inline
    def place(self, channel: Int, part: Int) -> Int:
        var columns = Int(self.columns)
        return 2 * columns * self._slot(channel, part) + channel % columns

    @always_inline
    def plane(self) -> Int:
        return Int(self.columns)

    @always_inline
    def count[
        acc: DType
    ](self, partials: Ptr[acc], channel: Int, part: Int) -> Scalar[acc]:
        return partials[
            unsafe_offset=2 * Int(self.slots) * Int(self.columns)
            + self._slot(channel, part)
        ]

    @always_inline
    def tail(self) -> Int:
        return 0
