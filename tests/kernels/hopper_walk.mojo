"""Walks launches of the Hopper convolutions on a CPU as their kernels do, over the pixels that tensor maps would give.

An argument is a problem: the pass (0 forward, 1 data gradient; 2 and 3 with groups as phases) and the fields of `ConvolutionProblem` up to the pads, apart by commas. Of every problem it is
checked that each (pixel of the result, tap, pixel of the source) that belongs together comes once and that nothing else
comes; of every tile shape that its tiles cover the result once, and that the parts of a split reduction go through all of
its stages. Prints the number of phases, or 0 where tensor maps cannot encode the problem.
"""

from std.math import ceildiv
from std.sys import argv
from std.utils.index import IndexList

from kernels.convolution.passes import DGRAD, FPROP
from kernels.convolution.problem import ConvolutionProblem
from kernels.convolution.sm90 import plan as fields
from kernels.convolution.sm90.grouped import (
    group_phases,
    problem_of_group,
    set_group_phase,
)
from kernels.convolution.sm90.plan import (
    Im2colAxis,
    Im2colPhase,
    Im2colPlan,
    dgrad_phases,
    fprop_phase,
)
from kernels.convolution.sm90.choice import TILE_256X64_OF_TAPS, TILE_SHAPES
from kernels.convolution.sm90.producer import (
    StageWalk,
    TapWalk,
    locate,
    source_of,
)
from kernels.convolution.sm90.store import is_stored, result_row
from kernels.convolution.sm90.tile import TileShape

comptime _ROOM = 16


def _unpacked(offsets: Int, deep: Bool) -> Tuple[Int, Int, Int]:
    if deep:
        return (offsets >> 10) & 31, (offsets >> 5) & 31, offsets & 31
    return 0, (offsets >> 8) & 255, offsets & 255


def _walk(p: ConvolutionProblem, dgrad: Bool) raises -> Int:
    var deep = p.is_deep()
    var phases = dgrad_phases(p) if dgrad else [fprop_phase(p)]
    for phase in phases:
        if phase.taps() > 0 and not phase.fits_copy_engine(deep):
            return 0
        _check_boxes(p, dgrad, phase)
    var plan = Im2colPlan[_ROOM]()
    plan.set_launch(
        p,
        dgrad=dgrad,
        tiles=1,
        column_tiles=1,
        stage_length=64,
    )
    for i in range(len(phases)):
        plan.set_phase(i, p, phases[i], 0)
    var seen = Dict[Int, Int]()
    var rows = List[Int]()
    for index in range(len(phases)):
        _collect(p, dgrad, plan, index, 0, 1, seen, rows)
    _check_rows(p, dgrad, rows^)
    _compare(p, dgrad, _source_pixels(p, dgrad), seen)
    if len(phases) == 1:
        _walk_shared_taps(p, dgrad, phases[0])
    comptime for i in range(len(TILE_SHAPES)):
        comptime if TILE_SHAPES[i].cluster == 1:
            _check_tiles[TILE_SHAPES[i]](p, dgrad, phases)
    return len(phases)


def _walk_shared_taps(
    p: ConvolutionProblem, dgrad: Bool, phase: Im2colPhase
) raises:
    """The same where stages serve all taps along W."""
    comptime shape = TILE_SHAPES[TILE_256X64_OF_TAPS]
    var wider = phase.sharing_taps(p, 1 if dgrad else p.stride_w)
    if not wider:
        return
    _check_boxes(p, dgrad, wider.value())
    var plan = Im2colPlan[1]()
    plan.set_launch(p, dgrad=dgrad, tiles=1, column_tiles=1, stage_length=64)
    plan.set_phase(0, p, wider.value(), 0)
    plan.set_shared_taps(phase.w.taps)
    var seen = Dict[Int, Int]()
    var rows = List[Int]()
    _collect[1, shape](p, dgrad, plan, 0, 0, 1, seen, rows)
    _check_rows(p, dgrad, rows^)
    _compare(p, dgrad, _source_pixels(p, dgrad), seen)


