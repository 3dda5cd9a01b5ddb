"""The models of PyTorch's benchmark suites, how one is measured in a process of its own, and when results are right."""
