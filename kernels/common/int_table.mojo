"""A table of integers that kernels read without a check of the index: each check would cost time and as much code as a
small kernel."""


struct IntTable(Movable):
    """Integers, by an index in [0, length)."""

    var _entries: List[Int]

    def __init__(out self, *, length: Int, fill: Int):
        self._entries = List[Int](length=length, fill=fill)

    @always_inline
    def __getitem__(self, index: Int) -> Int:
        return self._entries.unsafe_ptr()[unsafe_offset=index]

    @always_inline
    def __setitem__(mut self, index: Int, value: Int):
        self._entries.unsafe_ptr()[unsafe_offset=index] = value
