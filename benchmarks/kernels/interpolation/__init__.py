"""Interpolation: problems, checks, times."""
