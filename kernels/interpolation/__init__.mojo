"""Interpolation, forward and backward, in one to three dimensions, of every mode: sums with weights along each axis.

problem.mojo    tensors, and the tables that say which elements a result reads and how much of each
kernel.mojo     the interface of a kernel, and tables of kernels
direct.mojo     one thread for each result, correct on every device and for every problem
cpu/, gpu/      the fast kernels; dispatch.mojo selects one of them
entries.mojo    the entry in libraries
"""
