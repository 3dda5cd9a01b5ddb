"""Building libraries, and running graphs on PyTorch's tensors."""
