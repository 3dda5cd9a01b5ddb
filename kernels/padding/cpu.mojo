"""Borders on a CPU: rows are copied as vectors, and their ends; of the gradient the rows that show a row are added.
"""

from ..common.pointer import Ptr, accumulation_type
from ..common.vectors import (
    for_each_share,
    lanes,
    load_part,
    own_lines,
    pointer_inside,
    smallest_share,
    store_part,
)
from .problem import PaddingProblem


@always_inline
def _put[
    dtype: DType, result: DType, //, add: Bool
](sums: Ptr[result], source: Ptr[dtype], length: Int):
    """Stores a run, or adds it."""
    comptime V = lanes[dtype]
    for at in range(0, length, V):
        var value = load_part[V](source, at, length).cast[result]()
        comptime if add:
            value += load_part[V](sums, at, length)
        store_part(sums, at, length, value)


@always_inline
def _clear[dtype: DType, //](run: Ptr[dtype], length: Int):
    comptime V = lanes[dtype]
    for at in range(0, length, V):
        store_part(run, at, length, SIMD[dtype, V](0))


@no_inline
def border_dgrad_cpu[
    dtype: DType
](dx: Ptr[dtype], dy: Ptr[dtype], p: PaddingProblem):
    comptime Acc = accumulation_type[dtype]
    var length = p.length()
    var channels = Int(p.channels)
    # What dy's rows show of dx's in their order.
    var begin = max(-Int(p.w.low), 0) * channels
    var end = min(Int(p.w.extent), Int(p.w.padded) - Int(p.w.low)) * channels
    end = max(end, begin)
    var shift = Int(p.w.low) * channels

    def share(first: Int, last: Int) {imm}:
        var storage = own_lines[Acc](length)
        for unit in range(first, last):
            var slab = unit // Int(p.h.extent)
            var n = slab // Int(p.d.extent)
            var d = p.d.shown(Int32(slab % Int(p.d.extent)))
            var h = p.h.shown(Int32(unit % Int(p.h.extent)))
            var result = dx.unsafe_offset(unit * length)
            var sums = pointer_inside(storage)
            comptime if dtype == Acc:
                sums = rebind[Ptr[Acc]](result)
            var some = False
            for a in range(d.all()):
                for b in range(h.all()):
                    if d.place(a) < 0 or h.place(b) < 0:
                        continue
                    var row = dy.unsafe_offset(
                        p.padded_row(n, d.place(a), h.place(b))
                    )
                    var inner = sums.unsafe_offset(begin)
                    if some:
                        _put[True](
                            inner, row.unsafe_offset(begin + shift), end - begin
                        )
                    else:
                        some = True
                        _clear(sums, begin)
                        _put[False](
                            inner, row.unsafe_offset(begin + shift), end - begin
                        )
                        _clear(sums.unsafe_offset(end), length - end)
                    _add_borders(sums, row, p)
            if not some:
                _clear(sums, length)
            comptime if dtype != Acc:
                _put[False](result, sums, length)
        _ = storage^

    for_each_share(share, p.rows(), smallest_share(p.rows() * length, p.rows()))


@no_inline
def border_fprop_cpu[
    dtype: DType
](y: Ptr[dtype], x: Ptr[dtype], p: PaddingProblem):
    var length = p.length()
    var channels = Int(p.channels)
    var padded = p.padded_length()
    var rows = Int(p.batch) * Int(p.d.padded) * Int(p.h.padded)
    var begin = min(max(p.w.low, 0), p.w.padded)
    var end = max(min(p.w.low + p.w.extent, p.w.padded), begin)

    def share(first: Int, last: Int) {imm}:
        for unit in range(first, last):
            var slab = unit // Int(p.h.padded)
            var n = slab // Int(p.d.padded)
            var d = p.d.element(Int32(slab % Int(p.d.padded)))
            var h = p.h.element(Int32(unit % Int(p.h.padded)))
            var row = x.unsafe_offset(
                ((n * Int(p.d.extent) + Int(d)) * Int(p.h.extent) + Int(h))
                * length
            )
            var result = y.unsafe_offset(unit * padded)

            @always_inline
            def copy(first: Int32, last: Int32) {imm}:
                for place in range(first, last):
                    _put[False](
                        result.unsafe_offset(Int(place) * channels),
                        row.unsafe_offset(Int(p.w.element(place)) * channels),
                        channels,
                    )

            copy(0, begin)
            _put[False](
                result.unsafe_offset(Int(begin) * channels),
                row.unsafe_offset(Int(begin - p.w.low) * channels),
                Int(end - begin) * channels,
            )
            copy(end, p.w.padded)

    for_each_share(share, rows, smallest_share(rows * padded, rows))


@always_inline
def _add_borders[
    dtype: DType, Acc: DType, //
](sums: Ptr[Acc], row: Ptr[dtype], p: PaddingProblem):
    """What a row of dy shows before its first element of dx, and behind its last.
    """
    _add_places(sums, row, p, 0, min(p.w.low, p.w.padded))
    _add_places(sums, row, p, max(p.w.low + p.w.extent, 0), p.w.padded)


@always_inline
def _add_places[
    dtype: DType, Acc: DType, //
](
    sums: Ptr[Acc],
    row: Ptr[dtype],
    p: PaddingProblem,
    begin: Int32,
    end: Int32,
):
    """Places begin to end - 1 of a row of dy, which lie in a border."""
    var channels = Int(p.channels)
    for place in range(begin, end):
        _put[True](
            sums.unsafe_offset(Int(p.w.element(place)) * channels),
            row.unsafe_offset(Int(place) * channels),
            channels,
        )
