"""Measures and checks kernels: problems of each family, and calls of single library functions."""
