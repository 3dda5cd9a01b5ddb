"""Runs the kernels that scatter rows by a sorted list on a CPU, thread after thread: their own tables and sums.

An argument is "outer places count inner hit zeros length": of how many places the list speaks, one in eight of it outside, and
the length of a piece, 0 for the kernels' own. Rows are small whole numbers, so that sums are exact. Prints the number of
elements of each result.
"""

from std.memory.alloc import unsafe_alloc
from std.sys import argv

from kernels.common.pointer import Ptr
from kernels.indexing.extents import Rows
from kernels.indexing.sorted_rows import (
    SHARES,
    Pieces,
    last_piece,
    put_row,
    sum_parts,
    sum_piece,
)

comptime E = DType.float32
comptime UNWRITTEN = Float32(-1e30)


def _memory[dtype: DType](count: Int, fill: Scalar[dtype]) -> Ptr[dtype]:
    var data = rebind[Ptr[dtype]](unsafe_alloc[Scalar[dtype]](count + 1))
    for i in range(count + 1):
        data[unsafe_offset=i] = fill
    return data


def _check(argument: String) raises -> Int:
    var n = List[Int]()
    for word in argument.split(" "):
        n.append(Int(word))
    var rows = Rows(n[0], n[1], n[2], n[3], n[5] != 0)
    var columns = rows.outer * rows.inner
    var p = Pieces(rows)
    if n[6] > 0:
        p.length = n[6]
    var state = 12345 + n[1] * 7 + n[2]

    def random(below: Int) {mut state} -> Int:
        state = (state * 1103515245 + 12345) % (1 << 31)
        return (state >> 8) % below

    var index = List[Int](capacity=rows.count)
    for _ in range(rows.count):
        var place = random(n[4]) * rows.places // n[4]
        index.append(rows.places if random(8) == 0 else place)
    # Stable: place after place.
    var sorted = _memory[DType.int32](rows.count, 0)
    var sources = _memory[DType.int32](rows.count, 0)
    var filled = 0
    for place in range(rows.places + 1):
        for i in range(rows.count):
            if index[i] == place:
                sorted[unsafe_offset=filled] = Int32(place)
                sources[unsafe_offset=filled] = Int32(i)
                filled += 1
    var size = rows.outer * rows.places * rows.inner
    var x = _memory[E](size, 0)
    var source = _memory[E](rows.count * columns, 0)
    for i in range(size):
        x[unsafe_offset=i] = Float32(random(9))
    for i in range(rows.count * columns):
        source[unsafe_offset=i] = Float32(random(9) - 4)
    var wanted = _memory[E](size, 0)
    var put = _memory[E](size, 0)
    for i in range(size):
        wanted[unsafe_offset=i] = Float32(0) if rows.zeros else x[
            unsafe_offset=i
        ]
        put[unsafe_offset=i] = wanted[unsafe_offset=i]
    for i in range(rows.count):
        if index[i] == rows.places:
            continue
        for o in range(rows.outer):
            for c in range(rows.inner):
                var to = (o * rows.places + index[i]) * rows.inner + c
                var value = source[
                    unsafe_offset=(o * rows.count + i) * rows.inner + c
                ]
                wanted[unsafe_offset=to] += value
                put[unsafe_offset=to] = value

    var y = _memory[E](size, 0)
    var last_wins = _memory[E](size, 0)
    for i in range(size):
        var start = Float32(0) if rows.zeros else x[unsafe_offset=i]
        y[unsafe_offset=i] = start
        last_wins[unsafe_offset=i] = start
    var parts = _memory[E](2 * p.pieces() * columns, UNWRITTEN)
    for thread in range(p.pieces() * p.lanes * p.stretches + 3):
        sum_piece[E](y, parts, sorted, sources, source, p, thread)
    for piece in range(p.pieces() - 1):
        var last = last_piece(sorted, p, piece)
        if last < 0:
            continue
        var place = Int(sorted[unsafe_offset=(piece + 1) * p.length])
        for column in range(columns):
            var to = rows.at(column, place, rows.places)
            var total = Float32(0) if rows.zeros else x[unsafe_offset=to]
            for share in range(SHARES):
                total += sum_parts[E](parts, p, piece, last, column, share)
            y[unsafe_offset=to] = total
    for item in range(rows.count * columns + 3):
        put_row[E](last_wins, sorted, sources, source, rows, item)
    for i in range(size):
        if y[unsafe_offset=i] != wanted[unsafe_offset=i]:
            raise Error(
                t"{argument}: sum {i} is {y[unsafe_offset=i]}, not"
                t" {wanted[unsafe_offset=i]}"
            )
        if last_wins[unsafe_offset=i] != put[unsafe_offset=i]:
            raise Error(t"{argument}: element {i} is another row's")
    return size


def main() raises:
    for i in range(1, len(argv())):
        print(_check(String(argv()[i])))
