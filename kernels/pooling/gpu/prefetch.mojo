"""Pieces of a contiguous NCHW tensor (C = 1 here) and how their windows come to shared memory while others are worked
on.

A block takes one piece after another: whole planes, or a strip of a plane's rows. Shared memory holds the barriers of
two stages, the piece of dx, and the stages: the tensors' elements from the line on in which a piece's first window
begins. On sm_90 the copy engine brings it, at the price of a few instructions of one thread.
"""

from max.gpu import barrier
from max.gpu.memory import (
    AddressSpace,
    async_copy,
    async_copy_commit_group,
    async_copy_wait_group,
)
from std.math import ceildiv
from std.sys import size_of
from std.sys.info import _is_sm_9x_or_newer, is_nvidia_gpu

from ...common.pointer import Ptr
from ...common.ptx import (
    fence_mbarrier_init,
    load_bulk,
    made_here,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_wait,
)
from .prefetch_scatter_plan import BARRIER_BYTES, COPY_BYTES, STAGES, Pipeline
from .params import PoolingParams

comptime Shared = MutPointer[UInt8, _, address_space=AddressSpace.SHARED]


@always_inline
def keep(value: Int32) -> Int32:
    """The value in a register: the compiler would fetch a kernel's arguments anew for every use.
    """
    comptime if is_nvidia_gpu():
        return made_here(value)
    else:
        return value


