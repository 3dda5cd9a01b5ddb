"""Convolution: forward, data gradient and weight gradient, one to three spatial axes.

problem.mojo    the problem, from which tables and plans compute
operands.mojo   what library functions take, and their checks
kernel.mojo     what a kernel offers, and tables of kernels
entries.mojo    the entries in libraries, for every device and pass
cpu/, gpu/      kernels for a CPU and for any GPU; dispatch.mojo in each chooses
sm90/           kernels for Hopper, which are asked before those of gpu/
"""
