"""Building libraries of kernels, at once or beside eager PyTorch, and loading them."""
