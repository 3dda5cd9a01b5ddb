"""torchvision's operators of detection: regions of feature maps pooled to a fixed number of bins, and the elements that
a deformable convolution reads.

problem.mojo        regions, their bins and the pixels that bins read
regions_cpu.mojo    roi_align and roi_pool on a CPU: vectors of channels
regions_gpu.mojo    the same on a GPU: a thread has a vector of channels of a bin, or of a pixel whose gradient it gathers
scatter_gpu.mojo    their gradients on a GPU, added atomically
positions.mojo      ps_roi_align and ps_roi_pool on any device: every bin reads a channel of its own
deformable.mojo     a deformable convolution's points
columns_cpu.mojo    its columns and gradients on a CPU
columns_gpu.mojo    the same on a GPU
dispatch.mojo       selection of the kernel that runs a call
entries.mojo        the entries in libraries
"""
