"""Convolutions: problems, checks, times."""
