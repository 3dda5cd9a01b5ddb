"""The problems that an operator's arguments pose to a kernel: shapes and geometry, checked."""
