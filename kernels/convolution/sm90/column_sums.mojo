"""Two sums over the rows of each column of a result, of the values as they are stored: what batch normalization
reduces.

Each thread stores the same columns in all tiles of a walk, and keeps their sums in registers. When the walk ends, or
where its next tile has other columns, the four warps' sums are put together in the order of their rows and go to a slot
in memory (normalization/partials.mojo): every number has one writer and one place in the sum.

Moments are the sums of d = y - pivot and d * d, where the pivot is the first value that the thread sees of a column: no
cancellation, however far the mean lies from zero. Products are the sums of y and y * f with a factor f for each
element.
"""

from std.memory import Pointer
from std.utils.static_tuple import StaticTuple

import max.gpu.primitives.warp as warps

from ...common.pointer import Ptr
from ...common.ptx import named_barrier_sync, syncwarp
from ...common.widening import wide
from ...normalization.folded_rows import Moments
from ..passes import MOMENTS, PRODUCTS
from .tile import CONSUMER_BARRIER, CONSUMER_THREADS, PANEL_COLUMNS

comptime _Vector = SIMD[DType.float32, 8]
comptime _WARPS = 4
"""Warps of a consumer."""


@always_inline
def _shared[
    dtype: DType
](address: UInt32) -> Pointer[
    Scalar[dtype], MutAnyOrigin, address_space=AddressSpace.SHARED
]:
    return {unsafe_from_address = Int(address)}


@always_inline
def _from_lane(value: _Vector, distance: UInt32) -> _Vector:
    """Returns the value of the lane `distance` further on."""
    var result = _Vector()
    comptime for i in range(8):
        result[i] = warps.shuffle_down(value[i], distance)
    return result


