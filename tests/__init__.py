"""Tests; what they share stands in the modules of this folder."""

import os

# Read when PyTorch's OpenMP runtime is loaded. Where several processes share the cores, threads that turn while they
# wait cost the others more time than the work itself takes.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
