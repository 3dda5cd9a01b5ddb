"""Poolings: problems, checks, times."""
