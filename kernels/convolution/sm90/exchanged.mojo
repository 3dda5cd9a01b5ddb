"""A convolution of stride 1 as one from y to x: its data gradient is that one's forward pass, and its weight gradient
is that one's, with the taps of the filter in reverse and its two kinds of channels exchanged.

With taps t' = T - 1 - t, and pad' = (T - 1) * dilation - pad along every axis:

    dx[i, c]    = sum over t', k  dy[i - pad' + t' * dilation, k] * w'[c, t', k]
    dw'[c, t', k] = sum over i     dy[i - pad' + t' * dilation, k] * x[i, c]

So the ways in which aligned.mojo takes few channels of x serve few channels of y, too.
"""

from ..passes import FPROP, WGRAD
from ..problem import ConvolutionProblem


def exchanged_pass[pass_: Int]() -> Int:
    """Returns the pass of the exchanged problem that computes a gradient."""
    return WGRAD if pass_ == WGRAD else FPROP


def can_exchange(p: ConvolutionProblem) -> Bool:
    """Returns whether the exchanged problem is one: strides of 1, and pads that are not larger than the filter.
    """
    return (
        p.groups == 1
        and max(p.stride_d, p.stride_h, p.stride_w) == 1
        and p.pad_d <= (p.t - 1) * p.dilation_d
        and p.pad_h <= (p.r - 1) * p.dilation_h
        and p.pad_w <= (p.s - 1) * p.dilation_w
    )


def exchanged(problem: ConvolutionProblem) -> ConvolutionProblem:
    var p = problem
    p.c = problem.k
    p.k = problem.c
    p.d = problem.o
    p.h = problem.p
    p.w = problem.q
    p.o = problem.d
    p.p = problem.h
    p.q = problem.w
    p.pad_d = (p.t - 1) * p.dilation_d - problem.pad_d
    p.pad_h = (p.r - 1) * p.dilation_h - problem.pad_h
    p.pad_w = (p.s - 1) * p.dilation_w - problem.pad_w
    return p
