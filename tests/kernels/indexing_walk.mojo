"""Runs what the GPU's threads do that read and write at indices on a CPU, thread after thread, between guard elements.

An argument is "outer places count inner outside": one index in `outside` lies outside its dimension, 0 for none. Elements are small
whole numbers, so that sums are exact. Prints how many indices lie outside.
"""

from std.math import ceildiv
from std.memory.alloc import unsafe_alloc
from std.sys import argv

from kernels.checks.indices import check_share
from kernels.common.arithmetic import Divisor
from kernels.common.bounds import Bounds
from kernels.common.pointer import Ptr
from kernels.indexing.elements import flat_place, scatter_column
from kernels.indexing.extents import Rows
from kernels.indexing.gather import gather_element, gather_row_part
from kernels.indexing.unordered import (
    TOGETHER,
    VECTOR,
    scatter_unordered,
)

comptime E = DType.float32
comptime GUARD = 64
"""Elements in front of a tensor, and behind it."""
comptime UNTOUCHED = Float32(-1e30)
comptime IGNORED = Int64(-100)


struct Guarded(Movable):
    """A tensor between elements that nothing may write to."""

    var all: Ptr[E]
    var count: Int

    def __init__(out self, count: Int):
        self.all = rebind[Ptr[E]](unsafe_alloc[Float32](count + 2 * GUARD))
        self.count = count
        for i in range(count + 2 * GUARD):
            self.all[unsafe_offset=i] = UNTOUCHED

    def data(self) -> Ptr[E]:
        return self.all.unsafe_offset(GUARD)

    def check(self, what: String, wanted: List[Float32]) raises:
        for i in range(GUARD):
            var behind = self.all[unsafe_offset=GUARD + self.count + i]
            if self.all[unsafe_offset=i] != UNTOUCHED or behind != UNTOUCHED:
                raise Error(t"{what} wrote outside its result")
        for i in range(self.count):
            if self.data()[unsafe_offset=i] != wanted[i]:
                raise Error(
                    t"{what}: element {i} is {self.data()[unsafe_offset=i]},"
                    t" not {wanted[i]}"
                )


@fieldwise_init
struct Report(Movable):
    """Two words of a record, and the one that says that there is a report."""

    var words: Ptr[DType.int64]

    def __init__(out self):
        self.words = rebind[Ptr[DType.int64]](unsafe_alloc[Int64](3))
        self.clear()

    def clear(self):
        for i in range(3):
            self.words[unsafe_offset=i] = 0

    def bounds(self) -> Bounds:
        return Bounds(Int(self.words), Int(self.words.unsafe_offset(2)))

    def check(self, what: String, size: Int, given: List[Int64]) raises:
        """That one of the indices outside was reported, or none without any."""
        var index = self.words[unsafe_offset=1]
        var outside = 0
        var is_given = False
        for each in given:
            if each < 0 or each >= Int64(size):
                outside += 1
                is_given = is_given or each == index
        var told = self.words[unsafe_offset=0] == Int64(size) + 1 and is_given
        var found = self.words[unsafe_offset=2] == 1
        var silent = self.words[unsafe_offset=0] == 0 and not found
        if not (silent if outside == 0 else told and found):
            raise Error(
                t"{what}: of {outside} outside {size} was reported {index}"
            )
        self.clear()


def _filled(values: List[Float32]) -> Ptr[E]:
    var data = rebind[Ptr[E]](unsafe_alloc[Float32](len(values) + 1))
    for i in range(len(values)):
        data[unsafe_offset=i] = values[i]
    return data


def _indices(values: List[Int64]) -> Ptr[DType.int64]:
    var data = rebind[Ptr[DType.int64]](unsafe_alloc[Int64](len(values) + 1))
    for i in range(len(values)):
        data[unsafe_offset=i] = values[i]
    return data


def _nearest(index: Int64, size: Int) -> Int:
    return Int(max(Int64(0), min(index, Int64(size) - 1)))


