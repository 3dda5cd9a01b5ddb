"""Batch normalization's reductions over channels-last tensors, seen as [rows, C].

folded_rows.mojo  the view that every kernel here reduces: narrow rows are joined into wide ones
cpu.mojo          statistics and gradient sums on the CPU
gpu.mojo          the same on a GPU, in two stages
dispatch.mojo     selection of the kernel that runs a call
numbers.mojo      momentum and epsilon, as a call has them
operands.mojo     tensors of a call, and their extents
entries.mojo      the entries in libraries
partials.mojo     partial results of the first stage, or of a convolution's store, for the second stage

Normalizing itself is elementwise: it stays in the graph, where the compiler fuses it with its neighbours.
"""