@always_inline
def shift[dtype: DType](element: Int) -> Int32:
    """Returns how many elements lie before an element in its line."""
    return Int32(element % COPY_BYTES) % Int32(COPY_BYTES // size_of[dtype]())


@always_inline
def load_run[
    dtype: DType
](
    stage: MutPointer[UInt8, _, address_space=AddressSpace.SHARED],
    source: Ptr[dtype],
    first: Int,
    run: Int32,
    total: Int,
    lane: Int32,
    lanes: Int32,
):
    """Starts copies of the lines of `run` elements from number `first` on, of a tensor of `total`, by the lanes of a
    team."""
    comptime WIDE = COPY_BYTES // size_of[dtype]()
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
            async_copy[COPY_BYTES](
                from_first.unsafe_offset(at).unsafe_address_space_cast[
                    AddressSpace.GLOBAL
                ](),
                values.unsafe_offset(at),
            )
        else:
            values.unsafe_store[alignment=COPY_BYTES](
                at, from_first.unsafe_load[width=WIDE, alignment=COPY_BYTES](at)
            )
        line += lanes
    var at = (total // WIDE - begin) * WIDE + Int(lane)
    while at < first - begin * WIDE + Int(run):
        values[unsafe_offset=at] = from_first[unsafe_offset=at]
        at += Int(lanes)


@fieldwise_init
struct Lines(TrivialRegisterPassable):
    """The whole lines in which a run of a tensor's elements lies, for the copy engine of sm_90; a line in which the
    tensor ends is not whole."""

    var begin: UInt64
    var bytes: Int32

    @always_inline
    def __init__[
        dtype: DType, //
    ](out self, source: Ptr[dtype], first: Int, run: Int32, total: Int):
        """Finds the lines of `run` elements from number `first` on, of `total`; the tensor begins at a line.
        """
        comptime size = size_of[dtype]()
        comptime mask = ~UInt64(COPY_BYTES - 1)
        var begin = UInt64(Int(source)) + UInt64(first * size)
        var end = begin + UInt64(Int(run) * size)
        var last = UInt64(Int(source)) + UInt64(total * size)
        self.begin = begin & mask
        self.bytes = Int32(
            min((end + COPY_BYTES - 1) & mask, last & mask) - self.begin
        )

    @always_inline
    def load(
        self,
        stage: MutPointer[UInt8, _, address_space=AddressSpace.SHARED],
        counter: UInt32,
    ):
        """Starts the copy, by one thread; the barrier `counter` counts the bytes.
        """
        if self.bytes > 0:
            load_bulk(UInt32(Int(stage)), self.begin, self.bytes, counter)


@always_inline
def load_rest[
    dtype: DType
](
    stage: MutPointer[UInt8, _, address_space=AddressSpace.SHARED],
    source: Ptr[dtype],
    first: Int,
    run: Int32,
    total: Int,
):
    """Copies the elements of a run that lie in the line in which its tensor of `total` elements ends, if that line is
    not whole; by one thread."""
    comptime WIDE = COPY_BYTES // size_of[dtype]()
    var begin = first // WIDE * WIDE
    for at in range(max(total // WIDE * WIDE, begin), first + Int(run)):
        stage.unsafe_bitcast[Scalar[dtype]]()[
            unsafe_offset=at - begin
        ] = source[unsafe_offset=at]


@fieldwise_init
struct Piece(TrivialRegisterPassable):
    """Rows [h0, h0 + height) of `planes` planes from `plane` on, and the rows of windows over them, [oh0, oh1).
    """

    var plane: Int32
    var planes: Int32
    var h0: Int32
    var height: Int32
    var oh0: Int32
    var oh1: Int32

    @always_inline
    def __init__(out self, p: PoolingParams, c: Pipeline, unit: Int32):
        """The piece that begins with a plane, or strip; past the last one any.
        """
        var strip: Int32
        self.plane, strip = c.by_strips.divide(min(unit, c.units - 1))
        self.planes = min(c.planes, max(c.units - unit, 1))
        self.h0 = strip * c.rows
        self.height = min(c.rows, p.h.input - self.h0)
        self.oh0 = 0
        self.oh1 = p.h.output
        if c.by_strips.value > 1:
            self.oh0 = p.h.outputs_over[False](self.h0)[0]
            self.oh1 = p.h.outputs_over[False](self.h0 + self.height - 1)[1]

    @always_inline
    def first_window(self, p: PoolingParams) -> Int:
        return (Int(self.plane) * Int(p.h.output) + Int(self.oh0)) * Int(
            p.w.output
        )

    @always_inline
    def windows(self, p: PoolingParams) -> Int32:
        return (
            (self.planes - 1) * p.h.output + self.oh1 - self.oh0
        ) * p.w.output

    @always_inline
    def first_pixel(self, p: PoolingParams) -> Int:
        return (Int(self.plane) * Int(p.h.input) + Int(self.h0)) * Int(
            p.w.input
        )

    @always_inline
    def pixels(self, p: PoolingParams) -> Int32:
        return ((self.planes - 1) * p.h.input + self.height) * p.w.input


@always_inline
def prepare_stages(shared: Shared, thread: Int32):
    """Prepares the stages' barriers. All threads call it before any copy starts.
    """
    comptime if _is_sm_9x_or_newer():
        if thread == 0:
            comptime for stage in range(STAGES):
                mbarrier_init(_counter(shared, Int32(stage)), 1)
            fence_mbarrier_init()
        barrier()


@always_inline
def _counter(shared: Shared, stage: Int32) -> UInt32:
    """A stage's barrier, which counts bytes."""
    return UInt32(Int(shared)) + UInt32(8 * stage)


@always_inline
def stage_at(shared: Shared, c: Pipeline, stage: Int32) -> type_of(shared):
    return shared.unsafe_offset(
        Int(BARRIER_BYTES + c.sums_bytes + stage * c.stage_bytes)
    )


@always_inline
def ask_piece[
    dtype: DType, argmax: DType, //
](
    shared: Shared,
    dy: Ptr[dtype],
    argmaxes: Ptr[argmax],
    piece: Piece,
    stage: Int32,
    p: PoolingParams,
    c: Pipeline,
    thread: Int32,
):
    """Starts the copy of a piece's windows to a stage."""
    var first = piece.first_window(p)
    var run = piece.windows(p)
    var total = Int(c.windows)
    var to = stage_at(shared, c, stage)
    var argmaxes_to = to.unsafe_offset(Int(c.argmaxes_at))
    comptime if _is_sm_9x_or_newer():
        if thread == 0:
            var counter = _counter(shared, stage)
            var dy_lines = Lines(dy, first, run, total)
            var argmax_lines = Lines(argmaxes, first, run, total)
            # Only tensors end in lines that are not whole; COPY_BYTES elements are at least one.
            if first + Int(run) > total - COPY_BYTES:
                load_rest(to, dy, first, run, total)
                load_rest(argmaxes_to, argmaxes, first, run, total)
            mbarrier_expect(counter, Int(dy_lines.bytes + argmax_lines.bytes))
            dy_lines.load(to, counter)
            argmax_lines.load(argmaxes_to, counter)
    else:
        load_run(to, dy, first, run, total, thread, c.threads)
        load_run(argmaxes_to, argmaxes, first, run, total, thread, c.threads)
        comptime if is_nvidia_gpu():
            async_copy_commit_group()


@always_inline
def wait_for_piece(shared: Shared, stage: Int32, use: UInt32, *, last: Bool):
    """Waits for a stage's windows, in an even or an odd `use` of the stage; unless they are the `last`, the next are on
    their way. Other threads' part in it takes a barrier."""
    comptime if _is_sm_9x_or_newer():
        mbarrier_wait(_counter(shared, stage), use)
    elif is_nvidia_gpu():
        if last:
            async_copy_wait_group(0)
        else:
            async_copy_wait_group(Int32(STAGES - 1))
