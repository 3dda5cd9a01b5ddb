"""Interpolation's kernels: random problems, checked and timed."""
