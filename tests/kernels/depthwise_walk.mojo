"""Runs the depthwise kernels of tensor cores on a CPU: their own loads, tables and stores, thread after thread, and between
them what the instructions do with the places that the lanes name.

An argument is a problem as hopper_walk has it. Results are compared with the plain kernels', bit by bit: elements are small whole
numbers. Prints the number of elements, or 0 where the kernels do not take the problem.
"""

from std.memory import bitcast
from std.memory.alloc import unsafe_alloc
from std.sys import argv

from max.gpu.memory import AddressSpace

from kernels.common.pointer import Ptr
from kernels.convolution.analytic import (
    dgrad_element,
    fprop_element,
    wgrad_element,
)
from kernels.convolution.gather import PhaseAxis
from kernels.convolution.gpu.band import (
    CHANNELS,
    DEPTH,
    LINES,
    OCTETS,
    THREADS,
    Band,
    axes_of_rows,
    band_of,
    band_word,
    choose_tiling,
    fill_tables,
)
from kernels.convolution.gpu.depthwise_band import (
    DepthwiseBand,
    Sum,
    keep_sums,
    store_tile,
    sum_plainly,
)
from kernels.convolution.gpu import depthwise_band_wgrad as wgrad
from kernels.convolution.gpu.depthwise_band_wgrad import (
    BandWgrad,
    add_plainly,
    DepthwiseBandWgrad,
    choose_wgrad_band,
    diagonal,
    rows_in_use,
)
from kernels.convolution.gpu.planes import (
    PIECE,
    Corner,
    WordPtr,
    load_planes,
    place,
)
from kernels.convolution.epilogue_callback import NO_EPILOGUE
from kernels.convolution.kernel import ConvolutionTensors
from kernels.convolution.passes import DGRAD, FPROP, WGRAD
from kernels.convolution.problem import ConvolutionProblem

comptime E = DType.bfloat16
comptime Memory = WordPtr[AddressSpace.GENERIC]


