"""Conditions that a program asserts of its tensors, and operators of theirs.

entries.mojo    the entries in libraries
indices.mojo    indices that no kernel reads at
"""
