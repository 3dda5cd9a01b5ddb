"""Convolution on any GPU: tiled implicit GEMM in shared memory and direct depthwise kernels."""
