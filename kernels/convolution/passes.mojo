"""The three passes, the groups that a library function serves, and the sums that a store makes: compile-time parameters
of kernels and entries."""

comptime FPROP = 0
comptime DGRAD = 1
comptime WGRAD = 2

# Kernels for depthwise problems, which have entries of their own, are compiled for ANY_GROUPS alone.
comptime ONE_GROUP = 0
comptime WIDE_GROUPS = 1
comptime ANY_GROUPS = 2

# What a fused convolution adds up of what it stores.
comptime NO_SUMS = 0
comptime MOMENTS = 1
"""Moments of the stored elements, for statistics: counts, means and sums of squares."""
comptime PRODUCTS = 2
"""Sums of a gradient, and of its products with the deviation of x from its mean."""
