"""Runs of contiguous elements between a GPU's memory and shared memory, 16 bytes at a time wherever they begin."""

from max.gpu.memory import AddressSpace, async_copy
from std.math import ceildiv
from std.sys import size_of
from std.sys.info import is_nvidia_gpu

from ..ptx import load_bulk
from .direct import Data

comptime LINE = 16
"""Bytes that are moved at a time."""


@always_inline
def lines(elements: Int, size: Int) -> Int:
    """The lines that a run of elements of `size` bytes touches at most: it may begin anywhere in one.
    """
    return ceildiv(elements * size + LINE - size, LINE)


@always_inline
def shift[dtype: DType](element: Int) -> Int32:
    """How many elements lie before one in its line."""
    return Int32(element % LINE) % Int32(LINE // size_of[dtype]())


@always_inline
def load_run[
    dtype: DType
](
    stage: MutPointer[UInt8, _, address_space=AddressSpace.SHARED],
    source: Data[dtype],
    first: Int,
    run: Int32,
    total: Int,
    lane: Int32,
    lanes: Int32,
):
    """Asks for the lines of `run` elements from number `first` on, of a tensor of `total`, by the lanes of a team.
    """
    comptime WIDE = LINE // size_of[dtype]()
    var begin = first // WIDE
    # Lines that the tensor ends in are not whole.
    var whole = Int32(
        min(ceildiv(first + Int(run), WIDE), total // WIDE) - begin
    )
    var values = stage.unsafe_bitcast[Scalar[dtype]]()
    var from_first = source.unsafe_offset(begin * WIDE)
    var line = lane
    while line < whole:
        var at = Int(line) * WIDE
        comptime if is_nvidia_gpu():
            async_copy[LINE](
                from_first.unsafe_offset(at).unsafe_address_space_cast[
                    AddressSpace.GLOBAL
                ](),
                values.unsafe_offset(at),
            )
        else:
            values.unsafe_store[alignment=LINE](
                at, from_first.unsafe_load[width=WIDE, alignment=LINE](at)
            )
        line += lanes
    var at = (total // WIDE - begin) * WIDE + Int(lane)
    while at < first - begin * WIDE + Int(run):
        values[unsafe_offset=at] = from_first[unsafe_offset=at]
        at += Int(lanes)


@always_inline
def store_run[
    dtype: DType
](
    dx: Data[dtype],
    stage: MutPointer[UInt8, _, address_space=AddressSpace.SHARED],
    first: Int,
    run: Int32,
    lane: Int32,
    lanes: Int32,
):
    """Stores a run that lies in shared memory as far from a line's begin as in dx: whole lines, and what is left one by
    one."""
    comptime WIDE = LINE // size_of[dtype]()
    var begin = first // WIDE
    var own = Int32(first - begin * WIDE)
    var end = own + run
    var values = stage.unsafe_bitcast[Scalar[dtype]]()
    var to_first = dx.unsafe_offset(begin * WIDE)
    var line = lane + Int32(own > 0)
    while line < end // Int32(WIDE):
        var at = Int(line) * WIDE
        to_first.unsafe_store[alignment=LINE](
            at, values.unsafe_load[width=WIDE, alignment=LINE](at)
        )
        line += lanes
    if own > 0:
        var at = own + lane
        while at < min(end, Int32(WIDE)):
            to_first[unsafe_offset=Int(at)] = values[unsafe_offset=Int(at)]
            at += lanes
    # A run that ends in the line that it begins in is stored.
    if own == 0 or end >= Int32(WIDE):
        var at = end // Int32(WIDE) * Int32(WIDE) + lane
        while at < end:
            to_first[unsafe_offset=Int(at)] = values[unsafe_offset=Int(at)]
            at += lanes


@fieldwise_init
struct Lines(TrivialRegisterPassable):
    """The whole lines that a run of a tensor's elements lies in, for the copy engine of sm_90; those that the tensor ends in
    are not."""

    var begin: UInt64
    var bytes: Int32

    @always_inline
    def __init__[
        dtype: DType, //
    ](out self, source: Data[dtype], first: Int, run: Int32, total: Int):
        """`run` elements from number `first` on, of `total`; the tensor begins with a line.
        """
        comptime size = size_of[dtype]()
        comptime mask = ~UInt64(LINE - 1)
        var begin = UInt64(Int(source)) + UInt64(first * size)
        var end = begin + UInt64(Int(run) * size)
        var last = UInt64(Int(source)) + UInt64(total * size)
        self.begin = begin & mask
        self.bytes = Int32(
            min((end + LINE - 1) & mask, last & mask) - self.begin
        )

    @always_inline
    def load(
        self,
        stage: MutPointer[UInt8, _, address_space=AddressSpace.SHARED],
        counter: UInt32,
    ):
        """By one thread; the barrier `counter` counts the bytes."""
        if self.bytes > 0:
            load_bulk(UInt32(Int(stage)), self.begin, self.bytes, counter)


@always_inline
def load_rest[
    dtype: DType
](
    stage: MutPointer[UInt8, _, address_space=AddressSpace.SHARED],
    source: Data[dtype],
    first: Int,
    run: Int32,
    total: Int,
):
    """What of a run lies in the line that its tensor of `total` elements ends in, if that is not whole; by one thread.
    """
    comptime WIDE = LINE // size_of[dtype]()
    var begin = first // WIDE * WIDE
    for at in range(max(total // WIDE * WIDE, begin), first + Int(run)):
        stage.unsafe_bitcast[Scalar[dtype]]()[
            unsafe_offset=at - begin
        ] = source[unsafe_offset=at]
