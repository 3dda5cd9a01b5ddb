"""Rewrites of a convolution as one over the same memory with fewer axes or taps, where there is one.

A convolution over three axes that does nothing along one of them is one over two: R(2+1)D's and S3D's are all of that
kind. Where the window is as wide as the stride and nothing is padded, a window's row of taps is one run of memory, and
no two windows share a pixel: the taps of a row are channels. Where windows do not overlap along H either, each row of
windows is an image of its own. Patch embeddings are such convolutions, and so are transposed convolutions that double
an image.
"""

from .passes import DGRAD
from .problem import ConvolutionProblem


def rewritten[pass_: Int](problem: ConvolutionProblem) -> ConvolutionProblem:
    """Returns the problem that the kernels run instead; the tensors' elements stay where they are.
    """
    var g = problem
    if g.taps() == 1 or g.group_c() == 1:
        # Both orders of a filter are one.
        g.taps_inside = False
    return _with_windows_joined[pass_](_with_axes_joined(g))


def is_channels_last_better(problem: ConvolutionProblem) -> Bool:
    """Returns whether windows could be joined if the filter's channels lay inside.
    """
    return (
        problem.taps_inside
        and problem.taps() > 1
        and problem.group_c() > 1
        and joins_windows(_with_axes_joined(problem))
    )


def joins_windows(p: ConvolutionProblem) -> Bool:
    """Returns whether a row of taps is one run of memory, but for the filter's order.
    """
    return (
        p.groups == 1
        and p.s > 1
        and p.stride_w == p.s
        and p.dilation_w == 1
        and p.pad_w == 0
        and p.w == p.q * p.s
    )


def _with_axes_joined(p: ConvolutionProblem) -> ConvolutionProblem:
    var g = p
    if p.d == 1:
        return g
    if p.t == 1 and p.stride_d == 1 and p.pad_d == 0 and p.o == p.d:
        # Nothing along D: its planes are images. x [N * D, 1, H, W, C].
        g.n = p.n * p.d
        g.d = 1
        g.o = 1
        g.dilation_d = 1
    elif (
        p.r == 1
        and p.s == 1
        and p.stride_h == 1
        and p.stride_w == 1
        and p.pad_h == 0
        and p.pad_w == 0
        and p.p == p.h
        and p.q == p.w
    ):
        # Nothing along H and W: D takes the place of H. x [N, 1, D, H * W, C], w [K, 1, T, 1, C / G].
        g.d = 1
        g.h = p.d
        g.w = p.h * p.w
        g.t = 1
        g.r = p.t
        g.o = 1
        g.p = p.o
        g.q = p.p * p.q
        g.stride_d = 1
        g.stride_h = p.stride_d
        g.dilation_d = 1
        g.dilation_h = p.dilation_d
        g.dilation_w = 1
        g.pad_d = 0
        g.pad_h = p.pad_d
    return g


def _with_windows_joined[
    pass_: Int
](p: ConvolutionProblem) -> ConvolutionProblem:
    var g = p
    if p.taps_inside or not joins_windows(p):
        return g
    # x [N, D, H, Q, S * C], w [K, T, R, 1, S * C].
    g.c = p.s * p.c
    g.w = p.q
    g.s = 1
    g.stride_w = 1
    if (
        p.d == 1
        and p.t == 1
        and p.o == 1
        and p.pad_d == 0
        and p.stride_h == p.r
        and p.dilation_h == 1
        and p.pad_h == 0
        and p.h == p.p * p.r
    ):
        # x [N * P, 1, R, Q, S * C]. A data gradient's rows of taps stay apart, as phases; in the other passes there is
        # one row of windows, whose stride does not matter.
        g.n = p.n * p.p
        g.h = p.r
        g.p = 1
        g.stride_h = p.r if pass_ == DGRAD else 1
    return g
