"""Matrix products, batched and strided.

    problem          sizes and strides of a call, checked
    entries          library functions
    dispatch         which kernel runs
    cpu/             packed panels on a team of threads
    gpu/tiled        multiply-adds, any GPU, dtype and stride
    gpu/tensor_core  mma.sync on 16-bit elements, NVIDIA since sm_80; its copies stand in gpu/stages
    gpu/warpgroup    wgmma on 16-bit elements of large matrices, Hopper
    gpu/blocks       how a block of any of these finds its tile
"""
