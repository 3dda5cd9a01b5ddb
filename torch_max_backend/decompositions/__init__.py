"""Decompositions of aten ops before they are lowered, beyond PyTorch's own tables."""