def _collect[
    room: Int = _ROOM, shape: TileShape = TILE_SHAPES[0]
](
    p: ConvolutionProblem,
    dgrad: Bool,
    plan: Im2colPlan[room],
    index: Int,
    group: Int,
    groups: Int,
    mut seen: Dict[Int, Int],
    mut rows: List[Int],
) raises:
    """The rows and products of one phase, of one of `groups`, as a tile shape has them.
    """
    var deep = p.is_deep()
    var source_d = p.o if dgrad else p.d
    var source_h = p.p if dgrad else p.h
    var source_w = p.q if dgrad else p.w
    for row in range(Int(plan.phase(index, fields.ROWS))):
        if not is_stored[shape=shape](plan, index, Int32(row)):
            continue
        var place = Int(result_row[shape=shape](plan, index, Int32(row)))
        if place % groups != group:
            raise Error("another group's result")
        var target = place // groups
        rows.append(target)
        var n, l, j, i = plan.pixel(index, Int32(row))
        var walk = TapWalk.first(plan, index)
        for _ in range(Int(plan.taps(index))):
            var d, h, w = _unpacked(Int(walk.offsets), deep)
            d += Int(source_of[fields.AXIS_D](plan, index, l))
            h += Int(source_of[fields.AXIS_H](plan, index, j))
            w += Int(source_of[fields.AXIS_W](plan, index, i))
            var tap = Int(walk.tap) - group * p.k * p.taps()
            for _ in range(max(Int(plan.shared_taps()), 1)):
                # What lies outside arrives as zeros.
                if (
                    0 <= d < source_d
                    and 0 <= h < source_h
                    and 0 <= w < source_w
                ):
                    var pixel = (
                        (Int(n) * source_d + d) * source_h + h
                    ) * source_w + w
                    var key = (target * p.taps() + tap) * _source_pixels(
                        p, dgrad
                    )
                    if key + pixel in seen:
                        raise Error("a product comes twice")
                    seen[key + pixel] = 1
                w += 1
                tap += Int(plan.tap_step(fields.AXIS_W))
            walk.advance(plan, index)


def _walk_groups(p: ConvolutionProblem, dgrad: Bool) raises -> Int:
    """Groups whose phases are one launch's."""
    var own = problem_of_group(p)
    var phases = group_phases[DGRAD](p) if dgrad else group_phases[FPROP](p)
    if len(phases) > _ROOM:
        return 0
    var plan = Im2colPlan[_ROOM]()
    for i in range(len(phases)):
        set_group_phase(plan, i, p, phases[i], 0, p.group_k())
    plan.set_launch(own, dgrad=dgrad, tiles=1, column_tiles=1, stage_length=64)
    plan.set_groups(p.groups)
    for group in range(p.groups):
        var seen = Dict[Int, Int]()
        var rows = List[Int]()
        for i in range(len(phases)):
            if phases[i].group == group:
                _collect(own, dgrad, plan, i, group, p.groups, seen, rows)
        _check_rows(own, dgrad, rows^)
        _compare(own, dgrad, _source_pixels(own, dgrad), seen)
    return len(phases)


def _check_rows(p: ConvolutionProblem, dgrad: Bool, var rows: List[Int]) raises:
    sort(rows)
    for i in range(len(rows)):
        if rows[i] != i:
            raise Error("a pixel of the result comes twice or never")
    if len(rows) != (p.input_pixels() if dgrad else p.output_pixels()):
        raise Error("a pixel of the result is missing")


def _source_pixels(p: ConvolutionProblem, dgrad: Bool) -> Int:
    return p.output_pixels() if dgrad else p.input_pixels()


