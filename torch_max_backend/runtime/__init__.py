"""Compiling MAX graphs and running them on PyTorch's tensors."""
