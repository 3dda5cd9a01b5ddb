"""Tensors on their way into a compiled graph and out of it."""
