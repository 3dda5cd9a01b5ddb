"""Sorting on a CPU: cores share the rows.

A row's keys are sorted byte by byte, the lowest first, with their indices. Where few of many elements are wanted, the
keys' highest bits are counted before, and only elements that can be among them are sorted.
"""

from ..common.parallel import sync_parallelize, workers_for
from ..common.pointer import Ptr
from .keys import Sorting, key_bits, key_of, key_type

comptime GRAIN_SIZE = 8192
"""Elements below which another thread costs more than it gives: sorting one takes longer than adding one."""
# So few are sorted by insertion.
comptime INSERTED = 32
comptime BYTE_VALUES = 256
# Bits by which elements that cannot be wanted are found.
comptime SELECTION_BITS = 12


struct _Pairs[dtype: DType]:
    """Keys with their elements' indices."""

    var _keys: List[Scalar[key_type[Self.dtype]]]
    var _indices: List[Int32]

    def __init__(out self, length: Int):
        self._keys = List[Scalar[key_type[Self.dtype]]](
            unsafe_uninit_length=length
        )
        self._indices = List[Int32](unsafe_uninit_length=length)

    @always_inline
    def key(self, i: Int) -> Scalar[key_type[Self.dtype]]:
        return self._keys.unsafe_ptr()[unsafe_offset=i]

    @always_inline
    def index(self, i: Int) -> Int32:
        return self._indices.unsafe_ptr()[unsafe_offset=i]

    @always_inline
    def put(mut self, i: Int, key: Scalar[key_type[Self.dtype]], index: Int32):
        self._keys.unsafe_ptr()[unsafe_offset=i] = key
        self._indices.unsafe_ptr()[unsafe_offset=i] = index


@always_inline
def _bucket[dtype: DType](key: Scalar[key_type[dtype]]) -> Int:
    """The key's first SELECTION_BITS."""
    comptime shift = max(0, key_bits[dtype] - SELECTION_BITS)
    return Int(key >> Scalar[key_type[dtype]](shift))


@no_inline
def _last_bucket[
    dtype: DType, descending: Bool
](x: Ptr[dtype], length: Int, count: Int) -> Int:
    """The last bucket that the `count` smallest keys reach into."""
    var totals = List[Int32](length=1 << SELECTION_BITS, fill=0)
    var total = totals.unsafe_ptr()
    for i in range(length):
        var bucket = _bucket[dtype](
            key_of[dtype, descending](x[unsafe_offset=i])
        )
        total[unsafe_offset=bucket] += 1
    var bucket = 0
    var before = Int(total[unsafe_offset=0])
    while before < count:
        bucket += 1
        before += Int(total[unsafe_offset=bucket])
    _ = totals^
    return bucket


@no_inline
def _candidates[
    dtype: DType, descending: Bool
](mut pairs: _Pairs[dtype], x: Ptr[dtype], length: Int, count: Int) -> Int:
    """Fills `pairs` with all elements that may be among the first `count`, in their order; how many they are.
    """
    comptime if key_bits[dtype] > SELECTION_BITS:
        if length > INSERTED and 2 * count < length:
            var last = _last_bucket[dtype, descending](x, length, count)
            var found = 0
            for i in range(length):
                var key = key_of[dtype, descending](x[unsafe_offset=i])
                if _bucket[dtype](key) <= last:
                    pairs.put(found, key, Int32(i))
                    found += 1
            return found
    for i in range(length):
        pairs.put(i, key_of[dtype, descending](x[unsafe_offset=i]), Int32(i))
    return length


@no_inline
def _sort_by_insertion[dtype: DType](mut pairs: _Pairs[dtype], size: Int):
    for i in range(1, size):
        var key = pairs.key(i)
        var index = pairs.index(i)
        var place = i
        while place > 0 and pairs.key(place - 1) > key:
            pairs.put(place, pairs.key(place - 1), pairs.index(place - 1))
            place -= 1
        pairs.put(place, key, index)


@no_inline
def _sort_by_byte[
    dtype: DType
](
    mut result: _Pairs[dtype],
    pairs: _Pairs[dtype],
    size: Int,
    shift: Scalar[key_type[dtype]],
    starts: Ptr[DType.int32],
) -> Bool:
    """Stable, by one byte of the keys; whether there was anything to do."""
    for value in range(BYTE_VALUES):
        starts[unsafe_offset=value] = 0
    for i in range(size):
        starts[unsafe_offset=Int((pairs.key(i) >> shift) & 255)] += 1
    if Int(starts[unsafe_offset=Int((pairs.key(0) >> shift) & 255)]) == size:
        return False
    var before = Int32(0)
    for value in range(BYTE_VALUES):
        var many = starts[unsafe_offset=value]
        starts[unsafe_offset=value] = before
        before += many
    for i in range(size):
        var value = Int((pairs.key(i) >> shift) & 255)
        result.put(
            Int(starts[unsafe_offset=value]), pairs.key(i), pairs.index(i)
        )
        starts[unsafe_offset=value] += 1
    return True


@no_inline
def _sort_row[
    dtype: DType, descending: Bool
](
    values: Ptr[dtype],
    indices: Ptr[DType.int64],
    x: Ptr[dtype],
    sorting: Sorting,
    mut pairs: _Pairs[dtype],
    mut other: _Pairs[dtype],
    starts: Ptr[DType.int32],
):
    var size = _candidates[dtype, descending](
        pairs, x, sorting.length, sorting.count
    )
    if size <= INSERTED:
        _sort_by_insertion(pairs, size)
    else:
        for shift in range(0, key_bits[dtype], 8):
            if _sort_by_byte[dtype](
                other, pairs, size, Scalar[key_type[dtype]](shift), starts
            ):
                swap(pairs, other)
    for i in range(sorting.count):
        var index = Int(pairs.index(i))
        indices[unsafe_offset=i] = Int64(index)
        values[unsafe_offset=i] = x[unsafe_offset=index]


@no_inline
def sort_cpu[
    dtype: DType, descending: Bool
](
    values: Ptr[dtype],
    indices: Ptr[DType.int64],
    x: Ptr[dtype],
    sorting: Sorting,
):
    var workers = workers_for(
        sorting.rows * sorting.length, sorting.rows, GRAIN_SIZE
    )

    @always_inline
    def task(worker: Int) {imm}:
        var pairs = _Pairs[dtype](sorting.length)
        var other = _Pairs[dtype](sorting.length)
        var starts = List[Int32](length=BYTE_VALUES, fill=0)
        for row in range(
            sorting.rows * worker // workers,
            sorting.rows * (worker + 1) // workers,
        ):
            _sort_row[dtype, descending](
                values.unsafe_offset(row * sorting.count),
                indices.unsafe_offset(row * sorting.count),
                x.unsafe_offset(row * sorting.length),
                sorting,
                pairs,
                other,
                Ptr[DType.int32](unsafe_from_address=Int(starts.unsafe_ptr())),
            )
        _ = starts^

    sync_parallelize(task, workers)
