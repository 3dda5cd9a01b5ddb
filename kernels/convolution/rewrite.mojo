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
    var p = problem
    if p.taps() == 1 or p.group_c() == 1:
        # Both orders of a filter are one.
        p.taps_inside = False
    return _with_windows_joined[pass_](_with_axes_joined(p))


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
    var joined = p
    if p.d == 1:
        return joined
    if p.t == 1 and p.stride_d == 1 and p.pad_d == 0 and p.o == p.d:
        # Nothing along D: its planes are images. x [N * D, 1, H, W, C].
        joined.n = p.n * p.d
        joined.d = 1
        joined.o = 1
        joined.dilation_d = 1
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
        joined.d = 1
        joined.h = p.d
        joined.w = p.h * p.w
        joined.t = 1
        joined.r = p.t
        joined.o = 1
        joined.p = p.o
        joined.q = p.p * p.q
        joined.stride_d = 1
        joined.stride_h = p.stride_d
        joined.dilation_d = 1
        joined.dilation_h = p.dilation_d
        joined.dilation_w = 1
        joined.pad_d = 0
        joined.pad_h = p.pad_d
    return joined


def _with_windows_joined[
    pass_: Int
](p: ConvolutionProblem) -> ConvolutionProblem:
    var joined = p
    if p.taps_inside or not joins_windows(p):
        return joined
    # x [N, D, H, Q, S * C], w [K, T, R, 1, S * C].
    joined.c = p.s * p.c
    joined.w = p.q
    joined.s = 1
    joined.stride_w = 1
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
        joined.n = p.n * p.p
        joined.h = p.r
        joined.p = 1
        joined.stride_h = p.r if pass_ == DGRAD else 1
    return joined
