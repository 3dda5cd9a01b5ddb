"""Whole training steps: times, memory, bytes, loss curves."""
