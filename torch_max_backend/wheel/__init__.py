"""Builds the kernel libraries that a wheel carries (``python -m torch_max_backend.wheel``)."""
