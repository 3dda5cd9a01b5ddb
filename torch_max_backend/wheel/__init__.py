"""What a wheel carries: kernel libraries, built while the wheel is (``python -m torch_max_backend.wheel``)."""
