"""Random graphs, compiled and compared with eager PyTorch."""
