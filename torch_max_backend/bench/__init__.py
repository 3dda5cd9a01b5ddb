"""The parts of `torch-max-backend bench`.

arguments: the positional integers of Composable Kernel's examples. convolution, pooling: the operations. runner: one
case from inputs to figures. timing: interleaved medians over rotating inputs. ceilings: the rates of a copy and a
matrix product in the same run. report: what is printed.
"""
