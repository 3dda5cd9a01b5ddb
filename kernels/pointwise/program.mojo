"""The arguments of a pointwise program: its operands, and the place of the elements that it computes now.

A program computes `width` elements of one or more results from the elements of its inputs that belong to them. It is a
function over `ProgramOperands`, in which results and inputs stand alike, written for each elementwise expression; sizes
and strides are run-time arguments, so that layers of all sizes share it.

The elements are `parts` runs of neighbours, a power of two, each `width // parts` long. A GPU's thread has several
runs, so that it waits for memory once: a program reads all of its inputs before it writes.
"""

from std.memory import bitcast
from std.builtin.device_passable import DevicePassable, DeviceTypeEncoder
from std.sys.info import is_gpu, size_of
from std.utils.index import IndexList
from std.utils.static_tuple import StaticTuple

from ..common.gpu import VECTOR_BYTES
from ..common.pointer import Ptr


@fieldwise_init
struct ElementPosition[dims: Int](ImplicitlyCopyable, TrivialRegisterPassable):
    """An element's number in a result's memory, and the same as digits."""

    var index: Int
    var digits: IndexList[Self.dims, element_type=DType.int32]


struct RunPositions[dims: Int, parts: Int](
    ImplicitlyCopyable, TrivialRegisterPassable
):
    """The places where `parts` runs of neighbouring elements begin."""

    var data: StaticTuple[ElementPosition[Self.dims], Self.parts]
    var live: StaticTuple[Bool, Self.parts]
    """Whether a run's results are wanted; its inputs can be read in either case."""
    var column: Int
    """The last digit of the first run, and of the others where programs rely on it (`column`)."""

    @implicit
    @always_inline
    def __init__(out self, place: ElementPosition[Self.dims]):
        self.data = StaticTuple[ElementPosition[Self.dims], Self.parts](
            fill=place
        )
        self.live = StaticTuple[Bool, Self.parts](fill=True)
        self.column = Int(place.digits[Self.dims - 1])

    @always_inline
    def put[part: Int](mut self, place: ElementPosition[Self.dims], live: Bool):
        """Sets the place where run `part` begins, and whether its results are wanted.
        """
        self.data[part] = place
        self.live[part] = live


