"""What an operator's arguments ask of a kernel: shapes and geometry, checked."""
