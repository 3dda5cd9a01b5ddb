"""Copies that move elements and compute nothing: tensors with their axes in another order, tensors beside each other.

transpose.mojo      permuted copies, in tiles
concatenate.mojo    many tensors beside each other
dispatch.mojo       selection of the kernel that runs a call
entries.mojo        the entries in libraries
"""
