"""Reports of an index outside its dimension.

Every call of a launch list that may find one has a record in the host's memory, which a GPU writes to as well: the size
of the dimension plus one, and the index. One word for all lists says that there is a record; the host looks at it
before it launches again (torch_max_backend/runtime/launching/reports.py).
"""

from std.ffi import _Global

from .argument import KernelArgument
from .pointer import Ptr


@fieldwise_init
struct Bounds(Copyable, KernelArgument, Movable):
    """The record that a call reports to, as addresses; 0 where nobody reads reports.
    """

    var record: Int
    var found: Int

    @always_inline
    def holds(self, index: Int64, size: Int64) -> Bool:
        """Returns whether 0 <= index < size, and reports the index where it is not.
        """
        if index >= 0 and index < size:
            return True
        self.report(index, size)
        return False

    @always_inline
    def report(self, index: Int64, size: Int64):
        """Writes a report. Of several reports of one call the last one stays.
        """
        if self.record == 0:
            return
        var record = Ptr[DType.int64](unsafe_from_address=self.record)
        var found = Ptr[DType.int64](unsafe_from_address=self.found)
        record[unsafe_offset=0] = size + 1
        record[unsafe_offset=1] = index
        found[unsafe_offset=0] = 1


def _nowhere() -> Bounds:
    return Bounds(0, 0)


comptime BOUNDS = _Global["torch_max_bounds", _nowhere]
"""Bounds of the call that a launch list makes now. There is one for the process, whatever library asks."""


def current_bounds() raises -> Bounds:
    """Returns the record that the current call reports to."""
    return BOUNDS.get_or_create_ptr()[]
