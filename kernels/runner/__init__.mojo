"""Runs a list of library functions."""
