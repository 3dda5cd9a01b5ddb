"""Sliding windows laid out as columns, and columns added up where windows overlap, in two dimensions: im2col and
col2im.

problem.mojo    sizes, and where a window's elements lie on both sides
cpu.mojo        runs of neighbours as vectors
gpu.mojo        one thread for each vector of channels, or each element
entries.mojo    the entries in libraries
"""
