"""Whole graphs at random: programs that are drawn valid, run beside eager PyTorch, and shrunk where they differ."""
