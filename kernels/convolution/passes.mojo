"""The three passes, the groups that a library function serves, and the sums that a store makes: compile-time parameters of
kernels and entries."""

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
"""Of its elements: counts, means and squares, for statistics."""
comptime PRODUCTS = 2
"""Of a gradient, and of its products with how far x lies from its mean."""
