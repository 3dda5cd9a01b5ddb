"""Reductions of generated programs' values, and running sums.

program.mojo    a generated program as a type
values.mojo     the values of neighbouring elements, and how they are combined
cpu.mojo, gpu.mojo    one reduction
rows.mojo       several programs over the same rows, in one launch
many.mojo       one program over many tensors
scan.mojo       running sums
dispatch.mojo   selection of the kernel that runs a call
entries.mojo    the entries in libraries
"""
