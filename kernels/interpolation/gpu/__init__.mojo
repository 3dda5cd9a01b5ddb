"""Kernels of a GPU."""
