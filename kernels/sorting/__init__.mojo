"""Rows in sorted order, stable: a radix sort of keys that compare as unsigned integers.

keys.mojo       an element's key
cpu.mojo        a row for each core
gpu.mojo        a row over several blocks
dispatch.mojo   selection of the kernel that runs a call
entries.mojo    the entry in libraries
"""
