"""Types and small helpers that every convolution kernel shares."""

from ..parallel import worker_count

comptime Ptr[dtype: DType] = MutPointer[Scalar[dtype], MutUntrackedOrigin]

# The three passes; the value is a compile-time parameter of shared kernels.
comptime FPROP = 0
comptime DGRAD = 1
comptime WGRAD = 2

comptime accumulation_type[
    dtype: DType
]: DType = DType.float64 if dtype == DType.float64 else DType.float32
