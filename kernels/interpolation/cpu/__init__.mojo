"""Interpolation on the CPU: one axis after the other, in whole rows."""