def _element(words: Memory, word: Int, index: Int) -> Float32:
    """Element `index` from a word on."""
    var pair = bitcast[E, 2](words[unsafe_offset=word + index // 2])
    return pair[index % 2].cast[DType.float32]()


def _sum_channel[
    tiles: Int
](
    plane: Memory,
    table: Memory,
    octet: Int32,
    band: Band,
    axis: PhaseAxis,
    u: Int32,
) -> List[Float32]:
    """[tile][row][column] of the products that the kernel's lanes make."""
    var sums = List[Float32](length=tiles * LINES * PIECE, fill=0)
    for j in range(axis.taps):
        var tap = axis.first_tap + j * axis.tap_step
        var filter = table.unsafe_offset(tap * Int(band.columns.span))
        for step in range(Int(band.columns.steps)):
            var right = List[Float32](length=DEPTH * PIECE, fill=0)
            for lane in range(32):
                for half in range(2):
                    var k = lane % 4 * 2 + 8 * half
                    var pair = bitcast[E, 2](
                        band_word(
                            filter,
                            band.columns,
                            Int32(k + step * DEPTH),
                            Int32(lane // 4) + PIECE * u,
                        )
                    )
                    for e in range(2):
                        right[(k + e) * PIECE + lane // 4] = pair[e].cast[
                            DType.float32
                        ]()
            for i in range(tiles):
                for row in range(LINES):
                    var first = (
                        (
                            band.source_row(axis, Int32(row))
                            + Int32(j * axis.offset_step)
                        )
                        * band.planes.pitch
                        + Int32(2 * step)
                        + Int32(i)
                    )
                    for k in range(DEPTH):
                        var piece = first + Int32(k // PIECE)
                        var value = _element(
                            plane,
                            Int(4 * place[OCTETS](piece, octet)),
                            k % PIECE,
                        )
                        for n in range(PIECE):
                            sums[(i * LINES + row) * PIECE + n] += (
                                value * right[k * PIECE + n]
                            )
    return sums^


def _run[
    vector: Int, tiles: Int, plain: Bool
](result: Ptr[E], source: Ptr[E], w: Ptr[E], band: Band) raises:
    var words = band.shared_bytes() // 4
    var shared: Memory = unsafe_alloc[UInt32](words, alignment=128)
    var out = shared.unsafe_offset(Int(band.out_base))
    var tables = shared.unsafe_offset(Int(band.table_base))
    for block in range((Int(band.planes.channels) + CHANNELS - 1) // CHANNELS):
        var first_channel = Int32(block * CHANNELS)
        # What nobody writes is no number.
        for i in range(words):
            shared[unsafe_offset=i] = 0x7FFF7FFF
        for thread in range(THREADS):
            if fill_tables[E](tables, w, band, first_channel, Int32(thread)):
                raise Error("a filter's element is not finite")
        for unit in range(Int(band.units)):
            var column_tile = Int32(unit) % band.column_tiles
            var line_tile = Int32(unit) // band.column_tiles % band.line_tiles
            var group = Int32(unit) // band.column_tiles // band.line_tiles
            var first = line_tile * band.lines
            for thread in range(THREADS):
                if load_planes[E, vector, OCTETS, THREADS](
                    shared,
                    source,
                    band.planes,
                    Corner(
                        group * band.images,
                        first * Int32(band.rows.same.step) + band.lowest_row,
                        band.columns.first + column_tile * Int32(tiles * PIECE),
                        first_channel,
                    ),
                    Int32(thread),
                ):
                    raise Error("an element is not finite")
            var corner = Corner(
                group * band.images,
                first,
                column_tile * Int32(tiles * PIECE) * band.columns.period,
                first_channel,
            )
            for residue in range(band.rows.residues):
                var axis = band.rows.axis(residue)
                comptime if plain:
                    for thread in range(THREADS):
                        sum_plainly[E, tiles](
                            result,
                            source,
                            w,
                            band,
                            axis,
                            corner,
                            Int32(thread),
                        )
                    continue
                _multiply[tiles](shared, out, tables, band, axis, first_channel)
                for thread in range(THREADS):
                    store_tile[E, vector, tiles](
                        result, out, band, axis, corner, Int32(thread)
                    )
    shared.unsafe_free()


def _multiply[
    tiles: Int
](
    shared: Memory,
    results: Memory,
    tables: Memory,
    band: Band,
    axis: PhaseAxis,
    first_channel: Int32,
):
    for channel in range(
        min(Int32(CHANNELS), band.planes.channels - first_channel)
    ):
        var octet = channel // PIECE
        for u in range(band.columns.period):
            var sums = _sum_channel[tiles](
                shared.unsafe_offset(Int(4 * channel * band.planes.size)),
                tables.unsafe_offset(
                    Int(channel * band.filter_rows * band.columns.span)
                ),
                octet,
                band,
                axis,
                u,
            )
            for lane in range(32):
                var mine = Array[Sum, tiles](fill=0)
                for i in range(tiles):
                    for e in range(4):
                        var row = lane // 4 + e // 2 * 8
                        var n = lane % 4 * 2 + e % 2
                        mine[i][e] = sums[(i * LINES + row) * PIECE + n]
                keep_sums[E, tiles](
                    results.unsafe_offset(Int(4 * channel * band.out_size)),
                    octet,
                    band,
                    u,
                    Int32(lane),
                    mine,
                )


def _filled(count: Int, seed: Int) -> Ptr[E]:
    var data: Ptr[E] = unsafe_alloc[Scalar[E]](max(1, count), alignment=64)
    var state = UInt32(seed)
    for i in range(count):
        state = state * 1664525 + 1013904223
        data[unsafe_offset=i] = (Int32(state >> 16) % 5 - 2).cast[E]()
    return data


def _compare[
    plain: Bool
](p: ConvolutionProblem, forward: Bool, enough: Int) raises -> Int:
    var size = p.y_size() if forward else p.x_size()
    var source = _filled(p.x_size() if forward else p.y_size(), 1)
    var w = _filled(p.w_size(), 2)
    var result = _filled(size, 3)
    var axes = axes_of_rows(p, forward)
    var tiling = choose_tiling(p, forward, axes, enough)
    var band = band_of(p, forward, axes, tiling)
    for i in range(size):
        result[unsafe_offset=i] = 77
    comptime for tiles in [1, 2, 4]:
        if tiling.tiles == tiles:
            if p.c % PIECE == 0:
                _run[PIECE, tiles, plain](result, source, w, band)
            else:
                _run[2, tiles, plain](result, source, w, band)
    for i in range(size):
        var expected = fprop_element[E](
            source, w, p, i
        ) if forward else dgrad_element[E](source, w, p, i)
        if result[unsafe_offset=i] != expected:
            raise Error(
                t"element {i} is {result[unsafe_offset=i]}, not {expected}; {p}"
            )
    source.unsafe_free()
    w.unsafe_free()
    result.unsafe_free()
    return size


def _add_unit(
    matrices: MutPointer[Float32, MutUntrackedOrigin],
    x_plane: Memory,
    dy_plane: Memory,
    octet: Int32,
    band: BandWgrad,
):
    """Adds one channel's products to [tap row][16][8]."""
    for i in range(band.dy.pieces):
        for row in range(0, LINES, 2):
            for n in range(PIECE):
                var pair = SIMD[E, 2](0)
                for e in range(2):
                    var at = (
                        min(Int32(row + e), band.dy.rows - 1) * band.dy.pitch
                        + i
                    )
                    pair[e] = _element(
                        dy_plane, Int(4 * place[wgrad.OCTETS](at, octet)), n
                    ).cast[E]()
                pair = bitcast[E, 2](
                    rows_in_use(
                        bitcast[DType.uint32, 1](pair),
                        Int32(row),
                        band.dy.rows,
                    )
                )
                for e in range(2):
                    for r in range(Int(band.filter_rows)):
                        var first = (
                            band.x_row(Int32(row + e))
                            + Int32(r) * band.dilation_h
                        ) * band.x.pitch + i
                        for k in range(LINES):
                            var value = _element(
                                x_plane,
                                Int(
                                    4
                                    * place[wgrad.OCTETS](
                                        first + Int32(k // PIECE), octet
                                    )
                                ),
                                k % PIECE,
                            )
                            matrices[
                                unsafe_offset=(r * LINES + k) * PIECE + n
                            ] += (value * pair[e].cast[DType.float32]())


def _weight_gradient[
    vector: Int, plain: Bool
](result: Ptr[E], x: Ptr[E], dy: Ptr[E], band: BandWgrad) raises:
    var words = band.shared_bytes() // 4
    var shared: Memory = unsafe_alloc[UInt32](words, alignment=128)
    var dy_planes = shared.unsafe_offset(band.dy_base())
    var plain_sums = shared.unsafe_offset(band.sums_base()).unsafe_bitcast[
        Float32
    ]()
    var rows = Int(band.filter_rows)
    var size = rows * LINES * PIECE
    var matrices = unsafe_alloc[Float32](wgrad.CHANNELS * size)
    for block in range(
        (Int(band.x.channels) + wgrad.CHANNELS - 1) // wgrad.CHANNELS
    ):
        var first_channel = Int32(block * wgrad.CHANNELS)
        var channels = min(
            Int32(wgrad.CHANNELS), band.x.channels - first_channel
        )
        for i in range(words):
            shared[unsafe_offset=i] = 0x7FFF7FFF
        for i in range(Int(band.sum_count())):
            plain_sums[unsafe_offset=i] = 0
        for i in range(wgrad.CHANNELS * size):
            matrices[unsafe_offset=i] = 0
        for unit in range(band.units):
            var corners = band.corners(unit, first_channel)
            for thread in range(Int32(THREADS)):
                comptime if plain:
                    add_plainly[E](plain_sums, x, dy, band, corners[1], thread)
                    continue
                var met = load_planes[E, vector, wgrad.OCTETS, THREADS](
                    shared, x, band.x, corners[0], thread
                )
                met |= load_planes[E, vector, wgrad.OCTETS, THREADS](
                    dy_planes, dy, band.dy, corners[1], thread
                )
                if met:
                    raise Error("an element is not finite")
            comptime if not plain:
                for channel in range(channels):
                    _add_unit(
                        matrices.unsafe_offset(Int(channel) * size),
                        shared.unsafe_offset(Int(4 * channel * band.x.size)),
                        dy_planes.unsafe_offset(
                            Int(4 * channel * band.dy.size)
                        ),
                        channel // PIECE,
                        band,
                    )
        for channel in range(channels):
            for tap in range(band.filter_rows * band.taps):
                var matrix = matrices.unsafe_offset(
                    Int(channel) * size + Int(tap // band.taps) * LINES * PIECE
                )
                var total = (
                    diagonal(matrix, tap % band.taps * band.dilation_w)
                    + plain_sums[
                        unsafe_offset=Int(tap * wgrad.CHANNELS + channel)
                    ]
                )
                result[
                    unsafe_offset=Int(
                        (first_channel + channel) * band.filter_rows * band.taps
                        + tap
                    )
                ] = total.cast[E]()
    matrices.unsafe_free()
    shared.unsafe_free()


def _compare_wgrad[
    plain: Bool
](p: ConvolutionProblem, enough: Int) raises -> Int:
    var x = _filled(p.x_size(), 1)
    var dy = _filled(p.y_size(), 2)
    var result = _filled(p.w_size(), 3)
    var band = choose_wgrad_band(p, enough)
    for i in range(p.w_size()):
        result[unsafe_offset=i] = 77
    if p.c % PIECE == 0:
        _weight_gradient[PIECE, plain](result, x, dy, band)
    else:
        _weight_gradient[2, plain](result, x, dy, band)
    for i in range(p.w_size()):
        var expected = wgrad_element[E](x, dy, p, i)
        if result[unsafe_offset=i] != expected:
            raise Error(
                t"element {i} is {result[unsafe_offset=i]}, not {expected}; {p}"
            )
    x.unsafe_free()
    dy.unsafe_free()
    result.unsafe_free()
    return p.w_size()


def main() raises:
    var arguments = argv()
    var aligned = _filled(1, 0)
    var tensors = ConvolutionTensors(aligned, aligned, aligned, NO_EPILOGUE)
    for a in range(1, len(arguments)):
        var n = List[Int]()
        for word in String(arguments[a]).split(","):
            n.append(Int(String(word)))
        var problem = ConvolutionProblem(
            n=n[1],
            c=n[2],
            k=n[3],
            groups=n[4],
            d=n[5],
            h=n[6],
            w=n[7],
            t=n[8],
            r=n[9],
            s=n[10],
            o=n[11],
            p=n[12],
            q=n[13],
            stride_d=n[14],
            stride_h=n[15],
            stride_w=n[16],
            dilation_d=n[17],
            dilation_h=n[18],
            dilation_w=n[19],
            pad_d=n[20],
            pad_h=n[21],
            pad_w=n[22],
            workspace_limit=0,
            allow_tf32=False,
            taps_inside=False,
        )
        if n[0] == 2:
            if DepthwiseBandWgrad.refusal[E, WGRAD](tensors, problem):
                print(0)
                continue
            var count = _compare_wgrad[False](problem, 1)
            _ = _compare_wgrad[False](problem, 1 << 30)
            _ = _compare_wgrad[True](problem, 1)
            print(count)
            continue
        var forward = n[0] == 0
        var reason = DepthwiseBand.refusal[E, FPROP](
            tensors, problem
        ) if forward else DepthwiseBand.refusal[E, DGRAD](tensors, problem)
        if reason:
            print(0)
            continue
        # Large tiles, and small ones.
        var count = _compare[False](problem, forward, 1)
        _ = _compare[False](problem, forward, 1 << 30)
        _ = _compare[True](problem, forward, 1)
        print(count)
