"""Convolution: forward, data gradient, weight gradient and bias gradient, one to three spatial axes."""
