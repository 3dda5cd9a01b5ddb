"""Pooling, forward and backward, in one to three dimensions: maxima by int64 index or one-byte offset, and averages.

problem.mojo    geometry of one pooling operation
kernel.mojo     what a kernel offers, and tables of kernels
direct.mojo     one thread for each result, right on every device and for every geometry
cpu/, gpu/      the fast kernels; for each pass a table that says which kernel runs what, and the entries in libraries
passes.mojo     what the entries of both have in common
unpool.mojo     scattering and gathering by stored index
entries.mojo    its entries in libraries
"""
