"""Implicit-GEMM convolution for Hopper (sm_90a): wgmma fed by the copy engine."""
