"""grid_sample: images read between their pixels at the points of a grid, in two and three dimensions, and both
gradients.

problem.mojo    sizes, and a point's pixels, weights and their derivatives
cpu.mojo        vectors of points, or of channels where these are innermost
gpu.mojo        one thread for each point, or each vector of channels of one
dispatch.mojo   selection of the kernel that runs a call
entries.mojo    the entries in libraries
"""
