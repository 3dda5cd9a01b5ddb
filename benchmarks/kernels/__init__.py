"""What kernels are measured and checked with: problems of each family, and calls of single library functions."""
