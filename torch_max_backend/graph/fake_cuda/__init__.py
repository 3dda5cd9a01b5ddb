"""What tracing on fake CUDA tensors needs, for a GPU that is not present (``ahead``)."""
