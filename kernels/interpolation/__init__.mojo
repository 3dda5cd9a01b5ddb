"""Interpolation, forward and backward, in one to three dimensions, of every mode: sums with weights along each axis.

problem.mojo    tensors, and the tables that say which elements a result reads and how much of each
kernel.mojo     what a kernel offers, and tables of kernels
direct.mojo     one thread for each result, right on every device and for every problem
cpu/, gpu/      the fast kernels; dispatch.mojo says which of them runs what
entries.mojo    the entry in libraries
"""
