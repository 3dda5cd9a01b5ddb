"""What aten ops are decomposed into before they are lowered, beyond PyTorch's own tables."""
