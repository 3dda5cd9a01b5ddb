"""Conditions that a program asserts of its tensors.

entries.mojo    the entry in libraries
"""
