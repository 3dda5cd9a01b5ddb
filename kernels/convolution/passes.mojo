"""The three passes, and the groups that a library function serves: compile-time parameters of kernels and entries."""

comptime FPROP = 0
comptime DGRAD = 1
comptime WGRAD = 2

# Kernels for depthwise problems, which have entries of their own, are compiled for ANY_GROUPS alone.
comptime ONE_GROUP = 0
comptime WIDE_GROUPS = 1
comptime ANY_GROUPS = 2
