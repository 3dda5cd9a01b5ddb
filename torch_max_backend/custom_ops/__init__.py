"""Operators of our own in PyTorch's registry, which stand in traced graphs for what is lowered whole."""
