"""Pooling, forward and backward, in one to three dimensions.

problem.mojo        geometry of one pooling operation
direct*.mojo        one thread per result, right on every device and for every geometry
scatter.mojo        gradients and unpooling by stored index
gpu_tiles*.mojo     GPU, gradients for the common windows: tiles in registers
gpu_global.mojo     GPU, contiguous NCHW: gradient of global averages
gpu_fprop_*.mojo    GPU, contiguous NCHW: forward
gpu_channels.mojo   GPU, channels-last: 16-byte vectors of channels
gpu_ring_*.mojo     GPU, channels-last: gradient of maxima by scattering
gpu_planes_*.mojo   GPU, contiguous NCHW: gradients of maxima and averages
gpu.mojo            which GPU kernel runs what
cpu_vectors.mojo    CPU, channels-last: vectors of channels
cpu_max.mojo        CPU, contiguous NCHW: maxima, separable
cpu_*_max.mojo      CPU: gradients of maxima, by comparing and by scattering
cpu_avg.mojo        CPU: averages, separable
cpu.mojo            which CPU kernel runs what
ops.mojo            the registered operations: checks, then the choice of an implementation
"""
