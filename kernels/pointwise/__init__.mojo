"""Generated elementwise programs, run over all elements.

program.mojo    a program's arguments: its operands, and the place of its elements
cpu.mojo        vectors along the rows, an equal share for each core
gpu.mojo        some vectors for each thread
many.mojo       one program over many tensors
entries.mojo    the entries in libraries
"""
