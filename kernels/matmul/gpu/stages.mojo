"""One operand's stages of a product on tensor cores: copies into shared memory, and fragments out of it.

A stage has `depth` steps of the reduction and lies as the operand does in memory:

    along    [index][depth]    the reduction is contiguous, or nothing is
    across   [depth][index]    the index is

in pieces of 16 bytes that are exchanged by an XOR with the row's number, so that neither copies nor ldmatrix meet bank
conflicts. A thread copies pieces, or pairs of elements, asynchronously, as far as the operand is aligned; single
elements pass through its registers. Which order an operand has is known when the kernel is launched: the places of
fragments are sums of two parts that each lane computes once, so that the loop is the same for all.
"""

from std.memory import bitcast
from std.sys import _RegisterPackType
from std.sys._assembly import inlined_assembly
from std.utils.static_tuple import StaticTuple

from max.gpu import thread_idx

from ...common.pointer import Ptr

comptime PIECE = 8
"""Elements of 16 bytes."""


@always_inline
def _exchange[length: Int](row: Int32) -> Int32:
    """Returns the number that a row's pieces are exchanged by: eight rows, or two on a line of 128 bytes, meet all
    banks."""
    comptime if length >= 8 * PIECE:
        return row % 8
    else:
        return row // 2 % 4


@always_inline
def _place[length: Int](row: Int32, piece: Int32) -> Int32:
    """Returns the offset, in elements, of a piece of a row of `length` elements.
    """
    return row * Int32(length) + (piece ^ _exchange[length](row)) * PIECE


@always_inline
def _load_fragment[
    dtype: DType
](address: UInt32, across: Int32) -> SIMD[dtype, 8]:
    """Four 8 x 8 matrices, transposed if `across`; lane l names row l % 8 of matrix l / 8.
    """
    var words = inlined_assembly[
        """{
        .reg .pred across;
        setp.ne.s32 across, $5, 0;
        @across ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [$4];
        @!across ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];
        }""",
        _RegisterPackType[UInt32, UInt32, UInt32, UInt32],
        constraints="=&r,=&r,=&r,=&r,r,r,~{memory}",
    ](address, across)
    return bitcast[dtype, 8](
        SIMD[DType.uint32, 4](words[0], words[1], words[2], words[3])
    )