def _check(argument: String) raises -> Int:
    var n = List[Int]()
    for word in argument.split(" "):
        n.append(Int(word))
    var outer = n[0]
    var places = n[1]
    var count = n[2]
    var inner = n[3]
    var state = 12345 + n[1] * 7 + n[2] + n[4]

    def random(below: Int) {mut state} -> Int:
        state = (state * 1103515245 + 12345) % (1 << 31)
        return (state >> 8) % below

    var strange = [
        Int64(-1),
        Int64(places),
        Int64(1) << 40,
        -(Int64(1) << 62),
        Int64(places) + 3,
    ]

    def drawn(length: Int) {mut} -> List[Int64]:
        var found = List[Int64]()
        for _ in range(length):
            if n[4] > 0 and random(n[4]) == 0:
                found.append(strange[random(len(strange))])
            else:
                found.append(Int64(random(places)))
        return found^

    def numbers(length: Int) {mut} -> List[Float32]:
        var found = List[Float32]()
        for _ in range(length):
            found.append(Float32(random(9) - 4))
        return found^

    var report = Report()
    var xs = numbers(outer * places * inner)
    var sources = numbers(outer * count * inner)
    var each = drawn(outer * count * inner)
    var one_list = drawn(count)
    var x = _filled(xs)
    var source = _filled(sources)
    var index = _indices(each)
    var listed = _indices(one_list)
    var total = outer * count * inner
    var rows = Rows(outer, places, count, inner, False)

    # Every thread of whole blocks, as a GPU has them.
    var threads = total + 37
    var wanted = List[Float32]()
    for i in range(total):
        var o = i // inner // count
        var place = _nearest(each[i], places)
        wanted.append(xs[(o * places + place) * inner + i % inner])
    var y = Guarded(total)
    for thread in range(threads):
        gather_element[E](
            y.data(),
            x,
            index,
            Int64(total),
            Int64(places),
            Divisor(count),
            Divisor(inner),
            report.bounds(),
            thread,
        )
    y.check("gather_element", wanted)
    report.check("gather_element", places, each)

    for i in range(total):
        var o = i // inner // count
        var place = _nearest(one_list[i // inner % count], places)
        wanted[i] = xs[(o * places + place) * inner + i % inner]
    y = Guarded(total)
    for thread in range(threads):
        gather_row_part[E, 1](
            y.data(),
            x,
            listed,
            Int64(total),
            Int64(places),
            Divisor(count),
            Divisor(inner),
            report.bounds(),
            thread,
        )
    y.check("gather_row_part", wanted)
    report.check("gather_row_part", places, one_list)

    var sums = xs.copy()
    var last = xs.copy()
    for i in range(total):
        if each[i] >= 0 and each[i] < Int64(places):
            var o = i // inner // count
            var to = (o * places + Int(each[i])) * inner + i % inner
            sums[to] += sources[i]
            last[to] = sources[i]
            if (
                flat_place(
                    index,
                    Int64(places),
                    Divisor(count),
                    Divisor(inner),
                    report.bounds(),
                    i,
                )
                != to
            ):
                raise Error(t"flat_place of {i} is not {to}")
    report.check("flat_place of those inside", places, List[Int64]())
    for i in range(total):
        _ = flat_place(
            index,
            Int64(places),
            Divisor(count),
            Divisor(inner),
            report.bounds(),
            i,
        )
    report.check("flat_place", places, each)

    comptime for accumulate in [False, True]:
        var written = Guarded(len(xs))
        for i in range(len(xs)):
            written.data()[unsafe_offset=i] = xs[i]
        # Elements are put by as many threads only where a column has one.
        if accumulate or count == 1:
            var groups = ceildiv(count, TOGETHER)
            var threads = outer * inner * groups
            for thread in range(threads + 37):
                scatter_unordered[E, accumulate, by_rows=False, width=1](
                    written.data(),
                    index,
                    source,
                    Int64(places),
                    Int64(count),
                    Divisor(groups),
                    Divisor(inner),
                    Int64(threads),
                    report.bounds(),
                    thread,
                )
            written.check("scatter_unordered", sums if accumulate else last)
            report.check("scatter_unordered", places, each)
        written = Guarded(len(xs))
        for column in range(outer * inner + 37):
            scatter_column[E, accumulate](
                written.data(),
                x,
                index,
                source,
                rows,
                column,
                report.bounds(),
            )
        written.check("scatter_column", sums if accumulate else last)
        report.check("scatter_column", places, each)
        # Nobody reads reports: there are none.
        for column in range(outer * inner):
            scatter_column[E, accumulate](
                written.data(), x, index, source, rows, column, Bounds(0, 0)
            )
        written.check("scatter_column", sums if accumulate else last)

    sums = xs.copy()
    for i in range(total):
        var place = one_list[i // inner % count]
        if place >= 0 and place < Int64(places):
            var o = i // inner // count
            sums[(o * places + Int(place)) * inner + i % inner] += sources[i]
    comptime for width in [1, VECTOR]:
        if inner % width == 0:
            var written = Guarded(len(xs))
            for i in range(len(xs)):
                written.data()[unsafe_offset=i] = xs[i]
            var groups = ceildiv(count, TOGETHER)
            var threads = outer * inner // width * groups
            for thread in range(threads + 37):
                scatter_unordered[E, True, by_rows=True, width=width](
                    written.data(),
                    listed,
                    source,
                    Int64(places),
                    Int64(count),
                    Divisor(groups),
                    Divisor(inner // width),
                    Int64(threads),
                    report.bounds(),
                    thread,
                )
            written.check("scatter_unordered, by rows", sums)
            report.check("scatter_unordered, by rows", places, one_list)

    for thread in range(256):
        check_share(
            index,
            Int64(total),
            Int64(places),
            IGNORED,
            report.bounds(),
            thread,
            256,
        )
    report.check("check_share", places, each)
    var ignored = List[Int64]()
    for _ in range(3):
        ignored.append(IGNORED)
    check_share(
        _indices(ignored), 3, Int64(places), IGNORED, report.bounds(), 0, 1
    )
    report.check("check_share of ignored ones", places, List[Int64]())

    var outside = 0
    for value in each:
        outside += Int(value < 0 or value >= Int64(places))
    return outside


def main() raises:
    for i in range(1, len(argv())):
        print(_check(String(argv()[i])))
