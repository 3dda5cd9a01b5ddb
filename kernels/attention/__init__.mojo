"""Scaled dot product attention without probabilities in memory, forward and backward.

problem.mojo    sizes, strides, what a query sees
entries.mojo    what the operands are, and their checks
dispatch.mojo   which kernel runs
cpu/            blocks of queries and keys as packed matrix products
gpu/            tiled*.mojo, always right; products on tensor cores beside it
"""
