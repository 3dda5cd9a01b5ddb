"""Running a launch list on PyTorch's tensors."""
