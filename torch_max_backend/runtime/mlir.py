"""MAX's MLIR context, which each thread has to enter before it builds or compiles a graph."""

from __future__ import annotations

from max._mlir_context import in_default_mlir_context as in_mlir_context

__all__ = ["in_mlir_context"]
