"""What a store's program and its sums read beside the tile: elements of other tensors at the result's own places.

They are on their way through shared memory while the tile is multiplied and while the pieces before are stored. Loaded
to registers where the program wants them, a warp would wait for memory twice in each piece, with little else under way;
loaded there one piece ahead, it would wait as long, since loads that are younger share its scoreboard.
"""

from std.bit import count_trailing_zeros
from std.sys import size_of
from std.utils.static_tuple import StaticTuple

from ...common.async_copy import commit_copies, copy_elements, wait_for_copies
from ...common.gpu import VECTOR_BYTES
from ...common.pointer import Ptr, Shared
from ...common.warpgroup import vector_of
from .tile import CONSUMER_THREADS, TileShape

comptime SLOTS = 3
"""Tensors that are read, at most: shared memory has room for no more."""
comptime Beside[dtype: DType, width: Int] = StaticTuple[
    SIMD[dtype, width], SLOTS
]
"""What was read for some elements."""

comptime Addresses[parts: Int] = StaticTuple[Int, SLOTS * parts]
"""Where vectors of some pixels lie: of each tensor those of all pixels."""
comptime Reader[dtype: DType] = def[parts: Int](
    StaticTuple[Int, parts], Int
) capturing -> Addresses[parts]
"""Returns where to read for some pixels, counted through all of them, from a channel on."""

comptime Epilogue[dtype: DType] = def[width: Int, parts: Int](
    StaticTuple[Int, parts], Int, SIMD[dtype, width], Beside[dtype, width]
) capturing -> SIMD[dtype, width]
"""The elementwise ops that follow, applied to vectors of the result before they are stored."""

comptime Factor[dtype: DType] = def[width: Int, parts: Int](
    Int, SIMD[dtype, width]
) capturing -> SIMD[DType.float32, width]
"""A function that returns the factors of some pixels' elements (column_sums.mojo), from a channel on, made of what was
read to the last slot."""


@fieldwise_init
struct BesideQueue[dtype: DType, shape: TileShape](
    ImplicitlyCopyable, TrivialRegisterPassable
):
    """A thread's next vectors of the tensors beside. No other thread waits for them.
    """

    comptime slots = Self.shape.slots
    comptime rows = Self.shape.rows_at_once()
    comptime depth = Self.shape.queue_depth()
    comptime vector = vector_of[Self.dtype]()
    comptime width = Self.vector * Self.rows

    var home: UInt32
    """Address of the thread's first vector."""

    @always_inline
    def _address(self, piece: Int, vector: Int) -> UInt32:
        var place = UInt32(piece) % UInt32(max(Self.depth, 1))
        return (
            self.home
            + place * UInt32(Self.shape.piece_bytes())
            + UInt32(vector * CONSUMER_THREADS * VECTOR_BYTES)
        )

    @always_inline
    def copy(self, piece: Int, sources: Addresses[Self.rows]):
        """Starts the copies of a piece, as a group. What was there before is loaded already: loads and copies of a
        thread begin in its order."""
        comptime for n in range(Self.slots * Self.rows):
            copy_elements[Self.vector](
                self._address(piece, n),
                Ptr[Self.dtype](unsafe_from_address=sources[n]),
                0,
                True,
            )
        commit_copies()

    @always_inline
    def take(self, piece: Int) -> Beside[Self.dtype, Self.width]:
        """Returns the oldest piece, when it has arrived; each other place of the queue has a group of its own.
        """
        var beside = Beside[Self.dtype, Self.width](
            fill=SIMD[Self.dtype, Self.width](0)
        )
        comptime if Self.slots > 0:
            wait_for_copies[Self.depth - 1]()
            comptime for n in range(Self.slots * Self.rows):
                comptime slot = n // Self.rows
                beside[slot] = beside[slot].insert[
                    offset=n % Self.rows * Self.vector
                ](
                    Shared[Self.dtype](
                        unsafe_from_address=Int(self._address(piece, n))
                    ).unsafe_load[width=Self.vector, alignment=VECTOR_BYTES]()
                )
        return beside


@always_inline
def read_now[
    dtype: DType, read: Optional[Reader[dtype]], slots: Int, width: Int
](pixel: Int, channel: Int) -> Beside[dtype, width]:
    """Reads a vector of one pixel."""
    var beside = Beside[dtype, width](fill=SIMD[dtype, width](0))
    comptime if slots > 0:
        comptime reader = read.value()
        var sources = reader[1](StaticTuple[Int, 1](pixel), channel)
        comptime for slot in range(slots):
            beside[slot] = Ptr[dtype](
                unsafe_from_address=sources[slot]
            ).unsafe_load[width=width, alignment=width * size_of[dtype]()]()
    return beside


def operand_ahead(ahead: Int, slot: Int) -> Int:
    """Returns the number of the operand that is read to a slot: of the set bits of `ahead` the one with that number.
    """
    var rest = ahead
    for _ in range(slot):
        rest &= rest - 1
    return Int(count_trailing_zeros(rest))
