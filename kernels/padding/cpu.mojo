"""The gradient of a border on a CPU: the rows that show a row are added as vectors, then what lies beyond its ends.
"""

from ..pooling.cpu.vectors import (
    for_each_share,
    lanes,
    load_part,
    own_lines,
    pointer_inside,
    smallest_share,
    store_part,
)
from ..pooling.problem import Data, accumulator
from .problem import PaddingProblem


@always_inline
def _add[
    dtype: DType, Acc: DType, //
](sums: Data[Acc], source: Data[dtype], length: Int):
    comptime V = lanes[dtype]
    for at in range(0, length, V):
        var total = load_part[V](sums, at, length)
        store_part(
            sums,
            at,
            length,
            total + load_part[V](source, at, length).cast[Acc](),
        )


@no_inline
def border_dgrad_cpu[
    dtype: DType
](dx: Data[dtype], dy: Data[dtype], p: PaddingProblem):
    comptime Acc = accumulator[dtype]
    comptime V = lanes[dtype]
    var length = p.length()
    var channels = Int(p.channels)
    # What dy's rows show of dx's in their order.
    var begin = max(-Int(p.w.low), 0)
    var end = min(Int(p.w.extent), Int(p.w.padded) - Int(p.w.low))

    def share(first: Int, last: Int) {imm}:
        var storage = own_lines[Acc](length + V)
        var sums = pointer_inside(storage)
        for unit in range(first, last):
            var slab = unit // Int(p.h.extent)
            var n = slab // Int(p.d.extent)
            var d = p.d.shown(Int32(slab % Int(p.d.extent)))
            var h = p.h.shown(Int32(unit % Int(p.h.extent)))
            for at in range(0, length, V):
                store_part(sums, at, length, SIMD[Acc, V](0))
            for a in range(d.all()):
                for b in range(h.all()):
                    if d.place(a) < 0 or h.place(b) < 0:
                        continue
                    var row = dy.unsafe_offset(
                        p.padded_row(n, d.place(a), h.place(b))
                    )
                    if end > begin:
                        _add(
                            sums.unsafe_offset(begin * channels),
                            row.unsafe_offset(
                                (begin + Int(p.w.low)) * channels
                            ),
                            (end - begin) * channels,
                        )
                    _add_borders(sums, row, p)
            var result = dx.unsafe_offset(unit * length)
            for at in range(0, length, V):
                store_part(
                    result,
                    at,
                    length,
                    load_part[V](sums, at, length).cast[dtype](),
                )
        _ = storage^

    for_each_share(share, p.rows(), smallest_share(p.rows() * length, p.rows()))


@always_inline
def _add_borders[
    dtype: DType, Acc: DType, //
](sums: Data[Acc], row: Data[dtype], p: PaddingProblem):
    """What a row of dy shows before its first element of dx, and behind its last.
    """
    _add_places(sums, row, p, 0, min(p.w.low, p.w.padded))
    _add_places(sums, row, p, max(p.w.low + p.w.extent, 0), p.w.padded)


@always_inline
def _add_places[
    dtype: DType, Acc: DType, //
](
    sums: Data[Acc],
    row: Data[dtype],
    p: PaddingProblem,
    begin: Int32,
    end: Int32,
):
    """Places begin to end - 1 of a row of dy, which lie in a border."""
    var channels = Int(p.channels)
    var last = p.w.extent - 1
    for place in range(begin, end):
        var i = place - p.w.low
        if p.w.mirrored:
            i = -i if i < 0 else 2 * last - i
        else:
            i = min(max(i, 0), last)
        _add(
            sums.unsafe_offset(Int(i) * channels),
            row.unsafe_offset(Int(place) * channels),
            channels,
        )
