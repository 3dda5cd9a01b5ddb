"""Pooling, forward and backward, in one to three dimensions: maxima by int64 index or one-byte offset, and averages.

problem.mojo    geometry of one pooling operation
dispatch.mojo   which kernel runs what: a table for each operation and device
direct.mojo     one thread for each result, right on every device and for every geometry
scatter.mojo    gradients and unpooling by stored index
cpu/, gpu/      the fast kernels
ops.mojo        the registered operations: checks, then the choice of a kernel
"""
