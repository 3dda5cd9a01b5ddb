"""Computes convolutions on a CPU as sm90/aligned.mojo takes them for Hopper's matrix products, in whole numbers.

An argument is a problem: the fields of `ConvolutionProblem` up to the pads, apart by commas. For every way that the problem
can be taken in, and every pass, it is checked that the result is the convolution's, and that nothing outside of the copies
is read. Prints the number of ways.
"""

from std.sys import argv

from kernels.convolution.passes import DGRAD, FPROP, WGRAD
from kernels.convolution.problem import ConvolutionProblem
from kernels.convolution.sm90.aligned import (
    AlignedProblem,
    Recast,
    aligned_problem,
    recast_of,
    takes,
)
from kernels.convolution.sm90.copies import AlignedTensor
from kernels.convolution.sm90.exchanged import (
    can_exchange,
    exchanged,
    exchanged_pass,
)

comptime _LIMIT = 1 << 30
comptime Numbers = List[Int]


def _numbers(count: Int, seed: Int) -> Numbers:
    var result = Numbers(capacity=count)
    var state = seed
    for _ in range(count):
        state = (state * 1103515245 + 12345) % (1 << 31)
        result.append((state >> 8) % 7 - 3)
    return result^


def _product[
    pass_: Int
](
    p: ConvolutionProblem,
    channels: Int,
    image: Int,
    plane: Int,
    row: Int,
    pixel: Int,
    x: Numbers,
    other: Numbers,
) raises -> Numbers:
    """fprop of x, through a view, and w; or wgrad of x and dy."""
    var made = Numbers(
        length=p.y_size() if pass_ == FPROP else p.w_size(), fill=0
    )
    for at in range(p.output_pixels()):
        var j = at % p.q
        var i = at // p.q % p.p
        var l = at // p.q // p.p % p.o
        var n = at // p.q // p.p // p.o
        for tap in range(p.taps()):
            var d = l * p.stride_d - p.pad_d + tap // p.s // p.r * p.dilation_d
            var h = i * p.stride_h - p.pad_h + tap // p.s % p.r * p.dilation_h
            var w = j * p.stride_w - p.pad_w + tap % p.s * p.dilation_w
            if not (0 <= d < p.d and 0 <= h < p.h and 0 <= w < p.w):
                continue
            for c in range(min(channels, p.c)):
                var place = n * image + d * plane + h * row + w * pixel + c
                if place >= len(x):
                    raise Error("a view reads behind its tensor")
                for k in range(p.k):
                    var y = at * p.k + k
                    var filter = (k * p.taps() + tap) * p.c + c
                    comptime if pass_ == FPROP:
                        made[y] += x[place] * other[filter]
                    else:
                        made[filter] += x[place] * other[y]
    return made^


def _plain[
    pass_: Int
](p: ConvolutionProblem, x: Numbers, other: Numbers) raises -> Numbers:
    var plane = p.h * p.w * p.c
    return _product[pass_](p, p.c, p.d * plane, plane, p.w * p.c, p.c, x, other)


def _copied(tensor: AlignedTensor, source: Numbers) -> Numbers:
    var to = tensor.extents
    var given = tensor.given
    var place = tensor.place
    if not tensor.is_made():
        return source.copy()
    var made = Numbers(length=to.size(), fill=0)
    for part in range(place.parts):
        for at in range(given.size()):
            var d = at % given.d
            var b = at // given.d % given.b + place.shift + part * place.step
            var a = at // given.d // given.b + part * given.a
            if b < to.b:
                made[(a * to.b + b) * to.d + d] = source[at]
    return made^


def _back(tensor: AlignedTensor, made: Numbers) raises -> Numbers:
    """The user's tensor of a result, its parts added up."""
    var to = tensor.given
    var given = tensor.extents
    var place = tensor.place
    if len(made) != given.size():
        raise Error("a result has another size")
    var result = Numbers(length=to.size(), fill=0)
    for at in range(to.size()):
        var d = at % to.d
        var b = at // to.d % to.b
        var a = at // to.d // to.b
        for part in range(place.parts):
            var row = part * to.a + a
            var column = b + part * place.step
            result[at] += made[(row * given.b + column) * given.d + d]
    return result^


