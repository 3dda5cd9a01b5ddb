"""Pooling, forward and backward, in one to three dimensions.

problem.mojo   geometry of one pooling operation
direct.mojo    one thread per result, right on every device and for every geometry
ops.mojo       the registered operations: checks, then the choice of an implementation
"""
