"""Where kernel libraries and compiled graphs are found again: the disk cache, and what came with the package."""