struct ColumnSums[dtype: DType, kind: Int, columns: Int]:
    """A thread's sums. Of moments, each of the four threads that store the same columns of every fourth row has all
    eight columns of each panel; of products it has two of them, for all four.
    """

    comptime panels = Self.columns // PANEL_COLUMNS
    comptime width = 8 if Self.kind == MOMENTS else 2

    var first: StaticTuple[SIMD[DType.float32, Self.width], Self.panels]
    var second: StaticTuple[SIMD[DType.float32, Self.width], Self.panels]
    var pivot: StaticTuple[_Vector, Self.panels]
    """Values that deviations are taken from; of moments alone."""
    var count: Int32
    """Rows that have been added; of moments alone."""

    @always_inline
    def __init__(out self):
        self.first = {fill = 0}
        self.second = {fill = 0}
        self.pivot = {fill = 0}
        self.count = 0

    @always_inline
    def begin[panel: Int](mut self, value: SIMD[Self.dtype, 8]):
        """Takes the thread's first values as pivots."""
        comptime assert Self.kind == MOMENTS
        self.pivot[panel] = wide(value)

    @always_inline
    def add_moments[panel: Int](mut self, value: SIMD[Self.dtype, 8]):
        """Adds one row's values, before the row is counted."""
        comptime assert Self.kind == MOMENTS
        var deviation = wide(value) - self.pivot[panel]
        var first = rebind[_Vector](self.first[panel]) + deviation
        var second = deviation.fma(
            deviation, rebind[_Vector](self.second[panel])
        )
        self.first[panel] = rebind[SIMD[DType.float32, Self.width]](first)
        self.second[panel] = rebind[SIMD[DType.float32, Self.width]](second)

    @always_inline
    def add_products[panel: Int](mut self, products: Products, lane: UInt32):
        """Adds the sums that the four threads have over some rows of a panel.
        """
        comptime assert Self.kind == PRODUCTS
        self.first[panel] += rebind[SIMD[DType.float32, Self.width]](
            _share(products.first, lane)
        )
        self.second[panel] += rebind[SIMD[DType.float32, Self.width]](
            _share(products.second, lane)
        )

    @always_inline
    def _moments(self, panel: Int) -> Moments[DType.float32, 8]:
        if self.count == 0:
            return Moments[DType.float32, 8]()
        var first = rebind[_Vector](self.first[panel])
        var shift = first / Float32(self.count)
        var m2 = rebind[_Vector](self.second[panel]) - first * shift
        # The clamp catches rounding only; written so that NaN stays.
        m2 = m2.lt(0).select(_Vector(0), m2)
        var mean = self.pivot[panel] + shift
        return Moments[DType.float32, 8](Int(self.count), mean, m2)

    @always_inline
    def _put_down(self, address: UInt32, lane: UInt32):
        """Stores the sums to a warp's shared memory: both numbers of all columns, then the rows.
        """
        comptime second = UInt32(Self.columns * 4)
        comptime if Self.kind == PRODUCTS:
            var at = address + (lane % 8 * 8 + lane // 8 * 2) * 4
            comptime for panel in range(Self.panels):
                comptime behind = UInt32(panel * PANEL_COLUMNS * 4)
                _shared[DType.float32](at + behind).unsafe_store[alignment=8](
                    self.first[panel]
                )
                _shared[DType.float32](at + behind + second).unsafe_store[
                    alignment=8
                ](self.second[panel])
            return
        comptime for panel in range(Self.panels):
            var moments = self._moments(panel)
            comptime for step in range(2):
                comptime distance = UInt32(16 >> step)
                moments.merge(
                    Moments[DType.float32, 8](
                        Int(warps.shuffle_down(Int32(moments.count), distance)),
                        _from_lane(moments.mean, distance),
                        _from_lane(moments.m2, distance),
                    )
                )
            if lane < 8:
                var at = (
                    address + (UInt32(panel * PANEL_COLUMNS) + lane * 8) * 4
                )
                _shared[DType.float32](at).unsafe_store[alignment=16](
                    moments.mean
                )
                _shared[DType.float32](at + second).unsafe_store[alignment=16](
                    moments.m2
                )
                if lane == 0 and panel == 0:
                    _shared[DType.int32](address + 2 * second).unsafe_store(
                        Int32(moments.count)
                    )

    @staticmethod
    @always_inline
    def _taken_up(address: UInt32, column: UInt32) -> Moments[DType.float32, 1]:
        """Loads the sums that a warp has stored for a column; of products the fields are the sums.
        """
        comptime second = UInt32(Self.columns * 4)
        var count = Int32(0)
        comptime if Self.kind == MOMENTS:
            count = _shared[DType.int32](address + 2 * second).unsafe_load()
        var at = address + column * 4
        return Moments[DType.float32, 1](
            Int(count),
            _shared[DType.float32](at).unsafe_load(),
            _shared[DType.float32](at + second).unsafe_load(),
        )

    @always_inline
    def flush(
        mut self,
        partials: Ptr[DType.float32],
        slot: Int,
        slots: Int,
        width: Int32,
        staging: UInt32,
        warp_bytes: Int,
        consumer: Int32,
        thread: UInt32,
    ):
        """Puts the sums of a consumer's four warps into a slot, and begins anew.

        `width` columns belong to the tile. `staging` is the consumer's shared memory, `warp_bytes` for each warp, which
        then is free again; `thread` is one of the consumer's 128.
        """
        # All lanes have read what the warp has staged.
        syncwarp()
        self._put_down(staging + thread // 32 * UInt32(warp_bytes), thread % 32)
        named_barrier_sync(CONSUMER_BARRIER + consumer, CONSUMER_THREADS)
        if thread < UInt32(width):
            var total = Self._taken_up(staging, thread)
            comptime for other in range(1, _WARPS):
                var theirs = Self._taken_up(
                    staging + UInt32(other * warp_bytes), thread
                )
                comptime if Self.kind == MOMENTS:
                    total.merge(theirs)
                else:
                    total.mean += theirs.mean
                    total.m2 += theirs.m2
            var at = slot * 2 * Int(width) + Int(thread)
            partials[unsafe_offset=at] = total.mean[0]
            partials[unsafe_offset=at + Int(width)] = total.m2[0]
            comptime if Self.kind == MOMENTS:
                if thread == 0:
                    partials[
                        unsafe_offset=slots * 2 * Int(width) + slot
                    ] = Float32(total.count)
        named_barrier_sync(CONSUMER_BARRIER + consumer, CONSUMER_THREADS)
        self = Self()


@fieldwise_init
struct Products(ImplicitlyCopyable, TrivialRegisterPassable):
    """A thread's sums of y and y * f over some rows."""

    var first: _Vector
    var second: _Vector

    @always_inline
    def add[dtype: DType](mut self, value: SIMD[dtype, 8], factor: _Vector):
        var own = wide(value)
        self.first += own
        self.second = own.fma(factor, self.second)


@always_inline
def _share(value: _Vector, lane: UInt32) -> SIMD[DType.float32, 2]:
    """Returns the two columns that the lane keeps, from 2 * (lane // 8) on, of the sum over the four lanes with these
    columns."""
    return _exchanged[2](_exchanged[4](value, 16, lane), 8, lane)


@always_inline
def _exchanged[
    half: Int
](value: SIMD[DType.float32, 2 * half], distance: UInt32, lane: UInt32) -> SIMD[
    DType.float32, half
]:
    """Returns half of the sum with the lane `distance` away, which gets the other half.
    """
    var upper = lane & distance != 0
    var low = value.slice[half, offset=0]()
    var high = value.slice[half, offset=half]()
    var kept = high if upper else low
    var given = low if upper else high
    comptime for i in range(half):
        kept[i] += warps.shuffle_xor(given[i], distance)
    return kept
