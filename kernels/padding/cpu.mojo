"""Borders on a CPU: rows are copied as vectors, and their ends; of the gradient the rows that show a row are added.
"""

from ..common.plane_tables import (
    MIN_PLANES,
    MAX_TABLE_ENTRIES,
    OffsetTable,
    take_planes,
)
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

comptime SHORT_ROW = 20
"""Elements of a padded row below which a plane is taken element by element."""
comptime SHORT_GRADIENT = 32
"""The same for a gradient, whose rows are added several at a time."""


@always_inline
def _put[
    dtype: DType, result: DType, //, add: Bool
](sums: Ptr[result], source: Ptr[dtype], length: Int):
    """Stores a run, or adds it."""
    comptime V = lanes[dtype]
    comptime if not add:
        # The last vector ends with the run, and may store again what lies before.
        if length >= V:
            for at in range(0, length - V, V):
                sums.unsafe_store[alignment=1](
                    at,
                    source.unsafe_load[width=V, alignment=1](at).cast[result](),
                )
            sums.unsafe_store[alignment=1](
                length - V,
                source.unsafe_load[width=V, alignment=1](length - V).cast[
                    result
                ](),
            )
            return
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


def _padded_plane(p: PaddingProblem) -> Int:
    return Int(p.d.padded) * Int(p.h.padded) * Int(p.w.padded)


def _plane(p: PaddingProblem) -> Int:
    return Int(p.d.extent) * Int(p.h.extent) * Int(p.w.extent)


def _has_short_rows(p: PaddingProblem, longest: Int) -> Bool:
    """Returns whether there are many planes whose rows are too short for a call of their own.
    """
    return (
        p.channels == 1
        and Int(p.batch) >= MIN_PLANES
        and Int(p.w.padded) < longest
        and _padded_plane(p) <= MAX_TABLE_ENTRIES
    )


def _elements(p: PaddingProblem, vector: Int) -> OffsetTable:
    """Returns for each place of a padded plane the element that it shows."""
    var table = OffsetTable(_padded_plane(p), 1, vector)
    var i = 0
    for d in range(p.d.padded):
        for h in range(p.h.padded):
            var row = p.d.element(d) * p.h.extent + p.h.element(h)
            for w in range(p.w.padded):
                table.offsets[i] = row * p.w.extent + p.w.element(w)
                i += 1
    return table^


@no_inline
def _dgrad_by_table[
    dtype: DType
](dx: Ptr[dtype], dy: Ptr[dtype], p: PaddingProblem):
    comptime Acc = accumulation_type[dtype]
    comptime V = lanes[dtype]
    var table = _elements(p, V)
    var plane = _plane(p)
    var padded = _padded_plane(p)

    def share(first: Int, end: Int) {imm}:
        var storage = own_lines[Acc](plane + V)
        var sums = pointer_inside(storage)
        for n in range(first, end):
            _clear(sums, plane)
            var source = dy.unsafe_offset(n * padded)
            for i in range(padded):
                sums[unsafe_offset=Int(table.offsets[i])] += source[
                    unsafe_offset=i
                ].cast[Acc]()
            _put[False](dx.unsafe_offset(n * plane), sums, plane)
        _ = storage^

    var units = Int(p.batch)
    for_each_share(share, units, smallest_share(units * padded, units))
    _ = table^


@no_inline
def border_dgrad_cpu[
    dtype: DType
](dx: Ptr[dtype], dy: Ptr[dtype], p: PaddingProblem):
    comptime Acc = accumulation_type[dtype]
    if _has_short_rows(p, SHORT_GRADIENT):
        _dgrad_by_table(dx, dy, p)
        return
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
    if _has_short_rows(p, SHORT_ROW):
        var table = _elements(p, lanes[dtype])
        take_planes(y, x, table, _plane(p), Int(p.batch))
        return
    var length = p.length()
    var channels = Int(p.channels)
    var padded = p.padded_length()
    var rows = Int(p.batch) * Int(p.d.padded) * Int(p.h.padded)
    var begin = min(max(p.w.low, 0), p.w.padded)
    var end = max(min(p.w.low + p.w.extent, p.w.padded), begin)
    var elements = List[Int](capacity=Int(p.w.padded))
    for place in range(p.w.padded):
        elements.append(Int(p.w.element(place)))

    def share(first: Int, last: Int) {imm}:
        var shown = elements.unsafe_ptr()
        # Short rows have no time for divisions: one row on for each unit.
        var slab = first // Int(p.h.padded)
        var n = slab // Int(p.d.padded)
        var d_place = Int32(slab % Int(p.d.padded))
        var h_place = Int32(first % Int(p.h.padded)) - 1
        var d = p.d.element(d_place)
        for unit in range(first, last):
            h_place += 1
            if h_place == p.h.padded:
                h_place = 0
                d_place += 1
                if d_place == p.d.padded:
                    d_place = 0
                    n += 1
                d = p.d.element(d_place)
            var h = p.h.element(h_place)
            var row = x.unsafe_offset(
                ((n * Int(p.d.extent) + Int(d)) * Int(p.h.extent) + Int(h))
                * length
            )
            var result = y.unsafe_offset(unit * padded)

            @always_inline
            def copy(first: Int, last: Int) {imm}:
                if channels == 1:
                    for place in range(first, last):
                        result[unsafe_offset=place] = row[
                            unsafe_offset=shown[unsafe_offset=place]
                        ]
                    return
                for place in range(first, last):
                    _put[False](
                        result.unsafe_offset(place * channels),
                        row.unsafe_offset(
                            shown[unsafe_offset=place] * channels
                        ),
                        channels,
                    )

            copy(0, Int(begin))
            _put[False](
                result.unsafe_offset(Int(begin) * channels),
                row.unsafe_offset(Int(begin - p.w.low) * channels),
                Int(end - begin) * channels,
            )
            copy(Int(end), Int(p.w.padded))

    for_each_share(share, rows, smallest_share(rows * padded, rows))
    _ = elements^


@always_inline
def _add_borders[
    dtype: DType, Acc: DType, //
](sums: Ptr[Acc], row: Ptr[dtype], p: PaddingProblem):
    """Adds the places of a row of dy before the first element of dx, and those behind the last one.
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
    """Adds places `begin` to `end` - 1 of a row of dy, which lie in a border.
    """
    var channels = Int(p.channels)
    for place in range(begin, end):
        if channels == 1:
            sums[unsafe_offset=Int(p.w.element(place))] += row[
                unsafe_offset=Int(place)
            ].cast[Acc]()
            continue
        _put[True](
            sums.unsafe_offset(Int(p.w.element(place)) * channels),
            row.unsafe_offset(Int(place) * channels),
            channels,
        )
