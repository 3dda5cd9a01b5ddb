"""Building blocks of the kernels of every family. No module here imports from a family.

library.mojo       how a graph or a launch list calls a function of a library, and its scratch memory
pointer.mojo       pointers, and the type of sums
argument.mojo      structures that kernels take
check.mojo         checks of operands
atomics.mojo       additions that meet in memory
bounds.mojo        reports of indices outside their dimension
gpu.mojo           limits of a thread and of a launch on every GPU, and vectors of a thread
arithmetic.mojo    division by invariant numbers, functions that programs call
powers.mojo        powers of whole numbers
digits.mojo        sorting by digits
int_table.mojo     tables of integers without checks of the index
parallel.mojo      loops over a CPU's cores
plane_tables.mojo  tables of places in a plane
vectors.mojo       rows as vectors on a CPU, and shares of work
packed.mojo        products of packed matrices on a CPU
async_copy.mojo    asynchronous copies to shared memory
tensor_cores.mojo  the GPU's tensor-core capabilities
warpgroup.mojo     products of a warpgroup, from tiles that pass through registers
ptx.mojo           instructions of Hopper
"""
