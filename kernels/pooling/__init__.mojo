"""Pooling, forward and backward, in one to three dimensions: maxima by int64 index or one-byte offset, and averages.

problem.mojo    geometry of one pooling operation
kernel.mojo     the interface of a kernel, and tables of kernels
direct.mojo     one thread for each result, correct on every device and for every geometry
cpu/, gpu/      the fast kernels; fprop_dispatch.mojo and dgrad_dispatch.mojo select one of them
entries.mojo    the entries in libraries
unpool.mojo     scattering and gathering by stored index; unpool_entries.mojo, its entries
"""