def _check_tiles[
    shape: TileShape
](p: ConvolutionProblem, dgrad: Bool, phases: List[Im2colPhase]) raises:
    """Tiles cover rows and columns once, and the parts of a split reduction its stages, with all channels of all taps.
    """
    var columns = p.c if dgrad else p.k
    var depth = p.k if dgrad else p.c
    var step = shape.column_step(columns, not dgrad)
    var plan = Im2colPlan[1]()
    var phase = phases[0]
    var rows = p.n * phase.pixels()
    var column_tiles = ceildiv(columns, step)
    var tiles = ceildiv(rows, shape.rows()) * column_tiles
    plan.set_launch(
        p,
        dgrad=dgrad,
        tiles=tiles,
        column_tiles=column_tiles,
        stage_length=64,
        column_step=step,
        short_stages=shape.has_short_stages(1, False),
    )
    plan.set_phase(0, p, phase, 0)
    var covered = List[Int]()
    for tile in range(tiles):
        var at = locate[1, shape, True](plan, Int32(tile), 0)
        var end = min(columns, Int(at.column) + step)
        if Int(at.column) % 8 != 0 or end - Int(at.column) > shape.columns:
            raise Error("a tile's columns do not suit its shape")
        if Int(at.row) >= rows or Int(at.column) >= columns:
            raise Error("a tile is empty")
        for column in range(Int(at.column), end):
            covered.append(Int(at.row) // shape.rows() * columns + column)
    sort(covered)
    for i in range(len(covered)):
        if covered[i] != i:
            raise Error("a column comes twice or never")
    if len(covered) != ceildiv(rows, shape.rows()) * columns:
        raise Error("a column is missing")
    for stride in [1, 4, 6]:
        _check_kept_filter[shape](plan, stride)
    if not shape.may_split(1, False):
        _check_stages[shape](plan, 1, depth)
        return
    for bits in range(4):
        plan.set_parts(1 << bits)
        _check_stages[shape](plan, 1 << bits, depth)


def _check_kept_filter[
    shape: TileShape
](plan: Im2colPlan[1], stride: Int) raises:
    """A slot that keeps its filter is asked for the same columns and the same stage of the reduction in every round.
    """
    var steps = Int(plan.taps(0) * plan.channel_blocks())
    if not shape.keeps_filter(steps, stride, Int(plan.column_tiles())):
        return
    var kept = List[Int](length=shape.stages, fill=-1)
    var count = 0
    for tile in range(0, Int(plan.tiles()), stride):
        var at = locate[1, shape, True](plan, Int32(tile), 0)
        for stage in range(steps):
            var filter = Int(at.column) * steps + stage
            var slot = count % shape.stages
            if kept[slot] not in (-1, filter):
                raise Error("a slot keeps a filter that is not wanted")
            kept[slot] = filter
            count += 1


def _check_stages[
    shape: TileShape
](plan: Im2colPlan[1], parts: Int, depth: Int) raises:
    var whole = StageWalk.first(plan, 0)
    var stages = 0
    var channels = 0
    for part in range(parts):
        var at = locate[1, shape, False](plan, 0, Int32(part))
        if Int(at.first) != stages:
            raise Error("a part begins at another stage than the last one ends")
        var walk = StageWalk.first(plan, 0)
        walk.skip(plan, 0, at.first)
        for _ in range(Int(at.steps)):
            if (
                walk.block != whole.block
                or walk.taps.tap != whole.taps.tap
                or walk.taps.offsets != whole.taps.offsets
            ):
                raise Error("a part has another stage than the whole")
            var width = 32 if walk.is_short(plan) else 64
            channels += min(width, depth - Int(walk.block) * 64)
            walk.advance(plan, 0)
            whole.advance(plan, 0)
        stages += Int(at.steps)
    if channels != Int(plan.taps(0)) * depth:
        raise Error("a channel of a tap is missing")


def _check_boxes(p: ConvolutionProblem, dgrad: Bool, phase: Im2colPhase) raises:
    """The copy engine goes on to the next row where a box ends: boxes are as large as the result's phase.
    """
    var sizes = IndexList[3](p.d, p.h, p.w)
    var steps = IndexList[3](p.stride_d, p.stride_h, p.stride_w)
    if dgrad:
        sizes = IndexList[3](p.o, p.p, p.q)
        steps = IndexList[3](1, 1, 1)
    var axes: Array[Im2colAxis, 3] = [phase.d, phase.h, phase.w]
    for i in range(3):
        if axes[i].taps > 0:
            var last = sizes[i] - 1 + axes[i].upper
            if (last - axes[i].lower) // steps[i] + 1 != axes[i].extent:
                raise Error("a box has another extent than the result")


def _compare(
    p: ConvolutionProblem, dgrad: Bool, source_pixels: Int, seen: Dict[Int, Int]
) raises:
    var count = 0
    for y in range(p.output_pixels()):
        var q = y % p.q
        var line = y // p.q
        var pp = line % p.p
        var plane = line // p.p
        var o = plane % p.o
        var n = plane // p.o
        for tap in range(p.taps()):
            var s = tap % p.s
            var r = tap // p.s % p.r
            var t = tap // p.s // p.r
            var d = o * p.stride_d + t * p.dilation_d - p.pad_d
            var h = pp * p.stride_h + r * p.dilation_h - p.pad_h
            var w = q * p.stride_w + s * p.dilation_w - p.pad_w
            if not (0 <= d < p.d and 0 <= h < p.h and 0 <= w < p.w):
                continue
            var x = ((n * p.d + d) * p.h + h) * p.w + w
            var target = x if dgrad else y
            var source = y if dgrad else x
            count += 1
            if (target * p.taps() + tap) * source_pixels + source not in seen:
                raise Error("a product is missing")
    if count != len(seen):
        raise Error("a product comes that is none")


def main() raises:
    var arguments = argv()
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
        var dgrad = n[0] % 2 == 1
        print(
            _walk_groups(problem, dgrad) if n[0] >= 2 else _walk(problem, dgrad)
        )
