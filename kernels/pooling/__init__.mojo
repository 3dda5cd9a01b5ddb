"""Pooling, forward and backward, in one to three dimensions: maxima by int64 index or one-byte offset, and averages.

problem.mojo    geometry of one pooling operation
kernel.mojo     what a kernel offers, and tables of kernels
dispatch.mojo   which kernel runs what: a table for each pass and kind of device
direct.mojo     one thread for each result, right on every device and for every geometry
cpu/, gpu/      the fast kernels
unpool.mojo     scattering and gathering by stored index
entries.mojo    the functions of the family's libraries: checks, then the choice of a kernel
ops.mojo        the registered operations
"""