@fieldwise_init
struct FragmentOffsets[count: Int, size: Int, depth: Int](
    ImplicitlyCopyable, TrivialRegisterPassable
):
    """Offsets of a lane's rows of fragments in a stage of `size` indices, in bytes: the sum of a fragment's part and a
    step's."""

    var fragments: StaticTuple[UInt32, Self.count]
    var steps: StaticTuple[UInt32, Self.depth // 16]
    var across: Int32

    @staticmethod
    @always_inline
    def of(
        first: Int32, across: Int32, index: Int32, step: Int32, lane: Int32
    ) -> Self:
        """Returns the offsets of fragments of 16 indices from `first` on: the lane names a row of the matrix that
        begins `index` and `step` after the fragment's corner."""
        var fragments = StaticTuple[UInt32, Self.count](fill=0)
        var steps = StaticTuple[UInt32, Self.depth // 16](fill=0)
        var row = lane % 8
        comptime for i in range(Self.count):
            var at = first + index + Int32(16 * i)
            var place = (at + row) * Int32(Self.depth)
            if across != 0:
                place = ((at // PIECE) ^ _exchange[Self.size](row)) * PIECE
            fragments[i] = UInt32(2 * place)
        comptime for k in range(Self.depth // 16):
            var at = step + Int32(16 * k)
            var place = ((at // PIECE) ^ _exchange[Self.depth](row)) * PIECE
            if across != 0:
                place = (at + row) * Int32(Self.size)
            steps[k] = UInt32(2 * place)
        return Self(fragments, steps, across)

    @staticmethod
    @always_inline
    def left(first: Int32, lane: Int32, across: Int32) -> Self:
        """Returns the offsets of fragments of 16 rows: rows 0-7 and 8-15 of steps 0-7, then of steps 8-15.
        """
        var matrix = lane // 8
        return Self.of(first, across, matrix % 2 * 8, matrix // 2 * 8, lane)

    @staticmethod
    @always_inline
    def right(first: Int32, lane: Int32, across: Int32) -> Self:
        """Returns the offsets of pairs of fragments of 8 columns: steps 0-7 and 8-15 of one, then of the other.
        """
        var matrix = lane // 8
        return Self.of(first, across, matrix // 2 * 8, matrix % 2 * 8, lane)

    @always_inline
    def load[
        dtype: DType
    ](self, stage: UInt32, fragment: Int, k: Int) -> SIMD[dtype, 8]:
        return _load_fragment[dtype](
            stage + self.fragments[fragment] + self.steps[k], self.across
        )


struct Source[dtype: DType, size: Int, depth: Int, threads: Int, least: Int](
    ImplicitlyCopyable, TrivialRegisterPassable
):
    """One operand's part of a tile: `size` indices, of which some exist, and all steps.

    A thread copies every so many-th unit of a stage. Each lies one turn behind the one before, in memory and, but for
    the exchanges, in the stage. A unit is a piece or has `least` elements: 8, 2 or 1.
    """

    comptime each = Self.size * Self.depth // Self.threads
    """Elements of a stage that a thread copies."""
    comptime Values = Array[UInt16, Self.each]

    var data: Ptr[Self.dtype]
    """The address of this thread's first unit of the next stage."""
    var stage_step: Int32
    """Elements from one stage to the next."""
    var turn: Int32
    """Elements from one of this thread's units to the next."""
    var left: Int32
    """Steps from this thread's first one of the next stage on."""
    var across: Int32
    var in_pieces: Bool
    var place: UInt32
    """Bytes, of this thread's first unit in a stage."""
    var fixed: Int32
    """If `across`, the elements of each unit that exist, else the units that do."""

    @always_inline
    def __init__(
        out self,
        data: Ptr[Self.dtype],
        index: Int32,
        step: Int32,
        count: Int32,
        steps: Int32,
        in_pieces: Bool,
    ):
        # Of pieces, turns are whole periods of the exchange.
        comptime assert Self.threads // (Self.size // PIECE) % 8 == 0
        comptime assert Self.threads // (Self.depth // PIECE) % 8 == 0
        var across = index == 1 and step != 1
        var thread = UInt32(thread_idx.x)
        self.in_pieces = Self.least == PIECE or in_pieces
        var own = UInt32(PIECE if self.in_pieces else Self.least)
        var units = UInt32(Self.size if across else Self.depth) // own
        var row = Int32(thread // units)
        var rows = Int32(UInt32(Self.threads) // units)
        var inside = Int32((thread - UInt32(row) * units) * own)
        self.across = Int32(across)
        self.stage_step = Int32(Self.depth) * step
        if across:
            self.left = steps - row
            self.fixed = max(Int32(0), min(Int32(own), count - inside))
            self.turn = rows * step
            self.data = data.unsafe_offset(Int(row) * Int(step) + Int(inside))
            self.place = UInt32(
                2 * (_place[Self.size](row, inside // PIECE) + inside % PIECE)
            )
        else:
            self.left = steps - inside
            self.fixed = (count - row + rows - 1) // rows
            self.turn = rows * index
            self.data = data.unsafe_offset(
                Int(row) * Int(index) + Int(inside) * Int(step)
            )
            self.place = UInt32(
                2 * (_place[Self.depth](row, inside // PIECE) + inside % PIECE)
            )

    @always_inline
    def _existing[unit: Int](self) -> Tuple[Int32, Int32]:
        """Elements of each unit of the next stage that exist, and units that do.
        """
        if self.across != 0:
            comptime rows = UInt32(Self.threads * unit // Self.size)
            var left = UInt32(max(Int32(0), self.left))
            return self.fixed, Int32((left + rows - 1) // rows)
        return max(Int32(0), min(Int32(unit), self.left)), self.fixed

    @always_inline
    def start(mut self, stage: UInt32, mut values: Self.Values):
        """Starts the copy of the next stage; reads single elements into `values`, for `finish` to store.
        """
        comptime if Self.least == PIECE:
            self._copy[PIECE](stage)
        else:
            if self.in_pieces:
                self._copy[PIECE](stage)
            else:
                comptime if Self.least == 1:
                    self._read(values)
                else:
                    self._copy[Self.least](stage)
        self.data = self.data.unsafe_offset(Int(self.stage_step))
        self.left -= Int32(Self.depth)

    @always_inline
    def finish(self, stage: UInt32, values: Self.Values):
        comptime if Self.least == 1:
            if not self.in_pieces:
                if self.across != 0:
                    self._store[Self.size](stage, values)
                else:
                    self._store[Self.depth](stage, values)

    @always_inline
    def _copy[unit: Int](self, stage: UInt32):
        var valid, existing = self._existing[unit]()
        var source = UInt64(Int(self.data))
        var target = stage + self.place
        # Pieces alone may pass the first-level cache by.
        comptime name = "cp.async.cg" if unit == PIECE else "cp.async.ca"
        comptime for i in range(Self.each // unit):
            # The row's number changes the exchange; nothing carries, since rows of one thread differ in other bits.
            comptime along = Self.by[Self.depth](i, unit)
            comptime across = Self.by[Self.size](i, unit)
            inlined_assembly[
                name
                + ".shared.global [$0], [$1], "
                + String(2 * unit)
                + ", $2;",
                NoneType,
                constraints="r,l,r,~{memory}",
            ](
                target ^ (across if self.across != 0 else along),
                source,
                2 * valid if Int32(i) < existing else Int32(0),
            )
            source += UInt64(2 * Int(self.turn))
            # Rows from one unit to the next, times a row's length.
            target += UInt32(2 * Self.threads * unit)

    @staticmethod
    @always_inline
    def by[length: Int](i: Int, unit: Int) -> UInt32:
        """Returns the difference, in bytes, between the exchanges of a thread's unit `i` and of its first one.
        """
        return UInt32(
            _exchange[length](Int32(i * (Self.threads * unit // length)))
            * 2
            * PIECE
        )

    @always_inline
    def _read(self, mut values: Self.Values):
        var valid, existing = self._existing[1]()
        var units = existing if valid > 0 else Int32(0)
        var source = UInt64(Int(self.data))
        comptime for i in range(Self.each):
            # No branch: all loads are on their way before the first is waited for.
            values[i] = inlined_assembly[
                """{
                .reg .pred exists;
                setp.gt.s32 exists, $2, $3;
                mov.u16 $0, 0;
                @exists ld.global.u16 $0, [$1];
                }""",
                UInt16,
                constraints="=&h,l,r,n,~{memory}",
            ](source, units, Int32(i))
            source += UInt64(2 * Int(self.turn))

    @always_inline
    def _store[length: Int](self, stage: UInt32, values: Self.Values):
        """Stores `values` to rows of `length` elements."""
        comptime rows = Self.threads // length
        var target = stage + self.place
        comptime for i in range(Self.each):
            comptime by = Self.by[length](i, 1)
            inlined_assembly[
                "st.shared.u16 [$0], $1;",
                NoneType,
                constraints="r,h,~{memory}",
            ]((target ^ by) + UInt32(2 * i * rows * length), values[i])
