"""Passes over the joint graph, each by itself (``backend._partition`` gives their order)."""
