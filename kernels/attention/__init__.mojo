"""Scaled dot product attention without probabilities in memory, forward and backward.

problem.mojo    sizes, strides, and the keys that a query sees
entries.mojo    operands and their checks
dispatch.mojo   selection of the kernel
cpu/            blocks of queries and keys as packed matrix products
gpu/            tiled*.mojo, correct for every call; the others use tensor cores
"""
