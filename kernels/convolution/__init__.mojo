"""Convolution: forward, data gradient, weight gradient and bias gradient, one to three spatial axes.

problem.mojo    the problem, from which tables and plans compute
operands.mojo   what library functions take, and their checks
cpu/, gpu/      kernels for a CPU and for any GPU, each with a table (dispatch.mojo) and entries of its own
sm90/           kernels for Hopper, whose entries call those of gpu/ for what they do not take
"""
