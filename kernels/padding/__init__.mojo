"""Mirrored and repeated borders, forward and backward, in one to three dimensions.

problem.mojo    sizes, and which results of padding show an element
cpu.mojo        whole rows as vectors
gpu.mojo        one thread for each vector of channels, or each element
entries.mojo    the entry in libraries
"""
