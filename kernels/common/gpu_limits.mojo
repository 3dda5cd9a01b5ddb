"""What every GPU that kernels are compiled for grants a thread and a launch."""

comptime GRID_LIMIT = 65535
"""Blocks of a grid along y, and along z."""
comptime VECTOR_BYTES = 16
"""Bytes that a thread loads or stores by one instruction."""