struct ProgramOperands[count: Int, dims: Int](
    DevicePassable, ImplicitlyCopyable, TrivialRegisterPassable
):
    """Results and inputs: their memory, and how they are read. Behind them guards: whether a place is inside.

    The elements of a result are counted in memory order; the count's digits have the extents `extents`, the last one
    varies fastest. Operand n lies `starts[n]` elements behind its address, and `strides[n * dims + k]` on for each step
    of digit k. A guard has such a number too, and instead of an address an extent, which the number has to be below.
    Last come numbers of the expression, with their bits instead of an address.
    """

    comptime device_type: AnyType = Self

    var data: IndexList[Self.count]
    """Addresses; extents of guards; bits of numbers."""
    var extents: IndexList[Self.dims, element_type=DType.int32]
    var multipliers: IndexList[Self.dims, element_type=DType.uint32]
    """Multipliers that, with `shifts`, divide by `extents` (common/arithmetic.mojo)."""
    var shifts: IndexList[Self.dims, element_type=DType.uint32]
    var strides: IndexList[Self.count * Self.dims, element_type=DType.int32]
    var starts: IndexList[Self.count, element_type=DType.int32]

    def __init__(out self):
        self.data = {}
        self.extents = {}
        self.multipliers = {}
        self.shifts = {}
        self.strides = {}
        self.starts = {}

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        return "ProgramOperands"

    @always_inline
    def place[
        outermost: Int = 0
    ](self, index: Int) -> ElementPosition[Self.dims]:
        """Returns the place of a result's element `index`, below 2^31; of the one that is number `index` where digit
        `outermost` is counted last, if that is not 0.
        """
        var digits = IndexList[Self.dims, element_type=DType.int32]()
        var rest = UInt32(index)
        comptime for reverse in range(Self.dims):
            comptime k = Self.dims - 1 - reverse
            comptime if k != outermost:
                var product = UInt64(rest << 1) * UInt64(
                    UInt32(self.multipliers[k])
                )
                var quotient = UInt32(product >> 32) >> UInt32(self.shifts[k])
                digits[k] = Int(rest - quotient * UInt32(self.extents[k]))
                rest = quotient
        digits[outermost] = Int(rest)
        comptime if outermost == 0:
            return ElementPosition[Self.dims](index, digits)
        var number = Int32(0)
        comptime for k in range(Self.dims):
            number = number * Int32(self.extents[k]) + Int32(digits[k])
        return ElementPosition[Self.dims](Int(number), digits)

    @always_inline
    def _offset[n: Int](self, place: ElementPosition[Self.dims]) -> Int:
        var offset = Int32(self.starts[n])
        comptime for k in range(Self.dims):
            offset += Int32(place.digits[k]) * Int32(
                self.strides[n * Self.dims + k]
            )
        return Int(offset)

    @always_inline
    def _pointer[dtype: DType, n: Int](self) -> Ptr[dtype]:
        return Ptr[dtype](unsafe_from_address=self.data[n])

    @always_inline
    def address[dtype: DType, n: Int](self, index: Int) -> Int:
        """Returns where element `index` lies of an operand whose elements are numbered like the result's.
        """
        return Int(self._pointer[dtype, n]().unsafe_offset(index))

    @always_inline
    def _load[
        dtype: DType, width: Int
    ](self, source: Ptr[dtype]) -> SIMD[dtype, width]:
        comptime if is_gpu():
            comptime most = max(1, VECTOR_BYTES // size_of[dtype]())
            comptime if width > most:
                var value = SIMD[dtype, width]()
                comptime for part in range(width // most):
                    value = value.insert[offset=part * most](
                        source.unsafe_offset(part * most).unsafe_load[
                            width=most, alignment=VECTOR_BYTES
                        ]()
                    )
                return value
            else:
                return source.unsafe_load[
                    width=width, alignment=width * size_of[dtype]()
                ]()
        else:
            return source.unsafe_load[width=width]()

    @always_inline
    def linear[
        dtype: DType, n: Int, width: Int
    ](self, place: ElementPosition[Self.dims]) -> SIMD[dtype, width]:
        """Reads an operand whose elements are numbered like the result's."""
        return self._load[dtype, width](
            self._pointer[dtype, n]().unsafe_offset(place.index)
        )

    @always_inline
    def row[
        dtype: DType, n: Int, width: Int
    ](self, place: ElementPosition[Self.dims]) -> SIMD[dtype, width]:
        """Reads an operand that steps by one element with the last digit."""
        return self._load[dtype, width](
            self._pointer[dtype, n]().unsafe_offset(self._offset[n](place))
        )

    @always_inline
    def same[
        dtype: DType, n: Int, width: Int
    ](self, place: ElementPosition[Self.dims]) -> SIMD[dtype, width]:
        """Reads an operand that does not change with the last digit."""
        return SIMD[dtype, width](
            self._pointer[dtype, n]()[unsafe_offset=self._offset[n](place)]
        )

    @always_inline
    def strided[
        dtype: DType, n: Int, width: Int
    ](self, place: ElementPosition[Self.dims]) -> SIMD[dtype, width]:
        """Reads an operand that steps by any number of elements with the last digit.
        """
        var source = self._pointer[dtype, n]().unsafe_offset(
            self._offset[n](place)
        )
        var step = Int(self.strides[n * Self.dims + Self.dims - 1])
        var value = SIMD[dtype, width]()
        comptime for lane in range(width):
            value[lane] = source[unsafe_offset=lane * step]
        return value

    @always_inline
    def each[
        dtype: DType, n: Int, width: Int
    ](self, place: ElementPosition[Self.dims]) -> SIMD[dtype, width]:
        """Reads any operand, element by element; the elements may belong to several rows.
        """
        var source = self._pointer[dtype, n]()
        comptime if width == 1:
            return source[unsafe_offset=self._offset[n](place)]
        var value = SIMD[dtype, width]()
        comptime for lane in range(width):
            value[lane] = source[
                unsafe_offset=self._offset[n](self.place(place.index + lane))
            ]
        return value

    @always_inline
    def _in_short_rows[n: Int, length: Int](self, first: Int, lane: Int) -> Int:
        """Returns the place of an element of several rows of `length`, of which all belong to one place of the digits
        before the last two."""
        return (
            first
            + lane // length * Int(self.strides[n * Self.dims + Self.dims - 2])
            + lane % length * Int(self.strides[n * Self.dims + Self.dims - 1])
        )

    @always_inline
    def short_rows_if[
        dtype: DType, n: Int, width: Int, length: Int
    ](
        self, place: ElementPosition[Self.dims], mask: SIMD[DType.bool, width]
    ) -> SIMD[dtype, width]:
        """Reads rows of `length`, where `mask` holds; nothing is read elsewhere.
        """
        var first = self._offset[n](place)
        var value = SIMD[dtype, width]()
        comptime for lane in range(width):
            if mask[lane]:
                value[lane] = self._pointer[dtype, n]()[
                    unsafe_offset=self._in_short_rows[n, length](first, lane)
                ]
        return value

    @always_inline
    def lines_if[
        dtype: DType, n: Int, width: Int, length: Int
    ](
        self, place: ElementPosition[Self.dims], mask: SIMD[DType.bool, width]
    ) -> SIMD[dtype, width]:
        """Reads as `short_rows_if` does, where the elements of one place of all rows lie together and `mask` is the
        same for them."""
        comptime if width == 1:
            return self.short_rows_if[dtype, n, width, length](place, mask)
        comptime rows = width // length
        var first = self._offset[n](place)
        var value = SIMD[dtype, width]()
        comptime for lane in range(length):
            if mask[lane]:
                var line = self._load[dtype, rows](
                    self._pointer[dtype, n]().unsafe_offset(
                        self._in_short_rows[n, length](first, lane)
                    )
                )
                comptime for row in range(rows):
                    value[row * length + lane] = line[row]
        return value

    @always_inline
    def inside_short_rows[
        n: Int, width: Int, length: Int
    ](self, place: ElementPosition[Self.dims]) -> SIMD[DType.bool, width]:
        """Returns for each element of rows of `length` whether a guard holds.
        """
        var first = self._offset[n](place)
        var mask = SIMD[DType.bool, width](fill=False)
        comptime for lane in range(width):
            mask[lane] = UInt32(
                self._in_short_rows[n, length](first, lane)
            ) < UInt32(self.data[n])
        return mask

    @always_inline
    def number[dtype: DType, n: Int, width: Int](self) -> SIMD[dtype, width]:
        """A number of a floating dtype."""
        comptime bits = DType.uint16 if size_of[
            dtype
        ]() == 2 else DType.uint32 if size_of[dtype]() == 4 else DType.uint64
        return SIMD[dtype, width](bitcast[dtype, 1](Scalar[bits](self.data[n])))

    @always_inline
    def inside_same[
        n: Int, width: Int
    ](self, place: ElementPosition[Self.dims]) -> SIMD[DType.bool, width]:
        """Returns whether a guard holds that is the same for all neighbouring elements.
        """
        return SIMD[DType.bool, width](
            fill=UInt32(self._offset[n](place)) < UInt32(self.data[n])
        )

    @always_inline
    def inside_row[
        n: Int, width: Int
    ](self, place: ElementPosition[Self.dims]) -> SIMD[DType.bool, width]:
        """Returns for each element whether a guard that steps with the last digit holds.
        """
        var step = Int32(self.strides[n * Self.dims + Self.dims - 1])
        var first = Int32(self._offset[n](place))
        var mask = SIMD[DType.bool, width](fill=False)
        comptime for lane in range(width):
            mask[lane] = UInt32(first + Int32(lane) * step) < UInt32(
                self.data[n]
            )
        return mask

    @always_inline
    def inside_each[
        n: Int, width: Int
    ](self, place: ElementPosition[Self.dims]) -> SIMD[DType.bool, width]:
        """Returns for each element whether a guard holds, where elements may belong to several rows.
        """
        var mask = SIMD[DType.bool, width](fill=False)
        comptime for lane in range(width):
            mask[lane] = self.inside_same[n, 1](self.place(place.index + lane))[
                0
            ]
        return mask

    @always_inline
    def row_if[
        dtype: DType, n: Int, width: Int
    ](
        self, place: ElementPosition[Self.dims], mask: SIMD[DType.bool, width]
    ) -> SIMD[dtype, width]:
        """Reads as `row` does, where `mask` holds; nothing is read elsewhere.
        """
        if mask.reduce_and():
            return self.row[dtype, n, width](place)
        return self.strided_if[dtype, n, width](place, mask)

    @always_inline
    def same_if[
        dtype: DType, n: Int, width: Int
    ](
        self, place: ElementPosition[Self.dims], mask: SIMD[DType.bool, width]
    ) -> SIMD[dtype, width]:
        """Reads as `same` does, where `mask` holds; nothing is read elsewhere.
        """
        if mask.reduce_or():
            return self.same[dtype, n, width](place)
        return SIMD[dtype, width]()

    @always_inline
    def strided_if[
        dtype: DType, n: Int, width: Int
    ](
        self, place: ElementPosition[Self.dims], mask: SIMD[DType.bool, width]
    ) -> SIMD[dtype, width]:
        """Reads as `strided` does, where `mask` holds; nothing is read elsewhere.
        """
        var value = SIMD[dtype, width]()
        if mask.reduce_or():
            var first = self._offset[n](place)
            var step = Int(self.strides[n * Self.dims + Self.dims - 1])
            comptime for lane in range(width):
                if mask[lane]:
                    value[lane] = self._pointer[dtype, n]()[
                        unsafe_offset=first + lane * step
                    ]
        return value

    @always_inline
    def each_if[
        dtype: DType, n: Int, width: Int
    ](
        self, place: ElementPosition[Self.dims], mask: SIMD[DType.bool, width]
    ) -> SIMD[dtype, width]:
        """Reads as `each` does, where `mask` holds; nothing is read elsewhere.
        """
        var value = SIMD[dtype, width]()
        comptime for lane in range(width):
            if mask[lane]:
                value[lane] = self.each[dtype, n, 1](
                    self.place(place.index + lane)
                )[0]
        return value

    @always_inline
    def read[
        parts: Int, //, way: StaticString, dtype: DType, n: Int, width: Int
    ](self, places: RunPositions[Self.dims, parts]) -> SIMD[dtype, width]:
        """Reads an operand in one of the ways above, or as `column`: it steps by one element with the last digit, which
        all runs share, and does not change with the others."""
        comptime piece = width // parts
        var value = SIMD[dtype, width]()
        comptime if way == "column":
            var run = self._load[dtype, piece](
                self._pointer[dtype, n]().unsafe_offset(
                    Int(self.starts[n]) + places.column
                )
            )
            comptime for part in range(parts):
                value = value.insert[offset=part * piece](run)
        else:
            comptime for part in range(parts):
                var place = places.data[part]
                var run: SIMD[dtype, piece]
                comptime if way == "linear":
                    run = self.linear[dtype, n, piece](place)
                elif way == "row":
                    run = self.row[dtype, n, piece](place)
                elif way == "same":
                    run = self.same[dtype, n, piece](place)
                elif way == "strided":
                    run = self.strided[dtype, n, piece](place)
                elif way == "each":
                    run = self.each[dtype, n, piece](place)
                else:
                    run = self._several_if[way, dtype, n, piece](
                        place, SIMD[DType.bool, piece](fill=True)
                    )
                value = value.insert[offset=part * piece](run)
        return value

    @always_inline
    def _several_if[
        way: StaticString, dtype: DType, n: Int, width: Int
    ](
        self, place: ElementPosition[Self.dims], mask: SIMD[DType.bool, width]
    ) -> SIMD[dtype, width]:
        """Reads in one of the ways for short rows."""
        comptime length = 2 if way == "pairs" or way == "pair_lines" else 4
        comptime if way == "pair_lines" or way == "four_lines":
            return self.lines_if[dtype, n, width, length](place, mask)
        else:
            return self.short_rows_if[dtype, n, width, length](place, mask)

    @always_inline
    def read_if[
        parts: Int, //, way: StaticString, dtype: DType, n: Int, width: Int
    ](
        self,
        places: RunPositions[Self.dims, parts],
        mask: SIMD[DType.bool, width],
    ) -> SIMD[dtype, width]:
        """Reads as `read` does, where `mask` holds; nothing is read elsewhere.
        """
        comptime piece = width // parts
        var value = SIMD[dtype, width]()
        comptime for part in range(parts):
            var place = places.data[part]
            var own = mask.slice[piece, offset=part * piece]()
            var run: SIMD[dtype, piece]
            comptime if way == "row":
                run = self.row_if[dtype, n, piece](place, own)
            elif way == "same":
                run = self.same_if[dtype, n, piece](place, own)
            elif way == "strided":
                run = self.strided_if[dtype, n, piece](place, own)
            elif way == "each":
                run = self.each_if[dtype, n, piece](place, own)
            else:
                run = self._several_if[way, dtype, n, piece](place, own)
            value = value.insert[offset=part * piece](run)
        return value

    @always_inline
    def inside[
        parts: Int, //, way: StaticString, n: Int, width: Int
    ](self, places: RunPositions[Self.dims, parts]) -> SIMD[DType.bool, width]:
        """Returns for each element whether a guard holds, asked in one of the ways above.
        """
        comptime piece = width // parts
        var mask = SIMD[DType.bool, width](fill=False)
        comptime for part in range(parts):
            var place = places.data[part]
            var run: SIMD[DType.bool, piece]
            comptime if way == "row":
                run = self.inside_row[n, piece](place)
            elif way == "same":
                run = self.inside_same[n, piece](place)
            elif way == "each":
                run = self.inside_each[n, piece](place)
            else:
                comptime length = 2 if way == "pairs" else 4
                run = self.inside_short_rows[n, piece, length](place)
            mask = mask.insert[offset=part * piece](run)
        return mask

    @always_inline
    def store[
        dtype: DType, width: Int, parts: Int, //, n: Int
    ](self, places: RunPositions[Self.dims, parts], value: SIMD[dtype, width]):
        """Into a result: the runs that are wanted."""
        comptime if parts == 1:
            self._store[n](places.data[0], value)
        else:
            comptime piece = width // parts
            comptime for part in range(parts):
                if places.live[part]:
                    self._store[n](
                        places.data[part],
                        value.slice[piece, offset=part * piece](),
                    )

    @always_inline
    def _store[
        dtype: DType, width: Int, //, n: Int
    ](self, place: ElementPosition[Self.dims], value: SIMD[dtype, width]):
        var target = self._pointer[dtype, n]().unsafe_offset(place.index)
        comptime if is_gpu():
            comptime most = max(1, VECTOR_BYTES // size_of[dtype]())
            comptime if width > most:
                comptime for part in range(width // most):
                    target.unsafe_offset(part * most).unsafe_store[
                        alignment=VECTOR_BYTES
                    ](value.slice[most, offset=part * most]())
            else:
                target.unsafe_store[alignment=width * size_of[dtype]()](value)
        else:
            target.unsafe_store(value)
