"""Rows of a tensor on their way to the thread that asked for them, through shared memory."""

from std.sys.info import size_of

from max.gpu import thread_idx

from ...common.async_copy import copy_elements
from ...common.pointer import Ptr, Shared

comptime THREADS = 128
"""Of a block."""
comptime _QUEUE_BYTES = 24 * 1024
"""Shared memory of a block's queues: with three blocks to a multiprocessor, twice what an H200's memory wants to have
under way."""
comptime _LEAST_DEPTH = 4
"""Rows, where that is more."""


def _depth(row_bytes: Int) -> Int:
    """Returns the rows of a block's queues that have room, one more than are under way.
    """
    return max(_LEAST_DEPTH, _QUEUE_BYTES // (THREADS * row_bytes))


@fieldwise_init
struct RowQueue[dtype: DType, vector: Int, columns: Int](
    ImplicitlyCopyable, TrivialRegisterPassable
):
    """A thread's next rows of `columns` vectors, on their way through shared memory: more than registers could hold, so
    that threads that are few for their registers keep memory busy. No other thread waits for them. The caller groups
    the copies.
    """

    comptime DEPTH = _depth(Self.columns * Self.vector * size_of[Self.dtype]())
    comptime _PIECE = Self.vector * size_of[Self.dtype]()
    comptime _ROW = THREADS * Self.columns * Self._PIECE
    comptime BYTES = Self._ROW * Self.DEPTH
    """Of all threads of a block."""

    var home: UInt32
    """Address of the thread's first vector of all."""
    var newest: UInt32
    """Offset of the row that is copied next."""
    var oldest: UInt32
    """Offset of the row that is taken next."""

    @staticmethod
    @always_inline
    def of(shared: UInt32) -> Self:
        """Returns an empty queue in `BYTES` of shared memory."""
        return Self(shared + UInt32(thread_idx.x) * UInt32(Self._PIECE), 0, 0)

    @always_inline
    def copy(self, i: Int, source: Ptr[Self.dtype], valid: Bool):
        """Starts the copy of the next row's vector number i, zeros where not `valid`.
        """
        copy_elements[Self.vector](
            self.home + self.newest + UInt32(i * THREADS * Self._PIECE),
            source,
            0,
            valid,
        )

    @always_inline
    def end_row(mut self):
        """The next row's copies are started, if it has any."""
        self.newest = Self._after(self.newest)

    @always_inline
    def take(
        mut self, full: Bool
    ) -> Array[SIMD[Self.dtype, Self.vector], Self.columns]:
        """Returns the oldest row, which has arrived if it is `full`; else zeros.
        """
        var values = Array[SIMD[Self.dtype, Self.vector], Self.columns](fill=0)
        if full:
            comptime for i in range(Self.columns):
                values[i] = Shared[Self.dtype](
                    unsafe_from_address=Int(
                        self.home
                        + self.oldest
                        + UInt32(i * THREADS * Self._PIECE)
                    )
                ).unsafe_load[width=Self.vector, alignment=Self._PIECE]()
        self.oldest = Self._after(self.oldest)
        return values^

    @staticmethod
    @always_inline
    def _after(row: UInt32) -> UInt32:
        comptime last = UInt32(Self._ROW * (Self.DEPTH - 1))
        return 0 if row == last else row + UInt32(Self._ROW)
