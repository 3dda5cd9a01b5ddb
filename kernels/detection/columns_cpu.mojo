"""A deformable convolution's columns and their gradients on a CPU: vectors hold channels."""

from std.math import ceildiv

from ..common.parallel import worker_count
from ..common.vectors import (
    clear_run,
    for_each_share,
    lanes,
    load_part,
    smallest_share,
    store_part,
)
from ..common.pointer import Ptr, accumulation_type
from .deformable import DeformableProblem, DeformedPoint


@no_inline
def columns_cpu[
    dtype: DType, //
](
    columns: Ptr[dtype],
    x: Ptr[dtype],
    offset: Ptr[dtype],
    mask: Ptr[dtype],
    p: DeformableProblem,
):
    """Writes the elements that the windows read as columns."""
    comptime Acc = accumulation_type[dtype]
    comptime V = lanes[dtype]
    var units = Int(p.batch) * p.windows()
    var together = p.together()

    def share(first: Int, last: Int) {imm}:
        for unit in range(first, last):
            var image = x.unsafe_offset(unit // p.windows() * p.image())
            var column = columns.unsafe_offset(unit * p.column())
            for group in range(Int(p.offset_groups)):
                for tap in range(p.taps()):
                    var point = DeformedPoint[Acc](
                        offset, mask, unit, tap, group, p
                    )
                    var begin = group * together
                    while begin < (group + 1) * together:
                        var end = p.run(begin, (group + 1) * together)
                        var to = column.unsafe_offset(p.at(tap, begin))
                        for c in range(begin, end, V):
                            var total = SIMD[Acc, V](0)
                            comptime for k in range(4):
                                if point.pixel[k] >= 0:
                                    total += (
                                        load_part[V](
                                            image.unsafe_offset(
                                                Int(point.pixel[k])
                                                * Int(p.channels)
                                            ),
                                            c,
                                            end,
                                        ).cast[Acc]()
                                        * point.weight[k]
                                    )
                            store_part(
                                to,
                                c - begin,
                                end - begin,
                                (total * point.mask).cast[dtype](),
                            )
                        begin = end

    for_each_share(share, units, smallest_share(units * p.column(), units))


@no_inline
def columns_offset_gradient_cpu[
    dtype: DType, //
](
    doffset: Ptr[dtype],
    dmask: Ptr[dtype],
    dcolumns: Ptr[dtype],
    x: Ptr[dtype],
    offset: Ptr[dtype],
    mask: Ptr[dtype],
    p: DeformableProblem,
):
    """The gradients of offsets and masks."""
    comptime Acc = accumulation_type[dtype]
    comptime V = lanes[dtype]
    var units = Int(p.batch) * p.windows()
    var together = p.together()

    def share(first: Int, last: Int) {imm}:
        for unit in range(first, last):
            var image = x.unsafe_offset(unit // p.windows() * p.image())
            var column = dcolumns.unsafe_offset(unit * p.column())
            for group in range(Int(p.offset_groups)):
                for tap in range(p.taps()):
                    var point = DeformedPoint[Acc](
                        offset, mask, unit, tap, group, p
                    )
                    # For each pixel the sum over channels of the column's gradient times it.
                    var sums = Array[SIMD[Acc, V], 4](fill=SIMD[Acc, V](0))
                    var begin = group * together
                    while begin < (group + 1) * together:
                        var end = p.run(begin, (group + 1) * together)
                        var from_ = column.unsafe_offset(p.at(tap, begin))
                        for c in range(begin, end, V):
                            var given = load_part[V](
                                from_, c - begin, end - begin
                            ).cast[Acc]()
                            comptime for k in range(4):
                                if point.pixel[k] >= 0:
                                    sums[k] += (
                                        load_part[V](
                                            image.unsafe_offset(
                                                Int(point.pixel[k])
                                                * Int(p.channels)
                                            ),
                                            c,
                                            end,
                                        ).cast[Acc]()
                                        * given
                                    )
                        begin = end
                    var down = Scalar[Acc](0)
                    var along = Scalar[Acc](0)
                    var value = Scalar[Acc](0)
                    comptime for k in range(4):
                        var sum = sums[k].reduce_add()
                        down += sum * point.down[k]
                        along += sum * point.along[k]
                        value += sum * point.weight[k]
                    var at = (
                        unit * Int(p.offset_groups) + group
                    ) * p.taps() + tap
                    doffset[unsafe_offset=at * 2] = (down * point.mask).cast[
                        dtype
                    ]()
                    doffset[unsafe_offset=at * 2 + 1] = (
                        along * point.mask
                    ).cast[dtype]()
                    if p.masked:
                        dmask[unsafe_offset=at] = value.cast[dtype]()

    for_each_share(share, units, smallest_share(units * p.column(), units))


@no_inline
def columns_input_gradient_cpu[
    dtype: DType, sums: DType, //
](
    sums_of_image: Ptr[sums],
    dcolumns: Ptr[dtype],
    offset: Ptr[dtype],
    mask: Ptr[dtype],
    p: DeformableProblem,
):
    """Writes the images' gradient: each core adds the windows' contributions to its channels, in their order. The bits
    do not depend on the number of cores."""
    comptime Acc = accumulation_type[dtype]
    comptime V = lanes[dtype]
    var dx = rebind[Ptr[Acc]](sums_of_image)
    var channels = Int(p.channels)
    var together = p.together()
    var wanted = ceildiv(worker_count(), max(Int(p.batch), 1))
    var part = ceildiv(max(ceildiv(channels, wanted), 1), V) * V
    var parts = ceildiv(channels, part)
    var units = Int(p.batch) * parts

    def share(first: Int, last: Int) {imm}:
        for unit in range(first, last):
            var n = unit // parts
            var c_begin = unit % parts * part
            var c_end = min(c_begin + part, channels)
            var image = dx.unsafe_offset(n * p.image())
            for pixel in range(p.pixels()):
                clear_run(
                    image.unsafe_offset(pixel * channels + c_begin),
                    c_end - c_begin,
                )
            for window in range(p.windows()):
                var row = n * p.windows() + window
                var column = dcolumns.unsafe_offset(row * p.column())
                for group in range(
                    c_begin // together, ceildiv(c_end, together)
                ):
                    for tap in range(p.taps()):
                        var point = DeformedPoint[Acc](
                            offset, mask, row, tap, group, p
                        )
                        var begin = max(group * together, c_begin)
                        var last_c = min((group + 1) * together, c_end)
                        while begin < last_c:
                            var end = p.run(begin, last_c)
                            var from_ = column.unsafe_offset(p.at(tap, begin))
                            comptime for k in range(4):
                                if point.pixel[k] >= 0:
                                    var weight = point.weight[k] * point.mask
                                    var run = image.unsafe_offset(
                                        Int(point.pixel[k]) * channels
                                    )
                                    for c in range(begin, end, V):
                                        var sum = load_part[V](run, c, end)
                                        sum += (
                                            load_part[V](
                                                from_, c - begin, end - begin
                                            ).cast[Acc]()
                                            * weight
                                        )
                                        store_part(run, c, end, sum)
                            begin = end

    for_each_share(
        share,
        units,
        smallest_share(Int(p.batch) * p.windows() * p.column(), units),
    )
