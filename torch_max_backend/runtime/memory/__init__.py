"""Memory that several tensors share, in a step and between the two graphs of a step."""
