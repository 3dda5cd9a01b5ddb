"""The parts of `torch-max-backend bench`.

arguments: the positional integers of Composable Kernel's examples. case: what the runner asks of an operation.
convolution, pooling: the operations. epilogue: elementwise work behind a data gradient. memory: a device's room for
operands, and its cache. runner: one case from inputs to figures. timing: interleaved medians over rotating inputs.
ceilings: the rates of a copy and a matrix product in the same run. printing: what is printed.
"""
