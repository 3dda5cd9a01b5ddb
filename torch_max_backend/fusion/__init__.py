"""Elementwise operations of a graph as generated programs of a library (docs/internals/elementwise.md)."""

from torch_max_backend.fusion.rewrite import fuse

__all__ = ["fuse"]
