"""What `torch-max-backend bench` measures with: one module for each step.

arguments: the positional integers of Composable Kernel's examples, and committed lists. hardware: what a result was
measured on. ceilings: the copy and matmul rates of the same run. timing: interleaved medians over rotating inputs.
compiled: custom ops as MAX graphs that serve any size. convolution, pooling: the operations. runner: one case from
inputs to figures. report: what is printed. results: what is written.
"""
