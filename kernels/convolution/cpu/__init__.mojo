"""Convolution on the CPU: implicit GEMM, weight gradient and depthwise kernels."""
