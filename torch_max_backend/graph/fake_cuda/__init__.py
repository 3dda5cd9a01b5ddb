"""Support for tracing on fake CUDA tensors, for a GPU that is not present (``ahead``)."""
