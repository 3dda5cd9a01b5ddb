"""Pointwise operations and reductions of a graph as generated programs of a library (docs/internals/elementwise.md)."""
