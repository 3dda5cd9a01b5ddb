"""Matrix products, batched and strided.

problem.mojo            sizes and strides of a call, checked
dispatch.mojo           selection of the kernel
cpu/panels.mojo         packed panels on a team of threads
gpu/tiled.mojo          multiply-adds, any GPU, dtype and stride
gpu/tensor_core.mojo    mma.sync on 16-bit elements, NVIDIA since sm_80
gpu/stages.mojo         its copies to shared memory
gpu/warpgroup.mojo      wgmma on 16-bit elements of large matrices, Hopper
gpu/blocks.mojo         the mapping of their blocks to tiles
entries.mojo            the entry in libraries
"""
