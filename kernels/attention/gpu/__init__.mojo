"""Attention on a GPU."""