def _taken[
    dtype: DType, pass_: Int
](
    p: ConvolutionProblem, recast: Recast, x: Numbers, other: Numbers
) raises -> Numbers:
    var aligned = aligned_problem[dtype, pass_](p, recast)
    var view = aligned.view
    var copy = _copied(aligned.x, x)
    if aligned.x.is_made() and len(copy) != p.n * view.image:
        raise Error("a view has another size than its tensor")
    if aligned.problem.n != p.n:
        raise Error("a block has pixels of two images")
    comptime if pass_ == FPROP:
        var made = _product[FPROP](
            aligned.problem,
            view.channels,
            view.image,
            view.plane,
            view.row,
            view.pixel,
            copy,
            _copied(aligned.w, other),
        )
        return _back(aligned.y, made)
    else:
        var made = _product[WGRAD](
            aligned.problem,
            view.channels,
            view.image,
            view.plane,
            view.row,
            view.pixel,
            copy,
            _copied(aligned.y, other),
        )
        return _back(aligned.w, made)


def _reversed(p: ConvolutionProblem, w: Numbers) -> Numbers:
    """w [K, taps, C] as [C, taps, K], with the last tap first."""
    var made = Numbers(length=len(w), fill=0)
    for at in range(len(w)):
        var c = at % p.c
        var tap = at // p.c % p.taps()
        var k = at // p.c // p.taps()
        made[(c * p.taps() + p.taps() - 1 - tap) * p.k + k] = w[at]
    return made^


def _data_gradient(p: ConvolutionProblem, dy: Numbers, w: Numbers) -> Numbers:
    var made = Numbers(length=p.x_size(), fill=0)
    for at in range(p.output_pixels()):
        var j = at % p.q
        var i = at // p.q % p.p
        var l = at // p.q // p.p % p.o
        var n = at // p.q // p.p // p.o
        for tap in range(p.taps()):
            var d = l * p.stride_d - p.pad_d + tap // p.s // p.r * p.dilation_d
            var h = i * p.stride_h - p.pad_h + tap // p.s % p.r * p.dilation_h
            var x = j * p.stride_w - p.pad_w + tap % p.s * p.dilation_w
            if 0 <= d < p.d and 0 <= h < p.h and 0 <= x < p.w:
                var pixel = ((n * p.d + d) * p.h + h) * p.w + x
                for k in range(p.k):
                    for c in range(p.c):
                        made[pixel * p.c + c] += (
                            dy[at * p.k + k] * w[(k * p.taps() + tap) * p.c + c]
                        )
    return made^


def _check(
    found: Numbers, wanted: Numbers, recast: Recast, name: String
) raises:
    if found != wanted:
        raise Error(
            t"{name}: block {recast.block}, folds {recast.folds}, exchanges"
            t" {recast.exchanges}"
        )


def _walk[dtype: DType](p: ConvolutionProblem) raises -> Int:
    var x = _numbers(p.x_size(), 1)
    var w = _numbers(p.w_size(), 2)
    var dy = _numbers(p.y_size(), 3)
    var y = _plain[FPROP](p, x, w)
    var dw = _plain[WGRAD](p, x, dy)
    var dx = _data_gradient(p, dy, w)
    var ways = List[Recast]()
    ways.append(recast_of[dtype, FPROP](p))
    ways.append(recast_of[dtype, DGRAD](p))
    ways.append(recast_of[dtype, WGRAD](p))
    for block in range(1, 9):
        ways.append(Recast(block, False, False))
        ways.append(Recast(block, True, False))
    for recast in ways:
        if not recast.exchanges and takes[dtype, FPROP](p, recast):
            _check(_taken[dtype, FPROP](p, recast, x, w), y, recast, "fprop")
            _check(_taken[dtype, WGRAD](p, recast, x, dy), dw, recast, "wgrad")
    if not can_exchange(p):
        return len(ways)
    var other = exchanged(p)
    for recast in ways:
        if takes[dtype, FPROP](other, recast):
            _check(
                _taken[dtype, FPROP](other, recast, dy, _reversed(p, w)),
                dx,
                recast,
                "dgrad",
            )
            var made = _taken[dtype, WGRAD](other, recast, dy, x)
            _check(_reversed(other, made), dw, recast, "exchanged wgrad")
    return len(ways)


def main() raises:
    var arguments = argv()
    for i in range(1, len(arguments)):
        var f = List[Int]()
        for word in arguments[i].split(","):
            f.append(Int(word))
        var p = ConvolutionProblem(
            n=f[0],
            c=f[1],
            k=f[2],
            groups=f[3],
            d=f[4],
            h=f[5],
            w=f[6],
            t=f[7],
            r=f[8],
            s=f[9],
            o=f[10],
            p=f[11],
            q=f[12],
            stride_d=f[13],
            stride_h=f[14],
            stride_w=f[15],
            dilation_d=f[16],
            dilation_h=f[17],
            dilation_w=f[18],
            pad_d=f[19],
            pad_h=f[20],
            pad_w=f[21],
            workspace_limit=_LIMIT,
            allow_tf32=True,
            taps_inside=False,
        )
        _ = _walk[DType.float32](p)
        print(_walk[DType.bfloat16](p))
