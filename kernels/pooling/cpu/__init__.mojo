"""Pooling on the CPU: separable passes, vectors of channels, gathering and scattering of maxima's gradients."""
